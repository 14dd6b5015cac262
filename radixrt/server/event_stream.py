"""The response that is a stream of events, and ends with its client."""

# Tests: tests/server/test_server.py, tests/server/test_clients_that_go.py

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

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
    """The events of a stream, the first of which are known. `close` is awaited however it ends, and before it
    `on_whole` is called if all of it was written.
    """

    def __init__(
        self,
        first: bytes,
        events: AnswerEvents,
        stream: LiveStream,
        *,
        close: Callable[[], Awaitable[None]],
        on_whole: Callable[[], None],
    ) -> None:
        super().__init__((), headers=_AS_THEY_COME, media_type="text/event-stream")
        self._first, self._events, self._stream = first, events, stream
        self._close, self._on_whole = close, on_whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await while_connected(receive, self._write(send, writer_of(scope)))
        finally:
            await self._close()

    async def _write(self, send: Send, writer: BodyWriter) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})

        def on_news() -> bool:
            if writer.is_paused:  # what comes meanwhile is joined
                writer.when_resumed(self._stream.remind)
            elif events := self._events.of(self._stream.take()):
                writer.write(events)
            return not self._events.is_over

        if not self._events.is_over:
            try:
                await self._stream.listen(on_news)
            except RadixrtError as error:
                writer.write(self._events.failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._on_whole()
