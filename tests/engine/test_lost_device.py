"""A device that works no more, and one that has run out of memory: real Runtimes, and real processes."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import radixrt
from radixrt import DeviceLostError, PassError, Runtime, SamplingParams
from radixrt.assembly import assemble
from radixrt.batch.journal.run_folder import run_path
from radixrt.cli import main
from radixrt.config import RuntimeConfig
from radixrt.execution.model_runner import ModelRunner
from tests.support import failing_device
from tests.support.world.world import World

HOME = Path(radixrt.__file__).resolve().parent.parent
PARAMS = SamplingParams(temperature=0, max_new_tokens=4)


@pytest.fixture
def no_log() -> Iterator[None]:
    """Nothing is logged: pytest would keep exceptions with all that their frames hold."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime(device="cpu", max_total_tokens=2000) as runtime:
        yield runtime


def lose(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass of the Runtime loses the device."""

    def fail(batch: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runtime.parts.engine.runner, "launch", fail)
    monkeypatch.setattr(ModelRunner, "check_device", failing_device.say_lost)


def test_calls_of_a_lost_device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.generate("Mira likes", PARAMS).error is None
    lose(runtime, monkeypatch)
    calls = [
        lambda: runtime.generate("Mira likes", PARAMS),
        lambda: runtime.generate(["Mira likes", "Hugo"], PARAMS, on_error="return"),
        lambda: next(runtime.stream("Mira", PARAMS)),
        lambda: runtime.score(["Mira"], [" likes"]),
        lambda: runtime.save_cache("nothing"),
    ]
    with pytest.raises(DeviceLostError, match="works no more") as error:
        calls[0]()
    assert str(error.value.__cause__) == "an illegal memory access was encountered"
    for call in calls:
        with pytest.raises(DeviceLostError, match="go on in a new process"):
            call()
    assert not runtime.has_work


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize("is_lost", [True, False])
def test_closing_asks_nothing_of_a_lost_device(is_lost: bool) -> None:
    """What is on it is not freed either: that would ask it, too. What is on another one is."""
    parts = assemble(RuntimeConfig(device="cpu", max_total_tokens=2000))
    refs = [weakref.ref(parts.engine), weakref.ref(parts.engine.runner)]
    model, calls = weakref.ref(parts.model), []
    runtime = Runtime.from_parts(replace(parts, free_device=lambda: calls.append(model() is None)))
    del parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "launch", lambda runner, batch: (_ for _ in ()).throw(ZeroDivisionError))
        if is_lost:
            patch.setattr(ModelRunner, "check_device", failing_device.say_lost)
        with pytest.raises(DeviceLostError if is_lost else PassError):
            runtime.generate("Mira likes", PARAMS)
        runtime.close()
        runtime.close()
    assert calls == ([] if is_lost else [True])
    gc.collect()
    assert [ref() is not None for ref in refs] == [is_lost, is_lost]


def test_no_request_ends_with_the_device() -> None:
    world = World()
    requests = [world.submit([i, 1, 2], 4) for i in range(3)]
    world.step()
    world.runner.fail_run = world.runner.is_lost = True
    with pytest.raises(DeviceLostError):
        world.drain_requests()
    assert not any(request.finished for request in requests)
    assert world.engine.is_lost
    with pytest.raises(DeviceLostError, match="in an earlier step"):
        world.engine.step()


# -- what a runner finds out -------------------------------------------------------------------------------


@pytest.fixture
def runner(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """One on a CPU that looks as if it were on a GPU."""
    runner = runtime.parts.engine.runner
    assert isinstance(runner, ModelRunner)
    monkeypatch.setattr(runner, "device", torch.device("cuda", 0))
    monkeypatch.setattr(runner, "_on_device", lambda: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("memory had not run out"))
    return runner


def raised(error: Exception) -> tuple[Exception, weakref.ref[torch.Tensor]]:
    """The error as a pass raises it, and a tensor that only the frame of the pass holds."""
    refs = []

    def run() -> None:
        hidden = torch.zeros(3)
        refs.append(weakref.ref(hidden))
        raise error

    try:
        run()
    except Exception as found:
        return found, refs[0]
    raise AssertionError


def test_a_device_that_works(runner: ModelRunner) -> None:
    for _ in range(3):
        error, hidden = raised(RuntimeError("some kernel"))
        assert hidden() is not None
        runner.check_device(error)
        assert hidden() is None, "what a failed pass has made is free again"


def test_memory_that_has_run_out_is_given_back(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    error, hidden = raised(torch.OutOfMemoryError("out of memory"))
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(hidden() is None))
    runner.check_device(error)
    assert calls == [True]


@pytest.mark.parametrize("error", [RuntimeError("first line\nand more"), torch.OutOfMemoryError("full")])
def test_a_device_that_raises_is_lost(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def sticky(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")

    monkeypatch.setattr(torch.cuda, "synchronize", sticky)
    said = r"the device cuda:0 works no more \(CUDA error: device-side assert triggered\); only a new process"
    error, hidden = raised(error)
    with pytest.raises(DeviceLostError, match=said) as found:
        runner.check_device(error)
    assert found.value.__cause__ is error
    assert hidden() is not None, "freeing it would ask the device"


def test_a_device_that_counts_wrong_is_lost(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        counted = add(tensor, *arguments)
        counted[17].add_(1)
        return counted

    runner.check_device(RuntimeError())
    add = torch.Tensor.__iadd__
    monkeypatch.setattr(torch.Tensor, "__iadd__", wrong)
    with pytest.raises(DeviceLostError, match=r"works no more \(RuntimeError\)"):
        runner.check_device(RuntimeError())


def test_a_cpu_is_not_asked(runtime: Runtime) -> None:
    error, hidden = raised(torch.OutOfMemoryError("out of memory"))
    runtime.parts.engine.runner.check_device(error)
    assert hidden() is not None


# -- whole processes ---------------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.whole_gpu])]
QUESTIONS = (HOME / "examples" / "questions.jsonl").read_text().splitlines(keepends=True)[:150]


def arguments(output: Path, device: str) -> list[str]:
    """Of a batch of 150 questions to the built-in model, in the same passes on all devices."""
    questions = output.with_name("in.jsonl")
    questions.write_text("".join(QUESTIONS))
    files = ["--input", str(questions), "--output", str(output), "--no-progress"]
    limits = ["--max-total-tokens", "20000", "--max-running-requests", "64", "--chunked-prefill-size", "2048"]
    return ["batch", *files, "--device", device, *limits, "--temperature", "0"]


def lines_of(path: Path) -> dict[int, bytes]:
    """The records of an output, or of a journal, by line."""
    lines = [line[line.index(b"{") :] for line in path.read_bytes().splitlines() if b'"index"' in line]
    by_line = {json.loads(line)["index"]: line for line in lines}
    assert len(by_line) == len(lines), "no line has two"
    return by_line


def check_whole(output: Path) -> dict[int, bytes]:
    """Each line has a record without an error, and nearly all have the expected answer."""
    found = lines_of(output)
    assert sorted(found) == list(range(len(QUESTIONS)))
    records = [json.loads(found[index]) for index in range(len(QUESTIONS))]
    assert not [record["error"] for record in records if record["error"]]
    right = sum(
        record["text"].strip() == json.loads(line)["metadata"]["answer"]
        for record, line in zip(records, QUESTIONS, strict=True)
    )
    assert right >= 0.95 * len(QUESTIONS)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_lost_device_ends_the_command_resumably(tmp_path: Path, device: str) -> None:
    """In a process of its own: no other work can be done on a GPU there."""
    output = tmp_path / "out.jsonl"
    ended = subprocess.run(
        [sys.executable, failing_device.__file__, "lost", "5", *arguments(output, device)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HOME), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 75, ended.stderr
    assert "works no more" in ended.stderr
    assert re.search(r"\n\d+ of 150 records are kept in .*; the same command goes on from there\n", ended.stderr)
    assert "terminate called" not in ended.stderr  # the process ended by itself
    assert not output.exists()
    kept = lines_of(run_path(output) / "journal")
    assert 0 < len(kept) < 150
    assert not any(json.loads(record)["error"] for record in kept.values())
    assert main(arguments(output, device)) == 0
    assert kept.items() <= check_whole(output).items()
    assert not run_path(output).exists()


@pytest.mark.parametrize("device", DEVICES)
def test_passes_that_run_out_of_memory_cost_no_line_its_answer(
    tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(ModelRunner, "launch", failing_device.spoiled("memory", 30))
    assert main(arguments(output, device)) == 0
    failed = [record for record in caplog.records if record.exc_info is not None]
    assert failed
    assert all(record.exc_info[0] is torch.OutOfMemoryError for record in failed if record.exc_info)
    check_whole(output)
