"""A batch from file to file, over a runtime without a model."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import radixrt.batch.job
import radixrt.batch.lanes
import radixrt.batch.meter
from radixrt.batch.job import Batch, BatchInterrupted, ScannedBatch, run_batch
from radixrt.batch.journal.run_folder import has_run, run_path
from radixrt.batch.options import BatchConfig, BatchOptions
from radixrt.batch.tally import Tally
from radixrt.engine.signals import Interrupt
from radixrt.errors import BatchFileError, JournalError, RadixrtError, SchedulerError
from radixrt.files.disk import DISK
from radixrt.planning.token_store import TokenStore
from radixrt.report.batch_report import BatchReport, print_report
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request
from radixrt.workloads import best_hit_rate
from tests.support.fake_runtime import FakeRuntime
from tests.support.file_limit import file_limit

BAD = [
    b"{",
    b"\xff\xfe",
    b"[]",
    b"{}",
    b'{"prompt": ""}',
    b'{"prompt": "a", "token_ids": [1]}',
    b'{"prompt": "a", "temperture": 0}',
    b'{"token_ids": [1000]}',
    b'{"prompt": "' + b"x" * 50 + b'", "custom_id": "id-0"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "sampling_params": {"stop_token_ids": [1000]}, "custom_id": "id-1"}',
    b'{"prompt": "a", "sampling_params": {"top_k": NaN}}',
    b'{"prompt": "a", "metadata": 1e400}',
]
BLANK = [b"", b"  \t", b"\r"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path: Path, lines: list[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def good(number: int) -> bytes:
    return json.dumps(
        {"prompt": [number, number], "custom_id": f"id-{number}", "metadata": {"n": number}}
    ).encode()


def openai(number: int) -> bytes:
    body = {"prompt": [number, number]}
    line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode()


def figures(report: BatchReport) -> Tally:
    """The figures of the whole file."""
    return Tally(
        report.written, report.errors, report.prompt_tokens, report.cached_tokens, report.completion_tokens
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


def own(report: BatchReport) -> list[int]:
    """What the run of a report has done itself."""
    run = report.run
    return [run.answered, run.prompt_tokens, run.cached_tokens, run.completion_tokens]


def indices(path: Path) -> list[int]:
    return [record["index"] for record in read(path)]


def test_every_line_has_one_record_in_order(files: tuple[Path, Path]) -> None:
    lines = [good(0), *BAD, b"", good(1), b'{"prompt": "ab"}', good(0), b'{"token_ids": [3]}']
    write(files[0], lines)
    runtime = FakeRuntime(choose=lambda count: count - 1)
    report = run_batch(runtime, *files, default_params=SamplingParams(max_new_tokens=9))
    records = read(files[1])
    blank = len(BAD) + 1
    assert [r["index"] for r in records] == [i for i in range(len(lines)) if i != blank]
    errors = {r["index"]: r["error"]["type"] for r in records if r["error"]}
    assert list(errors.values()) == [
        *["invalid_line"] * 3,
        *["invalid_prompt"] * 3,
        "invalid_line",
        "invalid_prompt",
        "context_length_exceeded",
        "invalid_prompt",
        "invalid_parameters",
        *["invalid_line"] * 2,
        "duplicate_custom_id",
    ]
    assert "has 50 tokens, but this model's maximum context length is 50 tokens" in records[9]["error"]["message"]
    assert records[-2]["custom_id"] == "id-0"  # the second one of that name
    # a bad line that bears its name takes nothing from the sound one
    assert records[len(BAD) + 1] == {
        "custom_id": "id-1",
        "index": blank + 1,
        "text": "2 é\u2028",
        "token_ids": [2, 9],
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 2,
            "cached_tokens": 1,
            "computed_tokens": 1,
            "completion_tokens": 2,
            "recomputed_tokens": 0,
        },
        "timings": {"queue": 0.25, "first_token": 0.5, "total": 1.0},
        "metadata": {"n": 1},
        "error": None,
    }
    assert records[-3]["custom_id"] is None
    assert (report.output_path, report.requests, report.written) == (files[1], len(lines) - 1, len(lines) - 1)
    assert (report.errors, report.prompt_tokens, report.cached_tokens) == (len(BAD) + 1, 7, 3)
    assert (report.completion_tokens, report.best_hit_rate) == (8, 0.0)
    assert report.hit_rate == 3 / 7
    assert not run_path(files[1]).exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    lines=st.lists(st.sampled_from([*BAD, *BLANK]) | st.integers(0, 5).map(good), max_size=12),
    seed=st.integers(0, 2**32),
)
def test_bad_lines_change_no_other_record(tmp_path: Path, lines: list[bytes], seed: int) -> None:
    """In any order of completion, with the bad lines and without: the sound lines' records are the same."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines: list[bytes]) -> list[dict[str, Any]]:
        write(source, lines)
        run_batch(FakeRuntime(choose=random.Random(seed).randrange), source, output, overwrite=True)
        return read(output)

    records = run(lines)
    assert [r["index"] for r in records] == [i for i, line in enumerate(lines) if line not in BLANK]
    bad = {r["index"] for r in records if r["error"]}
    assert {i for i, line in enumerate(lines) if line in BAD} <= bad
    alone = run([b"" if i in bad else line for i, line in enumerate(lines)])
    assert alone == [r for r in records if not r["error"]]


def interrupt_at(runtime: FakeRuntime, *steps: int) -> None:
    count = 0

    def on_step() -> None:
        nonlocal count
        count += 1
        if count in steps:
            signal.raise_signal(signal.SIGINT)

    runtime.on_step = on_step


def kept(output: Path) -> list[int]:
    """The lines whose records are in the journal of a run that has not ended, in the order in which they came."""
    lines = (run_path(output) / "journal").read_bytes().split(b"\n")[1:-1]
    return [json.loads(line[line.index(b"{") :])["index"] for line in lines if b"{" in line]


def test_first_interrupt_keeps_what_is_finished(
    files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    write(files[0], [good(0), b"{", *[good(n) for n in range(2, 8)]])
    runtime = FakeRuntime(choose=lambda count: count // 2)
    interrupt_at(runtime, 3)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        BatchInterrupted, match=r"4 of 8 records are kept in .*out\.jsonl\.run; the same"
    ) as caught:
        run_batch(runtime, *files)
    assert kept(files[1]) == [1, 4, 5, 3]  # the bad line, and three that finished out of order
    assert not files[1].exists()
    assert caught.value.report.written == 4
    assert caught.value.report.completion_tokens == 6
    assert not runtime.has_work  # what did not finish has left the runtime
    assert signal.getsignal(signal.SIGINT) is before
    assert "Ctrl-C again" in capfd.readouterr().err

    submitted: list[int] = []
    submit = runtime.submit
    runtime.submit = lambda *requests, **_: (submitted.extend(r.index for r in requests), submit(*requests))[1]  # type: ignore[method-assign]
    report = run_batch(runtime, *files)
    assert sorted(submitted) == [0, 2, 6, 7]
    assert (report.requests, report.written, report.errors, report.completion_tokens) == (8, 8, 1, 14)
    assert (report.kept, own(report)) == (4, [4, 8, 4, 8])
    assert report.tokens_per_second == 8 / report.seconds
    assert indices(files[1]) == list(range(8))
    assert not run_path(files[1]).exists()


@pytest.mark.parametrize("seed", range(4))
def test_interrupted_again_and_again(files: tuple[Path, Path], seed: int) -> None:
    """Each record is computed once, and stays what it is; all are counted, whoever made them."""
    rng = random.Random(seed)
    write(files[0], [b"{" if n % 5 == 3 else openai(n) if n % 3 else good(n) for n in range(30)])
    failing = {1, 2, 6}  # in both formats
    runtime = FakeRuntime()
    runtime.failing = failing
    whole = run_batch(runtime, files[0], files[1].with_name("whole"), created=7)
    computed: list[int] = []
    ran = [0] * 4
    for _ in range(40):
        runtime = FakeRuntime(choose=rng.randrange)
        runtime.failing = failing
        interrupt_at(runtime, rng.randrange(1, 4))
        runtime.on_output = lambda output: computed.append(output.index)
        try:
            report = run_batch(runtime, *files, created=7)
        except BatchInterrupted as interrupted:
            report = interrupted.report
        ran = [a + b for a, b in zip(ran, own(report), strict=True)]
        assert ran[1:] == [report.prompt_tokens, report.cached_tokens, report.completion_tokens]
        if files[1].exists():
            break
    assert sorted(computed) == [n for n in range(30) if n % 5 != 3]
    assert files[1].read_bytes() == files[1].with_name("whole").read_bytes()
    assert figures(report) == figures(whole)
    assert ran == own(whole)
    assert figures(whole) == Tally(records=30, errors=9, prompt_tokens=42, cached_tokens=21, completion_tokens=42)


def test_a_batch_whose_removal_was_cut_short_is_complete(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call says so with the figures of all, and runs nothing; another one does not pass for it."""
    write(files[0], [b"{", *[good(n) for n in range(1, 5)]])
    for call in ("unlink", "rmdir", "fsync_folder"):

        def killed(path: Path, real: Callable[[Path], None] = getattr(DISK, call)) -> None:  # noqa: B008
            if files[1].exists():
                monkeypatch.undo()
                raise KeyboardInterrupt
            real(path)

        monkeypatch.setattr(DISK, call, killed)
        with pytest.raises(KeyboardInterrupt):
            run_batch(FakeRuntime(), *files)
        assert has_run(files[1])
        written = files[1].read_bytes()
        with pytest.raises(BatchFileError, match="holds a run of something else"):
            run_batch(FakeRuntime(), *files, default_params=SamplingParams(temperature=0.5))
        with pytest.raises(BatchFileError, match="Nothing has run"):
            run_batch(FakeRuntime(), *files, strict=True)
        runtime = FakeRuntime()
        runtime.on_step = lambda: pytest.fail("it ran again")
        report = run_batch(runtime, *files)
        assert (report.output_path, report.requests, report.kept) == (files[1], 5, 5)
        assert own(report) == [0] * 4
        assert figures(report) == Tally(5, 1, 8, 4, 8)
        assert files[1].read_bytes() == written
        assert sorted(os.listdir(files[1].parent)) == ["in.jsonl", "out.jsonl"]
        with pytest.raises(BatchFileError, match="exists; --overwrite"):
            run_batch(FakeRuntime(), *files)
        files[1].unlink()


def test_a_run_that_goes_on_and_is_stopped_plans_once(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bar begins where the one before has ended, and its page wants no plan of the whole file."""
    write(files[0], [good(n) for n in range(9)])
    planned: list[int] = []
    done: list[int] = []
    plan_batch, progress_bar = radixrt.batch.run.plan_batch, radixrt.batch.run.progress_bar

    def watched_plan(store: TokenStore, demands: Any, prompts: Any, held: Any = None) -> Any:
        planned.append(len(prompts))
        return plan_batch(store, demands, prompts, held)

    def watched_bar(*arguments: Any, **options: Any) -> Any:
        bar = progress_bar(*arguments, **options)
        done.append(bar.n)
        return bar

    monkeypatch.setattr(radixrt.batch.run, "plan_batch", watched_plan)
    monkeypatch.setattr(radixrt.batch.run, "progress_bar", watched_bar)
    page = files[1].with_name("report.html")
    for _ in range(2):
        runtime = FakeRuntime()
        interrupt_at(runtime, 2)
        with pytest.raises(BatchInterrupted):
            run_batch(runtime, *files, report=page)
        assert page.exists()
    assert len(planned) == len(done) == 2
    assert planned == [9 - count for count in done]
    assert done[0] == 0 < done[1]


def test_the_printed_figures(files: tuple[Path, Path]) -> None:
    """First the figures of all records, then the process's own."""
    write(
        files[0], [b"{", *[good(n) for n in range(1, 6)], b'{"token_ids": [6, 6, 6]}', b'{"token_ids": [7, 7, 7]}']
    )
    runtime = FakeRuntime()
    interrupt_at(runtime, 5)
    with pytest.raises(BatchInterrupted) as caught:
        run_batch(runtime, *files)
    assert shown(caught.value.report)[:6] == [
        "requests          6 of 8",
        "errors            1",
        "prompt tokens     10",
        "cached tokens     5",
        "hit rate          50.00% (best possible 0.00%, predicted 0.00%)",
        "generated tokens  10",
    ]
    assert shown(run_batch(FakeRuntime(), *files))[:8] == [
        "requests          8 (6 from earlier runs)",
        "errors            1",
        "prompt tokens     16",
        "cached tokens     7",
        "hit rate          43.75%",
        "generated tokens  14",
        "this run          2 requests, 6 prompt tokens, 4 generated tokens",
        "its hit rate      33.33% (best possible 0.00%, predicted 0.00%)",
    ]


def shown(report: BatchReport) -> list[str]:
    file = io.StringIO()
    print_report(report, Console(file=file, highlight=False))
    return file.getvalue().splitlines()


def test_a_run_of_something_else_is_not_gone_on_with(files: tuple[Path, Path]) -> None:
    write(files[0], [good(n) for n in range(4)])

    def interrupted(**options: Any) -> None:
        runtime = FakeRuntime()
        interrupt_at(runtime, 1)
        with pytest.raises(BatchInterrupted):
            run_batch(runtime, *files, **options)

    def refused(message: str, runtime: FakeRuntime | None = None, **options: Any) -> None:
        with pytest.raises(BatchFileError, match=f"holds a run of something else: .*{message}"):
            run_batch(runtime or FakeRuntime(), *files, **options)

    interrupted()
    refused(
        "parameters.temperature is not given there and 0.5 here", default_params=SamplingParams(temperature=0.5)
    )
    other = FakeRuntime()
    other.weights = "others"
    refused('weights.weights is "those" there and "others" here', other)
    other = FakeRuntime()
    other.seed = 1
    refused("settings.seed is 0 there and 1 here", other)
    other = FakeRuntime()
    other.builder.context_length -= 10
    refused("settings.lengths that the context allows", other)
    write(files[0], [good(n) for n in range(1, 5)])
    refused("input.lines")
    refused("input.lines", overwrite=True)
    interrupted(restart=True)
    assert kept(files[1]) == [0]
    run_batch(FakeRuntime(), *files)
    assert [record["metadata"]["n"] for record in read(files[1])] == [1, 2, 3, 4]


def test_two_writers(files: tuple[Path, Path]) -> None:
    write(files[0], [good(0), good(1)])
    runtime = FakeRuntime()

    def second() -> None:
        with pytest.raises(BatchFileError, match="process"):
            run_batch(FakeRuntime(), *files)

    runtime.on_step = second
    run_batch(runtime, *files)
    assert indices(files[1]) == [0, 1]


def test_an_output_that_came_in_between_is_not_replaced(files: tuple[Path, Path]) -> None:
    write(files[0], [good(0), good(1)])
    runtime = FakeRuntime()
    runtime.on_step = lambda: files[1].write_text("precious") and None
    with pytest.raises(BatchFileError, match="exists; --overwrite"):
        run_batch(runtime, *files)
    assert files[1].read_text() == "precious"
    runtime = FakeRuntime()
    runtime.on_step = lambda: pytest.fail("it ran again")
    run_batch(runtime, *files, overwrite=True)
    assert indices(files[1]) == [0, 1]


def test_few_at_a_time(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime never knows of more than so many requests, those with a prefix in common one after the other."""
    monkeypatch.setattr(radixrt.batch.lanes, "ENOUGH_WAITING", 4)
    monkeypatch.setattr(radixrt.batch.lanes, "SUBMITTED_AT_ONCE", 4)
    lines = [{"token_ids": [n % 5] * 3 + [n]} for n in range(50)]
    write(files[0], [json.dumps(line).encode() for line in lines])
    runtime = FakeRuntime()
    most, prompts = [0], []
    submit = runtime.submit

    def submitted(*requests: Request, in_order: bool = False) -> None:
        assert in_order
        submit(*requests)
        most.append(len(runtime.running))
        prompts.extend(request.prompt_ids.tolist() for request in requests)

    monkeypatch.setattr(runtime, "submit", submitted)
    report = run_batch(runtime, *files)
    assert max(most) == 8
    assert [prompt[0] for prompt in prompts] == sorted(n % 5 for n in range(50))
    assert report.best_hit_rate == best_hit_rate([np.array(line["token_ids"]) for line in lines])
    assert indices(files[1]) == list(range(50))


def test_second_interrupt_stops_at_once(files: tuple[Path, Path]) -> None:
    write(files[0], [good(n) for n in range(4)])
    runtime = FakeRuntime()

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    runtime.on_step = twice
    with pytest.raises(
        BatchInterrupted, match=r"interrupted: 0 of 4 records are kept in .*out\.jsonl\.run; the same"
    ):
        run_batch(runtime, *files)
    assert len(runtime.running) == 4  # nothing ran any more


def test_interrupt_while_reading(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write(files[0], [b"{", good(1), good(2)])
    runtime = FakeRuntime()
    prepare = runtime.prepare

    def interrupted(*args: Any, **kwargs: Any) -> Request:
        signal.raise_signal(signal.SIGINT)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(runtime, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_batch(runtime, *files)
    assert os.listdir(files[0].parent) == ["in.jsonl"]

    lines = radixrt.batch.job.read_lines

    def interrupts(path: Path, **options: Any) -> Any:
        for line in lines(path, **options):
            yield line
            signal.raise_signal(signal.SIGINT)

    monkeypatch.undo()
    monkeypatch.setattr(radixrt.batch.job, "read_lines", interrupts)
    with pytest.raises(BatchInterrupted, match="nothing has run in this call"):
        run_batch(runtime, *files)
    assert os.listdir(files[0].parent) == ["in.jsonl"]


def test_interrupt_in_the_last_pass_comes_too_late(files: tuple[Path, Path]) -> None:
    write(files[0], [good(0), good(1)])
    runtime = FakeRuntime()
    interrupt_at(runtime, 2)
    assert run_batch(runtime, *files).written == 2
    assert indices(files[1]) == [0, 1]


@contextlib.contextmanager
def scanned(files: tuple[Path, Path], runtime: FakeRuntime, interrupt: Interrupt) -> Iterator[ScannedBatch]:
    with Batch(*files, BatchConfig()) as batch:
        check = lambda prompt, params, line: runtime.prepare(prompt, params, index=line)  # noqa: E731
        yield batch.scan(None, check, interrupt=interrupt)


def test_an_interrupt_that_is_handed_in(files: tuple[Path, Path]) -> None:
    """It takes the place of signals, which are nobody's then; the counts can be read meanwhile."""
    write(files[0], [good(0), b"{", *[good(n) for n in range(2, 8)]])
    runtime, interrupt, seen = FakeRuntime(), Interrupt(), list[tuple[int, int]]()
    before = signal.getsignal(signal.SIGINT)
    with scanned(files, runtime, interrupt) as batch:
        assert batch.tally == Tally()

        def step() -> None:
            assert signal.getsignal(signal.SIGINT) is before
            seen.append((batch.tally.records, batch.tally.errors))
            if len(seen) == 3:
                interrupt.set(signal.SIGTERM)

        runtime.on_step = step
        with pytest.raises(BatchInterrupted, match="4 of 8 records are kept") as caught:
            batch.run(runtime, interrupt)
    assert caught.value.signal_number == signal.SIGTERM
    assert seen[:3] == [(1, 1), (2, 1), (3, 1)]  # what had begun has ended, too
    with scanned(files, FakeRuntime(), Interrupt()) as batch:
        assert batch.run(FakeRuntime(), Interrupt()).written == 8
        assert (batch.tally.records, batch.tally.errors) == (8, 1)
    interrupt = Interrupt()
    interrupt.set()
    write(files[0], [good(0)])
    with (
        pytest.raises(BatchInterrupted, match="nothing has run"),
        scanned((files[0], files[1].with_name("other")), runtime, interrupt),
    ):
        pass


def test_outside_the_main_thread(files: tuple[Path, Path]) -> None:
    write(files[0], [good(0)])
    thread = threading.Thread(target=run_batch, args=(FakeRuntime(), *files))
    thread.start()
    thread.join()
    assert indices(files[1]) == [0]


def test_an_exception_keeps_what_is_finished(files: tuple[Path, Path]) -> None:
    write(files[0], [good(n) for n in range(4)])
    runtime = FakeRuntime(choose=lambda count: count - 1)

    def fail() -> None:
        if len(runtime.running) == 2:
            raise MemoryError("none left")

    runtime.on_step = fail
    with pytest.raises(MemoryError):
        run_batch(runtime, *files)
    assert kept(files[1]) == [3, 2]
    assert [request.index for request in runtime.aborted] == [0, 1]


def test_a_failed_request_is_an_error_record(files: tuple[Path, Path]) -> None:
    write(files[0], [good(n) for n in range(3)])
    runtime = FakeRuntime()
    runtime.failing = {1}
    report = run_batch(runtime, *files)
    assert [r["error"] and r["error"]["type"] for r in read(files[1])] == [None, "failed", None]
    assert (report.errors, report.prompt_tokens, report.completion_tokens) == (1, 4, 4)


def test_with_strict_forms_a_cut_answer_is_an_error_record(files: tuple[Path, Path]) -> None:
    """The fake's answers all end by their length; only some were to have a form."""
    in_form = b'{"token_ids": [1], "regex": "a+", "max_tokens": 4}'
    openai = (
        b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "regex": "a"}}'
    )
    write(files[0], [good(0), in_form, openai])
    engine = SimpleNamespace(engine="llguidance")
    for strict_form in (False, True):
        runtime = FakeRuntime()
        runtime.builder._form = lambda params, stop_ids: engine if params.form else None  # type: ignore[method-assign, assignment, return-value]
        report = run_batch(runtime, *files, strict_form=strict_form, overwrite=True)
        first, second, third = read(files[1])
        assert first["error"] is None
        assert "form_engine" not in first
        assert report.errors == 2 * strict_form
        if strict_form:
            message = "the answer ended by its length, after 2 tokens, before its form had ended"
            assert second["error"] == {"type": "incomplete_form", "message": message}
            assert (third["error"]["code"], third["error"]["message"]) == ("incomplete_form", message)
            assert third["response"]["status_code"] == 400
        else:
            assert second["form_engine"] == third["response"]["body"]["form_engine"] == "llguidance"
            assert second["finish_reason"] == "length"


def test_a_lost_request_is_an_error(files: tuple[Path, Path]) -> None:
    write(files[0], [good(n) for n in range(3)])
    runtime = FakeRuntime()
    runtime.on_step = lambda: runtime.running.__delitem__(slice(1, None))
    with pytest.raises(SchedulerError, match="2 requests"):
        run_batch(runtime, *files)
    assert not files[1].exists()


def test_a_busy_runtime_is_refused(files: tuple[Path, Path]) -> None:
    write(files[0], [good(0)])
    runtime = FakeRuntime()
    runtime.submit(runtime.prepare("a"))
    with pytest.raises(RadixrtError, match="other requests"):
        run_batch(runtime, *files)


def test_seeds_and_indices_are_those_of_a_list(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write(files[0], [good(0), b"", b"{", good(3)])
    runtime = FakeRuntime()
    submitted: list[int] = []
    monkeypatch.setattr(runtime, "submit", lambda *requests, **_: submitted.extend(r.index for r in requests))
    with pytest.raises(SchedulerError):
        run_batch(runtime, *files)
    assert submitted == [0, 3]


def test_byte_order_mark_crlf_and_no_last_newline(files: tuple[Path, Path]) -> None:
    files[0].write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    run_batch(FakeRuntime(), *files)
    assert [(r["index"], r["error"]) for r in read(files[1])] == [(0, None), (2, None)]


def test_what_can_be_read_can_be_written(files: tuple[Path, Path]) -> None:
    """Metadata of any depth: the reader's limit comes before the writer's."""
    lines = [b'{"prompt": "a", "metadata": ' + b"[" * n + b"]" * n + b"}" for n in range(1, 1100)]
    lines += [lines[0].replace(b"[]", b"[" * n + b"]" * n) for n in range(1100, 20_000, 50)]
    write(files[0], lines)
    report = run_batch(FakeRuntime(), *files)
    assert 0 < report.errors < len(lines)


def test_compressed_from_and_to(tmp_path: Path) -> None:
    lines = b'{"prompt": "a"}\n\n{"prompt": "b"}\n'
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines))
    report = run_batch(FakeRuntime(), tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz")
    assert report.output_path == tmp_path / "out.jsonl.gz"
    written = gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes())
    assert [json.loads(line)["index"] for line in written.splitlines()] == [0, 2]

    runtime = FakeRuntime(choose=lambda count: count - 1)
    interrupt_at(runtime, 1)
    with pytest.raises(BatchInterrupted):
        run_batch(runtime, tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz", overwrite=True)
    assert kept(tmp_path / "out.jsonl.gz") == [2]
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()) == written
    run_batch(FakeRuntime(), tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz", overwrite=True)
    assert not run_path(tmp_path / "out.jsonl.gz").exists()


def test_standard_input_and_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(good(0) + b"\n" + good(1))))
    monkeypatch.chdir(tmp_path)
    assert run_batch(FakeRuntime(), "-", "-").output_path is None
    assert [json.loads(line)["index"] for line in capfd.readouterr().out.splitlines()] == [0, 1]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(good(0) + b"\n" + good(1))))
    runtime = FakeRuntime()
    interrupt_at(runtime, 1)
    with pytest.raises(BatchInterrupted, match="1 of 2 records are in standard output, in input order"):
        run_batch(runtime, "-", "-")
    assert os.listdir(tmp_path) == []
    (tmp_path / "out").touch()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(good(0))))
    run_batch(FakeRuntime(), "-", tmp_path / "out", overwrite=True)
    assert indices(tmp_path / "out") == [0]


def test_records_that_wait_for_standard_output_are_on_disk(
    files: tuple[Path, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lines wait if the last one ends first. If the disk is too small, the lines that fit are printed."""
    files[0].write_bytes(b"\n".join(good(index) for index in range(40)))
    scratch = files[0].parent / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    runtime = FakeRuntime(choose=lambda count: count - 1)
    sizes: list[int] = []
    runtime.on_step = lambda: sizes.append(sum(path.stat().st_size for path in scratch.glob("*/waiting")))
    run_batch(runtime, files[0], "-")
    records = capfd.readouterr().out.splitlines()
    assert [json.loads(record)["index"] for record in records] == list(range(40))
    assert sizes == sorted(sizes)
    assert sizes[-1] > 0.9 * len("".join(records))
    with (
        file_limit(len("".join(records)) // 2),
        pytest.raises(JournalError, match="waiting: File too large; raise the limit"),
    ):
        run_batch(FakeRuntime(choose=lambda count: count - 1), files[0], "-")
    printed = [json.loads(record)["index"] for record in capfd.readouterr().out.splitlines()]
    assert 10 < len(printed) < 30
    assert printed == list(range(40))[-len(printed) :]
    assert list(scratch.iterdir()) == []


def test_a_line_of_100_mb_is_one_error(files: tuple[Path, Path]) -> None:
    with open(files[0], "wb") as file:
        file.write(good(0) + b'\n{"prompt": "')
        file.seek(100_000_000, os.SEEK_CUR)
        file.write(b'"}\n' + good(2))
    run_batch(FakeRuntime(), *files)
    records = read(files[1])
    assert [r["index"] for r in records] == [0, 1, 2]
    assert [r["error"] and r["error"]["message"] for r in records] == [
        None,
        "the line has 100,000,015 bytes; at most 67,108,864 are read",
        None,
    ]


def test_5000_duplicate_ids(files: tuple[Path, Path]) -> None:
    write(files[0], [good(0)] * 5000)
    report = run_batch(FakeRuntime(), *files)
    assert (report.requests, report.errors, report.prompt_tokens) == (5000, 4999, 2)
    types = [record["error"] and record["error"]["type"] for record in read(files[1])]
    assert types == [None] + ["duplicate_custom_id"] * 4999


def test_an_input_that_is_cut_short_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "in.gz").write_bytes(gzip.compress(good(0) + b"\n" + good(1) + b"\n")[:-1])
    runtime = FakeRuntime()
    runtime.on_step = lambda: pytest.fail("it ran")
    with pytest.raises(BatchFileError, match=r"in\.gz is cut short after line 2 "):
        run_batch(runtime, tmp_path / "in.gz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_no_lines_give_an_empty_output(files: tuple[Path, Path], content: bytes) -> None:
    files[0].write_bytes(content)
    report = run_batch(FakeRuntime(), *files)
    assert (report.requests, report.hit_rate, report.tokens_per_second) == (0, 0.0, 0.0)
    assert files[1].read_bytes() == b""


def test_an_existing_output_is_kept(files: tuple[Path, Path]) -> None:
    write(files[0], [good(0)])
    files[1].write_text("precious")
    with pytest.raises(BatchFileError, match=r"out\.jsonl exists; --overwrite"):
        run_batch(FakeRuntime(), *files)
    assert files[1].read_text() == "precious"
    runtime = FakeRuntime()
    during: list[str] = []
    runtime.on_step = lambda: during.append(files[1].read_text())
    run_batch(runtime, *files, overwrite=True)
    assert during == ["precious"]
    assert indices(files[1]) == [0]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def refused(source: Path, output: Path, message: str) -> None:
        with pytest.raises(BatchFileError, match=message):
            run_batch(FakeRuntime(), source, output, overwrite=True)

    refused(source, out, "does not exist")
    refused(tmp_path, out, "is a folder")
    write(source, [good(0)])
    refused(source, tmp_path / "no" / "out.jsonl", "the folder .*no of the output does not exist")
    refused(source, tmp_path, "not a plain file")
    refused(source, tmp_path / "out.parquet", "records are JSON lines")
    refused(source, source, "the output .* is the input; give it another name")
    refused(source, tmp_path / ("x" * 256), "File name too long")
    refused(tmp_path / ("x" * 256), out, "does not exist")
    os.link(source, tmp_path / "link")
    refused(source, tmp_path / "link", "is the input")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(source)
    refused(source, tmp_path / "link", "is a symbolic link")
    for target in ("elsewhere", "nowhere", "/dev/null"):
        (tmp_path / "elsewhere").write_text("precious")
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to(target)
        refused(
            source, tmp_path / "link", 'is a symbolic link; give the path that it leads to; "-" is standard out'
        )
    assert (tmp_path / "elsewhere").read_text() == "precious"
    os.mkfifo(tmp_path / "fifo")
    refused(source, tmp_path / "fifo", 'is in the way of the output and is not a plain file; "-" is standard out')
    assert read(source)[0]["custom_id"] == "id-0"
    run_path(out).write_text("not radixrt's")
    refused(source, out, "is in the way of radixrt's own folder")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_refuses_is_fatal(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    calls = 0

    def refuse(*args: Any) -> None:
        nonlocal calls
        calls += 1
        raise OSError(28, "No space left on device")

    write(files[0], [good(0)])
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(JournalError, match=r"cannot write .*: No space left .* run the same command again"):
        run_batch(FakeRuntime(), *files)
    assert calls == 1  # not tried again
    assert not files[1].exists()
    monkeypatch.undo()
    run_batch(FakeRuntime(), *files)
    assert indices(files[1]) == [0]


def test_an_input_that_cannot_be_read(files: tuple[Path, Path]) -> None:
    write(files[0], [good(0)])
    files[0].chmod(0)
    if os.access(files[0], os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(BatchFileError, match=r"cannot read .*in\.jsonl: Permission denied"):
        run_batch(FakeRuntime(), *files)


def test_progress(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files[0], [good(0), b"{", good(2)])
    monkeypatch.setattr(radixrt.batch.meter, "LOG_INTERVAL", 0.0)
    run_batch(FakeRuntime(), *files, progress=True)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert "tokens/s, hit rate 50.0%" in shown.err
    assert shown.out == ""
    run_batch(FakeRuntime(), *files, overwrite=True)
    assert capsys.readouterr().err == ""


_PROCESS = """
import random, sys, time
from tests.support.fake_runtime import FakeRuntime
from radixrt.batch.job import run_batch

runtime = FakeRuntime(choose=random.Random(int(sys.argv[3])).randrange)
runtime.on_output = lambda output: (print(output.index, flush=True), time.sleep(0.001))
run_batch(runtime, sys.argv[1], sys.argv[2])
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.long)])
def test_killed_at_random_points(files: tuple[Path, Path], kills: int) -> None:
    """Records that were kept stay as they are to the last byte, and the output is that of a run in one piece."""
    rng = random.Random(kills)
    write(files[0], [b"{" if n % 10 == 3 else good(n) for n in range(40)])
    whole = files[1].with_name("whole")
    run_batch(FakeRuntime(), files[0], whole)
    expected = {json.loads(line)["index"]: line for line in whole.read_bytes().splitlines()}
    journal = run_path(files[1]) / "journal"

    def start(seed: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        arguments = [sys.executable, "-c", _PROCESS, *map(str, files), str(seed)]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment)

    survived: set[int] = set()
    for seed in range(kills):
        process = start(seed)
        assert process.stdout is not None
        for _ in range(rng.randrange(0, 9)):
            process.stdout.readline()
        time.sleep(rng.random() * 0.004)
        process.kill()
        process.communicate()
        if files[1].exists():  # it was quicker
            assert files[1].read_bytes() == whole.read_bytes()
            run_batch(FakeRuntime(), *files, overwrite=True)  # what is left of its folder goes
            files[1].unlink()
            survived = set()
            continue
        lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
        records = [line[line.index(b"{") :] for line in lines if b"{" in line]
        found = {json.loads(record)["index"]: record for record in records}
        assert len(found) == len(records), "no line has two"
        assert survived <= found.keys(), "nothing is lost"
        assert all(expected[index] == record for index, record in found.items())
        survived = set(found)
    assert start(kills).wait() == 0
    assert files[1].read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(files[0].parent)) == ["in.jsonl", "out.jsonl", "whole"]


def test_keywords_are_the_fields_of_the_configuration() -> None:
    assert list(BatchOptions.__annotations__) == [field.name for field in fields(BatchConfig)]
