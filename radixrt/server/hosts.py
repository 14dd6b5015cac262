"""Host names that a server without keys answers to.

A web page can let its own name resolve to 127.0.0.1 (DNS rebinding): the browser then takes this server for the
page's own, and lets the page read answers. But it still sends that name.
"""

# Tests: tests/server/test_refusals.py

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixrt.checks import short
from radixrt.server.refusal import Refusal
from radixrt.server.responses import refused

LOOPBACK = ("localhost", "127.0.0.1", "::1")

_HOST = re.compile(r"\[([^\]]*)\](?::\d+)?|([^:]*)(?::\d+)?")


class KnownHosts:
    """An application for requests to one of these hosts; others are refused."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app, self._names = app, {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        parts = _HOST.fullmatch(host.lower())
        if parts is not None and (parts[1] or parts[2]) in self._names:
            await self._app(scope, receive, send)
            return
        known = ", ".join(sorted(self._names))
        message = f"the host {short(host)!r} is not this server's; without API keys it is one of {known}"
        await refused(Refusal(403, message, "unknown_host"))(scope, receive, send)
