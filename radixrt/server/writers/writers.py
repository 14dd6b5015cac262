"""Processes that write streams: the server's own interpreter is for requests and passes.

A token costs an event loop tens of microseconds, most of them for its text, its event and the socket; at 10,000 a
second the thread that steps would wait for the interpreter. So connections of plain streams are lent to processes:
these get the tokens of a pass, a record each, and write. What is around the text of events, ends of answers and of
the response stay the server's own.
"""

# Tests: tests/server/test_writers.py

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from radixrt.errors import RadixrtError
from radixrt.schedule.answer import Answer
from radixrt.server.answer_events import Frames
from radixrt.server.writers.records import (
    Kind,
    begin_record,
    end_record,
    record,
    take_records,
    tokens_record,
)
from radixrt.text.tokenizer import Tokenizer
from radixrt.workers.channel import Message
from radixrt.workers.process import Process

_PROGRAM = "radixrt.server.writers.process"
_MOST_UNSENT = 1 << 20  # bytes of records; then tokens wait where they are, and are joined
_FEW_CORES = 8
_START_SECONDS = 120.0
_TOGETHER_SECONDS = 1e-3  # records wait for others

_log = logging.getLogger(__name__)


class WriterLost(RadixrtError):
    """The process that writes a stream has ended."""


class StreamWriters:
    """`count` processes that write streams, which take turns; within `with`, and in one event loop at a time."""

    def __init__(self, tokenizer: Tokenizer | None, count: int, late_seconds: float) -> None:
        """Without a tokenizer that the package tokenizers has there are none. Clients that read nothing for
        `late_seconds` are sent away.
        """
        self._plain = None if tokenizer is None or not count else tokenizer.serialized()
        self._count, self._late_seconds = count, late_seconds
        self.processes: list[_Writer] = []
        self._turns: Iterator[_Writer] = iter(())

    @property
    def can_write(self) -> bool:
        """Whether a process is there."""
        return any(not writer.has_ended for writer in self.processes)

    @staticmethod
    def usual_count() -> int:
        """Two, where there are cores to spare."""
        return 2 if len(os.sched_getaffinity(0)) >= _FEW_CORES else 0

    def __enter__(self) -> StreamWriters:
        """Start them, and wait until they are ready. Raises RadixrtError where one does not begin."""
        try:
            for _ in range(0 if self._plain is None else self._count):
                assert self._plain is not None
                self.processes.append(_Writer(self._plain, self._late_seconds))
            for writer in self.processes:
                writer.wait_until_ready()
            self._turns = itertools.cycle(self.processes)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self.processes:
            writer.end()

    def begin(
        self,
        connection: int,
        frames: Frames,
        states: Mapping[tuple[int, int], list[Any]],
        *,
        when_gone: Callable[[], None],
    ) -> LentStream | None:
        """Lend a connection, to which nothing else is written meanwhile, for the texts within these frames;
        `states` are those of the Detokenizers of answers that have begun. `when_gone` is called, and nothing more
        is written, where its client has gone or reads nothing. None: no process can take it now.
        """
        answers = [
            [[frame.before.decode(), frame.after.decode()], states.get(answer)]
            for answer, frame in frames.frames.items()
        ]
        told = {"answers": answers, "skip_special_tokens": frames.params.skip_special_tokens}
        for writer in itertools.islice(self._turns, len(self.processes)):
            if (number := writer.begin(connection, told)) is not None:
                return writer.lent(LentStream(writer, number, frames, when_gone))
        return None


class LentStream:
    """A stream that a process writes.

    Attributes:
        written: None once all is; WriterLost.
    """

    def __init__(self, writer: _Writer, number: int, frames: Frames, when_gone: Callable[[], None]) -> None:
        self._writer, self.number, self.when_gone = writer, number, when_gone
        self._order = {answer: place for place, answer in enumerate(frames.frames)}
        self._places: dict[Answer, int] = {}
        self.written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.written.add_done_callback(_look_at)  # nobody may wait for it

    @property
    def is_behind(self) -> bool:
        """Whether its process is: tokens had better wait."""
        return self._writer.is_behind

    def when_ahead(self, call: Callable[[], None]) -> None:
        """Call this once, when it is not behind any more."""
        self._writer.when_ahead[self.number] = call

    def check(self) -> None:
        """Raise WriterLost if the process has ended."""
        if self.written.done():
            self.written.result()

    def add(self, answer: Answer, token_ids: Sequence[int]) -> int:
        """Have tokens of an answer written. Returns its place."""
        place = self._places.get(answer)
        if place is None:
            place = self._places[answer] = self._order[answer.request.index, answer.sample_index]
        if token_ids:
            self._writer.send(tokens_record(self.number, place, token_ids))
        return place

    def end(self, place: int, piece: bytes, *, is_last: bool) -> None:
        """Have `piece` written after the text of the answer there. `is_last`: the stream ends with it."""
        self._writer.send(end_record(self.number, place, piece, is_last=is_last))

    def fail(self, piece: bytes) -> None:
        """Have `piece` written, and end the stream with it."""
        self._writer.send(record(Kind.FAIL, self.number, piece))

    def close(self) -> None:
        """Have the connection back, whatever was written."""
        self._writer.close(self.number)


def _look_at(written: asyncio.Future[None]) -> None:
    if not written.cancelled():
        written.exception()


class _Writer:
    """One process."""

    def __init__(self, tokenizer: str, late_seconds: float) -> None:
        self._records, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            file.write(tokenizer)
            file.seek(0)
            given = [theirs.fileno(), file.fileno()]
            first = {"records": given[0], "tokenizer": given[1], "late_seconds": late_seconds}
            self._process = Process(_PROGRAM, {}, Message(first), given)
        self.num_streams = 0  # that it was lent until now
        self._streams: dict[int, LentStream] = {}
        self._unsent, self._received = bytearray(), bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None  # before the first stream, and once it has ended
        self._flushes = self._waits = self.has_ended = False
        self.when_ahead: dict[int, Callable[[], None]] = {}  # by stream

    @property
    def has_streams(self) -> bool:
        return bool(self._streams)

    @property
    def is_behind(self) -> bool:
        return len(self._unsent) > _MOST_UNSENT

    def begin(self, connection: int, told: dict[str, Any]) -> int | None:
        """The number of a new stream, which `lent` is to be told of; None: it cannot be had now."""
        if self.has_ended:
            return None
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._flushes, self._waits = loop, False, False
            self._streams.clear()  # those of another loop, which has ended
            self.when_ahead.clear()
            loop.add_reader(self._records, self._read)
        self._flush()
        if self._unsent:
            return None
        number = self.num_streams
        sent = begin_record(number, told)
        try:
            count = socket.send_fds(self._records, [sent], [connection])
        except OSError:
            return None
        self._unsent += sent[count:]
        self.num_streams += 1
        return number

    def lent(self, stream: LentStream) -> LentStream:
        self._streams[stream.number] = stream
        return stream

    def wait_until_ready(self) -> None:
        """Raises RadixrtError if the process ends before, or takes too long."""
        self._records.settimeout(_START_SECONDS)
        try:
            self._received += self._records.recv(1 << 16)
        except OSError as error:
            raise RadixrtError(f"a process that writes streams does not begin: {error}") from error
        finally:
            self._records.setblocking(False)
        if not [*take_records(self._received)]:
            raise RadixrtError(f"a process that writes streams has ended at its begin: {self._process.end()}")

    def close(self, number: int) -> None:
        self.when_ahead.pop(number, None)
        if self._streams.pop(number, None) is not None:
            self.send(record(Kind.CLOSE, number))

    def send(self, sent: bytes) -> None:
        """Once for all records of a pass, whose streams are told of it in several turns of the loop."""
        if self.has_ended or self._loop is None:
            return
        self._unsent += sent
        if not (self._flushes or self._waits):
            self._loop.call_later(_TOGETHER_SECONDS, self._flush)
            self._flushes = True

    def _flush(self) -> None:
        self._flushes = False
        try:
            while self._unsent:
                del self._unsent[: self._records.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # its end is read
        waits = bool(self._unsent)
        if waits != self._waits and self._loop is not None:
            self._waits = waits
            if waits:
                self._loop.add_writer(self._records, self._flush)
            else:
                self._loop.remove_writer(self._records)
        if not self.is_behind:
            calls, self.when_ahead = self.when_ahead, {}
            for call in calls.values():
                call()

    def _read(self) -> None:
        try:
            read = self._records.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            read = b""
        self._received += read
        for kind, number, _ in take_records(self._received):
            if (stream := self._streams.pop(number, None)) is None:
                continue
            if kind is Kind.GONE:
                stream.when_gone()
            elif not stream.written.done():
                stream.written.set_result(None)
        if not read:
            _log.error(
                "a process that writes streams has ended (%s): the server writes new ones", self._process.end()
            )
            self._leave(WriterLost("the process that writes the stream has ended"))

    def _leave(self, error: RadixrtError | None) -> None:
        self.has_ended = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it was closed
                self._loop.remove_reader(self._records)
                self._loop.remove_writer(self._records)
        self._loop = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if error is not None and not stream.written.done():
                stream.written.set_exception(error)
        self._records.close()

    def end(self) -> None:
        """End the process."""
        if not self.has_ended:
            self._leave(None)
            self._process.end()
