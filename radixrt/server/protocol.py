"""HTTP/1.1 on one connection, with bounds."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from httptools import HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from radixrt.server.event_frame import chunk_of

_MAX_HEAD_BYTES = 65_536
_WRITER = "radixrt.body_writer"  # an extension of ASGI's scope
_TURNS_TO_FLUSH = 8  # of the event loop
_FRAMING = (b"content-length", b"transfer-encoding")


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection on which no head of a request comes in time, also if it comes byte by byte, and one whose
    client reads nothing of a response. A head of more than 64 KiB that comes in parts is refused, and so is what
    follows a body. An upgrade that is asked for, such as to HTTP/2 (h2c) by Java's client, is not taken notice of.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _open: Sequence[RequestResponseCycle] = ()  # those whose responses are not complete; several in a row
    _on_resumed: Callable[[], None] | None = None
    _outside_bytes = 0  # that came since the last bytes of a body, or end of a head or message
    _received, _rest = b"", b""  # the last bytes, and those of them that are to be parsed anew
    _is_repeated = False  # whether the head that is parsed was told before

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # which tells the last one alone
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        self._open, self._on_resumed = (), None
        _cancel(self._head_timer)
        _cancel(self._read_timer)

    def data_received(self, data: bytes) -> None:
        while data:
            self._outside_bytes += len(data)
            self._received, self._rest = data, b""
            super().data_received(data)
            data = self._rest
        if self._outside_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request has more than {_MAX_HEAD_BYTES:,} bytes.")

    def _unsupported_upgrade_warning(self) -> None:
        """Called for the parser's exception: with the head it has ended the request, and left its body. A new one,
        which knows of no end of the connection either, is told how the body is framed.
        """
        upgrade = sys.exc_info()[1]
        assert upgrade is not None
        framing = [b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING]
        rest = self._received[upgrade.args[0] :]
        self.parser = HttpRequestParser(self)
        if framing:
            self.cycle.more_body = True
            self._is_repeated = True
            rest = b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n", rest))
        self._rest = rest

    def on_message_begin(self) -> None:
        if not self._is_repeated:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeated:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_repeated:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._outside_bytes = 0
        if self._is_repeated:
            self._is_repeated = False
            return
        super().on_headers_complete()
        self._open = [*(cycle for cycle in self._open if not cycle.response_complete), self.cycle]
        self.scope["extensions"] = {_WRITER: {"writer": BodyWriter(self.cycle)}}

    def on_body(self, body: bytes) -> None:
        self._outside_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._outside_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._on_resumed = None
        self._await_head()

    def _await_head(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._end_idle, self._unread())

    def _end_idle(self, unread: int) -> None:
        # An answer that is complete may take long to be read.
        is_behind = self.transport.get_write_buffer_size() > 0
        if self.flow.write_paused or (is_behind and self._unread() < unread):
            self._await_head()
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def _await_reader(self) -> None:
        _cancel(self._read_timer)
        # Nothing is added while writing is paused.
        self._read_timer = self.loop.call_later(self.timeout_keep_alive, self._end_unread, self._unread())

    def _unread(self) -> int:
        """Bytes that were written and have not come to the client's system. Those in the buffer of this one count,
        too: it takes more only once a third of it, a megabyte or more, is free.
        """
        count, connected = self.transport.get_write_buffer_size(), self.transport.get_extra_info("socket")
        if connected is not None:
            with suppress(OSError, ValueError):  # a system that does not tell, or a socket that is closed
                held = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4))
                count += int.from_bytes(held, sys.byteorder)
        return count

    def _end_unread(self, unread: int) -> None:
        if self._unread() < unread:
            self._await_reader()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._read_timer)
        self._await_head()  # what is left has its time, too
        resumed, self._on_resumed = self._on_resumed, None
        if resumed is not None:
            resumed()

    def when_resumed(self, call: Callable[[], None]) -> None:
        """Call this once, when the client reads again."""
        self._on_resumed = call


class BodyWriter:
    """Writes pieces of a response's body to its connection, after the head. ASGI's `send` takes several times as
    long for each; it begins and ends the response.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope has the writer: a circle would wait for the collector

    @property
    def is_paused(self) -> bool:
        """Whether much that was written has not been read."""
        cycle = self._cycle()
        return cycle is not None and cycle.flow.write_paused and not cycle.disconnected

    def when_resumed(self, call: Callable[[], None]) -> None:
        """Call this once, when it is paused no more."""
        if (cycle := self._cycle()) is not None:
            protocol: Any = cycle.transport.get_protocol()
            protocol.when_resumed(call)

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty; nothing once the client has gone."""
        cycle = self._cycle()
        if cycle is not None and not cycle.disconnected:
            cycle.transport.write(chunk_of(piece))

    async def lent(self) -> int | None:
        """The connection, for another writer of pieces, once all that was written has gone; None where the client
        is behind, or has gone.
        """
        for _ in range(_TURNS_TO_FLUSH):
            cycle = self._cycle()
            if cycle is None or cycle.disconnected or self.is_paused:
                return None
            if not cycle.transport.get_write_buffer_size():
                connected = cycle.transport.get_extra_info("socket")
                return None if connected is None else int(connected.fileno())
            await asyncio.sleep(0)
        return None

    def abort(self) -> None:
        """End the connection, as if its client had gone."""
        if (cycle := self._cycle()) is not None:
            cycle.transport.abort()


def writer_of(scope: Mapping[str, Any]) -> BodyWriter | None:
    """The writer of the response to a request; None under another protocol."""
    found: BodyWriter | None = scope.get("extensions", {}).get(_WRITER, {}).get("writer")
    return found


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
