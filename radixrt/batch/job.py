"""A batch from beginning to end: check its paths, scan all lines, run the sound ones, make the output, report."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from radixrt.arrays import Int64Array
from radixrt.batch.error_limit import ErrorLimit
from radixrt.batch.formats.compression import check_output_name, encoded
from radixrt.batch.formats.line_format import LineParser
from radixrt.batch.formats.openai_batch import ChatReader
from radixrt.batch.formats.source import BadLine, read_lines
from radixrt.batch.journal.journal import Journal, Kept
from radixrt.batch.journal.late_journal import LateJournal
from radixrt.batch.journal.manifest import CUTS, ENDS, Manifest
from radixrt.batch.journal.run_folder import RunFolder, aside_path, has_run, run_path
from radixrt.batch.journal.standard_output import StandardOutput
from radixrt.batch.known_lines import KnownLines
from radixrt.batch.meter import reading_bar
from radixrt.batch.options import BatchConfig, BatchOptions
from radixrt.batch.reading import Lines, Reading
from radixrt.batch.record_writer import RecordCounts, RecordWriter, Sink
from radixrt.batch.run import AnyRuntime, BatchRun, R, batch_report, plan_of
from radixrt.batch.scan import Check, Scan, parameters_as_json, scan_lines
from radixrt.batch.tally import Tally
from radixrt.engine.signals import FirstSignal, Interrupt, Interrupted, first_interrupt, signal_of
from radixrt.errors import BatchFileError, DeviceLostError, ErrorRateError, RadixrtError
from radixrt.files.disk import temporary_folder
from radixrt.files.path_roles import PathRole, check_apart, check_target, read_role
from radixrt.files.standard import STANDARD
from radixrt.frontend.arguments import read_params
from radixrt.frontend.sampling_aliases import chosen_length
from radixrt.planning.batch_plan import BatchPlan
from radixrt.report.batch_report import BatchReport
from radixrt.report.files import ReportError, ReportFiles
from radixrt.sampling_params import MAX_NEW_TOKENS
from radixrt.text.token_spelling import TokenSpelling
from radixrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)


class BatchInterrupted(Interrupted):
    """A batch was stopped by Ctrl-C, SIGTERM or SIGHUP.

    Attributes:
        report: the figures up to then.
        signal_number: the signal.
    """

    def __init__(
        self, report: BatchReport, signal_number: int, how: str = "stopped", *, keeps: bool = True
    ) -> None:
        super().__init__(f"{how}: {_kept(report, keeps)}", signal_number)
        self.report = report


def run_batch(
    runtime: AnyRuntime[R], input_path: str | Path, output_path: str | Path, **options: Unpack[BatchOptions]
) -> BatchReport:
    """Answer each line of `input_path` with one record in `output_path`, in input order.

    `plain_lines` and `openai_batch` in `radixrt.batch.formats` describe the lines. A bad line becomes an error
    record and changes no other line's record. All lines are read and checked before the first request runs. They
    run in an order in which lines with a common prefix follow one another. With order="file" they run as they are
    read.

    Finished records are kept in the folder `OUTPUT.run`, and survive whatever ends the process. The same call goes
    on from there: kept records stay as they are, the others are computed. When all are there, the output gets its
    name in one step, and the folder is removed.

    At the first Ctrl-C or SIGTERM no more requests are begun, and started ones get some seconds to finish. A
    second one ends the batch after the current pass.

    Args:
        runtime: a Runtime without other requests. It stays open.
        options: see `BatchConfig`.

    Raises:
        ParameterError: an option is outside its bounds.
        BatchFileError, JournalError, DeviceLostError, ErrorRateError, BatchInterrupted: see `Batch`.
    """
    while runtime.has_work:
        if runtime.num_running or runtime.num_waiting:
            raise RadixrtError("the runtime has other requests; a batch needs one without")
        runtime.step()  # a pass beyond the end of an answer, of which another thread may have told before its end
    given = options.get("default_params")
    if options.get("chat_max_tokens") is None:
        options["chat_max_tokens"] = chosen_length(given, runtime.default_params)
    options["default_params"] = read_params(given, runtime.default_params)
    with Batch(input_path, output_path, BatchConfig(**options)) as batch:
        scanned = batch.scan(
            runtime.tokenizer,
            lambda prompt, params, line: runtime.prepare(prompt, params, index=line),
            runtime.context_length,
        )
        return scanned.run(runtime)


class Batch:
    """A file of prompts and the files that its answers need. In its context, `scan` reads the prompts.

    Args:
        input_path: JSON lines in UTF-8, plain or compressed by gzip or zstd; or parquet; "-" is standard input.
        output_path: a file in a folder that exists, compressed if its name ends in .gz or .zst; "-" is standard
            output, in input order; then no records are kept.
        options: see `BatchConfig`.
        beside: other files that the command reads or writes: these must not be among the batch's.

    Attributes:
        output: None for standard output.
        folder: `OUTPUT.run`; None for standard output.
        scratch: a folder for files that can be made again.

    Raises:
        BatchFileError: a file cannot be read, must not be replaced, or cannot be written; another process answers
            the same file; or `OUTPUT.run` holds a run of another input, model or parameters.
        ReportError: the output is whole, but the report cannot be written.
        JournalError: the disk failed while the batch ran; the same batch goes on later.
        DeviceLostError: the device works no more; the same batch goes on in a new process.
        ErrorRateError: more lines have errors than max_error_rate allows; with a higher one the batch goes on.
        BatchInterrupted: Ctrl-C or SIGTERM stopped the batch.

    A batch with order="file" that ends before its input was read to the end begins anew instead of going on, and
    so does one with too many bad lines.
    """

    def __init__(
        self,
        input_path: str | Path,
        output_path: str | Path,
        options: BatchConfig,
        beside: Sequence[PathRole] = (),
    ) -> None:
        _check_input(input_path)
        self._input = input_path
        self.output = None if output_path == STANDARD else Path(output_path)
        self.options = options
        self.default_params = read_params(options.default_params)
        self.report_files = ReportFiles(options.report, input_path)
        _check_output(output_path)
        own = [] if self.output is None else _output_places(self.output)
        check_apart([*read_role("the input", input_path), *own, *self.report_files.places, *beside])
        # After a finished run only its cleaning up may be left.
        if self.output is not None and self.output.exists() and not options.overwrite and not has_run(self.output):
            raise BatchFileError(f"the output {self.output} exists; --overwrite replaces it")
        self.folder: RunFolder | None = None
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Batch:
        with contextlib.ExitStack() as opened:
            if self.output is None:
                self.scratch = opened.enter_context(temporary_folder())
            else:
                self.folder = opened.enter_context(RunFolder(self.output))
                self.scratch = self.folder.scratch
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def scan(
        self,
        tokenizer: Tokenizer | None,
        check: Check,
        context_length: int | None = None,
        *,
        parser: LineParser | None = None,
        interrupt: Interrupt | None = None,
        named: Callable[[str], object] = lambda summary: None,
    ) -> ScannedBatch:
        """Read the whole input, and check each line. Where lines may run in the order of the file, a thread does,
        and this returns at once: errors show later.

        Args:
            tokenizer, check, context_length: see `scan_lines`.
            parser: of the lines; None: one for either format.
            interrupt: ends it, in place of Ctrl-C and SIGTERM.
            named: called with what `Scan.summary` says of bad lines, if there are any, once all lines are read.

        Raises:
            BatchFileError: the input cannot be read, or has a bad line and `strict` is set.
            ErrorRateError: too many lines are bad.
            BatchInterrupted: Ctrl-C or SIGTERM.
        """
        options = self.options
        parser = parser or LineParser(self.default_params, chat_max_tokens=options.chat_max_tokens)
        known = KnownLines(self.scratch)
        self._opened.callback(known.close)

        def read(interrupted: Interrupt) -> Scan:
            with reading_bar(self._input, options.progress) as bar:
                return scan_lines(
                    self._lines(interrupted, bar.update),
                    self.scratch,
                    parser=parser,
                    tokenizer=tokenizer,
                    check=check,
                    context_length=context_length,
                    known=known,
                )

        def read_and_tell(interrupted: Interrupt) -> Scan:
            scan = read(interrupted)
            if scan.problems:
                named(scan.summary())
            return scan

        if self._runs_what_is_known:
            reading = Reading(known, read_and_tell)
            self._opened.callback(reading.stop)
            return ScannedBatch(self, reading, ErrorLimit(options.max_error_rate, reading), parser.chats)
        with _interrupted("stopping; nothing has run in this call", interrupt) as interrupted:
            scan = read(interrupted)
            _stop_if(interrupted)  # the signal may have come after the last line
        if options.strict and scan.problems:
            raise BatchFileError(
                f"{scan.summary()}\nNothing has run. Without --strict (strict=True) they get error records."
            )
        error_limit = ErrorLimit(options.max_error_rate, scan)
        error_limit.check_bad_lines()
        if scan.problems:
            named(scan.summary())
        return ScannedBatch(self, scan, error_limit, parser.chats)

    @property
    def _runs_what_is_known(self) -> bool:
        """Whether lines may run before all are read. An earlier run may be one of other lines, which shows in the
        end; and a thread that waits for a pipe cannot be stopped.
        """
        options, folder = self.options, self.folder
        if options.order != "file" or options.strict or not os.path.isfile(self._input):
            return False
        return folder is None or folder.begins_anew(replace=options.overwrite, restart=options.restart)

    def _lines(
        self, interrupted: Interrupt, seen: Callable[[int], object]
    ) -> Iterator[tuple[int, bytes | BadLine]]:
        for line in read_lines(self._input, max_line=self.options.max_line_bytes, seen=seen):
            yield line
            _stop_if(interrupted)


class ScannedBatch:
    """A batch whose lines have been read, or are being read. It is valid inside the context of its `Batch`."""

    def __init__(self, batch: Batch, lines: Lines, error_limit: ErrorLimit, chats: ChatReader | None) -> None:
        self._lines, self._chats = lines, chats
        self._batch = batch
        self._error_limit = error_limit
        self._counts = RecordCounts(error_limit)
        self._run: BatchRun[Any] | None = None

    @property
    def lines(self) -> Scan:
        """All lines, once they are read. Raises as `Batch.scan` does."""
        return self._lines.whole()

    @property
    def tally(self) -> Tally:
        """Counts of the records so far, those of earlier runs included; from any thread."""
        counts, run = self._counts, self._run
        return counts.kept + counts.refused + (Tally() if run is None else run.tally)

    @property
    def failures(self) -> list[str]:
        """Why lines that are not bad have errors in this run: the most frequent reasons, a line each."""
        return self._error_limit.failures

    def needs_runtime(self) -> bool:
        """Whether a line without a record can run. Waits for one, or for the last line."""
        while not self._lines.is_whole:
            if not self._lines.is_bad.all():
                return True
            self._lines.wait(len(self._lines), 1.0)
        return len(self._missing()) > 0

    def run(self, runtime: AnyRuntime[R], interrupt: Interrupt | None = None) -> BatchReport:
        """Run each sound line without a record, and write output and report. For the errors see `Batch`.

        Where an `interrupt` is given, it takes the place of Ctrl-C and SIGTERM.
        """
        self._check_lengths(runtime.limits.pool_tokens)
        batch, options = self._batch, self._batch.options
        notice = f"stopping; requests that have begun get {options.drain_seconds:g} seconds to end"
        kept_in = None if batch.folder is None else batch.folder.path
        with _interrupted(notice, interrupt) as interrupted:
            counts = self._counts = RecordCounts(self._error_limit)
            failure: DeviceLostError | ErrorRateError | None = None
            run: BatchRun[R] | None = None
            try:
                with self._sink(runtime.identity, runtime.tokenizer, runtime.seed, counts) as sink:
                    records = self._records(sink, counts, runtime.tokenizer)
                    run = self._run = BatchRun(runtime, self._lines, records, interrupted, options)
                    try:
                        run.run()
                    except (DeviceLostError, ErrorRateError) as error:
                        failure = error
                if failure is None and run.is_complete:
                    self._make_output(interrupted)
            except KeyboardInterrupt as error:  # of a second signal
                if run is None:
                    raise
                how = str(error) or "interrupted"
                report = run.report(kept_in, counts)
                raise BatchInterrupted(report, signal_of(error), how, keeps=run.keeps) from error
            if failure is None and run.is_complete:
                return self._report(run.report(batch.output, counts), run.plan, runtime.tokenizer)
            report = self._report(run.report(kept_in, counts), run.plan, runtime.tokenizer)
            if failure is not None:
                same = "the same command"
                remedy = f"with a higher max_error_rate {same}" if isinstance(failure, ErrorRateError) else same
                raise type(failure)(f"{failure}\n{_kept(report, run.keeps, remedy)}") from failure.__cause__
            assert interrupted.number is not None  # nothing else leaves lines without records
            raise BatchInterrupted(report, interrupted.number, keeps=run.keeps)

    def finish(self, tokenizer: Tokenizer | None, seed: int) -> BatchReport:
        """Write output and report where `needs_runtime` is False: no line runs. For the errors see `Batch`.

        Args:
            tokenizer, seed: those of the runtime that is not needed. The weights are not compared with those of
                an earlier run, as nothing is computed with them.
        """
        kept = self._kept()
        weights = {} if kept is None else kept.manifest.weights
        with first_interrupt("all records are there, and the output is being made") as interrupted:
            counts = RecordCounts(self._error_limit)
            with self._sink(lambda: weights, tokenizer, seed, counts) as sink:
                records = self._records(sink, counts, tokenizer)
                records.refuse_bad_lines()
                records.sync()
            self._make_output(interrupted)
            report = batch_report(self.lines, counts, self._batch.output, self._batch.options, is_complete=True)
            return self._report(report, lambda: plan_of(self.lines, ~self.lines.is_bad), tokenizer)

    def _check_lengths(self, pool_tokens: int) -> None:
        """Raise BatchFileError if a line that is to run does not fit into the KV pool, and `strict` is set: before
        there is a journal, which would tie the run to this input.
        """
        if not self._batch.options.strict:
            return
        missing = self._missing()
        if len(too_long := missing[self.lines.too_long(missing, pool_tokens)]):
            raise BatchFileError(
                f"{len(too_long)} of {len(self.lines)} lines need more than the {pool_tokens:,} tokens of the KV "
                f"pool, the first one is line {self.lines.lines[too_long[0]] + 1}: raise max_total_tokens or "
                "memory_fraction. Nothing has run in this call. Without --strict (strict=True) they get error "
                "records."
            )

    def _missing(self) -> Int64Array:
        """Positions of sound lines without a record."""
        kept = self._kept()
        sound = ~self.lines.is_bad
        return np.flatnonzero(sound if kept is None else sound & ~kept.finished)

    def _kept(self) -> Kept | None:
        """What an earlier run with as many lines has left."""
        folder = self._batch.folder
        if folder is None or self._batch.options.restart:
            return None
        kept = folder.kept()
        return kept if kept is not None and kept.manifest.num_records == len(self.lines) else None

    def _records(self, sink: Sink, counts: RecordCounts, tokenizer: Tokenizer | None) -> RecordWriter:
        options = self._batch.options
        return RecordWriter(
            self._lines,
            sink,
            counts,
            TokenSpelling(tokenizer),
            options.created,
            strict_form=options.strict_form,
            chats=self._chats,
        )

    def _make_output(self, interrupted: Interrupt) -> None:
        batch = self._batch
        if batch.folder is not None and batch.output is not None:
            if isinstance(interrupted, FirstSignal):
                interrupted.notice = "all records are there, and the output is being made"
            batch.folder.finish(partial(encoded, batch.output))

    @contextlib.contextmanager
    def _sink(
        self,
        weights: Callable[[], Mapping[str, Any]],
        tokenizer: Tokenizer | None,
        seed: int,
        counts: RecordCounts,
    ) -> Iterator[Sink]:
        """The journal, whose records are counted, or standard output. Raises ErrorRateError if all lines are known
        and too many are bad: before there is either.
        """
        batch = self._batch
        if batch.folder is None:
            self._error_limit.check_bad_lines()
            with StandardOutput(batch.scratch) as output:
                yield output
            return
        identity = weights()  # now: to ask a runtime for it ends its requests
        with LateJournal(batch.scratch, partial(self._journal, identity, tokenizer, seed, counts)) as journal:
            if self._lines.is_whole:
                self._error_limit.check_bad_lines()
                journal.begin()
            yield journal

    def _journal(
        self,
        weights: Mapping[str, Any],
        tokenizer: Tokenizer | None,
        seed: int,
        counts: RecordCounts,
    ) -> Journal:
        """The journal of the run of all lines."""
        batch = self._batch
        assert batch.folder is not None
        settings: dict[str, Any] = {"seed": seed, CUTS: self.lines.cuts_hash, ENDS: self.lines.end_ids}
        if batch.options.chat_max_tokens not in (None, MAX_NEW_TOKENS, batch.default_params.max_new_tokens):
            settings["chat_max_tokens"] = batch.options.chat_max_tokens  # else it shows in others
        if batch.options.strict_form:
            settings["strict_form"] = True
        manifest = Manifest(
            num_records=len(self.lines),
            input={"lines": self.lines.input_hash},
            weights=weights,
            tokenizer={
                "token ids of the input": self.lines.tokens_hash,
                "sha256": None if tokenizer is None else tokenizer.identity,
            },
            parameters=parameters_as_json(batch.default_params),
            settings=settings,
        )
        options = batch.options
        return batch.folder.begin(
            manifest, replace=options.overwrite, restart=options.restart, found=counts.add_kept
        )

    def _report(
        self, report: BatchReport, plan: Callable[[], BatchPlan | None], tokenizer: Tokenizer | None
    ) -> BatchReport:
        """Write a report to its files, and return it."""
        files = self._batch.report_files
        try:
            files.write(report, plan() if files.has_page else None, tokenizer)
        except Exception as error:
            if report.is_complete:
                raise ReportError(f"the output is whole, but {error}", report) from error
            _log.exception("no report can be written")  # the reason for stopping matters more
        return report


def _check_input(path: str | Path) -> None:
    """Raise BatchFileError unless there is a file at a path; "-" is always fine."""
    if path == STANDARD:
        return
    if not os.path.exists(path):
        raise BatchFileError(f"the input {path} does not exist")
    if os.path.isdir(path):
        raise BatchFileError(f"the input {path} is a folder; it must be a file of JSON lines")


def _check_output(output_path: str | Path) -> None:
    """Raise BatchFileError unless an output can be written; "-" is always fine."""
    check_output_name(output_path)
    if output_path != STANDARD:
        check_target("the output", Path(output_path), instead='; "-" is standard output')


def _output_places(output: Path) -> list[PathRole]:
    """The output and what is beside it while it is made."""
    return [
        PathRole("the output", output, True),
        PathRole("the folder of the run", run_path(output), True),
        PathRole("the journal of the run", aside_path(output), True),
    ]


def _kept(report: BatchReport, keeps: bool, remedy: str = "the same command") -> str:
    """How many records a stopped batch has, where they are, and which command goes on with them."""
    if not report.requests:
        return "nothing has run in this call"
    if not keeps:
        why = "" if report.is_read else ", as the input was not read to its end"
        return f"no records are kept{why}; {remedy} begins anew"
    if report.output_path is None:
        return f"{report.records} are in standard output, in input order"
    return f"{report.records} are kept in {report.output_path}; {remedy} goes on from there"


def _interrupted(notice: str, given: Interrupt | None) -> AbstractContextManager[Interrupt]:
    """What is given, or the first signal with its notice."""
    return first_interrupt(notice) if given is None else contextlib.nullcontext(given)


def _stop_if(interrupted: Interrupt) -> None:
    """Raise BatchInterrupted if a signal has come before any line has run."""
    if interrupted.is_set() and interrupted.number is not None:
        raise BatchInterrupted(BatchReport.of_nothing(), interrupted.number)
