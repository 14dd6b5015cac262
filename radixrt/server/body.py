"""Reading a request's body: its size, its JSON, its depth."""

# Tests: tests/server/test_refusals.py

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from starlette.requests import ClientDisconnect

from radixrt.batch.formats.strict_json import loads
from radixrt.checks import kind, nests_deeper
from radixrt.server.limits import Limits
from radixrt.server.refusal import Refusal


async def read_body(pieces: AsyncIterable[bytes], limits: Limits) -> bytes:
    """A body, whole. Raises Refusal."""
    try:
        return await asyncio.wait_for(_whole(pieces, limits), limits.body_seconds)
    except asyncio.TimeoutError:
        raise Refusal(408, f"the body did not come within {limits.body_seconds:g} s", "timeout") from None
    except ClientDisconnect:
        raise gone() from None


def gone() -> Refusal:
    """For a client that nobody can tell any more: it is counted."""
    return Refusal(499, "the client has gone away", "gone")


async def _whole(pieces: AsyncIterable[bytes], limits: Limits) -> bytes:
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > limits.body_bytes:
            raise Refusal(413, f"the body has more than {limits.body_bytes:,} bytes", "body_too_large")
    return bytes(body)


def object_in(body: bytes, limits: Limits) -> dict[str, Any]:
    """The JSON object of a body, without what is null. Raises Refusal."""
    deep = Refusal(400, f"the body has more than {limits.depth} levels of arrays and objects", "invalid_json")
    try:
        given = loads(body)
    except RecursionError:
        raise deep from None
    except ValueError as error:
        raise Refusal(400, f"the body {error}", "invalid_json") from None
    if body.count(b"[") + body.count(b"{") > limits.depth and nests_deeper(given, limits.depth):
        raise deep
    if not isinstance(given, dict):
        raise Refusal(400, f"the body is {kind(given)}; it must be an object", "invalid_json")
    return {name: value for name, value in given.items() if value is not None}
