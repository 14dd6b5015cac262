"""Answer a file of prompts: look at all of it, run what is sound, write one record a line in input order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from radixrt.batch.batch_run import BatchRun, Order
from radixrt.batch.batch_runtime import BatchRuntime, R
from radixrt.batch.error_limit import ErrorLimit
from radixrt.batch.formats.compression import encoded
from radixrt.batch.formats.line_format import LineParser
from radixrt.batch.formats.source import BadLine, read_lines
from radixrt.batch.interruption import BatchInterrupted, what_is_kept
from radixrt.batch.journal.manifest import Manifest
from radixrt.batch.journal.run_folder import RunFolder
from radixrt.batch.journal.sinks import Journaled, Streamed
from radixrt.batch.journal.standard_output import StandardOutput
from radixrt.batch.paths import check_paths
from radixrt.batch.prescan import Check, Prescan, parameters_as_json, prescan
from radixrt.batch.progress import progress_bar
from radixrt.checks import check_float
from radixrt.engine.signals import DRAIN_SECONDS, FirstSignal, first_interrupt
from radixrt.errors import BatchFileError, DeviceLostError, ErrorRateError, ParameterError, RadixrtError
from radixrt.files.disk import temporary_folder
from radixrt.files.standard import STANDARD
from radixrt.report.batch_report import BatchReport
from radixrt.report.files import Paths, ReportError, ReportFiles
from radixrt.sampling_params import SamplingParams
from radixrt.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def run_batch(
    runtime: BatchRuntime[R], input_path: str | Path, output_path: str | Path, **others: Any
) -> BatchReport:
    """Answer each line of `input_path` with one record in `output_path`, in input order.

    `plain_lines` and `openai_batch` in `radixrt.batch.formats` describe the lines. A bad line becomes an error
    record and changes no other line's record. All lines are read and checked before the first request runs, in an
    order in which those that share a prefix follow one another.

    Finished records are kept in the folder `OUTPUT.run`, where nothing that ends the process can touch them. The
    same call goes on from there: records that are there stay as they are, the others are computed. When all are
    there, the output gets its name in one step, and the folder goes.

    At the first Ctrl-C or SIGTERM no more requests are begun, and those that have begun get some seconds to end; a
    second one ends the batch after the current pass.

    Args:
        runtime: a Runtime without other requests. It stays open.
        others: as of Batch.

    Raises:
        ParameterError, BatchFileError, JournalError, DeviceLostError, ErrorRateError, BatchInterrupted: as Batch.
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
        max_error_rate: stop once more than this share of all lines, 0 to 1, have error records; None: go on.
        drain_seconds: that requests which have begun may run on after the first signal.
        report: files that get the report, also of a batch that the first signal, a lost device or too many errors
            have stopped: .html is a page with plots, which needs matplotlib, .json its figures
            (`BatchReport.to_json`). They are replaced if they are there.
        price_per_hour: of the machine, in any currency, for the report.

    Raises:
        ParameterError: order, max_error_rate, drain_seconds or price_per_hour is outside its bounds.
        BatchFileError: a file cannot be read, must not be replaced, or cannot be written; another process answers
            the same file; or, by `run`, `OUTPUT.run` holds a run of another input, model or parameters.
        ReportError: the output is whole, but the report cannot be written.
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
        order: Order = "planned",
        keep_cache: bool = False,
        progress: bool = False,
        created: int | None = None,
        max_error_rate: float | None = None,
        drain_seconds: float = DRAIN_SECONDS,
        report: Paths = (),
        price_per_hour: float | None = None,
    ) -> None:
        if order not in ("planned", "file"):
            raise ParameterError(f"order is {order!r}; it must be 'planned' or 'file'")
        self._order, self._keep_cache = order, keep_cache
        self._error_limit = ErrorLimit(max_error_rate)
        self._drain_seconds = check_float("drain_seconds", drain_seconds, 0.0, 1e6)
        check_paths(input_path, output_path, overwrite=overwrite)
        self._input = input_path
        self._output = output_path if output_path == STANDARD else Path(output_path)
        self._defaults = SamplingParams() if default_params is None else default_params
        self._overwrite, self._restart, self._strict, self._progress = overwrite, restart, strict, progress
        self._created = created
        self._reports = ReportFiles(report, input_path, output_path)
        self._price = None if price_per_hour is None else check_float("price_per_hour", price_per_hour, 0.0, 1e9)
        self._opened = contextlib.ExitStack()
        self._folder: RunFolder | None = None  # none for standard output
        self._scan: Prescan | None = None

    def __enter__(self) -> Batch:
        with contextlib.ExitStack() as opened:
            if isinstance(self._output, Path):
                self._folder = opened.enter_context(RunFolder(self._output))
                self._scratch = self._folder.scratch
            else:
                self._scratch = opened.enter_context(temporary_folder())
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
        notice = "stopping; nothing has run in this call"
        with (
            first_interrupt(notice) as interrupted,
            progress_bar("reading", " lines", None, self._progress) as bar,
        ):
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
        run = BatchRun(
            runtime,
            scan,
            interrupted,
            self._error_limit,
            order=self._order,
            keep_cache=self._keep_cache,
            drain_seconds=self._drain_seconds,
            progress=self._progress,
            created=self._created,
        )
        kept_in = None if self._folder is None else self._folder.path
        try:
            self._answer(run, runtime, interrupted)
        except (DeviceLostError, ErrorRateError) as error:
            report = self._report(run, kept_in, runtime.tokenizer)
            who = "the same command"
            if isinstance(error, ErrorRateError):
                who = f"with a higher max_error_rate {who}"
            raise type(error)(f"{error}\n{what_is_kept(report, who)}") from error.__cause__
        if run.is_complete:
            output = self._output if isinstance(self._output, Path) else None
            return self._report(run, output, runtime.tokenizer)
        assert interrupted.number is not None  # why else
        raise BatchInterrupted(self._report(run, kept_in, runtime.tokenizer), interrupted.number)

    def _answer(self, run: BatchRun[R], runtime: BatchRuntime[R], interrupted: FirstSignal) -> None:
        """Run what has no record yet, and make the output if all have one."""
        scan = self._scan
        assert scan is not None
        if self._folder is None:
            with StandardOutput(self._scratch, len(scan)) as output:
                run.run(Streamed(output))
            return
        assert isinstance(self._output, Path)
        manifest = Manifest(
            num_records=len(scan),
            input={"lines": scan.input_hash},
            weights=runtime.identity(),
            tokenizer={"token ids of the input": scan.tokens_hash},
            parameters=parameters_as_json(self._defaults),
            settings={"seed": runtime.seed},
        )
        journal = self._folder.begin(manifest, replace=self._overwrite, restart=self._restart, found=run.found)
        run.run(Journaled(journal))
        if run.is_complete:
            interrupted.notice = "all records are there, and the output is being made"
            self._folder.finish(partial(encoded, self._output))

    def _report(self, run: BatchRun[R], output_path: Path | None, tokenizer: Tokenizer | None) -> BatchReport:
        """The report, which has gone to its files."""
        report = run.report(output_path, self._price)
        try:
            self._reports.write(report, run.plan() if self._reports.has_page else None, tokenizer)
        except Exception as error:
            if run.is_complete:
                raise ReportError(f"the output is whole, but {error}", report) from error
            _log.exception("no report can be written")  # that the batch was stopped matters more
        return report


def _stop_if(interrupted: FirstSignal) -> None:
    """Raise BatchInterrupted if a signal has come before anything has run."""
    if interrupted.number is not None:
        raise BatchInterrupted(BatchReport.of_nothing(), interrupted.number)
