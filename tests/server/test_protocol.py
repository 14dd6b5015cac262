"""Connections that do not behave, and those that send requests one after the other."""

from __future__ import annotations

import gc
import json
import socket
import time
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from radixrt.server.protocol import BoundedProtocol
from tests.support.serving import GREEDY, LONG, QUESTIONS, Serving, held, until

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


@pytest.mark.parametrize("size", [1, 50, 10_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_upgrade_that_is_asked_for_changes_nothing(size: int, is_chunked: bool, serving: Serving) -> None:
    """As Java's client does with each first request to http://."""
    body = json.dumps({"prompt": "Mira likes Oslo."}).encode()
    upgrade = b"Host: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    sent = b"POST /tokenize HTTP/1.1\r\n" + upgrade + framing + b"\r\n\r\n" + framed
    sent += b"GET /health HTTP/1.1\r\n" + upgrade + b"\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    with connected(serving()) as connection:
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        told = b""
        while told.count(b'"status"') < 2:
            more = connection.recv(65_536)
            assert more
            told += more
    assert told.count(b"HTTP/1.1 200 ") == 3
    assert b'"count":' in told


def test_upgrades_that_many_requests_in_a_row_ask_for(serving: Serving) -> None:
    asks = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with connected(serving()) as connection:
        connection.sendall(asks * 600 + last)
        assert read_to_end(connection).count(b"HTTP/1.1 200 ") == 601


@pytest.mark.parametrize("begin", [b"HTTP/1.1\r\nConnection: close, Upgrade", b"HTTP/1.0\r\nConnection: Upgrade"])
def test_an_upgrade_that_the_last_request_asks_for(begin: bytes, serving: Serving) -> None:
    body = b'{"prompt": "Mira likes Oslo."}'
    with connected(serving()) as connection:
        connection.sendall(b"POST /tokenize %s\r\nHost: a\r\nUpgrade: h2c\r\n" % begin)
        connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        told = read_to_end(connection)
    assert b" 200 OK" in told
    assert b'"count":' in told


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


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Connections have little room for what is not read; one entry for each that went on."""
    made, resume = BoundedProtocol.connection_made, BoundedProtocol.resume_writing
    found: list[None] = []

    def with_little_room(self: BoundedProtocol, transport: Any) -> None:
        made(self, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport.set_write_buffer_limits(high=1000)

    def noted(self: BoundedProtocol) -> None:
        found.append(None)
        resume(self)

    monkeypatch.setattr(BoundedProtocol, "connection_made", with_little_room)
    monkeypatch.setattr(BoundedProtocol, "resume_writing", noted)
    return found


def late_reader(url: str, content: bytes) -> socket.socket:
    """A connection on which this was sent, with little room for what comes."""
    late = socket.socket()
    late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    late.settimeout(20)
    late.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    late.sendall(content)
    return late


def posted(body: dict[str, Any], header: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{header}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


STREAMED = {**LONG, "max_tokens": 300, "logprobs": 0, "stream": True}


def test_who_reads_late_gets_everything_in_fewer_events(
    serving: Serving, runtime: Runtime, resumed: list[None]
) -> None:
    """Its events are joined while it does not read; others have theirs meanwhile."""
    url = serving()
    whole = {**STREAMED, "stream": False}
    expected = httpx.post(f"{url}/v1/completions", json=whole, timeout=60).json()["choices"][0]
    with late_reader(url, posted(STREAMED, "Connection: close\r\n")) as late:
        until(lambda: runtime.num_running == 1)
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAMED, timeout=60) as other:
            assert sum(line.startswith("data: {") for line in other.iter_lines()) > 100
        until(lambda: not runtime.has_work)
        reader = late.makefile("rb")
        while reader.readline() != b"\r\n":
            pass
        events, size = b"", 0
        while size := int(reader.readline(), 16):
            events += reader.read(size)
            assert reader.readline() == b"\r\n"
    choices = [json.loads(one[6:])["choices"][0] for one in events.split(b"\n\n")[:-2]]
    assert events.endswith(b"data: [DONE]\n\n")
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert tokens == expected["logprobs"]["tokens"]
    assert len(choices) < 200
    assert resumed


@pytest.mark.parametrize("more", [b"", GET + b"\r\n"], ids=["one request", "two in a row"])
def test_who_reads_nothing_and_goes_leaves_nothing(
    serving: Serving, runtime: Runtime, resumed: list[None], more: bytes
) -> None:
    """Its answer has ended, and waits to be read."""
    server = Server(runtime, "built-in", limits=Limits(pending=1))
    with late_reader(serving(server), posted(STREAMED) + more):
        until(lambda: runtime.num_running == 1)
        until(lambda: not runtime.has_work)
        assert server._pending._count == 1
    until(lambda: server._pending._count == 0)
    assert not runtime._driver._listeners


def test_what_is_answered_is_gone_without_the_collector(serving: Serving) -> None:
    """As Python's is kept from old objects, and runs rarely."""
    url = serving()

    def count() -> int:
        return sum(type(one) in (BoundedProtocol, RequestResponseCycle) for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = count()
        for _ in range(20):
            httpx.get(f"{url}/health")
        until(lambda: count() <= before + 2, 5)
    finally:
        gc.enable()
