"""Answer a file of prompts: read, run, write one record a line in input order."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm  # not tqdm.auto: a notebook's bar needs more packages

from radixrt.batch.line_format import LineParser, error_line, output_line
from radixrt.batch.ordered_file import OrderedFile
from radixrt.batch.output_file import check_output_name, partial_path
from radixrt.batch.record import LineError, LineErrorType, Reply
from radixrt.batch.report import BatchReport
from radixrt.batch.source import STANDARD, BadLine, read_lines
from radixrt.errors import (
    BatchFileError,
    ParameterError,
    PromptError,
    RadixrtError,
    SchedulerError,
)
from radixrt.interrupt import first_interrupt
from radixrt.output import FinishReason, RequestOutput
from radixrt.sampling_params import SamplingParams
from radixrt.text.token_spelling import TokenSpelling
from radixrt.text.tokenizer import Tokenizer
from radixrt.workloads import best_hit_rate

_LOG_INTERVAL = 30.0  # seconds between two states of the bar where stderr is not a terminal


class PreparedRequest(Protocol):
    """A request as `BatchRuntime.prepare` makes it."""

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]: ...


R = TypeVar("R", bound=PreparedRequest)


class BatchRuntime(Protocol[R]):
    """What a batch needs of a `Runtime`."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def has_work(self) -> bool: ...

    def prepare(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
    ) -> R: ...

    def submit(self, *requests: R) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request: R) -> object: ...


class BatchInterrupted(KeyboardInterrupt):
    """A batch was stopped by Ctrl-C; what was finished is in the partial file, in input order.

    Attributes:
        report: the figures up to then.
    """

    def __init__(self, report: BatchReport) -> None:
        where = report.output_path or "standard output"
        super().__init__(f"stopped: {report.written} of {report.requests} records are in {where}, in input order")
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
    partial = partial_path(output_path)
    if not output_path.parent.is_dir():
        raise BatchFileError(f"the folder {output_path.parent} of the output does not exist; make it first")
    for path in (output_path, partial):
        if not path.exists():
            continue
        if input_path != STANDARD and path.samefile(input_path):
            raise BatchFileError(f"the input {input_path} would be overwritten; give another output")
        if not path.is_file():
            raise BatchFileError(f"{path} is in the way of the output and is not a plain file")
    if not overwrite:
        if output_path.exists():
            raise BatchFileError(f"the output {output_path} exists; --overwrite replaces it")
        if partial.exists():
            raise BatchFileError(
                f"{partial} holds the records of a batch that did not end; move it away, "
                "or --overwrite replaces it"
            )


def run_batch(
    runtime: BatchRuntime[R],
    input_path: str | Path,
    output_path: str | Path,
    *,
    default_params: SamplingParams | None = None,
    overwrite: bool = False,
    progress: bool = False,
    created: int | None = None,
) -> BatchReport:
    """Answer each line of `input_path` with one record in `output_path`, in input order.

    `radixrt.batch.plain_lines` and `openai_batch` describe the lines. A bad line becomes an error record and
    changes no other line's record. Records go to `OUTPUT.partial`, which is renamed when it is whole. All lines
    are read before the first request is submitted, so that the scheduler can order them by what they share.

    The first Ctrl-C ends the batch after the current pass; a second one ends it at once.

    Args:
        runtime: a Runtime without other requests. It stays open.
        input_path: JSON lines in UTF-8, plain or compressed by gzip or zstd; or parquet; "-" is standard input.
        output_path: a file in a folder that exists, compressed if its name ends in .gz or .zst; "-" is standard
            output.
        default_params: parameters of lines that give none.
        overwrite: replace an existing output, or the partial file of a batch that did not end.
        progress: show a bar on stderr; where that is not a terminal, it moves every 30 seconds.
        created: Unix time in seconds that records in OpenAI's format bear; None is now.

    Raises:
        BatchFileError: a file cannot be read, must not be replaced, or cannot be written.
        BatchInterrupted: the batch was stopped by Ctrl-C.
    """
    check_paths(input_path, output_path, overwrite=overwrite)
    if runtime.has_work:
        raise RadixrtError("the runtime has other requests; a batch needs one without")
    defaults = SamplingParams() if default_params is None else default_params
    with first_interrupt() as interrupted, OrderedFile(output_path, overwrite=overwrite) as output:
        spelling = TokenSpelling(runtime.tokenizer)
        job = _Job(
            runtime, output, interrupted, progress, int(time.time()) if created is None else created, spelling
        )
        job.read(input_path, LineParser(defaults))
        if not interrupted.is_set():
            job.run()
        complete = job.all_read and not job.unanswered
        if complete:
            output.finish()
    report = job.report(Path(output_path) if complete and output.partial else output.partial)
    if not complete:
        raise BatchInterrupted(report)
    return report


@dataclass(frozen=True)
class _Unanswered(Generic[R]):
    """A sound line without its record yet."""

    position: int  # of its record in the output
    request: R
    reply: Reply


@dataclass
class _Job(Generic[R]):
    runtime: BatchRuntime[R]
    output: OrderedFile
    interrupted: threading.Event
    progress: bool
    created: int
    spelling: TokenSpelling
    all_read: bool = False
    unanswered: dict[int, _Unanswered[R]] = field(default_factory=dict)  # by index, in input order
    custom_ids: set[str] = field(default_factory=set)  # of the sound lines
    best_hit_rate: float = 0.0
    seconds: float = 0.0
    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def read(self, path: str | Path, parser: LineParser) -> None:
        """Make each input line a request to run, or an error record."""
        with _bar("reading", " lines", None, self.progress) as bar:
            for index, line in read_lines(path):
                if self.interrupted.is_set():
                    return
                position = self.requests
                self.requests += 1
                try:
                    self.unanswered[index] = self._prepare(position, index, line, parser)
                except LineError as error:
                    self._refuse(position, index, error)
                bar.update()
        self.all_read = True
        self.output.flush()

    def _prepare(self, position: int, index: int, line: bytes | BadLine, parser: LineParser) -> _Unanswered[R]:
        record = parser.parse(line)

        def bad(type: LineErrorType, message: str) -> LineError:
            return LineError(type, message, record.reply)

        try:
            request = self.runtime.prepare(record.prompt, record.sampling_params, index=index)
        except PromptError as error:
            raise bad(LineErrorType.INVALID_PROMPT, f"the prompt {error}") from error
        except ParameterError as error:
            raise bad(LineErrorType.INVALID_PARAMETERS, str(error)) from error
        # last, so that a bad line takes no custom_id from a sound one
        if record.custom_id is not None:
            if record.custom_id in self.custom_ids:
                raise bad(LineErrorType.DUPLICATE_CUSTOM_ID, "a line before this one has the same custom_id")
            self.custom_ids.add(record.custom_id)
        return _Unanswered(position, request, record.reply)

    def _refuse(self, position: int, index: int, error: LineError) -> None:
        self.errors += 1
        self.output.put(position, error_line(index, error))

    def run(self) -> None:
        """Run what was read until all is answered or the batch is interrupted."""
        self.best_hit_rate = best_hit_rate([line.request.prompt_ids for line in self.unanswered.values()])
        began = time.perf_counter()
        try:
            with _bar("answering", " requests", self.requests, self.progress) as bar:
                bar.update(self.errors)
                self.runtime.submit(*(line.request for line in self.unanswered.values()))
                while self.runtime.has_work and not self.interrupted.is_set():
                    outputs = self.runtime.step()
                    for output in outputs:
                        self._answer(output)
                    if outputs:
                        self.output.flush()
                        bar.set_postfix_str(self._rates(time.perf_counter() - began), refresh=False)
                        bar.update(len(outputs))
        finally:
            self.seconds = time.perf_counter() - began
            for line in self.unanswered.values():
                self.runtime.abort(line.request)
            while self.runtime.has_work:  # what was aborted leaves the runtime
                self.runtime.step()
        if not self.interrupted.is_set() and self.unanswered:
            raise SchedulerError(f"the runtime ended without an answer to {len(self.unanswered)} requests")

    def _rates(self, seconds: float) -> str:
        hit_rate = self.cached_tokens / max(1, self.prompt_tokens)
        return f"{self.completion_tokens / seconds:,.0f} tokens/s, hit rate {hit_rate:.1%}"

    def _answer(self, output: RequestOutput) -> None:
        """Write the record of a finished request."""
        line = self.unanswered.pop(output.index)
        record = output_line(output.index, line.reply, output, created=self.created, spelling=self.spelling)
        self.output.put(line.position, record)
        if output.finish_reason is FinishReason.ERROR:
            self.errors += 1
            return
        self.prompt_tokens += output.usage.prompt_tokens
        self.cached_tokens += output.usage.cached_tokens
        self.completion_tokens += output.usage.completion_tokens

    def report(self, output_path: Path | None) -> BatchReport:
        return BatchReport(
            output_path=output_path,
            requests=self.requests,
            written=self.requests - len(self.unanswered),
            errors=self.errors,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            best_hit_rate=self.best_hit_rate,
            seconds=self.seconds,
        )


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
