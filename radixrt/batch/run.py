"""Runs the sound lines of a batch: from requests in a planned order to outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from radixrt.arrays import BoolArray, Int32Array, Int64Array
from radixrt.batch.formats.record import LineError, LineErrorType, Reply
from radixrt.batch.meter import Meter, MeteredRuntime, progress_bar
from radixrt.batch.options import BatchConfig
from radixrt.batch.record_writer import RecordCounts, RecordWriter
from radixrt.batch.retry import Retries
from radixrt.batch.scan import Scan, SoundLine
from radixrt.batch.tally import Tally
from radixrt.engine.signals import FirstSignal
from radixrt.errors import ParameterError, PromptError, SchedulerError
from radixrt.limits import RunLimits
from radixrt.output import RequestOutput
from radixrt.planning.batch_plan import BatchPlan, plan_batch
from radixrt.report.batch_report import BatchReport, RunFigures
from radixrt.report.timeline import Sample
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer

# Requests are made while the device computes: some at a time, whenever fewer wait than a scheduler ranks.
ENOUGH_WAITING = 1024
SUBMITTED_AT_ONCE = 512

_NOTHING, _NO_RUN = Tally(), RunFigures()

_PlannedLine = tuple[int, int | None]
"""A line's position, and the tokens of its prompt that later lines need (`Request.reusable_len`)."""


class PreparedRequest(Protocol):
    """A request from `BatchRuntime.prepare`."""

    @property
    def id(self) -> int | str:
        """The id of its output, unique in the runtime."""

    @property
    def prompt_ids(self) -> Int32Array: ...

    @property
    def max_new_tokens(self) -> int: ...


R = TypeVar("R", bound=PreparedRequest)


class HasJson(Protocol):
    """What a report shows as it is."""

    def to_json(self) -> dict[str, Any]: ...


class BatchRuntime(MeteredRuntime, Protocol[R]):
    """The methods of a `Runtime` that a batch calls."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def context_length(self) -> int: ...

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished requests that `step` can advance."""

    @property
    def seed(self) -> int: ...

    @property
    def limits(self) -> RunLimits: ...

    @property
    def reuses_prefixes(self) -> bool: ...

    @property
    def products(self) -> Sequence[HasJson]: ...

    def identity(self) -> Mapping[str, Any]: ...

    def prepare(
        self,
        prompt: str | Sequence[int] | Int32Array | Sequence[Mapping[str, Any]] | Chat,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        keep: int | None = None,
    ) -> R: ...

    def submit(self, *requests: R, in_order: bool = False) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request: R) -> object: ...

    def cached_len(self, prompt_ids: Int32Array) -> int:
        """Leading tokens of a prompt that are in the cache now."""

    def has_begun(self, request: R) -> bool:
        """Whether a pass has computed some of a submitted request."""


@dataclass(frozen=True)
class _PendingLine(Generic[R]):
    """A line whose request the runtime has.

    Attributes:
        position: of its record in the output.
    """

    position: int
    request: R
    reply: Reply


class BatchRun(Generic[R]):
    """One process's work on a batch.

    Args:
        runtime: has no other requests.
        scan: the lines.
        records: writes their records.
        interrupted: once it is set, no more requests are submitted.
        options: of the batch.
    """

    def __init__(
        self,
        runtime: BatchRuntime[R],
        scan: Scan,
        records: RecordWriter,
        interrupted: FirstSignal,
        options: BatchConfig,
    ) -> None:
        self._runtime = runtime
        self._scan = scan
        self._records = records
        self._interrupted = interrupted
        self._options = options
        self._pending: dict[int | str, _PendingLine[R]] = {}  # by the id of the request
        self._retries = Retries()
        self._first_hits: dict[int, int] = {}  # cached tokens that a line's first try had, by position
        self._meter = Meter(runtime)
        self._plan: BatchPlan | None = None
        self._predicted_hit_rate: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether each line has its record."""
        return not self._records.missing

    def run(self) -> None:
        """Run each line without a record until all have one or the batch is interrupted.

        Raises:
            ErrorRateError: more lines have errors than the limit allows.
            DeviceLostError: the runtime cannot go on.
        """
        records, meter = self._records, self._meter
        records.refuse_bad_lines()
        with progress_bar(
            "answering", " requests", len(self._scan), self._options.progress, done=records.written
        ) as bar:
            waiting = self.planned_lines()
            meter.begin(records.written)
            try:
                while self._goes_on(waiting):
                    outputs = self._runtime.step()
                    self._book(outputs)
                    records.end_pass()
                    meter.end_pass(records.written, len(outputs))
                    bar.set_postfix_str(meter.rates, refresh=False)
                    bar.update(records.durable - bar.n)
                records.sync()
                bar.update(records.durable - bar.n)
            finally:
                meter.end(records.written)
                self._drain()
        if records.missing and not self._interrupted.is_set():
            raise SchedulerError(f"the runtime ended without an answer to {records.missing} requests")

    def report(self, output_path: Path | None, counts: RecordCounts) -> BatchReport:
        """Figures of the batch so far. `output_path`: where the records are; None for standard output."""
        best, meter = self._plan.statistics.best_hit_rate if self._plan else None, self._meter
        products = tuple(table.to_json() for table in self._runtime.products)
        return batch_report(
            self._scan,
            counts,
            output_path,
            self._options,
            tally=meter.tally,
            run=meter.figures(best_hit_rate=best, predicted_hit_rate=self._predicted_hit_rate, products=products),
            timeline=meter.timeline,
            is_complete=self.is_complete,
        )

    def plan(self) -> BatchPlan | None:
        """A plan of all sound lines; after an interruption the plan of this run, None if it had none yet."""
        if not self.is_complete:
            return self._plan
        sound = ~self._scan.is_bad
        if self._plan is not None and len(self._plan) == int(sound.sum()):
            return self._plan
        return plan_of(self._scan, sound)

    # -- which lines run, and when -------------------------------------------------------------------------

    def planned_lines(self) -> Iterator[_PlannedLine]:
        """The sound lines without a record, in the order in which they run.

        Those that do not fit in the pool come first: they fail at once.
        """
        scan, limits = self._scan, self._runtime.limits
        positions = np.flatnonzero(~scan.is_bad & ~self._records.finished)
        needed = scan.tokens.lengths[positions] + np.maximum(1, scan.new_tokens[positions]) - 1
        too_long = positions[needed > limits.pool_tokens]
        positions = positions[needed <= limits.pool_tokens]
        self._plan = plan = self._plan_of(positions)
        if self._options.order == "file":
            return _without_keep(np.concatenate([too_long, positions]))
        all_fit = plan.pool_for_all <= limits.pool_tokens
        drops_prefixes = not (all_fit or self._options.keep_cache)
        if all_fit or drops_prefixes:
            self._predicted_hit_rate = self._prediction(plan)
        if not drops_prefixes:
            return _without_keep(np.concatenate([too_long, plan.run.order]))
        planned = zip(plan.run.order.tolist(), plan.keep.tolist(), strict=True)
        return itertools.chain(_without_keep(too_long), planned)

    def _prediction(self, plan: BatchPlan) -> float | None:
        """The hit rate to expect; None if there is no cache, it has two tiers, or what it has may be evicted."""
        stats, limits = self._runtime.cache_stats(), self._runtime.limits
        if not self._runtime.reuses_prefixes or stats.host_capacity or not len(plan):
            return None
        held = stats.capacity - stats.free
        if not held:
            return plan.predict(limits).hit_rate
        fits = held + plan.pool_beyond_held <= limits.pool_tokens
        return plan.predict_without_eviction().hit_rate if fits else None

    def _plan_of(self, positions: Int64Array) -> BatchPlan:
        stats = self._runtime.cache_stats()
        is_empty = stats.free == stats.capacity and not stats.host_tokens
        held = None if is_empty or not self._runtime.reuses_prefixes else self._runtime.cached_len
        return plan_batch(self._scan.tokens, self._scan.demands, positions, held)

    def _goes_on(self, waiting: Iterator[_PlannedLine]) -> bool:
        """Submit waiting lines, unless the batch is interrupted. Whether there is a pass to run."""
        if not self._interrupted.is_set():
            self._feed(waiting)
            return self._runtime.has_work
        self._abort_not_begun()
        in_time = self._interrupted.age < self._options.drain_seconds
        return bool(self._pending) and in_time and self._runtime.has_work

    def _feed(self, waiting: Iterator[_PlannedLine]) -> None:
        """Submit lines if there is room: retries once nothing else runs, otherwise the next ones."""
        while True:
            planned: list[_PlannedLine] = []
            if not self._pending:
                planned = [(position, None) for position in self._retries.take()]
            if not self._retries.is_active and self._runtime.num_waiting < ENOUGH_WAITING:
                planned = list(itertools.islice(waiting, SUBMITTED_AT_ONCE))
            if planned:
                self._submit(planned)
            if self._pending or not planned:
                return

    def _submit(self, planned: list[_PlannedLine]) -> None:
        scan, requests = self._scan, []
        lines = scan.read([position for position, _ in planned])
        for (position, keep), line in zip(planned, lines, strict=True):
            assert isinstance(line, SoundLine)
            number, tokens = int(scan.lines[position]), scan.tokens[position]
            try:
                request = self._runtime.prepare(tokens, line.sampling_params, index=number, keep=keep)
            except (PromptError, ParameterError) as error:  # such as one too long for the KV pool
                why = LineError(LineErrorType.INVALID_PROMPT, f"the prompt {error}", line.reply)
                self._records.refuse(position, why)
                continue
            self._pending[request.id] = _PendingLine(position, request, line.reply)
            requests.append(request)
        if requests:
            self._runtime.submit(*requests, in_order=True)
        self._records.enforce_error_limit()

    def _abort_not_begun(self) -> None:
        """Abort the requests that have not begun."""
        for request_id, line in list(self._pending.items()):
            if not self._runtime.has_begun(line.request):
                self._runtime.abort(line.request)
                del self._pending[request_id]

    def _drain(self) -> None:
        """Abort all requests and step until the runtime has none, unless its device is lost."""
        for line in self._pending.values():
            self._runtime.abort(line.request)
        while self._runtime.has_work:
            self._runtime.step()

    # -- outputs -------------------------------------------------------------------------------------------

    def _book(self, outputs: list[RequestOutput]) -> None:
        """Write the records of ended requests, except for aborted ones and those to be retried."""
        failed: list[tuple[_PendingLine[R], RequestOutput]] = []  # all of one pass: a step books one
        for output in outputs:
            line = self._pending.pop(output.id, None)
            if line is not None and output.cause is None:
                self._answer(line, output)
            elif line is not None:
                failed.append((line, output))
        retried = bool(failed) and self._retries.book([line.position for line, _ in failed])
        for line, output in failed:
            if retried:
                self._first_hits.setdefault(line.position, output.usage.cached_tokens)
            else:
                self._answer(line, output)
        self._records.enforce_error_limit()

    def _answer(self, line: _PendingLine[R], output: RequestOutput) -> None:
        """Write the record of a final output."""
        if (cached := self._first_hits.pop(line.position, None)) is not None:
            # A retry finds the tokens that the first try has computed: its own hits do not count.
            computed = output.usage.prompt_tokens - cached
            output = replace(output, usage=replace(output.usage, cached_tokens=cached, computed_tokens=computed))
        if self._records.answer(line.position, line.reply, output):
            self._meter.count(output)


def batch_report(
    scan: Scan,
    counts: RecordCounts,
    output_path: Path | None,
    options: BatchConfig,
    *,
    tally: Tally = _NOTHING,
    run: RunFigures = _NO_RUN,
    timeline: tuple[Sample, ...] = (),
    is_complete: bool,
) -> BatchReport:
    """Figures of a batch.

    Args:
        scan: the lines.
        counts: of the records that needed no runtime.
        output_path: where the records are; None for standard output.
        tally, run, timeline: of the requests that have run; nothing if none had to.
        is_complete: whether each line has its record.
    """
    total = counts.kept + counts.refused + tally
    return BatchReport(
        output_path=output_path,
        requests=len(scan),
        written=total.records,
        errors=total.errors,
        prompt_tokens=total.prompt_tokens,
        cached_tokens=total.cached_tokens,
        completion_tokens=total.completion_tokens,
        kept=counts.kept.records,
        run=run,
        price_per_hour=options.price_per_hour,
        timeline=timeline,
        is_complete=is_complete,
    )


def plan_of(scan: Scan, lines: BoolArray) -> BatchPlan:
    """A plan of some lines, `[N]`, from an empty cache."""
    return plan_batch(scan.tokens, scan.demands, np.flatnonzero(lines))


def _without_keep(positions: Int64Array) -> Iterator[_PlannedLine]:
    return zip(positions.tolist(), itertools.repeat(None))
