"""Connections that do not behave, and those that send requests one after the other."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from tests.support.serving import GREEDY, QUESTIONS, Serving, held

GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)


def read_to_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"a" * 1000),
        (GET + b"X: ", b"a" * 1000),
        (GET, b"X: " + b"a" * 100 + b"\r\n"),
        (CHUNKED + b"0\r\n", b"X: " + b"a" * 100 + b"\r\n"),
        (CHUNKED + b"1;", b"a" * 1000),
    ],
    ids=["path", "header", "headers", "trailers", "extension"],
)
def test_what_is_not_a_body_has_a_bound(begin: bytes, more: bytes, serving: Serving) -> None:
    url, sent = serving(), 0
    with connected(url) as connection:
        connection.sendall(begin)
        try:
            while sent < 2**24:
                connection.sendall(more)
                sent += len(more)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 2**24
    assert httpx.get(f"{url}/v1/models").status_code == 200


def test_a_head_that_is_too_long_is_told_so(serving: Serving) -> None:
    with connected(serving()) as connection:
        connection.sendall(GET + b"X: " + b"a" * 65_536)
        told = read_to_end(connection)
    assert told.startswith(b"HTTP/1.1 400 ")
    assert told.endswith(b"The head of the request has more than 65,536 bytes.")


def test_requests_in_a_row_are_answered_in_order(serving: Serving, runtime: Runtime) -> None:
    """The connection is idle after the last one alone, however long that takes."""
    url = serving(Server(runtime, "built-in", limits=Limits(idle_seconds=1)))
    body = json.dumps({**GREEDY, "prompt": QUESTIONS[0]}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connected(url) as connection:
        with held(runtime):
            connection.sendall(GET + b"\r\n" + post + body)
            time.sleep(2)
        first, second = read_to_end(connection).split(b"HTTP/1.1 200 ")[1:]
    assert b'"object":"list"' in first
    assert b"Oslo" in second
