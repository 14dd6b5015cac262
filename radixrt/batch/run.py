"""Runs the sound lines of a batch: from requests in a planned order to outputs."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from tqdm import tqdm

from radixrt.arrays import BoolArray, Int32Array, Int64Array
from radixrt.batch.dispatch import Dispatch
from radixrt.batch.formats.record import LineError, LineErrorType, Reply, type_of_prompt_error
from radixrt.batch.known_lines import SoundLine
from radixrt.batch.lanes import ENOUGH_WAITING, SUBMITTED_AT_ONCE, Handout, Lane
from radixrt.batch.meter import Meter, MeteredRuntime, progress_bar
from radixrt.batch.options import BatchConfig
from radixrt.batch.parts import Part, PartialOutputs, part_at
from radixrt.batch.reading import Lines
from radixrt.batch.record_writer import RecordCounts, RecordWriter
from radixrt.batch.retry import Retries
from radixrt.batch.scan import Checked, Scan
from radixrt.batch.suspects import killed
from radixrt.batch.tally import Tally
from radixrt.cache.cache_stats import CacheStats
from radixrt.engine.gc_control import old_objects_left_alone
from radixrt.engine.signals import Interrupt
from radixrt.errors import ParameterError, PromptError, ReplicaLostError, SchedulerError
from radixrt.limits import RunLimits
from radixrt.output import RequestOutput
from radixrt.planning.batch_plan import BatchPlan, plan_batch
from radixrt.planning.shards import Pieces, shards
from radixrt.report.batch_report import BatchReport, RunFigures
from radixrt.report.timeline import Sample
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer

READ_AT_ONCE = 512  # lines
_LOOK_SECONDS = 0.1  # between two looks for signals, where nothing runs until more lines are known

_NOTHING, _NO_RUN = Tally(), RunFigures()


class PreparedRequest(Checked, Protocol):
    """A request from `BatchRuntime.prepare`."""

    @property
    def id(self) -> int | str:
        """The id of its output, unique in the runtime."""


R = TypeVar("R", bound=PreparedRequest)
R_contra = TypeVar("R_contra", bound=PreparedRequest, contravariant=True)


class HasJson(Protocol):
    """What a report shows as it is."""

    def to_json(self) -> dict[str, Any]: ...


class BatchRuntime(MeteredRuntime, Protocol[R]):
    """What a batch needs of a `Runtime` or a `ReplicaGroup`."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def context_length(self) -> int: ...

    @property
    def default_params(self) -> SamplingParams: ...

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

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request: R) -> object: ...

    def cached_len(self, prompt_ids: Int32Array) -> int:
        """Leading tokens of a prompt that are in the cache now."""

    def has_begun(self, request: R) -> bool:
        """Whether a pass has computed some of a submitted request."""


class SubmittingLane(Lane, Protocol[R_contra]):
    """A replica, as `BatchRun` uses it."""

    def submit(self, *requests: R_contra) -> None:
        """Take requests, to be served in this order."""


class SingleRuntime(BatchRuntime[R], Protocol[R]):
    """A `Runtime`."""

    def submit(self, *requests: R, in_order: bool = False) -> None: ...


@runtime_checkable
class ReplicatedRuntime(BatchRuntime[R], Protocol[R]):
    """A `ReplicaGroup`. Outputs of a replica that was lost have a ReplicaLostError as their cause."""

    @property
    def lanes(self) -> Sequence[SubmittingLane[R]]: ...

    @property
    def replica_figures(self) -> Sequence[HasJson]: ...

    def pieces(self, plan: BatchPlan) -> Pieces:
        """A plan's prompts, with the work that each is."""

    def part_of(self, request: R, part: Part) -> R:
        """The request for some of the answers that another one asks for."""

    def handout(self, pieces: Pieces) -> Handout:
        """Pieces in ranges, one for each lane."""

    def drain(self) -> None:
        """Wait a moment for requests that were aborted, and end the lanes that still have any."""


AnyRuntime = SingleRuntime[R] | ReplicatedRuntime[R]


@dataclass(frozen=True)
class _OneLane(Generic[R]):
    """A Runtime by itself."""

    runtime: SingleRuntime[R]
    is_ready, is_gone = True, False

    @property
    def is_idle(self) -> bool:
        return not self.runtime.has_work

    @property
    def num_waiting(self) -> int:
        return self.runtime.num_waiting

    @property
    def num_running(self) -> int:
        return self.runtime.num_running

    def submit(self, *requests: R) -> None:
        self.runtime.submit(*requests, in_order=True)


class _Line(NamedTuple):
    """A line to be submitted.

    Attributes:
        position: of its record in the output.
        keep: tokens of its prompt that later lines need (`Request.reusable_len`).
        piece: its place in the planned run; None for one that is not there.
        part: which answers to its prompt it has; None for all.
        is_retry: whether it runs again because its pass failed.
    """

    position: int
    keep: int | None = None
    piece: int | None = None
    part: Part | None = None
    is_retry: bool = False


@dataclass(frozen=True)
class _PendingLine(Generic[R]):
    """A line whose request a lane has."""

    line: _Line
    lane: int
    request: R
    reply: Reply


@dataclass(frozen=True)
class _PlannedLines:
    """The sound lines without a record, in the order in which they run.

    Attributes:
        too_long: positions of those that do not fit in the pool: they fail at once.
        order: `[N]` positions of the others.
        keep: `[N]`, see `_Line`; None where all of a prompt stays cached.
        pieces: each a place of the order, or some of its answers.
        num_answers: by position.
        handout: of the pieces.
    """

    too_long: Int64Array
    order: Int64Array
    keep: Int32Array | None
    pieces: Pieces
    num_answers: Int64Array
    handout: Handout

    @property
    def is_done(self) -> bool:
        """Whether all lines have ended."""
        return self.handout.is_done

    def next(self) -> Iterator[tuple[int, list[_Line]]]:
        """Lines for lanes that have room, with the number of the lane, some at a time."""
        for lane, pieces in self.handout.next():
            yield lane, list(map(self.line, pieces))

    def line(self, piece: int) -> _Line:
        """The line of a piece."""
        place = int(self.pieces.places[piece])
        position = int(self.order[place])
        part = part_at(self.pieces, piece, int(self.num_answers[position]))
        # Further parts need all of their prompt.
        keep = None if self.keep is None or part is not None else int(self.keep[place])
        return _Line(position, keep, piece, part)


class _FileLines(Generic[R]):
    """The sound lines without a record as they are known, in the order of the file, for a Runtime by itself."""

    def __init__(self, lines: Lines, records: RecordWriter, lane: _OneLane[R]) -> None:
        self._lines, self._records, self._lane = lines, records, lane
        self._next = 0  # position of the first line that was not looked at

    @property
    def is_done(self) -> bool:
        """Whether all lines were handed out."""
        return self._lines.is_whole and self._next == len(self._lines)

    def next(self) -> Iterator[tuple[int, list[_Line]]]:
        """As `_PlannedLines` has it."""
        if self._lane.num_waiting >= ENOUGH_WAITING:
            return
        is_bad = self._lines.is_bad
        while self._next < len(is_bad):
            first, self._next = self._next, min(self._next + SUBMITTED_AT_ONCE, len(is_bad))
            sound = first + np.flatnonzero(~is_bad[first : self._next])
            if len(positions := self._records.unfinished(sound)):
                yield 0, list(map(_Line, positions.tolist()))
                return

    def wait(self) -> None:
        """Wait a moment for lines that are not known yet."""
        self._lines.wait(self._next, _LOOK_SECONDS)


class BatchRun(Generic[R]):
    """One process's work on a batch.

    Args:
        runtime: has no other requests; a `ReplicatedRuntime` shares the lines among its lanes.
        lines: may become more. All are waited for where that is needed: by several lanes, by the planned order,
            and to tell what of a cache's tokens the best order hits.
        records: writes their records.
        interrupted: once it is set, no more requests are submitted.
        options: of the batch.
    """

    def __init__(
        self,
        runtime: AnyRuntime[R],
        lines: Lines,
        records: RecordWriter,
        interrupted: Interrupt,
        options: BatchConfig,
    ) -> None:
        self._runtime = runtime
        self._source = lines
        self._records = records
        self._interrupted = interrupted
        self._options = options
        self._pending: dict[int | str, _PendingLine[R]] = {}  # by the id of the request
        self._retries: Retries[_Line] = Retries()
        # Cached tokens that a line's first try had, by position and first answer.
        self._first_hits: dict[tuple[int, int], int] = {}
        self._partial = PartialOutputs()  # by position
        self._meter = Meter(runtime)
        self._replicas: ReplicatedRuntime[R] | None = None
        self._lanes: Sequence[SubmittingLane[R]]
        if isinstance(runtime, ReplicatedRuntime):
            self._replicas, self._lanes = runtime, runtime.lanes
        else:
            self._lanes = (_OneLane(runtime),)
        self._knows_all = False  # whether no more lines come, and the error records of all bad ones are there
        self._plan: BatchPlan | None = None
        self._predicted_hit_rate: Callable[[], float | None] = lambda: None
        self._repeated_tokens: int | None = None  # where the plan is cut for several replicas
        self._missed_tokens = 0  # of these, those that count as misses: not those of a prompt's further answers

    @property
    def is_complete(self) -> bool:
        """Whether each line has its record."""
        return self._records.is_complete

    @property
    def keeps(self) -> bool:
        """Whether the records so far stay, if the run ends now."""
        return self._records.keeps

    @property
    def tally(self) -> Tally:
        """Counts of the lines that this run has answered so far."""
        return self._meter.tally

    def run(self) -> None:
        """Run each line without a record until all have one or the batch is interrupted.

        Raises:
            ErrorRateError: more lines have errors than the limit allows.
            DeviceLostError: the runtime cannot go on.
        """
        records, meter = self._records, self._meter
        while not (self._takes_known_lines or self._source.is_whole):
            if self._interrupted.is_set():
                return
            self._source.wait(sys.maxsize, _LOOK_SECONDS)
        records.refuse_bad_lines()
        total = len(self._source) if self._source.is_whole else None
        told = "answering", " requests", total, self._options.progress
        with old_objects_left_alone(), progress_bar(*told, done=records.written) as bar:
            lines = self._lines
            meter.begin(records.written)
            try:
                if isinstance(lines, _PlannedLines):
                    for first in range(0, len(lines.too_long), READ_AT_ONCE):
                        self._submit(0, list(map(_Line, lines.too_long[first : first + READ_AT_ONCE].tolist())))
                while self._goes_on():
                    outputs = self._runtime.step()
                    self._book(outputs)
                    records.end_pass()
                    meter.end_pass(records.written, 0 if self._replicas else len(outputs))
                    bar.set_postfix_str(meter.rates, refresh=False)
                    self._show(bar)
                records.refuse_bad_lines()
                records.sync()
                self._show(bar)
            finally:
                meter.end(records.written)
                self._drain()
        if not self.is_complete and not self._interrupted.is_set():
            raise SchedulerError(f"the runtime ended without an answer to {records.missing} requests")

    def _show(self, bar: tqdm) -> None:
        """Show how many records will not be lost, and of how many, once that is known."""
        if bar.total is None and self._source.is_whole:
            bar.total = len(self._source)
        bar.update(self._records.durable - bar.n)

    def report(self, output_path: Path | None, counts: RecordCounts) -> BatchReport:
        """Figures of the batch so far. `output_path`: where the records are, if they stay; None for standard
        output.
        """
        is_read = self._source.is_whole  # first: more lines may become known
        if self.is_complete and self._takes_known_lines:
            self._plan = self._plan_of(self._positions()[1])
        best, meter = self._plan.statistics.best_hit_rate if self._plan else None, self._meter
        products = tuple(table.to_json() for table in self._runtime.products)
        return batch_report(
            self._source,
            counts,
            output_path if self.keeps else None,
            self._options,
            tally=meter.tally,
            run=meter.figures(
                best_hit_rate=best,
                predicted_hit_rate=self._predicted_hit_rate(),
                products=products,
                repeated_tokens=self._repeated_tokens,
                replicas=tuple(each.to_json() for each in self._replicas.replica_figures)
                if self._replicas
                else (),
            ),
            timeline=meter.timeline,
            is_complete=self.is_complete,
            is_read=is_read,
            keeps=self.keeps,
        )

    def plan(self) -> BatchPlan | None:
        """A plan of all sound lines; after an interruption the plan of this run, None if it had none yet."""
        if not self.is_complete:
            return self._plan
        scan = self._source.whole()
        sound = ~scan.is_bad
        if self._plan is not None and len(self._plan) == int(sound.sum()):
            return self._plan
        return plan_of(scan, sound)

    # -- which lines run, and when -------------------------------------------------------------------------

    @cached_property
    def _takes_known_lines(self) -> bool:
        """Whether lines run before all are known: where an order, several lanes or the best hits need no plan that
        is made before the first one.
        """
        return self._options.order == "file" and not self._replicas and self._is_cache_empty()

    @cached_property
    def _lines(self) -> _PlannedLines | _FileLines[R]:
        if self._takes_known_lines:
            return _FileLines(self._source, self._records, _OneLane(cast("SingleRuntime[R]", self._runtime)))
        return self.planned_lines()

    def _positions(self) -> tuple[Int64Array, Int64Array]:
        """Of the sound lines without a record: those that do not fit in the pool, and the others."""
        scan = self._source.whole()
        positions = self._records.unfinished(np.flatnonzero(~scan.is_bad))
        is_too_long = scan.too_long(positions, self._runtime.limits.pool_tokens)
        return positions[is_too_long], positions[~is_too_long]

    def planned_lines(self) -> _PlannedLines:
        """The sound lines without a record, in the order in which they run."""
        scan, limits = self._source.whole(), self._runtime.limits
        too_long, positions = self._positions()
        self._plan = plan = self._plan_of(positions)
        num_answers = scan.demands().num_answers
        if self._options.order == "file":
            pieces = Pieces.alike(len(positions))
            return _PlannedLines(too_long, positions, None, pieces, num_answers, self._handout(pieces))
        pieces = self._replicas.pieces(plan) if self._replicas else Pieces.alike(len(plan))
        if self._replicas and self._runtime.reuses_prefixes:
            ranges = shards(pieces, len(self._lanes))
            self._repeated_tokens = int(ranges.repeated_tokens.sum())
            self._missed_tokens = int(ranges.repeated_tokens[~ranges.begins_within_a_prompt].sum())
        all_fit = plan.pool_for_all <= limits.pool_tokens
        drops_prefixes = not (all_fit or self._options.keep_cache)
        if all_fit or drops_prefixes:
            # Told in the end: of 200,000 prompts it takes longer than to plan them.
            self._predicted_hit_rate = partial(self._prediction, plan, self._runtime.cache_stats())
        keep = plan.keep if drops_prefixes else None
        return _PlannedLines(too_long, plan.run.order, keep, pieces, num_answers, self._handout(pieces))

    @property
    def _handed_out(self) -> Handout:
        """Of the pieces of a planned run, which several lanes need."""
        assert isinstance(self._lines, _PlannedLines)
        return self._lines.handout

    def _handout(self, pieces: Pieces) -> Handout:
        if self._replicas:
            return self._replicas.handout(pieces)
        return Handout(Dispatch(shards(pieces, 1)), self._lanes, first=0)

    def _prediction(self, plan: BatchPlan, stats: CacheStats) -> float | None:
        """The hit rate to expect, with those figures of the cache at first; None if there is no cache, it has two
        tiers, or what it has may be evicted.
        """
        limits = self._runtime.limits
        if not self._runtime.reuses_prefixes or stats.host_capacity or not len(plan):
            return None
        held = stats.capacity - stats.free
        if not held:
            found = plan.predict(limits)
            return replace(found, cached_tokens=max(0, found.cached_tokens - self._missed_tokens)).hit_rate
        fits = held + plan.pool_beyond_held <= limits.pool_tokens
        return plan.predict_without_eviction().hit_rate if fits and not self._replicas else None

    def _plan_of(self, positions: Int64Array) -> BatchPlan:
        scan, no_cache = self._source.whole(), self._takes_known_lines or not self._runtime.reuses_prefixes
        held = None if no_cache or self._is_cache_empty() else self._runtime.cached_len
        return plan_batch(scan.tokens, scan.demands(self._runtime.limits.pool_tokens), positions, held)

    def _is_cache_empty(self) -> bool:
        stats = self._runtime.cache_stats()
        return stats.free == stats.capacity and not stats.host_tokens

    def _goes_on(self) -> bool:
        """Submit waiting lines, unless the batch is interrupted. Whether there is a pass to run or to wait for."""
        while not self._interrupted.is_set():
            if not self._knows_all:
                self._knows_all = self._source.is_whole
                self._records.refuse_bad_lines()
            self._feed()
            if self._runtime.has_work:
                return True
            lines = self._lines
            waits = self._retries.is_active or not lines.is_done
            if isinstance(lines, _PlannedLines) or not waits or self._pending:
                return waits and not self._pending  # for a lane
            self._records.end_pass()
            lines.wait()
        self._abort_not_begun()
        in_time = self._interrupted.age < self._options.drain_seconds
        return bool(self._pending) and in_time and self._runtime.has_work

    def _feed(self) -> None:
        """Submit lines if there is room: retries once nothing else runs, otherwise the next ones."""
        fed = True
        while fed:
            fed = False
            ready = next((number for number, lane in enumerate(self._lanes) if lane.is_ready), None)
            if ready is not None and not self._pending and (again := self._retries.take()):
                self._submit(ready, again)
                fed = True
            if not self._retries.is_active:
                for lane, lines in self._lines.next():
                    self._submit(lane, lines)
                    fed = True
            fed = fed and not self._pending  # all of them were refused

    def _submit(self, lane: int, planned: list[_Line]) -> None:
        source, requests = self._source, []
        positions = dict.fromkeys(line.position for line in planned)  # once each
        read = dict(zip(positions, source.read(positions), strict=True))
        for line in planned:
            sound = read[line.position]
            assert isinstance(sound, SoundLine)
            if (failure := self._partial.failure(line.position)) is not None:
                self._end(lane, line)
                self._answer(line, sound.reply, failure)
                continue
            number, tokens = int(source.lines[line.position]), source.prompt(line.position)
            try:
                request = self._runtime.prepare(tokens, sound.sampling_params, index=number, keep=line.keep)
            except (PromptError, ParameterError) as error:  # such as one too long for the KV pool
                if line.part is None or not line.part.first:  # the others are refused, too
                    why = LineError(type_of_prompt_error(error), f"the prompt {error}", sound.reply)
                    self._records.refuse(line.position, why)
                self._end(lane, line)
                continue
            if line.part is not None and self._replicas is not None:
                request = self._replicas.part_of(request, line.part)
            self._pending[request.id] = _PendingLine(line, lane, request, sound.reply)
            requests.append(request)
        if requests:
            self._lanes[lane].submit(*requests)
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
        if self._replicas:
            self._replicas.drain()
        while self._runtime.has_work:
            self._runtime.step()

    # -- outputs -------------------------------------------------------------------------------------------

    def _book(self, outputs: list[RequestOutput]) -> None:
        """Write the records of ended requests, except for aborted ones and those to be run again."""
        failed: list[tuple[_PendingLine[R], RequestOutput]] = []  # all of one pass: a step books one of each lane
        lost: defaultdict[int, list[tuple[_PendingLine[R], RequestOutput]]] = defaultdict(list)  # by lane
        for output in outputs:
            line = self._pending.pop(output.id, None)
            if line is None:
                continue
            if isinstance(output.cause, ReplicaLostError):
                lost[line.lane].append((line, output))
                continue
            self._end(line.lane, line.line)
            if output.cause is None:
                self._answer(line.line, line.reply, output)
            else:
                failed.append((line, output))
        for lane, found in lost.items():
            self._lose(lane, found)
        again = [line.line._replace(keep=None, is_retry=True) for line, _ in failed]
        retried = bool(failed) and self._retries.book(again)
        for line, output in failed:
            if retried:
                self._first_hits.setdefault(_key(line.line), output.usage.cached_tokens)
            else:
                self._answer(line.line, line.reply, output)
        self._records.enforce_error_limit()

    def _end(self, lane: int, line: _Line) -> None:
        """A line has ended, or is one to be retried."""
        if line.piece is not None and not line.is_retry:
            self._handed_out.end(lane, line.piece)

    def _lose(self, lane: int, lost: list[tuple[_PendingLine[R], RequestOutput]]) -> None:
        """Lines that a lane was lost with wait again, but for those that are known to end each process."""
        handout, by_piece = self._handed_out, {line.line.piece: (line, output) for line, output in lost}
        for line, _ in lost:
            if line.line.is_retry and line.line.piece is not None:
                handout.suspect(line.line.piece)
        first = [line.line.piece for line, _ in lost if not line.line.is_retry and line.line.piece is not None]
        for piece in handout.lose(lane, first) if first else ():
            line, output = by_piece[piece]
            self._answer(line.line, line.reply, killed(output))

    def _answer(self, line: _Line, reply: Reply, output: RequestOutput) -> None:
        """Write the record of a final output, once the line has all of its answers."""
        if (cached := self._first_hits.pop(_key(line), None)) is not None:
            # A retry finds the tokens that the first try has computed: its own hits do not count.
            computed = output.usage.prompt_tokens - cached
            output = replace(output, usage=replace(output.usage, cached_tokens=cached, computed_tokens=computed))
        whole = output if line.part is None else self._partial.add(line.position, line.part, output)
        if whole is None:
            return
        if isinstance(whole.cause, ReplicaLostError):  # it has run nowhere to its end
            error = LineError(LineErrorType.FAILED, str(whole.failure), reply)
            self._records.refuse(line.position, error)
        elif self._records.answer(line.position, reply, whole):
            self._meter.count(whole)


def _key(line: _Line) -> tuple[int, int]:
    """Of what runs as one request."""
    return line.position, 0 if line.part is None else line.part.first


def batch_report(
    lines: Sized,
    counts: RecordCounts,
    output_path: Path | None,
    options: BatchConfig,
    *,
    tally: Tally = _NOTHING,
    run: RunFigures = _NO_RUN,
    timeline: tuple[Sample, ...] = (),
    is_complete: bool,
    is_read: bool = True,
    keeps: bool = True,
) -> BatchReport:
    """Figures of a batch.

    Args:
        lines: as far as they are known.
        counts: of the records that needed no runtime.
        output_path: where the records are; None for standard output, and if none are kept.
        tally, run, timeline: of the requests that have run; nothing if none had to.
        is_complete: whether each line has its record.
        is_read: whether all lines are known.
        keeps: whether the records stay. Otherwise only the figures of the run count them.
    """
    total = counts.kept + counts.refused + tally if keeps else _NOTHING
    return BatchReport(
        output_path=output_path,
        requests=len(lines),
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
        is_read=is_read,
    )


def plan_of(scan: Scan, lines: BoolArray) -> BatchPlan:
    """A plan of some lines, `[N]`, from an empty cache."""
    return plan_batch(scan.tokens, scan.demands(), np.flatnonzero(lines))
