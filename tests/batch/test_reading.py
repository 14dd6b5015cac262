"""A batch in the order of the file runs lines while others are read; what it writes is what it always wrote."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import radixrt.batch.job
import radixrt.batch.scan
from radixrt.batch.formats.line_format import LineParser
from radixrt.batch.formats.source import read_lines
from radixrt.batch.job import Batch, BatchInterrupted, run_batch
from radixrt.batch.journal.run_folder import run_path
from radixrt.batch.options import BatchConfig
from radixrt.batch.scan import scan_lines
from radixrt.cache.cache_stats import CacheStats
from radixrt.errors import BatchFileError, ErrorRateError
from radixrt.output import RequestOutput
from radixrt.planning.token_store import TokenWriter
from radixrt.report.batch_report import BatchReport, file_figures
from radixrt.sampling_params import SamplingParams
from tests.support.fake_runtime import FakeRuntime

LONG = 20.0  # seconds: more than anything here takes


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(radixrt.batch.scan, "BLOCK_LINES", 2)
    yield
    assert "radixrt-reading" not in {thread.name for thread in threading.enumerate()}


def good(number: int) -> bytes:
    return json.dumps({"prompt": [number, 1], "custom_id": f"id-{number}"}).encode()


def write(path: Path, lines: list[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def pause(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object]) -> None:
    """Call this before each line is read, with its place in the file."""

    def lines(*args: Any, **options: Any) -> Iterator[Any]:
        for place, line in read_lines(*args, **options):
            before(place)
            yield place, line

    monkeypatch.setattr(radixrt.batch.job, "read_lines", lines)


class Stepping(FakeRuntime):
    """Attribute `steps`: passes so far; `has_stepped` is set after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.has_stepped = 0, threading.Event()

    def step(self) -> list[RequestOutput]:
        found = super().step()
        self.steps += 1
        self.has_stepped.set()
        return found


@pytest.mark.parametrize(
    ("options", "is_early"),
    [
        ({"order": "file"}, True),
        ({"order": "file", "overwrite": True}, True),
        ({"order": "file", "strict": True}, False),
        ({"order": "planned"}, False),
    ],
)
def test_which_runs_begin_before_the_last_line_is_read(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, options: Any, is_early: bool
) -> None:
    write(files[0], [good(n) for n in range(9)])
    runtime, seen = Stepping(), []
    seconds = LONG if is_early else 0.3

    def before(place: int) -> None:
        if place == 8:
            seen.append(runtime.has_stepped.wait(seconds))

    pause(monkeypatch, before)
    assert run_batch(runtime, *files, **options).written == 9
    assert seen == [is_early]
    if "strict" in options:
        write(files[0], [good(0), b"{"])
        with pytest.raises(BatchFileError, match="Nothing has run"):
            run_batch(runtime, *files, **options, overwrite=True)


def test_pipes_and_runs_that_go_on_are_read_first(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for a pipe cannot be stopped; and an earlier run may be one of other lines."""
    lines, seen = [good(n) for n in range(9)], list[bool]()
    os.mkfifo(files[0])
    threading.Thread(target=write, args=(files[0], lines), daemon=True).start()
    runtime = Stepping()

    def before(place: int) -> None:
        if place == 8:
            seen.append(runtime.has_stepped.wait(0.3))

    pause(monkeypatch, before)
    run_batch(runtime, *files, order="file")

    files[0].unlink()
    write(files[0], lines)
    files[1].unlink()
    runtime = Stepping()

    def on_step() -> None:
        if runtime.steps == 3:
            signal.raise_signal(signal.SIGINT)

    runtime.on_step = on_step
    with pytest.raises(BatchInterrupted, match="4 of 9 records are kept in"):
        run_batch(runtime, *files)
    runtime = Stepping()
    report = run_batch(runtime, *files, order="file")
    assert (report.kept, runtime.steps) == (4, 5)
    assert seen == [False] * 3


def test_a_cache_that_has_something_is_planned_for(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best hits are those of the cache at first."""
    write(files[0], [good(n) for n in range(9)])
    runtime = Stepping()
    runtime.prompt_tokens = 5  # cached
    seen: list[bool] = []

    def before(place: int) -> None:
        if place == 8:
            seen.append(runtime.has_stepped.wait(0.3))

    pause(monkeypatch, before)
    report = run_batch(runtime, *files, order="file")
    assert report.written == 9
    assert report.best_hit_rate is not None
    assert seen == [False]


def test_a_duplicate_that_is_read_after_the_first_has_run(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files[0], [good(0), good(1), good(2), b"", b"{", good(0), good(3)])
    runtime = Stepping()
    pause(monkeypatch, lambda place: place >= 5 and runtime.has_stepped.wait(LONG))
    report = run_batch(runtime, *files, order="file")
    errors = {record["index"]: record["error"] and record["error"]["type"] for record in records(files[1])}
    assert errors == {0: None, 1: None, 2: None, 4: "invalid_line", 5: "duplicate_custom_id", 6: None}
    assert (report.requests, report.errors, report.is_complete) == (6, 2, True)


LINES = [good(0), good(1), b'{"prompt": [1, 2, 3]}', b'{"token_ids": [5], "n": 2}', b'{"prompt": [7]}']
LINES += [b'{"prompt": "' + b"x" * 60 + b'"}', b'{"prompt": [1], "temperature": -1}', b'{"prompt": ""}']
LINES += [b"", b"  ", b"{", b"[]"]


class Killed(BaseException):
    """In the place of a kill."""


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_records_are_those_of_a_file_that_is_read_first(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Whatever ends some runs in the middle, and however reading and passes follow one another."""
    lines = data.draw(st.lists(st.sampled_from(LINES), max_size=14))
    kills = data.draw(st.lists(st.integers(0, 9), max_size=2))
    slow = data.draw(st.sets(st.integers(0, 13)))
    write(files[0], lines)
    expected = files[1].with_name("expected.jsonl")
    with monkeypatch.context() as patch:
        run_batch(FakeRuntime(), *(files[0], expected), created=0, overwrite=True, strict=False)
        for kill in [*kills, None]:
            runtime = Stepping()

            def on_step(runtime: Stepping = runtime, kill: int | None = kill) -> None:
                if runtime.steps == kill:
                    raise Killed

            runtime.on_step = on_step
            pause(patch, lambda place, runtime=runtime: place in slow and runtime.has_stepped.wait(0.01))  # type: ignore[misc]
            try:
                report = run_batch(runtime, *files, created=0, order="file", overwrite=True)
            except Killed:
                continue
            assert report.is_complete
            break
    assert files[1].read_bytes() == expected.read_bytes()
    assert not run_path(files[1]).exists()


def test_records_on_standard_output_come_while_lines_are_read(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    write(files[0], [b"{", good(1), good(2), good(3), b"[]", good(5)])
    early: list[bytes] = []

    def before(place: int) -> None:
        for _ in range(int(LONG * 100) if place == 5 else 0):
            if len(early) < 2:
                early.extend(capfdbinary.readouterr().out.splitlines())
                threading.Event().wait(0.01)

    pause(monkeypatch, before)
    run_batch(Stepping(), files[0], "-", order="file")
    assert [json.loads(line)["index"] for line in early] == [0, 1]
    late = capfdbinary.readouterr().out.splitlines()
    assert [json.loads(line)["index"] for line in late] == [2, 3, 4, 5]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_signal_while_lines_are_read(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """Records are kept if the file has been read by the time that what runs has ended."""
    write(files[0], [good(n) for n in range(9)])
    runtime, goes_on = Stepping(), threading.Event()
    monkeypatch.setattr(runtime, "has_begun", lambda request: True)
    pause(monkeypatch, lambda place: place == 8 and goes_on.wait(LONG if is_whole else 0.5))

    def on_step() -> None:
        if runtime.steps == 1:
            signal.raise_signal(signal.SIGINT)
            if is_whole:
                goes_on.set()
                while threading.active_count() > before:  # those that read end
                    threading.Event().wait(0.001)

    before = threading.active_count()
    runtime.on_step = on_step
    kept = r"\d of 9 records are kept in .*out\.jsonl\.run; the same command goes on from there"
    lost = "stopped: no records are kept, as the input was not read to its end; the same command begins anew"
    with pytest.raises(BatchInterrupted, match=kept if is_whole else lost) as error:
        run_batch(runtime, *files, order="file")
    found = error.value.report
    assert found.run.answered
    assert not found.is_complete
    if is_whole:
        assert (found.is_read, found.written, found.output_path) == (True, found.run.answered, run_path(files[1]))
        assert (found.requests, found.prompt_tokens) == (9, found.run.prompt_tokens)
    else:
        assert (found.is_read, found.written, found.output_path) == (False, 0, None)
        assert (found.errors, found.prompt_tokens, found.completion_tokens) == (0, 0, 0)
        assert file_figures(found)["requests"] == f"0 of {found.requests} read so far"
    assert "radixrt-reading" not in {thread.name for thread in threading.enumerate()}
    assert run_path(files[1]).exists() == is_whole
    report = run_batch(FakeRuntime(), *files, order="file")
    assert bool(report.kept) == is_whole
    assert [record["index"] for record in records(files[1])] == list(range(9))


def test_what_standard_output_has_of_lines_that_are_read(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files[0], [good(n) for n in range(9)])
    runtime = Stepping()
    pause(monkeypatch, lambda place: place == 8 and threading.Event().wait(0.5))

    def on_step() -> None:
        if runtime.steps == 1:
            signal.raise_signal(signal.SIGINT)

    runtime.on_step = on_step
    told = r"stopped: (\d) records of \d lines read so far are in standard output, in input order"
    with pytest.raises(BatchInterrupted, match=told) as error:
        run_batch(runtime, files[0], "-", order="file")
    assert error.value.report.to_json()["read"] is False


def test_too_many_errors_are_told_once_the_last_line_is_read(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is a share of all lines."""
    write(files[0], [b"{", b"{", *[good(n) for n in range(4)], b"{"])
    runtime = Stepping()
    runtime.failing = {3}
    pause(monkeypatch, lambda place: place == 6 and runtime.has_stepped.wait(LONG))
    with pytest.raises(ErrorRateError, match=r"4 of 7 lines have errors, more than a max_error_rate of 0\.5 "):
        run_batch(runtime, *files, order="file", max_error_rate=0.5)
    pause(monkeypatch, lambda place: None)
    report = run_batch(FakeRuntime(), *files, order="file", max_error_rate=0.6)
    assert report.kept >= 4
    assert (report.errors, report.written) == (4, 7)


@pytest.mark.parametrize("to_standard_output", [False, True])
@pytest.mark.parametrize("order", ["planned", "file"])
@pytest.mark.parametrize("lines", [[good(0), b"{", b"{"], [b"{", b"{"]])
def test_too_many_bad_lines_leave_nothing_behind(
    files: tuple[Path, Path],
    capfd: pytest.CaptureFixture[str],
    lines: list[bytes],
    order: Any,
    to_standard_output: bool,
) -> None:
    """Where all lines are known before the first one runs, the order makes no difference."""
    output, runtime = "-" if to_standard_output else files[1], FakeRuntime()

    def answer() -> BatchReport:
        with Batch(files[0], output, BatchConfig(order=order, max_error_rate=0.1)) as batch:
            scanned = batch.scan(None, lambda prompt, params, line: runtime.prepare(prompt, params, index=line))
            assert len(scanned.lines) == len(lines)  # waits for all
            return scanned.run(runtime) if scanned.needs_runtime() else scanned.finish(None, 0)

    write(files[0], lines)
    with pytest.raises(ErrorRateError) as error:
        answer()
    told = str(error.value).splitlines()
    assert told[0] == f"2 of {len(lines)} lines are bad (2 invalid_line):"
    assert told[-1] == "That is more than a max_error_rate of 0.1 allows. Nothing has run."
    assert capfd.readouterr().out == ""
    assert [path.name for path in files[0].parent.iterdir()] == ["in.jsonl"]
    write(files[0], [good(n) for n in range(len(lines))])
    assert answer().errors == 0


@pytest.mark.parametrize("has_run", [False, True])
def test_bad_lines_that_are_read_late_leave_nothing_behind(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    """What has run is given up, so that the mended input can run."""
    write(files[0], [*[good(n) for n in range(6)], b"{", b"{"])
    runtime, has_begun, cache_stats = Stepping(), threading.Event(), FakeRuntime().cache_stats

    def begin() -> CacheStats:
        has_begun.set()
        while not has_run and "radixrt-reading" in {thread.name for thread in threading.enumerate()}:
            threading.Event().wait(0.001)
        return cache_stats()

    monkeypatch.setattr(runtime, "cache_stats", begin)  # a run begins by asking for them
    if has_run:
        pause(monkeypatch, lambda place: place == 6 and runtime.has_stepped.wait(LONG))
    else:
        pause(monkeypatch, lambda place: has_begun.wait(LONG))
    with pytest.raises(ErrorRateError) as error:
        run_batch(runtime, *files, order="file", max_error_rate=0.2)
    told = str(error.value).splitlines()
    assert told[0] == "2 of 8 lines are bad (2 invalid_line):"
    assert told[-2:] == [
        f"That is more than a max_error_rate of 0.2 allows.{'' if has_run else ' Nothing has run.'}",
        "no records are kept; with a higher max_error_rate the same command begins anew",
    ]
    assert bool(runtime.steps) == has_run
    assert [path.name for path in files[0].parent.iterdir()] == ["in.jsonl"]
    pause(monkeypatch, lambda place: None)
    write(files[0], [good(n) for n in range(8)])
    assert run_batch(FakeRuntime(), *files, order="file", max_error_rate=0.2).written == 8


def test_a_file_that_is_cut_short(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told when it shows, what runs is given up, and nothing is left."""
    rng = iter(os.urandom(8000))
    whole = gzip.compress(b"".join(good(n) + b" " * (next(rng) % 9) + b"\n" for n in range(4000)))
    files[0].write_bytes(whole[: len(whole) // 2])
    runtime = Stepping()
    pause(monkeypatch, lambda place: place == 9 and runtime.has_stepped.wait(LONG))
    with pytest.raises(BatchFileError, match="cut short"):
        run_batch(runtime, *files, order="file")
    assert runtime.steps
    assert not runtime.has_work
    assert [path.name for path in files[0].parent.iterdir()] == ["in.jsonl"]


def test_the_cause_is_told_though_the_tokens_have_gone(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that are known run until the reading thread, which has removed the tokens, tells its error."""
    write(files[0], [good(n) for n in range(9)])
    runtime, has_failed = Stepping(), threading.Event()

    def before(place: int) -> None:
        if place == 8:
            raise BatchFileError("the cause")

    def leave(writer: TokenWriter, *error: object) -> None:
        own(writer, *error)
        has_failed.set()
        runtime.has_stepped.wait(LONG)

    own = TokenWriter.__exit__
    monkeypatch.setattr(TokenWriter, "__exit__", leave)
    monkeypatch.setattr(runtime, "identity", lambda: {"waits": has_failed.wait(LONG)})
    pause(monkeypatch, before)
    with pytest.raises(BatchFileError, match=r"^the cause$"):
        run_batch(runtime, *files, order="file")
    assert runtime.steps


@pytest.mark.parametrize("order", ["planned", "file"])
def test_no_file_stays_open(files: tuple[Path, Path], order: Any) -> None:
    def check(prompt: Any, params: Any, line: int) -> Any:
        return FakeRuntime().prepare(prompt, params, index=line)

    write(files[0], [good(n) for n in range(9)])
    before = len(os.listdir("/dev/fd"))
    with Batch(*files, BatchConfig(order=order)) as batch:
        assert len(batch.scan(None, check).lines) == 9
    numbered, parser = read_lines(files[0]), LineParser(SamplingParams())
    assert len(scan_lines(numbered, files[0].parent, parser=parser, tokenizer=None, check=check)) == 9
    assert len(os.listdir("/dev/fd")) == before


def test_no_line_can_run(files: tuple[Path, Path]) -> None:
    """No runtime is needed then; whether one is shows once a line is known that can run."""
    told: list[str] = []

    def check(prompt: Any, params: Any, line: int) -> Any:
        return FakeRuntime().prepare(prompt, params, index=line)

    for lines, is_needed in (([b"{"] * 5, False), ([b"{"] * 5 + [good(1)], True), ([], False)):
        write(files[0], lines)
        with Batch(*files, BatchConfig(order="file", overwrite=True)) as batch:
            scanned = batch.scan(None, check, named=told.append)
            assert scanned.needs_runtime() == is_needed
            if not is_needed:
                assert scanned.finish(None, 0).errors == len(lines)
                assert len(records(files[1])) == len(lines)
    assert [each.split(" are")[0] for each in told] == ["5 of 5 lines", "5 of 6 lines"]


def test_the_bar_learns_how_many_lines_there_are(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(files[0], [good(n) for n in range(9)])
    runtime = Stepping()
    pause(monkeypatch, lambda place: place == 8 and runtime.has_stepped.wait(LONG))
    run_batch(runtime, *files, order="file", progress=True)
    assert "9/9" in capfd.readouterr().err


def test_many_lines(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the arrays have room for at first."""
    monkeypatch.setattr(radixrt.batch.scan, "BLOCK_LINES", 100)
    monkeypatch.setattr("radixrt.batch.known_lines._FIRST_ROWS", 64)
    write(files[0], [good(n) for n in range(900)])
    runtime = Stepping()
    pause(monkeypatch, lambda place: place == 899 and runtime.has_stepped.wait(LONG))
    run_batch(runtime, *files, order="file")
    assert [record["token_ids"][0] for record in records(files[1])] == [n + 1 for n in range(900)]
