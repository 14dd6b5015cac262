"""HTTP/1.1 on one connection, with bounds."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 65_536


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection on which no head of a request comes in time, also if it comes byte by byte, and one whose
    client reads nothing of a response. A head of more than 64 KiB is refused, and so is what follows a body.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
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


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
