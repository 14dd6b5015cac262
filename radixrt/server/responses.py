"""Responses: JSON of any text, and streams of events that end with their clients."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from radixrt.server.connected import ClientGone, while_connected
from radixrt.server.refusal import Refusal

Events = AsyncGenerator[bytes, None]

# A proxy is to pass events on as they come.
_AS_THEY_COME = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_A_TEXT = uuid4().hex  # that is nowhere else in an event


def json_bytes(value: object) -> bytes:
    """`value` as JSON in UTF-8. Halves of surrogate pairs have none; Python's escape of them is JSON's."""
    return _json(value).encode("utf-8", "backslashreplace")


def event_bytes(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


class TextEvents:
    """Events that differ in a text alone: the rest of them is made once."""

    def __init__(self, value_of: Callable[[str], object]) -> None:
        """`value_of` gives the value of an event with a text, which is in it once."""
        self._before, self._after = event_bytes(value_of(_A_TEXT)).split(json_bytes(_A_TEXT))

    def of(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + json_bytes(text) + self._after


class JsonResponse(Response):
    """A value as JSON; bytes are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else json_bytes(content)


def refused(refusal: Refusal) -> Response:
    """The response to a request that gets no answer."""
    return JsonResponse(refusal.body(), refusal.status, refusal.headers)


async def failed(request: Request, error: Exception) -> Response:
    """The response after a defect, which uvicorn then logs with its traceback."""
    return refused(Refusal(500, "the server has failed at this request; its log has more", "failed"))


class EventStream(StreamingResponse):
    """Server-sent events, the first of which are known. They are closed with the stream, however it ends."""

    def __init__(self, first: bytes, rest: Events) -> None:
        super().__init__(rest, headers=_AS_THEY_COME, media_type="text/event-stream")
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await while_connected(receive, self.stream_response(send))
        finally:
            await self._rest.aclose()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for events in self._rest:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
