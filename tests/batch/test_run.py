"""A batch's run over the real scheduler: failures of a request, a pass, the device; too many errors; signals."""

from __future__ import annotations

import gc
import json
import math
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import radixrt.batch.lanes
import radixrt.batch.record_writer
from radixrt.batch.formats.line_format import record_error
from radixrt.batch.formats.record import LineErrorType
from radixrt.batch.job import BatchInterrupted, run_batch
from radixrt.batch.journal.run_folder import run_path
from radixrt.errors import DeviceLostError, ErrorRateError, ParameterError, PassError
from radixrt.output import RequestOutput
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.booking import Booking
from radixrt.schedule.request import Request
from radixrt.text.builder import TextBuilder
from tests.support.fake_runtime import FakeRuntime
from tests.support.runtimes import SIZES, SimulatedRuntime, expected_tokens, simulated_runtime

COUNT = 40
NEW_TOKENS = 6


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.jsonl"
    lines = [{"token_ids": prompt(n), "max_new_tokens": NEW_TOKENS, "custom_id": f"id-{n}"} for n in range(COUNT)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source, tmp_path / "out.jsonl"


def prompt(number: int) -> list[int]:
    return [number % 2, number % 5, number // 5 % 5, number // 25, 1, number % 3]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def kept(output: Path) -> dict[int, bytes]:
    """The records in the journal of a run that has not ended, by line."""
    lines = (run_path(output) / "journal").read_bytes().split(b"\n")[1:-1]
    records = [line[line.index(b"{") :] for line in lines if b"{" in line]
    by_line = {json.loads(record)["index"]: record for record in records}
    assert len(by_line) == len(records), "no line has two"
    return by_line


def check_answers(output: Path, bad: set[int] = frozenset()) -> list[dict[str, Any]]:  # type: ignore[assignment]
    """Each line has its record, in order, and the model's answer unless it is a bad one. Returns the bad ones'."""
    records = read(output)
    assert [record["index"] for record in records] == list(range(COUNT))
    assert {record["index"] for record in records if record["error"]} == set(bad)
    fresh = simulated_runtime()
    for record in records:
        if record["index"] not in bad:
            assert record["token_ids"] == expected_tokens(fresh, prompt(record["index"]), NEW_TOKENS)
    return [record for record in records if record["error"]]


def has(*indices: int) -> Any:
    return lambda booking: any(answer.request.index in indices for answer in booking.answers)


def failing(when: Any) -> Any:
    return lambda booking: RuntimeError("out of something") if when(booking) else None


def test_old_objects_are_left_alone_until_all_is_answered(files: tuple[Path, Path]) -> None:
    """A full collection would take as long as many a pass."""
    frozen: list[bool] = []
    runtime = simulated_runtime()
    runtime.hooks.launch_fault = lambda booking: frozen.append(gc.get_freeze_count() > 0)
    run_batch(runtime, *files)
    assert len(frozen) > 3
    assert all(frozen)
    assert gc.get_freeze_count() == 0
    check_answers(files[1])


# -- passes that fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launch_fault", "run_fault"])
@pytest.mark.parametrize("bad", [{17}, {0, 3, 39}, set(range(8, 16))])
def test_lines_that_fail_alone_have_errors(files: tuple[Path, Path], where: str, bad: set[int]) -> None:
    runtime = simulated_runtime()
    setattr(runtime.hooks, where, failing(has(*bad)))
    report = run_batch(runtime, *files)
    records = check_answers(files[1], bad)
    assert {record["error"]["message"] for record in records} == {
        "its pass failed: RuntimeError: out of something"
    }
    assert report.errors == len(bad)
    most = 1 + math.ceil(math.log2(SIZES.max_running))  # first with others, then in ever smaller groups
    assert max(runtime.hooks.begun.values()) <= most
    assert not runtime.has_work
    runtime.world.check_drained()


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_passes_that_are_too_large_cost_no_line_its_answer(files: tuple[Path, Path], most: int) -> None:
    runtime = simulated_runtime()
    runtime.hooks.launch_fault = failing(lambda booking: len(booking.answers) > most)
    assert run_batch(runtime, *files).errors == 0
    check_answers(files[1])


def test_every_pass_fails(files: tuple[Path, Path]) -> None:
    runtime = simulated_runtime()
    runtime.hooks.launch_fault = failing(lambda booking: True)
    run_batch(runtime, *files)
    check_answers(files[1], set(range(COUNT)))
    # The first runs and those again; and a pass is launched before it is known that the one before has failed.
    assert len(runtime.hooks.passes) <= 2 * (COUNT + 2 * COUNT)
    assert max(runtime.hooks.begun.values()) <= 1 + math.ceil(math.log2(SIZES.max_running))


def test_lines_that_run_again_count_the_hits_of_their_first_try(files: tuple[Path, Path]) -> None:
    """What they find then is in part their own work, and no engine can have more hits than the best possible."""
    runtime = simulated_runtime()
    runtime.hooks.run_fault = failing(
        lambda booking: len(booking.answers) > 2 and len(runtime.hooks.passes) % 3 == 0
    )
    report = run_batch(runtime, *files)
    check_answers(files[1])
    assert max(runtime.hooks.begun.values()) > 1
    assert report.best_hit_rate is not None
    assert 0 < report.run.hit_rate <= report.best_hit_rate
    for record in read(files[1]):
        usage = record["usage"]
        assert usage["cached_tokens"] + usage["computed_tokens"] == usage["prompt_tokens"]


def test_what_failed_runs_apart(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is in a pass with lines that are run again, and the others go on before and after."""
    monkeypatch.setattr(radixrt.batch.lanes, "ENOUGH_WAITING", 10)
    monkeypatch.setattr(radixrt.batch.lanes, "SUBMITTED_AT_ONCE", 10)
    runtime = simulated_runtime()
    bad = 10
    runtime.hooks.launch_fault = failing(has(bad))
    run_batch(runtime, *files)
    check_answers(files[1], {bad})
    group = {index for index, count in runtime.hooks.begun.items() if count > 1}
    assert bad in group
    assert 4 < len(group) < 20
    start = next(i for i, indices in enumerate(runtime.hooks.passes) if i > 5 and bad in indices)
    end = max(i for i, indices in enumerate(runtime.hooks.passes) if group & set(indices))
    assert all(set(indices) <= group for indices in runtime.hooks.passes[start : end + 1])
    assert [bad] in runtime.hooks.passes[start : end + 1]
    assert set().union(*map(set, runtime.hooks.passes[end + 1 :])), "more lines are begun after that"


def test_one_of_several_answers_fails(tmp_path: Path) -> None:
    """A line whose first answer has ended, and whose second one's pass then fails, is run again as a whole."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"token_ids": [1, 2, 3], "n": 3, "max_new_tokens": 5}) + "\n")
    runtime = simulated_runtime()
    failed = [0]

    def once(booking: Booking) -> Exception | None:
        if failed[0] or all(answer.parent is None for answer in booking.answers):
            return None
        failed[0] += 1
        return RuntimeError("once")

    runtime.hooks.launch_fault = once
    assert run_batch(runtime, source, out).errors == 0
    (record,) = read(out)
    assert failed == [1]
    assert [answer["finish_reason"] for answer in record["outputs"]] == ["length"] * 3


def test_an_answer_that_is_not_the_first_says_why_it_has_failed() -> None:
    """The first one has ended whole."""
    runtime = simulated_runtime()
    runtime.hooks.launch_fault = failing(lambda booking: all(answer.parent for answer in booking.answers))
    with pytest.raises(PassError, match="prompt 0: its pass failed: RuntimeError: out of something"):
        runtime.generate([4, 4, 1, 2], SamplingParams(max_new_tokens=8, n=2, stop_token_ids=(1,)))


# -- one request alone -------------------------------------------------------------------------------------


def test_values_that_are_not_finite(files: tuple[Path, Path]) -> None:
    runtime = simulated_runtime()
    runtime.world.runner.poison_next = True
    report = run_batch(runtime, *files)
    bad = {record["index"] for record in read(files[1]) if record["error"]}
    assert len(bad) == report.errors == 1
    (record,) = check_answers(files[1], bad)
    assert record["error"] == {"type": "failed", "message": "the model computed values that are not finite"}
    assert max(runtime.hooks.begun.values()) == 1  # that is not run again


def test_text_that_cannot_be_made(files: tuple[Path, Path]) -> None:
    runtime = simulated_runtime()
    runtime.hooks.text_fault = lambda index: ValueError("half a character") if index in (4, 5) else None
    assert run_batch(runtime, *files).errors == 2
    records = check_answers(files[1], {4, 5})
    assert {record["error"]["message"] for record in records} == {"no output can be made: half a character"}


class _BadText(TextBuilder):
    def __init__(self) -> None:
        """Nothing is pushed."""

    def push(self, token_id: int) -> bool:
        raise ValueError("no such piece")

    def finish(self) -> str:
        return ""


def test_a_stop_string_that_cannot_be_looked_for(files: tuple[Path, Path]) -> None:
    """It is looked for while a pass is booked, which goes on with the others' tokens."""
    runtime = simulated_runtime()
    runtime.hooks.make_text = lambda index: _BadText() if index == 9 else None
    assert run_batch(runtime, *files).errors == 1
    (record,) = check_answers(files[1], {9})
    assert record["error"]["message"] == "no text can be made of its answer: no such piece"
    runtime.world.check_drained()


def test_a_record_that_cannot_be_made(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    output_line = radixrt.batch.record_writer.output_line

    def faulty(index: int, *others: Any, **options: Any) -> bytes:
        if index == 6:
            raise KeyError("logprobs")
        return output_line(index, *others, **options)

    monkeypatch.setattr(radixrt.batch.record_writer, "output_line", faulty)
    assert run_batch(simulated_runtime(), *files).errors == 1
    (record,) = check_answers(files[1], {6})
    assert record["custom_id"] == "id-6"
    assert record["error"]["message"] == "no record can be made of its answer: KeyError: 'logprobs'"


# -- a device that is lost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launch_fault", "run_fault"])
@pytest.mark.parametrize("at", [0, 1, 7, 20])
def test_a_lost_device_costs_no_line_its_answer(files: tuple[Path, Path], where: str, at: int) -> None:
    runtime = simulated_runtime()

    def lost(booking: Booking) -> Exception | None:
        if len(runtime.hooks.passes) <= at:
            return None
        runtime.world.runner.is_lost = True
        return RuntimeError("an illegal memory access was encountered")

    setattr(runtime.hooks, where, lost)
    with pytest.raises(
        DeviceLostError, match=r"works no more\n\d+ of 40 records are kept in .*; the same"
    ) as error:
        run_batch(runtime, *files)
    assert isinstance(error.value.__cause__, RuntimeError)
    found = kept(files[1])
    assert not any(json.loads(record)["error"] for record in found.values())
    assert not files[1].exists()
    assert not runtime.has_work
    assert runtime.parts.engine.is_lost
    with pytest.raises(DeviceLostError, match="in a new process"):
        runtime.step()
    runtime.close()
    assert run_batch(simulated_runtime(), *files).errors == 0
    check_answers(files[1])
    assert found.items() <= dict(enumerate(line for line in files[1].read_bytes().splitlines())).items()


def test_a_device_that_is_lost_while_a_batch_ends(files: tuple[Path, Path]) -> None:
    """In the passes that what was aborted takes to leave the runtime."""
    runtime = simulated_runtime()

    def stopped() -> None:
        if len(runtime.hooks.passes) == 9:
            runtime.hooks.run_fault = failing(lambda booking: True)
            runtime.world.runner.is_lost = True
            signal.raise_signal(signal.SIGINT)

    runtime.hooks.on_step = stopped
    with pytest.raises(DeviceLostError):
        run_batch(runtime, *files, drain_seconds=0)
    run_batch(simulated_runtime(), *files)
    check_answers(files[1])


# -- too many errors ---------------------------------------------------------------------------------------


def spoil(source: Path, *numbers: int) -> None:
    lines = source.read_text().splitlines()
    for number in numbers:
        lines[number] = '{"token_ids": []}' if number % 2 else "{"
    source.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("rate", "stops"), [(None, False), (0.0, True), (0.0749, True), (0.075, False), (1, False)]
)
def test_too_many_bad_lines_run_nothing(files: tuple[Path, Path], rate: float | None, stops: bool) -> None:
    spoil(files[0], 3, 4, 7)
    runtime = simulated_runtime()
    if not stops:
        assert run_batch(runtime, *files, max_error_rate=rate).errors == 3
        check_answers(files[1], {3, 4, 7})
        return
    message = r"3 of 40 lines are bad \(1 invalid_line, 2 invalid_prompt\):\n  line 4: .*\n.*max_error_rate of 0"
    with pytest.raises(ErrorRateError, match=rf"(?s){message}.*Nothing has run"):
        run_batch(runtime, *files, max_error_rate=rate)
    assert not runtime.hooks.passes
    assert not run_path(files[1]).exists()


def test_errors_of_all_kinds_and_runs_are_counted(files: tuple[Path, Path]) -> None:
    spoil(files[0], 3, 4)
    failures = {10: "loud", 20: "loud", 30: "low"}

    def runtime() -> SimulatedRuntime:
        made = simulated_runtime()
        made.hooks.text_fault = lambda index: ValueError(failures[index]) if index in failures else None
        return made

    with pytest.raises(ErrorRateError) as error:
        run_batch(runtime(), *files, max_error_rate=3 / 40)
    shown = str(error.value).splitlines()
    count = int(shown[0].split()[0])
    assert count in (4, 5)  # two of them may end in one pass, whose answers are all kept
    assert shown[0] == f"{count} of 40 lines have errors, more than a max_error_rate of 0.075 allows:"
    assert "  1 x invalid_prompt: token_ids is empty" in shown
    assert sum(int(line.split()[0]) for line in shown[1:-1]) == count
    assert "with a higher max_error_rate the same command goes on from there" in shown[-1]
    found = kept(files[1])
    assert sum(json.loads(record)["error"] is not None for record in found.values()) == count

    again = runtime()
    with pytest.raises(ErrorRateError, match=f"{count} of 40 lines"):  # at once: these errors are there
        run_batch(again, *files, max_error_rate=3 / 40)
    assert not again.hooks.passes
    with pytest.raises(ErrorRateError, match="5 of 40 lines"):
        run_batch(again, *files, max_error_rate=4 / 40)
    run_batch(again, *files, max_error_rate=5 / 40)
    check_answers(files[1], {3, 4, *failures})


def test_a_rate_is_reached_and_not_exceeded(files: tuple[Path, Path]) -> None:
    """29 of 100 are 29 %, though 0.29 * 100 is a little less than 29."""
    files[0].write_text("{\n" * 29 + '{"token_ids": [1]}\n' * 71)
    assert run_batch(simulated_runtime(), *files, max_error_rate=0.29).errors == 29


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan, "0.5"])
def test_rates_out_of_bounds(files: tuple[Path, Path], rate: Any) -> None:
    with pytest.raises(ParameterError, match="max_error_rate is"):
        run_batch(simulated_runtime(), *files, max_error_rate=rate)


def test_flags_that_are_none_and_parameters_as_a_dict(files: tuple[Path, Path]) -> None:
    files[1].write_text("an older one")
    for option, value in (("overwrite", "no"), ("restart", 1), ("strict", None), ("created", "now")):
        with pytest.raises(ParameterError, match=f"{option} is {value!r}"):
            run_batch(simulated_runtime(), *files, **{option: value})
    with pytest.raises(ParameterError, match="sampling parameters are a dict or a SamplingParams, not 5"):
        run_batch(simulated_runtime(), *files, overwrite=True, default_params=5)  # type: ignore[arg-type]
    assert files[1].read_text() == "an older one"
    run_batch(simulated_runtime(), *files, overwrite=True, default_params={"n": 2})
    assert {len(json.loads(line)["outputs"]) for line in files[1].read_text().splitlines()} == {2}


@pytest.mark.parametrize("line_format", ["plain", "openai"])
def test_errors_are_found_in_records(tmp_path: Path, line_format: str) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked: list[dict[str, Any]] = [{"prompt": [1, 2]}, {"prompt": [1, 2]}, {"prompt": [3] * 99}]
    if line_format == "openai":
        asked = [
            {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"model": "m", **line}}
            for n, line in enumerate(asked)
        ]
    source.write_text("".join(json.dumps(line) + "\n" for line in asked))
    runtime = FakeRuntime()
    runtime.failing = {1}
    run_batch(runtime, source, out)
    assert [record_error(record) for record in read(out)] == [
        None,
        (LineErrorType.FAILED, "the pass failed"),
        (
            LineErrorType.CONTEXT_LENGTH,
            "the prompt has 99 tokens, but this model's maximum context length is 50 tokens: it may have at most "
            "49",
        ),
    ]


# -- signals -----------------------------------------------------------------------------------------------


def at_pass(runtime: SimulatedRuntime, number: int, *signals: int) -> None:
    pending = list(signals)

    def send() -> None:
        while pending and len(runtime.hooks.passes) >= number:
            signal.raise_signal(pending.pop(0))

    runtime.hooks.on_step = send


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_has_begun_is_finished(
    files: tuple[Path, Path], number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime = simulated_runtime()
    at_pass(runtime, 12, number)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(BatchInterrupted, match=r"\d+ of 40 records are kept in") as error:
        run_batch(runtime, *files)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert error.value.signal_number == number
    assert "requests that have begun get 20 seconds to end; Ctrl-C again stops at once" in capfd.readouterr().err
    begun = set(runtime.hooks.begun)
    assert SIZES.max_running < len(begun) < COUNT
    assert set(kept(files[1])) == begun
    assert not any(json.loads(record)["error"] for record in kept(files[1]).values())
    assert error.value.report.written == len(begun)
    runtime.world.check_drained()
    again = simulated_runtime()
    run_batch(again, *files)
    assert set(again.hooks.begun) == set(range(COUNT)) - begun
    check_answers(files[1])


def test_what_does_not_end_in_time_has_no_record(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("radixrt.engine.signals.time.monotonic", lambda: now[0])
    runtime = simulated_runtime()
    at_pass(runtime, 12, signal.SIGTERM)
    send = runtime.hooks.on_step

    def step() -> None:
        now[0] += 1.0
        send()

    runtime.hooks.on_step = step
    with pytest.raises(BatchInterrupted):
        run_batch(runtime, *files, drain_seconds=2)
    found = kept(files[1])
    assert 0 < len(found) < len(runtime.hooks.begun)
    assert len(runtime.hooks.passes) < 12 + NEW_TOKENS
    assert not any(json.loads(record)["error"] for record in found.values())
    runtime.world.check_drained()
    run_batch(simulated_runtime(), *files)
    check_answers(files[1])


def test_no_time_for_what_has_begun(files: tuple[Path, Path]) -> None:
    runtime = simulated_runtime()
    at_pass(runtime, 12, signal.SIGINT)
    with pytest.raises(BatchInterrupted):
        run_batch(runtime, *files, drain_seconds=0)
    assert len(runtime.hooks.passes) <= 13
    runtime.world.check_drained()


@pytest.mark.parametrize("seconds", [-1, math.inf, "20"])
def test_drain_seconds_out_of_bounds(files: tuple[Path, Path], seconds: Any) -> None:
    with pytest.raises(ParameterError, match="drain_seconds is"):
        run_batch(simulated_runtime(), *files, drain_seconds=seconds)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_after_the_pass(files: tuple[Path, Path], number: signal.Signals) -> None:
    runtime = simulated_runtime()
    at_pass(runtime, 12, signal.SIGINT, number)
    how = "interrupted" if number == signal.SIGINT else "terminated"
    with pytest.raises(BatchInterrupted, match=rf"{how}: \d+ of 40 records are kept in") as error:
        run_batch(runtime, *files)
    assert error.value.signal_number == number
    assert len(runtime.hooks.passes) <= 13
    runtime.world.check_drained()
    run_batch(simulated_runtime(), *files)
    check_answers(files[1])


def test_an_application_keeps_its_own_handler(files: tuple[Path, Path]) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        runtime = simulated_runtime()
        at_pass(runtime, 12, signal.SIGTERM)
        assert run_batch(runtime, *files).written == COUNT
        assert calls
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        runtime = simulated_runtime()
        at_pass(runtime, 12, signal.SIGTERM)
        assert run_batch(runtime, *files, overwrite=True).written == COUNT
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    check_answers(files[1])


def test_failed_lines_wait_for_the_next_run(files: tuple[Path, Path]) -> None:
    """A pass fails after the signal: its lines are neither run again nor given errors."""
    runtime = simulated_runtime()
    at_pass(runtime, 12, signal.SIGINT)
    runtime.hooks.launch_fault = failing(lambda booking: len(runtime.hooks.passes) > 13)
    with pytest.raises(BatchInterrupted):
        run_batch(runtime, *files)
    assert not any(json.loads(record)["error"] for record in kept(files[1]).values())
    run_batch(simulated_runtime(), *files)
    check_answers(files[1])


@pytest.mark.parametrize("seed", range(6))
def test_everything_at_once(files: tuple[Path, Path], seed: int) -> None:
    """Signals, failing passes and lost devices, run after run: no line is answered twice, or with what is not its
    own.
    """
    rng = random.Random(seed)
    bad = {rng.randrange(COUNT), rng.randrange(COUNT)}
    found: dict[int, bytes] = {}
    for attempt in range(60):
        runtime = simulated_runtime()
        runtime.hooks.launch_fault = failing(has(*bad))
        at_pass(runtime, rng.randrange(1, 20), rng.choice([signal.SIGINT, signal.SIGTERM]))
        if attempt % 3 == 2:
            runtime.world.runner.is_lost = True
        try:
            run_batch(runtime, *files, drain_seconds=rng.choice([0, 20]))
            break
        except (BatchInterrupted, DeviceLostError):
            now = kept(files[1])
            assert found.items() <= now.items()
            found = now
    check_answers(files[1], bad)


def test_requests_that_wait_are_withdrawn_by_a_runtime_that_says_who_has_begun(files: tuple[Path, Path]) -> None:
    files[0].write_text('{"prompt": [1, 1]}\n' * 6)
    runtime = FakeRuntime()
    outputs: list[int] = []
    runtime.on_output = lambda output: outputs.append(output.index)
    steps = [0]

    def on_step() -> None:
        steps[0] += 1
        if steps[0] == 2:
            running: list[Request] = runtime.running
            runtime.begun = running[:2]
            signal.raise_signal(signal.SIGTERM)

    runtime.on_step = on_step
    with pytest.raises(BatchInterrupted):
        run_batch(runtime, *files)
    assert outputs == [0, 1, 2]
    assert sorted(kept(files[1])) == [0, 1, 2]


def test_an_answer_to_somebody_else_is_nobodys_record(files: tuple[Path, Path]) -> None:
    """One that waits to be taken, of a request with the number of a line."""
    runtime = simulated_runtime()
    before = runtime.prepare([1, 1, 1], SamplingParams(max_new_tokens=30), index=0)
    runtime.submit(before)
    while runtime.has_work:  # the answer stays with the driver, as after a second Ctrl-C
        runtime.step()
    run_batch(runtime, *files)
    check_answers(files[1])


def test_an_output_of_nobody_is_not_written(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was withdrawn may still end."""
    runtime = simulated_runtime()
    at_pass(runtime, 12, signal.SIGINT)
    step, seen = runtime.step, []

    def noted() -> list[RequestOutput]:
        outputs = step()
        seen.extend(str(output.finish_reason) for output in outputs)
        return outputs

    monkeypatch.setattr(runtime, "step", noted)
    with pytest.raises(BatchInterrupted):
        run_batch(runtime, *files)
    assert "abort" in seen
    assert {json.loads(record)["finish_reason"] for record in kept(files[1]).values()} == {"length"}
