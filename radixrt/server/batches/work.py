"""What is computed of a batch: its lines are read and checked, and answered in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.batch.formats.line_format import LineParser
from radixrt.batch.formats.record import InputRecord, LineError, LineErrorType
from radixrt.batch.formats.source import BadLine, is_plain
from radixrt.batch.job import Batch, ScannedBatch
from radixrt.batch.options import BatchConfig
from radixrt.batch.scan import Check, Checked, Scan
from radixrt.engine.signals import Interrupt
from radixrt.errors import ParameterError
from radixrt.parsers.choosing import Parsers
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.server.batches.background import BackgroundRuntime, Pauses, Places, prepared
from radixrt.server.batches.chats import ServedChats
from radixrt.server.batches.record import Problem
from radixrt.server.limits import Limits

_MOST_PROBLEMS = 100  # that a batch is told of
_READ_AT_ONCE = 2**20  # bytes
_OF_THE_FILE = (LineErrorType.INVALID_LINE, LineErrorType.DUPLICATE_CUSTOM_ID)


class BatchFailed(Exception):
    """Nothing of a batch has run, as its file cannot be that of a batch.

    Attributes:
        problems: why.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__(problems[0].message)
        self.problems = problems


@dataclass
class Ending(Interrupt):
    """Ends a batch: once it is set, or once time is up.

    Attributes:
        expires_at: Unix time in seconds; None: never.
        clock: tells it.
    """

    expires_at: float | None = None
    clock: Callable[[], float] = time.time

    def is_set(self) -> bool:
        if self.number is None and self.expires_at is not None and self.clock() >= self.expires_at:
            self.set()
        return super().is_set()


class _PausingParser(LineParser):
    """Lets other threads go on between lines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pause = Pauses()

    def parse(self, line: bytes | BadLine) -> InputRecord:
        self._pause()
        return super().parse(line)


class Work:
    """Answers batches of all tenants by the Runtime that serves."""

    def __init__(self, runtime: Runtime, limits: Limits, drain_seconds: float) -> None:
        """`drain_seconds`: for lines that have begun, once a batch is to end."""
        self._runtime, self._limits, self._drain_seconds = runtime, limits, drain_seconds
        self._places = Places(runtime.limits.max_running_requests)
        self._weights = runtime.identity()  # now: later, requests of clients would have to end for it
        self._chats: ServedChats | None = None
        self._chat_max_tokens: int | None = None
        self._on_submit: Callable[[], object] = lambda: None

    def begin(self, parsers: Parsers, on_submit: Callable[[], object], chat_max_tokens: int | None = None) -> None:
        """From now on, answers to chats are taken apart by `parsers`, and `on_submit` is called before lines are
        handed to the engine. Chats that give no maximum have `chat_max_tokens`, if there is such a default.
        """
        self._chat_max_tokens = chat_max_tokens
        self._chats = ServedChats(parsers, self._runtime.tokenizer)
        self._on_submit = on_submit

    def opened(self, input_path: Path, output_path: Path) -> Batch:
        """The batch of a file, with the options of a server's. Raises BatchFailed where it is none."""
        self._check_lines(input_path)
        options = BatchConfig(
            default_params=self._runtime.default_params,
            chat_max_tokens=self._chat_max_tokens,
            drain_seconds=self._drain_seconds,
            max_line_bytes=self._limits.body_bytes,
        )
        return Batch(input_path, output_path, options)

    def scan(
        self, batch: Batch, endpoint: str, model: str, tenant: str | None, interrupt: Interrupt
    ) -> ScannedBatch:
        """Read and check all lines; `model` where one names none. Raises BatchFailed where one is none of this
        endpoint, or BatchInterrupted.
        """
        runtime = self._runtime
        scanned = batch.scan(
            runtime.tokenizer,
            self._check_of(tenant),
            runtime.context_length,
            parser=_PausingParser(
                runtime.default_params,
                url=endpoint,
                chats=self._chats,
                model=model,
                chat_max_tokens=self._chat_max_tokens,
            ),
            interrupt=interrupt,
        )
        if not len(scanned.lines):
            raise BatchFailed(Problem("empty_file", "the file has no lines"))
        if problems := _problems(scanned.lines):
            raise BatchFailed(*problems)
        return scanned

    def run(self, scanned: ScannedBatch, tenant: str | None, interrupt: Interrupt) -> None:
        """Answer all lines. Raises as `ScannedBatch.run` does."""
        with self._places.shared(), self._runtime.session() as session:
            runtime = BackgroundRuntime(
                self._runtime,
                session,
                self._places,
                tenant=tenant,
                weights=self._weights,
                on_submit=self._on_submit,
            )
            scanned.run(runtime, interrupt)

    def check_whole(self) -> None:
        """See `Runtime.check_whole`."""
        self._runtime.check_whole()

    def _check_of(self, tenant: str | None) -> Check:
        pause, most = Pauses(), self._limits.answers

        def check(prompt: Any, params: SamplingParams, line: int) -> Checked:
            if params.n > most:
                raise ParameterError(f"n is {params.n}; {most} answers are the most")
            pause()
            return prepared(self._runtime, tenant, prompt, params, index=line)

        return check

    def _check_lines(self, path: Path) -> None:
        """Raise BatchFailed where a file would take more to read than its size tells."""
        if not is_plain(path):
            raise BatchFailed(Problem("invalid_file", "the file is compressed; it must be plain JSON lines"))
        most = self._limits.batch_lines
        with path.open("rb") as file:
            count = sum(piece.count(b"\n") for piece in iter(lambda: file.read(_READ_AT_ONCE), b""))
        if count > most:
            raise BatchFailed(Problem("too_many_lines", f"the file has {count:,} lines; {most:,} are the most"))


def _problems(scan: Scan) -> list[Problem]:
    """The first lines that are no requests, or have the custom_id of another one. Others get error records."""
    if not any(scan.num_problems.get(kind) for kind in _OF_THE_FILE):
        return []
    found: list[Problem] = []
    bad = np.flatnonzero(scan.is_bad).tolist()
    for position, error in zip(bad, scan.read(bad), strict=True):
        assert isinstance(error, LineError)
        if error.type in _OF_THE_FILE:
            found.append(Problem(error.type.value, error.message, int(scan.lines[position]) + 1))
        if len(found) == _MOST_PROBLEMS:
            break
    return found
