"""Work for a client, as long as it is there."""

# Tests: tests/server/test_clients_that_go.py

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client has gone away."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` returns. Where the client goes away before, it is cancelled: ClientGone."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        left.cancel()
        if task.cancel():
            with suppress(asyncio.CancelledError):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
