"""Real signals to real processes that answer a batch: what they end with, and that the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import radixrt
from radixrt.batch.journal.run_folder import run_path
from radixrt.cli import main
from tests.support import signalled_batch
from tests.support.signalled_batch import BEGUN, AnyRuntime, Builder, stand_in

COUNT = 40
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
STATUS = {INT: 130, TERM: 143, HUP: 129}
SIGNALS = [(INT,), (TERM,), (HUP,), (INT, INT), (TERM, TERM), (INT, TERM)]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of a batch, one line of which is bad."""
    lines = [json.dumps({"prompt": [n, 1], "custom_id": f"id-{n}"}) for n in range(COUNT)]
    lines[2] = "{"
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    return ["batch", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]


def records_kept(output: Path) -> dict[int, bytes]:
    """The records of a run that has not ended, by line; {} if there is no such run."""
    journal = run_path(output) / "journal"
    lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
    records = [line[line.index(b"{") :] for line in lines if b"{" in line]
    found = {json.loads(record)["index"]: record for record in records}
    assert len(found) == len(records), "no line has two"
    return found


def signalled(phase: str, arguments: list[str], signals: tuple[int, ...]) -> tuple[int, str]:
    """Send signals to the command in a phase, the second once the first is heard. Its status and its words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, signalled_batch.__file__, phase, *arguments, "--no-progress"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    heard = b""
    try:
        assert process.stdout.readline() == f"{phase}\n".encode()
        for number in signals:
            process.send_signal(number)
            while number != HUP and b"stops at once" not in heard and (line := process.stderr.readline()):
                heard += line
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return process.returncode, (heard + rest).decode()


def check_completed(arguments: list[str], before: dict[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command ends with each record once; kept records are unchanged."""
    output = Path(arguments[-1])
    with monkeypatch.context() as patch:
        for names, name, value in stand_in(AnyRuntime, Builder):
            patch.setitem(names, name, value)
        assert main([*arguments, "--no-progress"]) == 0
    lines = output.read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["index"] for record in records] == list(range(COUNT))
    assert [record["index"] for record in records if record["error"]] == [2]
    assert before.items() <= dict(enumerate(lines)).items()
    assert not run_path(output).exists()


@pytest.mark.long_unless(kept=lambda given: given["signals"] in [(INT,), (HUP,), (INT, TERM)])
@pytest.mark.parametrize("signals", SIGNALS)
def test_while_it_runs(arguments: list[str], signals: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    status, said = signalled("running", arguments, signals)
    assert status == STATUS[signals[-1]]
    assert "requests that have begun get 20 seconds to end; Ctrl-C again stops at once" in said
    kept = records_kept(Path(arguments[-1]))
    if len(signals) == 1:
        assert BEGUN <= len(kept) <= BEGUN + 6  # what had begun, and what had ended before
        assert f"stopped: {len(kept)} of 40 records are kept in " in said
        assert "the same command goes on from there" in said
    else:
        assert 0 < len(kept) < BEGUN + 3
        how = "terminated" if signals[-1] == TERM else "interrupted"
        assert (
            f"{how}: {len(kept)} of 40 records are kept in {run_path(Path(arguments[-1]))}; the same comm" in said
        )
    assert time.monotonic() - began < 15
    check_completed(arguments, kept, monkeypatch)


def test_a_hangup_that_is_ignored(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        status, _ = signalled("running", arguments, (HUP, HUP, TERM))
    finally:
        signal.signal(HUP, before)
    assert status == 143
    check_completed(arguments, records_kept(Path(arguments[-1])), monkeypatch)


@pytest.mark.parametrize("signals", [pytest.param((TERM,), marks=pytest.mark.long), (INT, INT)])
def test_while_it_reads(arguments: list[str], signals: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    status, said = signalled("reading", arguments, signals)
    assert status == STATUS[signals[-1]]
    assert "nothing has run in this call" in said
    assert not run_path(Path(arguments[-1])).exists()
    check_completed(arguments, {}, monkeypatch)


@pytest.mark.parametrize("signals", [pytest.param((INT,), marks=pytest.mark.long), (TERM,)])
def test_while_it_writes_the_output_it_goes_on(
    arguments: list[str], signals: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = signalled("writing", arguments, signals)
    assert status == 0
    assert "all records are there, and the output is being made; Ctrl-C again stops at once" in said
    output = Path(arguments[-1])
    assert [json.loads(line)["index"] for line in output.read_bytes().splitlines()] == list(range(COUNT))
    assert not run_path(output).exists()


@pytest.mark.parametrize("signals", [pytest.param((INT, INT), marks=pytest.mark.long), (TERM, TERM)])
def test_twice_while_it_writes_the_output(
    arguments: list[str], signals: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _ = signalled("writing", arguments, signals)
    assert status == STATUS[signals[-1]]
    assert not Path(arguments[-1]).exists()
    kept = records_kept(Path(arguments[-1]))
    assert len(kept) == COUNT
    check_completed(arguments, kept, monkeypatch)


def test_too_many_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded, exit status 1; a higher rate goes on."""
    for names, name, value in stand_in(AnyRuntime, Builder):
        monkeypatch.setitem(names, name, value)
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda **options: pytest.fail("it loaded"))
    assert main([*arguments, "--no-progress", "--max-error-rate", "0.02"]) == 1
    assert "more than a max_error_rate of 0.02 allows" in capsys.readouterr().err
    monkeypatch.setitem(vars(radixrt), "Runtime", AnyRuntime)
    assert main([*arguments, "--no-progress", "--max-error-rate", "0.1", "--drain-seconds", "3"]) == 0
    assert main([*arguments, "--overwrite", "--max-error-rate", "2"]) == 2
    assert "max_error_rate is 2.0" in capsys.readouterr().err
