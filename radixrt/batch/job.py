"""Answer a file of prompts: look at all of it, run what is sound, write one record a line in input order."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm  # not tqdm.auto: a notebook's bar needs more packages

from radixrt.batch.journal import Journal
from radixrt.batch.line_format import LineParser, error_line, output_line
from radixrt.batch.manifest import Manifest
from radixrt.batch.meter import Meter, MeteredRuntime
from radixrt.batch.ordered_file import OrderedFile
from radixrt.batch.output_file import check_output_name, encoded
from radixrt.batch.prescan import Check, Prescan, SoundLine, parameters_as_json, prescan
from radixrt.batch.record import LineError, LineErrorType, Reply
from radixrt.batch.report import BatchReport
from radixrt.batch.report_files import Paths, ReportFiles
from radixrt.batch.run_folder import RunFolder, run_path
from radixrt.batch.source import STANDARD, BadLine, read_lines
from radixrt.bounds import real
from radixrt.errors import BatchFileError, ParameterError, PromptError, RadixrtError, SchedulerError
from radixrt.interrupt import first_interrupt
from radixrt.output import FinishReason, RequestOutput
from radixrt.planning.batch_plan import BatchPlan, plan_batch
from radixrt.planning.prefix_order import prefix_order
from radixrt.planning.prefix_tree import prefix_tree
from radixrt.planning.run_order import run_order
from radixrt.sampling_params import SamplingParams
from radixrt.text.token_spelling import TokenSpelling
from radixrt.text.tokenizer import Tokenizer

AT_ONCE = 8192  # requests that a runtime knows of at most
_LOG_INTERVAL = 30.0  # seconds between two states of the bar where stderr is not a terminal

_log = logging.getLogger(__name__)


class PreparedRequest(Protocol):
    """A request as `BatchRuntime.prepare` makes it."""

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]: ...

    @property
    def max_new_tokens(self) -> int: ...


R = TypeVar("R", bound=PreparedRequest)


class BatchRuntime(MeteredRuntime, Protocol[R]):
    """What a batch needs of a `Runtime`."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def seed(self) -> int: ...

    def identity(self) -> Mapping[str, Any]: ...

    def prepare(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.int32] | Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
    ) -> R: ...

    def submit(self, *requests: R) -> None: ...

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
    if not overwrite and not run_path(output_path).exists():  # a run that has only to be cleared away, perhaps
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
        progress: show bars on stderr; where that is not a terminal, they move every 30 seconds.
        created: Unix time in seconds that records in OpenAI's format bear; None: each that of its answer.
        report: files that get the report, also if the batch is interrupted: .html is a page with plots, which
            needs matplotlib, .json its figures (`BatchReport.to_json`). They are replaced if they are there.
        price_per_hour: of the machine, in any currency, for the report.

    Raises:
        BatchFileError: a file cannot be read, must not be replaced, or cannot be written; another process answers
            the same file; or, by `run`, `OUTPUT.run` holds a run of another input, model or parameters.
        ParameterError: price_per_hour is not a number from 0 to 1e9.
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
        progress: bool = False,
        created: int | None = None,
        report: Paths = (),
        price_per_hour: float | None = None,
    ) -> None:
        check_paths(input_path, output_path, overwrite=overwrite)
        self._input = input_path
        self._output = output_path if output_path == STANDARD else Path(output_path)
        self._defaults = SamplingParams() if default_params is None else default_params
        self._overwrite, self._restart, self._strict, self._progress = overwrite, restart, strict, progress
        self._created = created
        self._reports = ReportFiles(report, input_path, output_path)
        self._price = None if price_per_hour is None else real("price_per_hour", price_per_hour, 0.0, 1e9)
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
        job = _Job(runtime, scan, interrupted, self._progress, self._created)
        output_path = self._answer(job, runtime, scan)
        report = job.report(output_path, self._price)
        self._write_report(report, job, runtime.tokenizer)
        if not job.is_complete:
            raise BatchInterrupted(report)
        return report

    def _answer(self, job: _Job[R], runtime: BatchRuntime[R], scan: Prescan) -> Path | None:
        """Run the job, and make the output if it is complete. Returns where the records are."""
        if self._folder is None:
            with OrderedFile(STANDARD, overwrite=False) as output:
                job.run(_Streamed(output))
                if job.is_complete:
                    output.finish()
            return None
        assert isinstance(self._output, Path)
        manifest = Manifest(
            num_records=len(scan),
            input={"lines": scan.input_hash},
            weights=runtime.identity(),
            tokenizer={"token ids of the input": scan.tokens_hash},
            parameters=parameters_as_json(self._defaults),
            settings={"seed": runtime.seed},
        )
        journal = self._folder.begin(manifest, replace=self._overwrite, restart=self._restart)
        job.run(_Journaled(journal))
        if job.is_complete:
            self._folder.finish(partial(encoded, self._output))
            return self._output
        return self._folder.path

    def _write_report(self, report: BatchReport, job: _Job[R], tokenizer: Tokenizer | None) -> None:
        try:
            self._reports.write(report, job.plan() if self._reports.has_page else None, tokenizer)
        except BatchFileError as error:
            if job.is_complete:
                raise
            _log.warning("%s", error)  # that the batch was interrupted matters more


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
    def __init__(self, output: OrderedFile) -> None:
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
        progress: bool,
        created: int | None,
    ) -> None:
        self._runtime = runtime
        self._scan = scan
        self._interrupted = interrupted
        self._progress = progress
        self._created = created
        self._spelling = TokenSpelling(runtime.tokenizer)
        self._records: _Records | None = None  # where they go, once it runs
        self._left = len(scan)  # records to come
        self._unanswered: dict[int, _Unanswered[R]] = {}  # that run, by line
        self._kept = 0  # records of earlier runs
        self._meter = Meter(runtime)
        self._best_hit_rate = 0.0
        self._errors = int(scan.is_bad.sum())
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0

    @property
    def is_complete(self) -> bool:
        return not self._left

    def run(self, records: _Records) -> None:
        """Run what has no record until all have one or the batch is interrupted."""
        scan = self._scan
        finished = np.zeros(len(scan), np.bool_) if records.finished is None else records.finished.copy()
        self._records, self._kept = records, int(finished.sum())
        self._left = len(scan) - self._kept
        bad = np.flatnonzero(scan.is_bad & ~finished).tolist()
        for position, error in zip(bad, scan.read(bad), strict=True):
            assert isinstance(error, LineError)
            self._put(position, error_line(int(scan.lines[position]), error))
        waiting = self._in_order(np.flatnonzero(~scan.is_bad & ~finished))
        self._meter.begin(self._written)
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
                    self._meter.look(self._written)
                    bar.set_postfix_str(self._meter.rates, refresh=False)
                    bar.update(records.counted - bar.n)
                self._meter.end(self._written)
                bar.update(self._written - bar.n)
        finally:
            for line in self._unanswered.values():
                self._runtime.abort(line.request)
            while self._runtime.has_work:  # what was aborted leaves the runtime
                self._runtime.step()
        if self._left and not self._interrupted.is_set():
            raise SchedulerError(f"the runtime ended without an answer to {self._left} requests")

    def _in_order(self, positions: npt.NDArray[np.int64]) -> Iterator[int]:
        """The positions, those whose prompts share a prefix one after the other."""
        tokens, new_tokens = self._scan.tokens, self._scan.new_tokens
        starts, ends = tokens.offsets[positions], tokens.offsets[positions + 1]
        order = prefix_order(tokens.tokens, starts, ends, tokens.forget)
        planned = run_order(order, prefix_tree(order), ends - starts, new_tokens[positions].astype(np.int64))
        lengths = (ends - starts)[planned.order]
        # A prompt that is wholly cached computes its last token again.
        self._best_hit_rate = float(np.minimum(planned.shared, lengths - 1).sum() / max(1, lengths.sum()))
        return iter(positions[planned.order].tolist())

    def _submit(self, positions: list[int]) -> None:
        scan, requests = self._scan, []
        for position, line in zip(positions, scan.read(positions), strict=True):
            assert isinstance(line, SoundLine)
            number = int(scan.lines[position])
            try:
                request = self._runtime.prepare(scan.tokens[position], line.sampling_params, index=number)
            except (PromptError, ParameterError) as error:  # such as one too long for the pool of KV
                self._errors += 1
                refused = LineError(LineErrorType.INVALID_PROMPT, f"the prompt {error}", line.reply)
                self._put(position, error_line(number, refused))
                continue
            self._unanswered[number] = _Unanswered(position, request, line.reply)
            requests.append(request)
        if requests:
            self._runtime.submit(*requests)

    def _answer(self, output: RequestOutput) -> None:
        """Write the record of a finished request."""
        line = self._unanswered.pop(output.index)
        created = int(time.time()) if self._created is None else self._created
        record = output_line(output.index, line.reply, output, created=created, spelling=self._spelling)
        self._put(line.position, record)
        self._meter.count(output)
        if output.finish_reason is FinishReason.ERROR:
            self._errors += 1
            return
        self._prompt_tokens += output.usage.prompt_tokens
        self._cached_tokens += output.usage.cached_tokens
        self._completion_tokens += output.usage.completion_tokens

    def _put(self, position: int, line: bytes) -> None:
        assert self._records is not None  # it runs
        self._records.put(position, line)
        self._left -= 1

    @property
    def _written(self) -> int:
        return len(self._scan) - self._left

    def report(self, output_path: Path | None, price_per_hour: float | None) -> BatchReport:
        """What has come of it."""
        return BatchReport(
            output_path=output_path,
            requests=len(self._scan),
            written=self._written,
            errors=self._errors,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            kept=self._kept,
            run=self._meter.figures(best_hit_rate=self._best_hit_rate),
            price_per_hour=price_per_hour,
            timeline=self._meter.timeline,
        )

    def plan(self) -> BatchPlan:
        """Of all lines that are sound: the others have no tokens."""
        return plan_batch(self._scan.tokens, self._scan.new_tokens.astype(np.int64))


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
