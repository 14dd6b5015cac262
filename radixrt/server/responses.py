"""Responses: JSON of any text, and events."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from radixrt.server.refusal import Refusal

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
