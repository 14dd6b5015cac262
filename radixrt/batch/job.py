"""Answer a file of prompts: look at all of it, run what is sound, write one record a line in input order."""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm  # not tqdm.auto: a notebook's bar needs more packages

from radixrt.batch.compression import check_output_name, encoded
from radixrt.batch.journal import Journal
from radixrt.batch.line_format import LineParser, error_line, output_line, tally
from radixrt.batch.manifest import Manifest
from radixrt.batch.prescan import Check, Prescan, SoundLine, parameters_as_json, prescan
from radixrt.batch.record import LineError, LineErrorType, Reply
from radixrt.batch.report import BatchReport
from radixrt.batch.run_folder import RunFolder, has_run
from radixrt.batch.source import STANDARD, BadLine, read_lines
from radixrt.batch.standard_output import StandardOutput
from radixrt.batch.tally import Tally
from radixrt.errors import BatchFileError, ParameterError, PromptError, RadixrtError, SchedulerError
from radixrt.interrupt import first_interrupt
from radixrt.output import RequestOutput
from radixrt.planning.batch_plan import plan_batch
from radixrt.planning.limits import RunLimits
from radixrt.sampling_params import SamplingParams
from radixrt.text.token_spelling import TokenSpelling
from radixrt.text.tokenizer import Tokenizer

Order = Literal["planned", "file"]

AT_ONCE = 8192  # requests that a runtime knows of at most
_LOG_INTERVAL = 30.0  # seconds between two states of the bar where stderr is not a terminal


class PreparedRequest(Protocol):
    """A request as `BatchRuntime.prepare` makes it."""

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]: ...

    @property
    def max_new_tokens(self) -> int: ...


R = TypeVar("R", bound=PreparedRequest)


class BatchRuntime(Protocol[R]):
    """What a batch needs of a `Runtime`."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def seed(self) -> int: ...

    @property
    def limits(self) -> RunLimits: ...

    @property
    def reuses_prefixes(self) -> bool: ...

    def identity(self) -> Mapping[str, Any]: ...

    def prepare(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.int32] | Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        keep: int | None = None,
    ) -> R: ...

    def submit(self, *requests: R, in_order: bool = False) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request: R) -> object: ...


class BatchInterrupted(KeyboardInterrupt):
    """A batch was stopped by Ctrl-C.

    Attributes:
        report: the figures up to then.
    """

    def __init__(self, report: BatchReport) -> None:
        count = f"{report.written} of {report.requests} records are"
        if not report.requests:
            where = "nothing has run yet"
        elif report.output_path is None:
            where = f"{count} in standard output, in input order"
        else:
            where = f"{count} kept in {report.output_path}; the same command goes on from there"
        super().__init__(f"stopped: {where}")
        self.report = report


def check_paths(input_path: str | Path, output_path: str | Path, *, overwrite: bool) -> None:
    """Raise BatchFileError unless the batch can read its input and may write its output; "-" is always fine."""
    if input_path != STANDARD:
        input_path = Path(input_path)
        if not input_path.exists():
            raise BatchFileError(f"the input {input_path} does not exist")
        if input_path.is_dir():
            raise BatchFileError(f"the input {input_path} is a folder; it must be a file of JSON lines")
    check_output_name(output_path)
    if output_path == STANDARD:
        return
    output_path = Path(output_path)
    if not output_path.parent.is_dir():
        raise BatchFileError(f"the folder {output_path.parent} of the output does not exist; make it first")
    if not output_path.exists():
        return
    if input_path != STANDARD and output_path.samefile(input_path):
        raise BatchFileError(f"the input {input_path} would be overwritten; give another output")
    if not output_path.is_file():
        raise BatchFileError(f"{output_path} is in the way of the output and is not a plain file")
    if not overwrite and not has_run(output_path):  # one that has only to be cleared away, perhaps
        raise BatchFileError(f"the output {output_path} exists; --overwrite replaces it")


def run_batch(
    runtime: BatchRuntime[R], input_path: str | Path, output_path: str | Path, **others: Any
) -> BatchReport:
    """Answer each line of `input_path` with one record in `output_path`, in input order.

    `radixrt.batch.plain_lines` and `openai_batch` describe the lines. A bad line becomes an error record and
    changes no other line's record. All lines are read and checked before the first request runs, in an order in
    which those that share a prefix follow one another.

    Finished records are kept in the folder `OUTPUT.run`, where nothing that ends the process can touch them. The
    same call goes on from there: records that are there stay as they are, the others are computed. When all are
    there, the output gets its name in one step, and the folder goes.

    The first Ctrl-C ends the batch after the current pass; a second one ends it at once.

    Args:
        runtime: a Runtime without other requests. It stays open.
        others: as of Batch.

    Raises:
        BatchFileError, JournalError, BatchInterrupted: as Batch.
    """
    if runtime.has_work:
        raise RadixrtError("the runtime has other requests; a batch needs one without")
    with Batch(input_path, output_path, **others) as batch:
        batch.look(runtime.tokenizer, lambda prompt, params, line: runtime.prepare(prompt, params, index=line))
        return batch.run(runtime)


class Batch:
    """A file of prompts on its way to a file of records. In its context `look` comes first, then `run`.

    Args:
        input_path: JSON lines in UTF-8, plain or compressed by gzip or zstd; or parquet; "-" is standard input.
        output_path: a file in a folder that exists, compressed if its name ends in .gz or .zst; "-" is standard
            output, in input order; nothing is kept of it.
        default_params: parameters of lines that give none.
        overwrite: replace an existing output.
        restart: forget what an earlier run has left, whatever it was of.
        strict: run nothing if a line is bad.
        order: in which prompts run: "planned", so that those that share a prefix follow one another, those with
            the longest answers first; or "file", first come, first served: for comparison.
        keep_cache: what the pool has room for stays cached when the batch has ended. Else what no prompt to come
            begins with leaves the cache at once, if there is no room for all.
        progress: show bars on stderr; where that is not a terminal, they move every 30 seconds.
        created: Unix time in seconds that records in OpenAI's format bear; None: each that of its answer.

    Raises:
        BatchFileError: a file cannot be read, must not be replaced, or cannot be written; another process answers
            the same file; or, by `run`, `OUTPUT.run` holds a run of another input, model or parameters.
        JournalError: the disk failed while it ran; the same batch goes on later.
        BatchInterrupted: it was stopped by Ctrl-C.
    """

    def __init__(
        self,
        input_path: str | Path,
        output_path: str | Path,
        *,
        default_params: SamplingParams | None = None,
        overwrite: bool = False,
        restart: bool = False,
        strict: bool = False,
        order: Order = "planned",
        keep_cache: bool = False,
        progress: bool = False,
        created: int | None = None,
    ) -> None:
        if order not in ("planned", "file"):
            raise ParameterError(f"order is {order!r}; it must be 'planned' or 'file'")
        check_paths(input_path, output_path, overwrite=overwrite)
        self._input = input_path
        self._output = output_path if output_path == STANDARD else Path(output_path)
        self._defaults = SamplingParams() if default_params is None else default_params
        self._overwrite, self._restart, self._strict, self._progress = overwrite, restart, strict, progress
        self._order, self._keep_cache = order, keep_cache
        self._created = created
        self._opened = contextlib.ExitStack()
        self._folder: RunFolder | None = None  # none for standard output
        self._scan: Prescan | None = None

    def __enter__(self) -> Batch:
        with contextlib.ExitStack() as opened:
            if isinstance(self._output, Path):
                self._folder = opened.enter_context(RunFolder(self._output))
                self._scratch = self._folder.scratch
            else:
                self._scratch = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def look(self, tokenizer: Tokenizer | None, check: Check) -> Prescan:
        """Read the whole input, and check each line. With `strict` a bad one raises BatchFileError.

        Args:
            tokenizer, check: as of `prescan`.
        """
        with first_interrupt() as interrupted, _bar("reading", " lines", None, self._progress) as bar:
            self._scan = prescan(
                self._lines(interrupted),
                self._scratch,
                parser=LineParser(self._defaults),
                tokenizer=tokenizer,
                check=check,
                seen=bar.update,
            )
        if self._strict and self._scan.problems:
            raise BatchFileError(
                f"{self._scan.summary()}\nNothing has run. Without strict these get error records."
            )
        return self._scan

    def _lines(self, interrupted: threading.Event) -> Iterator[tuple[int, bytes | BadLine]]:
        for line in read_lines(self._input):
            yield line
            if interrupted.is_set():
                raise BatchInterrupted(BatchReport.of_nothing())

    def run(self, runtime: BatchRuntime[R]) -> BatchReport:
        """Run what is sound and has no record yet, and write the output."""
        with first_interrupt() as interrupted:
            return self._run(runtime, interrupted)

    def _run(self, runtime: BatchRuntime[R], interrupted: threading.Event) -> BatchReport:
        scan = self._scan
        assert scan is not None, "look comes first"
        job = _Job(
            runtime,
            scan,
            interrupted,
            order=self._order,
            keep_cache=self._keep_cache,
            progress=self._progress,
            created=self._created,
        )
        if self._folder is None:
            with StandardOutput() as output:
                job.run(_Streamed(output))
            return job.ended(None)
        assert isinstance(self._output, Path)
        manifest = Manifest(
            num_records=len(scan),
            input={"lines": scan.input_hash},
            weights=runtime.identity(),
            tokenizer={"token ids of the input": scan.tokens_hash},
            parameters=parameters_as_json(self._defaults),
            settings={"seed": runtime.seed},
        )
        journal = self._folder.begin(manifest, replace=self._overwrite, restart=self._restart, found=job.found)
        job.run(_Journaled(journal))
        if job.is_complete:
            self._folder.finish(partial(encoded, self._output))
        return job.ended(self._output if job.is_complete else self._folder.path)


class _Records(Protocol):
    """Where records go."""

    @property
    def finished(self) -> npt.NDArray[np.bool_] | None:
        """Which positions have a record; None: none has."""

    @property
    def counted(self) -> int:
        """Records that will not be lost."""

    def put(self, position: int, line: bytes) -> None: ...

    def settle(self) -> None:
        """A pass has ended: what is due is due now."""


class _Journaled:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.put, self.settle = journal.append, journal.sync_if_due

    @property
    def finished(self) -> npt.NDArray[np.bool_] | None:
        return self._journal.finished

    @property
    def counted(self) -> int:
        return self._journal.durable


class _Streamed:
    def __init__(self, output: StandardOutput) -> None:
        self._output = output
        self.settle = output.flush
        self.finished = None
        self.counted = 0

    def put(self, position: int, line: bytes) -> None:
        self._output.put(position, line)
        self.counted += 1


@dataclass(frozen=True)
class _Unanswered(Generic[R]):
    """A sound line without its record yet."""

    position: int  # of its record in the output
    request: R
    reply: Reply


class _Job(Generic[R]):
    """The part of a batch that needs a runtime."""

    def __init__(
        self,
        runtime: BatchRuntime[R],
        scan: Prescan,
        interrupted: threading.Event,
        *,
        order: Order,
        keep_cache: bool,
        progress: bool,
        created: int | None,
    ) -> None:
        self._runtime = runtime
        self._scan = scan
        self._interrupted = interrupted
        self._order = order
        self._keep_cache = keep_cache
        self._progress = progress
        self._created = created
        self._spelling = TokenSpelling(runtime.tokenizer)
        self._records: _Records | None = None  # where they go, once it runs
        self._left = len(scan)  # records to come
        self._unanswered: dict[int, _Unanswered[R]] = {}  # that run, by line
        self._best_hit_rate = self._seconds = 0.0
        self._predicted_hit_rate: float | None = None
        self._earlier = self._own = Tally()

    @property
    def is_complete(self) -> bool:
        return not self._left

    def found(self, record: bytes) -> None:
        """Count a record that an earlier run has left."""
        self._earlier += tally(record)

    def run(self, records: _Records) -> None:
        """Run what has no record until all have one or the batch is interrupted."""
        scan = self._scan
        finished = np.zeros(len(scan), np.bool_) if records.finished is None else records.finished.copy()
        self._records, self._left = records, len(scan) - int(finished.sum())
        bad = np.flatnonzero(scan.is_bad & ~finished).tolist()
        for position, error in zip(bad, scan.read(bad), strict=True):
            assert isinstance(error, LineError)
            self._put(position, error_line(int(scan.lines[position]), error))
        waiting = self._in_order(np.flatnonzero(~scan.is_bad & ~finished))
        began = time.perf_counter()
        try:
            with _bar("answering", " requests", len(scan), self._progress) as bar:
                while not self._interrupted.is_set():
                    if len(self._unanswered) <= AT_ONCE // 2:
                        self._submit(list(itertools.islice(waiting, AT_ONCE // 2)))
                    if not self._runtime.has_work:
                        break
                    for output in self._runtime.step():
                        self._answer(output)
                    records.settle()
                    bar.set_postfix_str(self._rates(time.perf_counter() - began), refresh=False)
                    bar.update(records.counted - bar.n)
                bar.update(len(scan) - self._left - bar.n)
        finally:
            self._seconds = time.perf_counter() - began
            for line in self._unanswered.values():
                self._runtime.abort(line.request)
            while self._runtime.has_work:  # what was aborted leaves the runtime
                self._runtime.step()
        if self._left and not self._interrupted.is_set():
            raise SchedulerError(f"the runtime ended without an answer to {self._left} requests")

    def _in_order(self, positions: npt.NDArray[np.int64]) -> Iterator[tuple[int, int | None]]:
        """The positions as they are to run, each with the tokens of its prompt that are wanted again after it."""
        scan, limits = self._scan, self._runtime.limits
        plan = plan_batch(scan.tokens, scan.new_tokens.astype(np.int64) * scan.num_answers, positions)
        self._best_hit_rate = plan.statistics.best_hit_rate
        if self._order == "file":
            return zip(positions.tolist(), itertools.repeat(None))
        if self._runtime.reuses_prefixes and plan.longest_request <= limits.pool_tokens:
            self._predicted_hit_rate = plan.predict(limits).hit_rate
        if self._keep_cache or plan.most_tokens <= limits.pool_tokens:
            return zip(plan.run.order.tolist(), itertools.repeat(None))
        return zip(plan.run.order.tolist(), plan.keep.tolist(), strict=True)

    def _submit(self, planned: list[tuple[int, int | None]]) -> None:
        scan, requests = self._scan, []
        lines = scan.read([position for position, _ in planned])
        for (position, keep), line in zip(planned, lines, strict=True):
            assert isinstance(line, SoundLine)
            number = int(scan.lines[position])
            try:
                tokens = scan.tokens[position]
                request = self._runtime.prepare(tokens, line.sampling_params, index=number, keep=keep)
            except (PromptError, ParameterError) as error:  # such as one too long for the pool of KV
                refused = LineError(LineErrorType.INVALID_PROMPT, f"the prompt {error}", line.reply)
                self._put(position, error_line(number, refused))
                continue
            self._unanswered[number] = _Unanswered(position, request, line.reply)
            requests.append(request)
        if requests:
            self._runtime.submit(*requests, in_order=True)

    def _rates(self, seconds: float) -> str:
        return f"{self._own.completion_tokens / seconds:,.0f} tokens/s, hit rate {self._own.hit_rate:.1%}"

    def _answer(self, output: RequestOutput) -> None:
        """Write the record of a finished request."""
        line = self._unanswered.pop(output.index)
        created = int(time.time()) if self._created is None else self._created
        record = output_line(output.index, line.reply, output, created=created, spelling=self._spelling)
        self._put(line.position, record)

    def _put(self, position: int, line: bytes) -> None:
        assert self._records is not None  # it runs
        self._records.put(position, line)
        self._own += tally(line)
        self._left -= 1

    def ended(self, output_path: Path | None) -> BatchReport:
        """The report of a batch that is complete; raises BatchInterrupted with that of another."""
        total = self._earlier + self._own
        report = BatchReport(
            output_path=output_path,
            requests=len(self._scan),
            written=total.records,
            errors=total.errors,
            prompt_tokens=total.prompt_tokens,
            cached_tokens=total.cached_tokens,
            completion_tokens=total.completion_tokens,
            best_hit_rate=self._best_hit_rate,
            seconds=self._seconds,
            own=self._own,
            predicted_hit_rate=self._predicted_hit_rate,
        )
        if not self.is_complete:
            raise BatchInterrupted(report)
        return report


def _bar(what: str, unit: str, total: int | None, shown: bool) -> tqdm:
    interval = 0.1 if sys.stderr.isatty() else _LOG_INTERVAL
    return tqdm(
        desc=what,
        unit=unit,
        total=total,
        disable=not shown,
        mininterval=interval,
        maxinterval=max(10.0, interval),
        delay=1.0 if total is None else 0.0,  # reading is mostly too quick to show
        leave=total is not None,
    )
