"""A server's socket, and what listens to it."""

# Tests: tests/server/test_server.py, tests/cli/test_serve.py

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import Config

from radixrt.engine.signals import handled_by
from radixrt.errors import ParameterError
from radixrt.server.admin import Admin
from radixrt.server.app import Server
from radixrt.server.hard_end import end_process_within
from radixrt.server.limits import Limits
from radixrt.server.protocol import BoundedProtocol

_SWITCH_SECONDS = 5e-4  # after which the thread that steps gets the interpreter back; by default it waits 5 ms
_CUT_SECONDS = 5  # for requests that are cut; uvicorn cancels what is left, with tracebacks
HANG_SECONDS = 5  # for the pass that runs, after a second signal


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens: clients that come before the server does wait. Raises ParameterError where the
    address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # only now nobody else can have the port
    except OSError as error:
        raise ParameterError(
            f"the server cannot listen at {host}, port {port}: {error.strerror or error}"
        ) from error
    return listening


@contextmanager
def switching_soon() -> Iterator[None]:
    """For a process that serves: its threads wait less for the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Unsignalled(uvicorn.Server):
    """A server that leaves signals to who runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener(_Unsignalled):
    """Serves by `run(sockets=[...])` until SIGTERM, SIGINT or SIGHUP; then refuses new connections, and lets
    requests that run end. Those left after `drain_seconds`, or at a second signal, are cut. `run` returns then,
    once the pass that runs has ended; after a second signal that is given 5 s, and then the process ends.

    Attributes:
        signal: the first one; None before it has come.
        force_exit: whether a second one has come.
    """

    def __init__(
        self,
        server: Server,
        drain_seconds: int,
        on_start: Callable[[], None] = lambda: None,
        admin: tuple[Admin, socket.socket] | None = None,
    ) -> None:
        """With `admin`, its actions are served beside, at that socket, until the server has ended."""
        super().__init__(_config(server.app(), server.limits, drain_seconds + _CUT_SECONDS))
        self.signal: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # before it runs
        self._server, self._drain_seconds, self._on_start, self._admin = server, drain_seconds, on_start, admin

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with handled_by(self.handle_exit):  # until the threads of its loop have ended, too: a pass may hang
            super().run(sockets)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._admin is None:
            await super().serve(sockets)
            return
        admin, bound = self._admin
        beside = _Unsignalled(_config(admin.app(), self._server.limits, _CUT_SECONDS))
        served = asyncio.ensure_future(beside.serve([bound]))
        try:
            await super().serve(sockets)
        finally:
            beside.should_exit = True
            await served

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._server.draining = self.should_exit = True
        loop = self._loop
        if self.signal is None:
            self.signal = sig
            if loop is not None:
                loop.call_soon_threadsafe(loop.call_later, self._drain_seconds, self._cut)
                loop.call_soon_threadsafe(self._server.drain)  # its locks may be held by what the signal cuts
        elif not self.force_exit:
            self.force_exit = True
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._cut)
                loop.call_soon_threadsafe(end_process_within, HANG_SECONDS, self.signal)

    def _cut(self) -> None:
        """Let the requests end as if their clients had gone away."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _config(app: Starlette, limits: Limits, end_seconds: int) -> Config:
    return Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        limit_concurrency=limits.connections,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=end_seconds,
        http=BoundedProtocol,
        loop="uvloop",
        ws="none",
    )
