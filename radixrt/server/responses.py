"""Responses: JSON of any text."""

# Tests: tests/server/test_server.py

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from radixrt.server.event_frame import json_bytes
from radixrt.server.refusal import Refusal


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
