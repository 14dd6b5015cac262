"""Clients that go away end what they asked for, whenever they go."""

from __future__ import annotations

import socket

import httpx
import pytest

from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from tests.support.serving import LONG, QUESTIONS, Serving, counted, held, until


def abandoned(url: str, content: bytes, length: int | None = None) -> socket.socket:
    """A connection on which a body was sent, which may have been announced to be longer."""
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {length or len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(stream: bool, serving: Serving, runtime: Runtime) -> None:
    """Their places are free at once, before the pass that runs has ended."""
    url = serving(Server(runtime, "built-in", limits=Limits(pending=1)))
    request = httpx.Request("POST", url, json={**LONG, "stream": stream})
    with held(runtime):
        with abandoned(url, request.content):
            until(lambda: runtime.num_waiting == 1)
        until(lambda: counted(url, 499) == 1)
        with abandoned(url, request.content):
            until(lambda: runtime.num_waiting == 2)
    until(lambda: not runtime.has_work)


@pytest.mark.parametrize("prompt", [QUESTIONS[0], QUESTIONS])
def test_in_the_middle_of_a_stream(prompt: str | list[str], serving: Serving, runtime: Runtime) -> None:
    """Of one prompt, or of several, which all end."""
    url, began = serving(), runtime.activity().decoded_tokens
    body = {**LONG, "prompt": prompt, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    until(lambda: not runtime.has_work)
    assert runtime.activity().decoded_tokens - began < 890


def test_in_the_middle_of_an_answer(serving: Serving, runtime: Runtime) -> None:
    url, began = serving(), runtime.activity().decoded_tokens
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=LONG, timeout=httpx.Timeout(30, read=0.3))
    until(lambda: not runtime.has_work)
    assert runtime.activity().decoded_tokens - began < 890
    until(lambda: counted(url, 499) == 1)


def test_in_the_middle_of_a_body(serving: Serving) -> None:
    url = serving()
    with abandoned(url, b"{", 100):
        pass
    until(lambda: counted(url, 499) == 1)
