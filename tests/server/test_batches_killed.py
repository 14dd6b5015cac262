"""`radixrt serve --files-dir`, from its options to its end by a signal, and from there on."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from radixrt.cli import main
from radixrt.server.files.folder import files_folder
from tests.support.serving import GREEDY, QUESTIONS, Served, client_of, until

COUNT = 300


def begin(client: openai.OpenAI) -> Any:
    """A batch that takes some seconds, and the ids of its lines."""
    ids = [f"id-{n}" for n in range(COUNT)]
    lines = [
        {
            "custom_id": one,
            "method": "POST",
            "url": "/v1/completions",
            "body": {**GREEDY, "prompt": f"{one} {QUESTIONS[n % 3]}", "max_tokens": 60, "ignore_eos": True},
        }
        for n, one in enumerate(ids)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return batch, ids


def journalled(kept: Path, batch_id: str) -> dict[str, bytes]:
    """The records that a batch has on disk, by their custom_id."""
    journal = kept / "no-key" / "runs" / f"{batch_id}.jsonl.run" / "journal"
    lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
    records = [line[line.index(b"{") :] for line in lines if b"{" in line]
    found = {json.loads(record)["custom_id"]: record for record in records}
    assert len(found) == len(records), "no line has two"
    return found


def check_completed(client: openai.OpenAI, batch_id: str, ids: list[str], before: dict[str, bytes]) -> None:
    """Each line has one answer, in order, and those of before are not made again."""
    until(lambda: client.batches.retrieve(batch_id).status == "completed", 60)
    batch = client.batches.retrieve(batch_id)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (COUNT, COUNT)
    assert batch.output_file_id is not None
    lines = client.files.content(batch.output_file_id).read().splitlines()
    found = {json.loads(line)["custom_id"]: line for line in lines}
    assert [json.loads(line)["custom_id"] for line in lines] == ids
    assert before.items() <= found.items()


def test_killed_twice(tmp_path: Path) -> None:
    """Once while it answers, and once more after that."""
    kept, before = tmp_path / "kept", dict[str, bytes]()
    with Served(tmp_path, "--files-dir", str(kept)) as served:
        batch, ids = begin(client_of(served.url))
        until(lambda: len(journalled(kept, batch.id)) > 0, 60)
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
    before = journalled(kept, batch.id)
    assert 0 < len(before) < COUNT
    with Served(tmp_path, "--files-dir", str(kept)) as served:
        until(lambda: len(journalled(kept, batch.id)) > len(before), 60)
        assert client_of(served.url).batches.retrieve(batch.id).status == "in_progress"
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
    again = journalled(kept, batch.id)
    assert before.items() <= again.items()
    assert len(before) < len(again) < COUNT
    with Served(tmp_path, "--files-dir", str(kept)) as served:
        check_completed(client_of(served.url), batch.id, ids, again)
    assert [*(kept / "no-key" / "runs").iterdir()] == []


@pytest.mark.parametrize(
    "signals",
    [pytest.param((signal.SIGTERM,), marks=pytest.mark.long), (signal.SIGTERM, signal.SIGINT)],
)
def test_a_server_that_is_to_end_leaves_its_batch(signals: tuple[signal.Signals, ...], tmp_path: Path) -> None:
    """Lines that have begun end first, unless a second signal cuts them; no others begin, even while a client is
    answered. The rest goes on later.
    """
    kept = tmp_path / "kept"
    with Served(tmp_path, "--files-dir", str(kept)) as served:
        client = client_of(served.url)
        batch, ids = begin(client)
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        served.until_it_runs(64)
        body = {**GREEDY, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            events = response.iter_lines()
            next(events)
            began = time.monotonic()
            for number in signals:
                served.process.send_signal(number)
                time.sleep(0.1)
            if len(signals) == 1:
                assert "data: [DONE]" in list(events)
        assert served.process.wait(60) == 128 + signal.SIGTERM
        if len(signals) == 2:
            assert time.monotonic() - began < 15
    assert "Traceback" not in served.told()
    before = journalled(kept, batch.id)
    assert len(before) < COUNT
    assert (len(before) >= 64) == (len(signals) == 1)
    record = json.loads((kept / "no-key" / "batches" / f"{batch.id}.json").read_text())
    assert (record["status"], record["counts"]["completed"]) == ("in_progress", len(before))
    if len(signals) == 2:  # once: it takes seconds
        return
    with Served(tmp_path, "--files-dir", str(kept)) as served:
        check_completed(client_of(served.url), batch.id, ids, before)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("file", "files cannot be kept in file: File exists"),
        ("nothing/there", "files cannot be kept in nothing/there: No such file or directory"),
        ("taken", "another process writes to taken"),
        ("model/kept", "the folder of --files-dir model/kept is in the model's folder model"),
    ],
)
def test_folders_that_cannot_be(
    folder: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("model").mkdir()
    with files_folder(Path("taken")):
        options = ["--model", "model"] if folder.startswith("model") else []
        assert main(["serve", "--port", "0", "--files-dir", folder, *options]) == 2
    assert message in capsys.readouterr().err
    assert not Path("model/kept").exists()
