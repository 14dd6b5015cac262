"""Where an endpoint is served."""

# Tests: tests/server/test_server.py

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send


def route_of(method: str, path: str, respond: Callable[[Request], Awaitable[Response]]) -> Route:
    """The route of one method alone: Starlette's own would take HEAD where GET is."""
    route = Route(path, _Application(respond), methods=[method])
    route.methods = {method}
    return route


class _Application:
    """As a function alone an endpoint would have Starlette look for handlers of errors around it, and write past
    these. The application has them, too.
    """

    def __init__(self, respond: Callable[[Request], Awaitable[Response]]) -> None:
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._respond(Request(scope, receive, send))
        await response(scope, receive, send)
