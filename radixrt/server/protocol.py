"""HTTP/1.1 on one connection, with bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_MAX_HEAD_BYTES = 65_536
_WRITER = "radixrt.body_writer"  # an extension of ASGI's scope


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection on which no head of a request comes in time, also if it comes byte by byte, and one whose
    client reads nothing of a response. A head of more than 64 KiB is refused, and so is what follows a body.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _on_resumed: Callable[[], None] | None = None
    _outside_bytes = 0  # that came since the last bytes of a body, or end of a head or message

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._head_timer)
        _cancel(self._read_timer)

    def data_received(self, data: bytes) -> None:
        self._outside_bytes += len(data)
        super().data_received(data)
        if self._outside_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request has more than {_MAX_HEAD_BYTES:,} bytes.")

    def on_headers_complete(self) -> None:
        self._outside_bytes = 0
        super().on_headers_complete()
        self.scope["extensions"] = {_WRITER: {"writer": BodyWriter(self, self.cycle)}}

    def on_body(self, body: bytes) -> None:
        self._outside_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._outside_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def _await_head(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._end_idle)

    def _end_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._read_timer)
        self._read_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._read_timer)
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

    def __init__(self, protocol: BoundedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle

    @property
    def is_paused(self) -> bool:
        """Whether much that was written has not been read."""
        return self._cycle.flow.write_paused

    def when_resumed(self, call: Callable[[], None]) -> None:
        """Call this once, when it is paused no more."""
        self._protocol.when_resumed(call)

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty; nothing once the client has gone."""
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def writer_of(scope: Mapping[str, Any]) -> BodyWriter:
    """The writer of the response to a request."""
    writer: BodyWriter = scope["extensions"][_WRITER]["writer"]
    return writer


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
