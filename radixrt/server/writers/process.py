"""The process that writes streams: it makes texts of tokens, events of texts, and writes them to connections."""

# Tests: tests/server/test_writers.py

from __future__ import annotations

import json
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque

from radixrt.server.event_frame import EventFrame, chunk_of
from radixrt.server.writers.records import Kind, end_of, record, take_records, tokens_of
from radixrt.text.builder import Detokenizer
from radixrt.text.plain_tokenizer import plain_tokenizer
from radixrt.text.tokenizer import Tokenizer
from radixrt.workers.channel import Channel

_READ_AT_ONCE = 1 << 20
_DESCRIPTORS_AT_ONCE = 64
_LOOK_SECONDS = 1.0  # between looks for clients that are late

_log = logging.getLogger(__name__)


class Answer:
    """One answer as it is written."""

    def __init__(self, frame: EventFrame, text: Detokenizer) -> None:
        self._frame, self._text = frame, text
        self.token_ids: list[int] = []  # that came since the last piece
        self.ending: bytes | None = None  # what is written after its text, once it has ended

    def piece(self) -> bytes:
        """The events of what has come."""
        text = self._text.push(*self.token_ids) if self.token_ids else ""
        self.token_ids.clear()
        if self.ending is not None:
            text += self._text.finish()
        events = (self._frame.of(text) if text else b"") + (self.ending or b"")
        self.ending = None
        return events


class Stream:
    """A connection, and the answers that are written to it. What comes while its client is behind is joined."""

    def __init__(self, connection: int, answers: list[Answer]) -> None:
        self._connection, self._answers = connection, answers
        self._unsent = b""
        self._last: Answer | None = None  # with which the stream has ended
        self._failure: bytes | None = None
        self._has_failed = False
        self.is_gone = False
        self.late_since: float | None = None  # since then there is no room

    def fileno(self) -> int:
        return self._connection

    @property
    def is_over(self) -> bool:
        """Whether all was written."""
        return (self._has_failed or self._last is not None) and not self._unsent

    def tokens(self, answer: int, token_ids: list[int]) -> None:
        self._answers[answer].token_ids += token_ids

    def end(self, answer: int, is_last: bool, piece: bytes) -> None:
        self._answers[answer].ending = piece
        if is_last:
            self._last = self._answers[answer]

    def fail(self, piece: bytes) -> None:
        self._failure, self._has_failed = piece, True

    def write(self) -> None:
        """As much as there is room for."""
        while not self.is_gone:
            if not self._unsent:
                others = [answer.piece() for answer in self._answers if answer is not self._last]
                piece = b"".join(others) + (b"" if self._last is None else self._last.piece())
                piece += self._failure or b""
                self._failure = None
                if not piece:
                    return
                self._unsent = chunk_of(piece)
            try:
                sent = os.write(self._connection, self._unsent)
            except BlockingIOError:
                self.late_since = self.late_since or time.monotonic()
                return
            except OSError:  # its client has gone
                self.is_gone = True
                return
            self._unsent, self.late_since = self._unsent[sent:], None

    def close(self) -> None:
        os.close(self._connection)


class Writing:
    """All streams of a process."""

    def __init__(self, records: socket.socket, tokenizer: Tokenizer, late_seconds: float) -> None:
        self._records, self._tokenizer, self._late_seconds = records, tokenizer, late_seconds
        self._received, self._connections = bytearray(), deque[int]()
        self._streams: dict[int, Stream] = {}
        self._late: set[int] = set()  # streams that wait for room
        self._selector = selectors.DefaultSelector()
        self._selector.register(records, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the server has gone."""
        looked = time.monotonic()
        while True:
            ready = self._selector.select(_LOOK_SECONDS)
            touched: set[int] = set()
            for key, _ in ready:
                if key.fileobj is self._records:
                    if not self._read(touched):
                        return
                else:
                    touched.add(key.data)
            for number in touched & self._streams.keys():
                self._advance(number)
            if (now := time.monotonic()) - looked > _LOOK_SECONDS:
                looked = now
                self._look_for_late(now)

    def _read(self, touched: set[int]) -> bool:
        """Take what has come. Returns False at the end."""
        data, connections, flags, _ = socket.recv_fds(self._records, _READ_AT_ONCE, _DESCRIPTORS_AT_ONCE)
        if flags & socket.MSG_CTRUNC:  # whose connections the next ones are is not known any more
            raise SystemExit("no more descriptors can be had")
        self._connections += connections
        self._received += data
        for kind, number, content in take_records(self._received):
            if kind is Kind.BEGIN:
                self._begin(number, content)
                continue
            stream = self._streams.get(number)
            if stream is None:
                continue  # it is gone, and what came before was on its way
            touched.add(number)
            if kind is Kind.TOKENS:
                stream.tokens(*tokens_of(content))
            elif kind is Kind.END:
                stream.end(*end_of(content))
            elif kind is Kind.FAIL:
                stream.fail(content)
            else:
                self._forget(number)
        return bool(data)

    def _begin(self, number: int, content: bytes) -> None:
        told = json.loads(content)
        skip = told["skip_special_tokens"]
        answers = []
        for frame, state in told["answers"]:
            text = Detokenizer(self._tokenizer, skip_special_tokens=skip)
            if state is not None:
                text.restore(state)
            answers.append(Answer(EventFrame(*(part.encode() for part in frame)), text))
        self._streams[number] = Stream(self._connections.popleft(), answers)

    def _advance(self, number: int) -> None:
        stream = self._streams[number]
        try:
            stream.write()
        except BaseException:  # also a panic of the tokenizer's: it must not cost the others theirs
            _log.exception("a stream cannot be written")
            stream.is_gone = True
        is_late = stream.late_since is not None
        if is_late != (number in self._late):
            if is_late:
                self._selector.register(stream, selectors.EVENT_WRITE, number)
                self._late.add(number)
            else:
                self._leave(number)
        if stream.is_gone or stream.is_over:
            self._forget(number)
            self._tell(Kind.GONE if stream.is_gone else Kind.OVER, number)

    def _forget(self, number: int) -> None:
        if number in self._late:
            self._leave(number)
        self._streams.pop(number).close()

    def _leave(self, number: int) -> None:
        self._selector.unregister(self._streams[number])
        self._late.discard(number)

    def _look_for_late(self, now: float) -> None:
        for number in tuple(self._late):
            since = self._streams[number].late_since
            if since is not None and now - since > self._late_seconds:
                self._forget(number)
                self._tell(Kind.GONE, number)

    def _tell(self, kind: Kind, number: int) -> None:
        self._records.sendall(record(kind, number))  # the server reads at once


def main() -> None:
    """`python -m radixrt.server.writers.process FD`: FD is a connected socket, whose first message tells of the
    socket for records.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server hears them
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    while not (messages := channel.receive()):
        if channel.is_closed:
            return
        channel.wait()
    first = messages[0].body
    with open(first["tokenizer"], encoding="utf-8") as file:
        tokenizer = plain_tokenizer(file.read())
    with socket.socket(fileno=first["records"]) as records:
        try:
            records.sendall(record(Kind.READY, 0))
            Writing(records, tokenizer, first["late_seconds"]).run()
        except (BrokenPipeError, ConnectionResetError):  # the server has gone
            return


if __name__ == "__main__":
    main()
