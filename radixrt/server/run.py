"""A server's socket, and what listens to it."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import socket

import uvicorn
from uvicorn.config import Config

from radixrt.errors import ParameterError
from radixrt.server.app import Server

_MAX_HEADER_BYTES = 65_536
_KEEP_ALIVE_SECONDS = 30


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket to listen with. Raises ParameterError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ParameterError(f"the server cannot listen at {host}, port {port}: {error}") from error
    return bound


def uvicorn_of(server: Server, drain_seconds: int) -> uvicorn.Server:
    """What serves until SIGTERM or SIGINT, by `run(sockets=[...])`; then refuses new requests, and lets those that
    run end in that time.
    """
    config = Config(
        server.app(),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
        http="h11",
    )
    return _Draining(config, server)


class _Draining(uvicorn.Server):
    """Tells the server before uvicorn waits for what runs."""

    def __init__(self, config: Config, server: Server) -> None:
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame: object) -> None:
        self._server.draining = True
        super().handle_exit(sig, frame)  # type: ignore[arg-type]
