"""Responses: JSON of any text, and streams of events that end with their clients."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from radixrt.server.refusal import Refusal

Events = AsyncGenerator[bytes, None]

# A proxy is to pass events on as they come.
_AS_THEY_COME = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def json_bytes(value: object) -> bytes:
    """`value` as JSON in UTF-8. Halves of surrogate pairs have none; Python's escape of them is JSON's."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def event_bytes(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


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
    """Server-sent events, the first of which is known. They are closed with the stream, however it ends."""

    def __init__(self, first: bytes, rest: Events) -> None:
        super().__init__(_chained(first, rest), headers=_AS_THEY_COME, media_type="text/event-stream")
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


async def _chained(first: bytes, rest: Events) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event
