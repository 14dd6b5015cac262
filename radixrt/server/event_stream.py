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
from radixrt.server.writers.writers import LentStream, StreamWriters, WriterLost

# A proxy is to pass events on as they come.
_AS_THEY_COME = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """The events of a stream, the first of which are known. They are written past ASGI if there is a BodyWriter,
    and by another process if its `writers` can: see there. `on_written` is called after the last one, unless the
    client has gone, and `close` is awaited in any case.
    """

    def __init__(
        self,
        first: bytes,
        events: AnswerEvents,
        stream: LiveStream,
        *,
        writers: StreamWriters | None,
        close: Callable[[], Awaitable[None]],
        on_written: Callable[[], None],
    ) -> None:
        super().__init__((), headers=_AS_THEY_COME, media_type="text/event-stream")
        self._first, self._events, self._stream, self._writers = first, events, stream, writers
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
                if (lent := await self._lent(writer)) is None:
                    await self._stream.listen(partial(self._write_news, writer))
                else:
                    await self._written(lent)
            while not self._events.is_over:
                if piece := self._events.of(await self._stream.news()):
                    await send_piece(piece)
        except WriterLost:  # nobody knows what was written
            assert writer is not None
            writer.abort()
            return
        except RadixrtError as error:
            await send_piece(self._events.failure(error))
        await send_piece(b"", more=False)
        self._on_written()

    async def _lent(self, writer: BodyWriter) -> LentStream | None:
        """The stream as another process writes it, if one does."""
        if self._writers is None or not self._writers.can_write or (frames := self._events.frames()) is None:
            return None
        if (connection := await writer.lent()) is None:
            return None
        if (states := self._stream.lend_texts()) is None:
            return None
        lent = self._writers.begin(connection, frames, states, when_gone=writer.abort)
        if lent is None:
            self._stream.take_texts_back()
        return lent

    async def _written(self, lent: LentStream) -> None:
        """Raises WriterLost."""
        lent.written.add_done_callback(lambda _: self._stream.remind())  # it may have been lost
        try:
            try:
                await self._stream.listen(partial(self._lend_news, lent))
            except WriterLost:
                raise
            except RadixrtError as error:
                lent.fail(self._events.failure(error))
            await lent.written
        finally:
            lent.close()

    def _lend_news(self, lent: LentStream) -> bool:
        lent.check()
        if lent.is_behind:
            lent.when_ahead(self._stream.remind)
            return True
        for answer, token_ids, chunk in self._stream.lent_news():
            place = lent.add(answer, token_ids)
            if chunk is not None:
                lent.end(place, self._events.of([chunk]), is_last=self._events.is_over)
        return not self._events.is_over

    def _write_news(self, writer: BodyWriter) -> bool:
        if writer.is_paused:  # what comes meanwhile is joined
            writer.when_resumed(self._stream.remind)
        elif piece := self._events.of(self._stream.take()):
            writer.write(piece)
        return not self._events.is_over
