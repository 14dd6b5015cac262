"""The part of a batch that needs a runtime: from sound lines to records."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal

import numpy as np
import numpy.typing as npt

from radixrt.batch.batch_runtime import BatchRuntime, R
from radixrt.batch.error_limit import ErrorLimit
from radixrt.batch.formats.line_format import error_line, output_line, record_error, record_tally
from radixrt.batch.formats.record import LineError, LineErrorType, Reply
from radixrt.batch.journal.sinks import Records
from radixrt.batch.meter import Meter
from radixrt.batch.prescan import Prescan, SoundLine
from radixrt.batch.progress import progress_bar
from radixrt.batch.retry import Retries
from radixrt.batch.tally import ERROR_RECORD, Tally
from radixrt.engine.signals import FirstSignal
from radixrt.errors import ParameterError, PromptError, SchedulerError
from radixrt.output import RequestOutput
from radixrt.planning.batch_plan import BatchPlan, plan_batch
from radixrt.report.batch_report import BatchReport
from radixrt.text.token_spelling import TokenSpelling

Order = Literal["planned", "file"]

# The device computes while requests are made: some at a time, and whenever fewer wait than a scheduler looks at.
ENOUGH_WAITING = 1024
SUBMITTED_AT_ONCE = 512

_log = logging.getLogger(__name__)

_Planned = tuple[int, int | None]
"""The position of a line, and the tokens of its prompt that are wanted again after it (`Request.reusable_len`)."""


@dataclass(frozen=True)
class _Unanswered(Generic[R]):
    """A sound line without its record yet."""

    position: int  # of its record in the output
    request: R
    reply: Reply


class BatchRun(Generic[R]):
    """One process's work on a batch.

    Args:
        runtime: one without other requests.
        scan: what the lines ask for.
        interrupted: set once no more requests are to be begun.
        error_limit: told of each record with an error.
        order, keep_cache, drain_seconds, progress, created: as of `Batch`.
    """

    def __init__(
        self,
        runtime: BatchRuntime[R],
        scan: Prescan,
        interrupted: FirstSignal,
        error_limit: ErrorLimit,
        *,
        order: Order,
        keep_cache: bool,
        drain_seconds: float,
        progress: bool,
        created: int | None,
    ) -> None:
        self._runtime = runtime
        self._scan = scan
        self._interrupted = interrupted
        self._error_limit = error_limit
        self._order = order
        self._keep_cache = keep_cache
        self._drain_seconds = drain_seconds
        self._progress = progress
        self._created = created
        self._spelling = TokenSpelling(runtime.tokenizer)
        self._records: Records | None = None  # where they go, once it runs
        self._left = len(scan)  # records to come
        self._unanswered: dict[int | str, _Unanswered[R]] = {}  # that the runtime knows of, by its id there
        self._retries = Retries()
        self._first_hits: dict[int, int] = {}  # tokens that lines to be run again had found at first, by position
        self._earlier = self._refused = Tally()  # records of earlier runs, and of lines that did not run
        self._meter = Meter(runtime)
        self._plan: BatchPlan | None = None
        self._predicted_hit_rate: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether each line has its record."""
        return not self._left

    def found(self, record: bytes) -> None:
        """Count a record that an earlier run has left."""
        value = json.loads(record)
        self._earlier += record_tally(value)
        if (error := record_error(value)) is not None:
            self._error_limit.count(*error)

    def run(self, records: Records) -> None:
        """Run what has no record until all have one or the batch is interrupted.

        Raises:
            ErrorRateError: more lines have errors than the limit allows.
            DeviceLostError: the runtime can run no more.
        """
        scan = self._scan
        finished = np.zeros(len(scan), np.bool_) if records.finished is None else records.finished.copy()
        self._records, self._left = records, len(scan) - int(finished.sum())
        bad = np.flatnonzero(scan.is_bad & ~finished).tolist()
        for position, error in zip(bad, scan.read(bad), strict=True):
            assert isinstance(error, LineError)
            self._refuse(position, error)
        self._error_limit.enforce()
        done = len(scan) - self._left
        with progress_bar("answering", " requests", len(scan), self._progress, done=done) as bar:
            waiting = self._planned(np.flatnonzero(~scan.is_bad & ~finished))
            self._meter.begin(self._written)
            try:
                while self._goes_on(waiting):
                    outputs = self._runtime.step()
                    self._book(outputs)
                    records.settle()
                    self._meter.look(self._written, len(outputs))
                    bar.set_postfix_str(self._meter.rates, refresh=False)
                    bar.update(records.counted - bar.n)
                records.sync()
                bar.update(records.counted - bar.n)
            finally:
                self._meter.end(self._written)
                self._leave()
        if self._left and not self._interrupted.is_set():
            raise SchedulerError(f"the runtime ended without an answer to {self._left} requests")

    def report(self, output_path: Path | None, price_per_hour: float | None) -> BatchReport:
        """What has come of it. `output_path`: where the records are; None for standard output."""
        best = self._plan.statistics.best_hit_rate if self._plan else None
        run = self._meter.figures(best_hit_rate=best, predicted_hit_rate=self._predicted_hit_rate)
        total = self._earlier + self._refused + self._meter.tally
        return BatchReport(
            output_path=output_path,
            requests=len(self._scan),
            written=total.records,
            errors=total.errors,
            prompt_tokens=total.prompt_tokens,
            cached_tokens=total.cached_tokens,
            completion_tokens=total.completion_tokens,
            kept=self._earlier.records,
            run=run,
            price_per_hour=price_per_hour,
            timeline=self._meter.timeline,
            is_complete=self.is_complete,
        )

    def plan(self) -> BatchPlan | None:
        """A plan of all sound lines, those that have run before included; if it was stopped, of those that were to
        run in it, as far as it came to that.
        """
        if not self.is_complete:
            return self._plan
        sound = np.flatnonzero(~self._scan.is_bad)
        if self._plan is not None and len(self._plan) == len(sound):
            return self._plan
        return self._plan_of(sound)

    # -- which lines run, and when -------------------------------------------------------------------------

    def _planned(self, positions: npt.NDArray[np.int64]) -> Iterator[_Planned]:
        """The positions in the order in which they run, those first that the pool is too small for."""
        scan, limits = self._scan, self._runtime.limits
        most = scan.tokens.lengths[positions] + np.maximum(1, scan.new_tokens[positions]) - 1
        too_long = positions[most > limits.pool_tokens]
        positions = positions[most <= limits.pool_tokens]
        self._plan = plan = self._plan_of(positions)
        if self._order == "file":
            return _unkept(np.concatenate([too_long, positions]))
        fits = plan.most_tokens <= limits.pool_tokens
        keeps = not (fits or self._keep_cache)
        if (fits or keeps) and self._is_predictable(plan):
            self._predicted_hit_rate = plan.predict(limits).hit_rate
        if not keeps:
            return _unkept(np.concatenate([too_long, plan.run.order]))
        return itertools.chain(_unkept(too_long), zip(plan.run.order.tolist(), plan.keep.tolist(), strict=True))

    def _is_predictable(self, plan: BatchPlan) -> bool:
        """Whether it begins with an empty cache, of one tier, that the longest request has room in."""
        stats, limits = self._runtime.cache_stats(), self._runtime.limits
        is_empty = stats.free == stats.capacity and not stats.host_capacity
        return is_empty and self._runtime.reuses_prefixes and 0 < plan.longest_request <= limits.pool_tokens

    def _plan_of(self, positions: npt.NDArray[np.int64]) -> BatchPlan:
        scan = self._scan
        return plan_batch(scan.tokens, scan.new_tokens.astype(np.int64) * scan.num_answers, positions)

    def _goes_on(self, waiting: Iterator[_Planned]) -> bool:
        """Submit lines that wait, unless the batch is to end. Whether there is a pass to run."""
        if not self._interrupted.is_set():
            self._feed(waiting)
            return self._runtime.has_work
        self._withdraw()
        in_time = self._interrupted.age < self._drain_seconds
        return bool(self._unanswered) and in_time and self._runtime.has_work

    def _feed(self, waiting: Iterator[_Planned]) -> None:
        """Submit lines if there is room: those whose pass failed, once nothing else runs, or the next ones."""
        while True:
            planned: list[_Planned] = []
            if not self._unanswered:
                planned = [(position, None) for position in self._retries.take()]
            if not self._retries and self._runtime.num_waiting < ENOUGH_WAITING:
                planned = list(itertools.islice(waiting, SUBMITTED_AT_ONCE))
            if planned:
                self._submit(planned)
            if self._unanswered or not planned:
                return

    def _withdraw(self) -> None:
        """Take back the requests that have not begun."""
        for request_id, line in list(self._unanswered.items()):
            if not self._runtime.has_begun(line.request):
                self._runtime.abort(line.request)
                del self._unanswered[request_id]

    def _leave(self) -> None:
        """Let the runtime be without requests again, unless it can run no more."""
        for line in self._unanswered.values():
            self._runtime.abort(line.request)
        while self._runtime.has_work:
            self._runtime.step()

    def _submit(self, planned: list[_Planned]) -> None:
        scan, requests = self._scan, []
        lines = scan.read([position for position, _ in planned])
        for (position, keep), line in zip(planned, lines, strict=True):
            assert isinstance(line, SoundLine)
            number, tokens = int(scan.lines[position]), scan.tokens[position]
            try:
                request = self._runtime.prepare(tokens, line.sampling_params, index=number, keep=keep)
            except (PromptError, ParameterError) as error:  # such as one too long for the pool of KV
                self._refuse(position, LineError(LineErrorType.INVALID_PROMPT, f"the prompt {error}", line.reply))
                continue
            self._unanswered[request.id] = _Unanswered(position, request, line.reply)
            requests.append(request)
        if requests:
            self._runtime.submit(*requests, in_order=True)
        self._error_limit.enforce()

    # -- records -------------------------------------------------------------------------------------------

    def _book(self, outputs: list[RequestOutput]) -> None:
        """Write the records of requests that have ended, unless they were withdrawn or are to be run again."""
        failed: list[tuple[_Unanswered[R], RequestOutput]] = []  # of one pass: a step books no more
        for output in outputs:
            line = self._unanswered.pop(output.id, None)
            if line is not None and output.cause is None:
                self._answer(line, output)
            elif line is not None:
                failed.append((line, output))
        run_again = bool(failed) and self._retries.book([line.position for line, _ in failed])
        for line, output in failed:
            if run_again:
                self._first_hits.setdefault(line.position, output.usage.cached_tokens)
            else:
                self._answer(line, output)
        self._error_limit.enforce()

    def _answer(self, line: _Unanswered[R], output: RequestOutput) -> None:
        """Write the record of a request that has ended for good."""
        if (cached := self._first_hits.pop(line.position, None)) is not None:  # the rest it had computed itself
            computed = output.usage.prompt_tokens - cached
            output = replace(output, usage=replace(output.usage, cached_tokens=cached, computed_tokens=computed))
        created = int(time.time()) if self._created is None else self._created
        try:
            record = output_line(output.index, line.reply, output, created=created, spelling=self._spelling)
        except Exception as error:  # one line's record must not cost the others theirs
            _log.exception("no record can be made of the answer to line %d", output.index + 1)
            why = f"no record can be made of its answer: {type(error).__name__}: {error}"
            self._refuse(line.position, LineError(LineErrorType.FAILED, why, line.reply))
            return
        self._put(line.position, record)
        self._meter.count(output)
        if output.failure is not None:
            self._error_limit.count(LineErrorType.FAILED, output.failure)

    def _refuse(self, position: int, error: LineError) -> None:
        """Write the record of a line that has no answer."""
        self._put(position, error_line(int(self._scan.lines[position]), error))
        self._refused += ERROR_RECORD
        self._error_limit.count(error.type, error.message)

    def _put(self, position: int, line: bytes) -> None:
        assert self._records is not None  # it runs
        self._records.put(position, line)
        self._left -= 1

    @property
    def _written(self) -> int:
        return len(self._scan) - self._left


def _unkept(positions: npt.NDArray[np.int64]) -> Iterator[_Planned]:
    return zip(positions.tolist(), itertools.repeat(None))
