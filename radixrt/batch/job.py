"""Answer a file of prompts: look at all of it, run what is sound, write one record a line in input order."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
from tqdm import tqdm  # not tqdm.auto: a notebook's bar needs more packages

from radixrt.batch.batch_runtime import BatchRuntime, R
from radixrt.batch.error_limit import ErrorLimit
from radixrt.batch.interruption import BatchInterrupted, what_is_kept
from radixrt.batch.line_format import LineParser, error_line, output_line
from radixrt.batch.manifest import Manifest
from radixrt.batch.ordered_file import OrderedFile
from radixrt.batch.output_file import encoded
from radixrt.batch.paths import check_paths
from radixrt.batch.prescan import Check, Prescan, SoundLine, parameters_as_json, prescan
from radixrt.batch.record import LineError, LineErrorType, Reply
from radixrt.batch.records import Journaled, Records, Streamed
from radixrt.batch.report import BatchReport
from radixrt.batch.retry import Retries
from radixrt.batch.run_folder import RunFolder
from radixrt.batch.source import STANDARD, BadLine, read_lines
from radixrt.bounds import real
from radixrt.errors import (
    BatchFileError,
    DeviceLostError,
    ErrorRateError,
    ParameterError,
    PromptError,
    RadixrtError,
    SchedulerError,
)
from radixrt.interrupt import DRAIN_SECONDS, FirstSignal, first_interrupt
from radixrt.output import FinishReason, RequestOutput
from radixrt.planning.prefix_order import prefix_order
from radixrt.planning.prefix_tree import prefix_tree
from radixrt.planning.run_order import run_order
from radixrt.sampling_params import SamplingParams
from radixrt.text.token_spelling import TokenSpelling
from radixrt.text.tokenizer import Tokenizer

AT_ONCE = 8192  # requests that a runtime knows of at most
_LOG_INTERVAL = 30.0  # seconds between two states of the bar where stderr is not a terminal

_log = logging.getLogger(__name__)


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

    At the first Ctrl-C or SIGTERM no more requests are begun, and those that have begun get some seconds to end; a
    second one ends the batch after the current pass.

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
        max_error_rate: stop once more than this share of all lines, 0 to 1, have error records; None: go on.
        drain_seconds: that requests which have begun may run on after the first signal.

    Raises:
        ParameterError: max_error_rate or drain_seconds is outside its bounds.
        BatchFileError: a file cannot be read, must not be replaced, or cannot be written; another process answers
            the same file; or, by `run`, `OUTPUT.run` holds a run of another input, model or parameters.
        JournalError: the disk failed while it ran; the same batch goes on later.
        DeviceLostError: the device works no more; the same batch goes on in a new process.
        ErrorRateError: more lines have errors than max_error_rate allows; with a higher one it goes on.
        BatchInterrupted: it was stopped by Ctrl-C or SIGTERM.
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
        max_error_rate: float | None = None,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self._error_limit = ErrorLimit(max_error_rate)
        self._drain_seconds = real("drain_seconds", drain_seconds, 0.0, 1e6)
        check_paths(input_path, output_path, overwrite=overwrite)
        self._input = input_path
        self._output = output_path if output_path == STANDARD else Path(output_path)
        self._defaults = SamplingParams() if default_params is None else default_params
        self._overwrite, self._restart, self._strict, self._progress = overwrite, restart, strict, progress
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
        """Read the whole input, and check each line. With `strict` a bad one raises BatchFileError, and too many
        of them raise ErrorRateError.

        Args:
            tokenizer, check: as of `prescan`.
        """
        notice = "stopping; nothing has run yet"
        with first_interrupt(notice) as interrupted, _bar("reading", " lines", None, self._progress) as bar:
            self._scan = prescan(
                self._lines(interrupted),
                self._scratch,
                parser=LineParser(self._defaults),
                tokenizer=tokenizer,
                check=check,
                seen=bar.update,
            )
            _stop_if(interrupted)  # it may have come behind the last line
        if self._strict and self._scan.problems:
            raise BatchFileError(
                f"{self._scan.summary()}\nNothing has run. Without strict these get error records."
            )
        self._error_limit.check(self._scan)
        return self._scan

    def _lines(self, interrupted: FirstSignal) -> Iterator[tuple[int, bytes | BadLine]]:
        for line in read_lines(self._input):
            yield line
            _stop_if(interrupted)

    def run(self, runtime: BatchRuntime[R]) -> BatchReport:
        """Run what is sound and has no record yet, and write the output."""
        notice = f"stopping; requests that have begun get {self._drain_seconds:g} seconds to end"
        with first_interrupt(notice) as interrupted:
            return self._run(runtime, interrupted)

    def _run(self, runtime: BatchRuntime[R], interrupted: FirstSignal) -> BatchReport:
        scan = self._scan
        assert scan is not None, "look comes first"
        job = _Job(
            runtime,
            scan,
            interrupted,
            self._error_limit,
            drain_seconds=self._drain_seconds,
            progress=self._progress,
            created=self._created,
        )
        if self._folder is None:
            with OrderedFile(STANDARD, overwrite=False) as output:
                job.run(Streamed(output), None)
                if job.is_complete:
                    output.finish()
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
        journal = self._folder.begin(manifest, replace=self._overwrite, restart=self._restart)
        job.run(Journaled(journal), self._folder.path)
        if job.is_complete:
            interrupted.notice = "all records are there, and the output is being made"
            self._folder.finish(partial(encoded, self._output))
        return job.ended(self._output if job.is_complete else self._folder.path)


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
        interrupted: FirstSignal,
        error_limit: ErrorLimit,
        *,
        drain_seconds: float,
        progress: bool,
        created: int | None,
    ) -> None:
        self._runtime = runtime
        self._scan = scan
        self._interrupted = interrupted
        self._error_limit = error_limit
        self._drain_seconds = drain_seconds
        self._progress = progress
        self._created = created
        self._spelling = TokenSpelling(runtime.tokenizer)
        self._records: Records | None = None  # where they go, once it runs
        self._left = len(scan)  # records to come
        self._unanswered: dict[int, _Unanswered[R]] = {}  # that the runtime knows of, by line
        self._retries = Retries()
        self._best_hit_rate = self._seconds = 0.0
        self._errors = int(scan.is_bad.sum())
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0

    @property
    def is_complete(self) -> bool:
        return not self._left

    def run(self, records: Records, kept_in: Path | None) -> None:
        """Run what has no record until all have one or the batch is interrupted.

        `kept_in` is where records are kept, for messages.
        """
        try:
            self._run(records)
        except DeviceLostError as error:
            raise DeviceLostError(f"{error}\n{what_is_kept(self._report(kept_in))}") from error
        except ErrorRateError as error:
            kept = what_is_kept(self._report(kept_in), "with a higher max_error_rate the same command")
            raise ErrorRateError(f"{error}\n{kept}") from error

    def _run(self, records: Records) -> None:
        scan = self._scan
        finished = np.zeros(len(scan), np.bool_) if records.finished is None else records.finished.copy()
        self._records, self._left = records, len(scan) - int(finished.sum())
        self._error_limit.count_kept(records.kept())
        bad = np.flatnonzero(scan.is_bad & ~finished).tolist()
        for position, error in zip(bad, scan.read(bad), strict=True):
            assert isinstance(error, LineError)
            self._refuse(position, error)
        waiting = self._in_order(np.flatnonzero(~scan.is_bad & ~finished))
        began = time.perf_counter()
        try:
            with _bar("answering", " requests", len(scan), self._progress) as bar:
                while self._goes_on(waiting):
                    self._book(self._runtime.step())
                    records.settle()
                    bar.set_postfix_str(self._rates(time.perf_counter() - began), refresh=False)
                    bar.update(records.counted - bar.n)
                bar.update(len(scan) - self._left - bar.n)
        finally:
            self._seconds = time.perf_counter() - began
            for line in self._unanswered.values():
                self._runtime.abort(line.request)
            while self._runtime.has_work:  # what was aborted leaves the runtime, unless that can run no more
                self._runtime.step()
        if self._left and not self._interrupted.is_set():
            raise SchedulerError(f"the runtime ended without an answer to {self._left} requests")

    def _goes_on(self, waiting: Iterator[int]) -> bool:
        """Submit lines that wait, unless the batch is to end. Whether there is a pass to run."""
        if not self._interrupted.is_set():
            self._feed(waiting)
            return self._runtime.has_work
        self._withdraw()
        in_time = self._interrupted.age < self._drain_seconds
        return bool(self._unanswered) and in_time and self._runtime.has_work

    def _feed(self, waiting: Iterator[int]) -> None:
        """Submit lines if there is room: those whose pass failed, once nothing else runs, or the next ones."""
        while True:
            positions = [] if self._unanswered else self._retries.take()
            if not self._retries and len(self._unanswered) <= AT_ONCE // 2:
                positions = list(itertools.islice(waiting, AT_ONCE // 2))
            if positions:
                self._submit(positions)
            if self._unanswered or not positions:
                return

    def _withdraw(self) -> None:
        """Take back the requests that have not begun."""
        for index, line in list(self._unanswered.items()):
            if not line.request.has_begun:
                self._runtime.abort(line.request)
                del self._unanswered[index]

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
                self._refuse(position, LineError(LineErrorType.INVALID_PROMPT, f"the prompt {error}", line.reply))
                continue
            self._unanswered[number] = _Unanswered(position, request, line.reply)
            requests.append(request)
        if requests:
            self._runtime.submit(*requests)

    def _rates(self, seconds: float) -> str:
        hit_rate = self._cached_tokens / max(1, self._prompt_tokens)
        return f"{self._completion_tokens / seconds:,.0f} tokens/s, hit rate {hit_rate:.1%}"

    def _book(self, outputs: list[RequestOutput]) -> None:
        """Write the records of requests that have ended, unless they were withdrawn or are to be run again."""
        failed: list[tuple[_Unanswered[R], RequestOutput]] = []  # of one pass: a step books no more
        for output in outputs:
            line = self._unanswered.pop(output.index, None)
            if line is not None and output.cause is None:
                self._answer(line, output)
            elif line is not None:
                failed.append((line, output))
        if failed and not self._retries.book([line.position for line, _ in failed]):
            for line, output in failed:
                self._answer(line, output)

    def _answer(self, line: _Unanswered[R], output: RequestOutput) -> None:
        """Write the record of a request that has ended for good."""
        created = int(time.time()) if self._created is None else self._created
        try:
            record = output_line(output.index, line.reply, output, created=created, spelling=self._spelling)
        except Exception as error:  # one line's record must not cost the others theirs
            _log.exception("no record can be made of the answer to line %d", output.index + 1)
            self._errors += 1
            why = f"no record can be made of its answer: {type(error).__name__}: {error}"
            self._refuse(line.position, LineError(LineErrorType.FAILED, why, line.reply))
            return
        self._put(line.position, record)
        errors = [answer.error for answer in output.outputs if answer.finish_reason is FinishReason.ERROR]
        if errors:
            self._error_limit.count(LineErrorType.FAILED, errors[0] or "")
        if output.finish_reason is FinishReason.ERROR:
            self._errors += 1
            return
        self._prompt_tokens += output.usage.prompt_tokens
        self._cached_tokens += output.usage.cached_tokens
        self._completion_tokens += output.usage.completion_tokens

    def _refuse(self, position: int, error: LineError) -> None:
        """Write the record of a line that has no answer."""
        self._put(position, error_line(int(self._scan.lines[position]), error))
        self._error_limit.count(error.type, error.message)

    def _put(self, position: int, line: bytes) -> None:
        assert self._records is not None  # it runs
        self._records.put(position, line)
        self._left -= 1

    def ended(self, output_path: Path | None) -> BatchReport:
        """The report of a batch that is complete; raises BatchInterrupted with that of another."""
        report = self._report(output_path)
        if self._interrupted.number is not None and not self.is_complete:
            raise BatchInterrupted(report, self._interrupted.number)
        return report

    def _report(self, output_path: Path | None) -> BatchReport:
        return BatchReport(
            output_path=output_path,
            requests=len(self._scan),
            written=len(self._scan) - self._left,
            errors=self._errors,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            best_hit_rate=self._best_hit_rate,
            seconds=self._seconds,
        )


def _stop_if(interrupted: FirstSignal) -> None:
    """Raise BatchInterrupted if a signal has come before anything has run."""
    if interrupted.number is not None:
        raise BatchInterrupted(BatchReport.of_nothing(), interrupted.number)


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
