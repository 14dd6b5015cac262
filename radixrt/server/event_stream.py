"""The response that is a stream of events, and ends with its client."""

# Tests: tests/server/test_server.py, tests/server/test_clients_that_go.py

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from radixrt.engine.live_stream import LiveStream
from radixrt.errors import RadixrtError
from radixrt.server.answer_events import AnswerEvents
from radixrt.server.connected import ClientGone, while_connected
from radixrt.server.protocol import BodyWriter, writer_of

# A proxy is to pass events on as they come.
_AS_THEY_COME = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """The events of a stream, the first of which are known. They are written past ASGI if there is a BodyWriter.
    `on_written` is called after the last one, unless the client has gone, and `close` is awaited in any case.
    """

    def __init__(
        self,
        first: bytes,
        events: AnswerEvents,
        stream: LiveStream,
        *,
        close: Callable[[], Awaitable[None]],
        on_written: Callable[[], None],
    ) -> None:
        super().__init__((), headers=_AS_THEY_COME, media_type="text/event-stream")
        self._first, self._events, self._stream = first, events, stream
        self._close, self._on_written = close, on_written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await while_connected(receive, self._write(send, writer_of(scope)))
        finally:
            await self._close()

    async def _write(self, send: Send, writer: BodyWriter | None) -> None:
        async def send_piece(piece: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_piece(self._first)
        try:
            if writer is not None and not self._events.is_over:
                await self._stream.listen(partial(self._write_news, writer))
            while not self._events.is_over:
                if piece := self._events.of(await self._stream.news()):
                    await send_piece(piece)
        except RadixrtError as error:
            await send_piece(self._events.failure(error))
        await send_piece(b"", more=False)
        self._on_written()

    def _write_news(self, writer: BodyWriter) -> bool:
        if writer.is_paused:  # what comes meanwhile is joined
            writer.when_resumed(self._stream.remind)
        elif piece := self._events.of(self._stream.take()):
            writer.write(piece)
        return not self._events.is_over
