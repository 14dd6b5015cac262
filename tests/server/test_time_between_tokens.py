"""Streams at once: each gets its next token while the next passes run, however many there are."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.protocol import writer_of
from tests.support.serving import QUESTIONS, Serving

MOST = 3  # passes between two tokens of a stream
TOKENS = 30  # of each
TOLD = b'"token_logprobs"'  # in an event of tokens, if log-probabilities are asked for


class Watched(Server):
    """Notes how many passes there were when an event with tokens goes to the socket, for each stream."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, "built-in")
        self.passes: list[list[int]] = []

    def app(self) -> Starlette:
        app = super().app()
        app.add_middleware(self._watch)
        return app

    def _watch(self, app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            own: list[int] = []
            self.passes.append(own)

            def note(piece: bytes) -> None:
                if TOLD in piece:
                    own.append(self.runtime.activity().passes)

            async def noted(message: Message) -> None:
                note(message.get("body", b""))
                await send(message)

            def written(piece: bytes) -> None:
                note(piece)
                write(piece)

            writer = writer_of(scope)
            write, writer.write = writer.write, written  # type: ignore[method-assign]
            await app(scope, receive, noted)

        return watched


async def read_all(url: str, count: int) -> list[bytes]:
    """What `count` clients at once read, each a stream of TOKENS tokens."""
    body = {"prompt": QUESTIONS[0], "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, "stream": True}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(head.encode() + content)
        read = await reader.read()
        writer.close()
        return read

    return await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.parametrize("count", [128, pytest.param(512, marks=pytest.mark.long)])
def test_each_stream_goes_on(count: int, serving: Serving, runtime: Runtime) -> None:
    server, began = Watched(runtime), runtime.cache_stats()
    answers = asyncio.run(read_all(serving(server), count))
    assert runtime.cache_stats().recomputed_tokens == began.recomputed_tokens, "there was room for all"
    assert all(answer.count(b"data: [DONE]") == 1 for answer in answers)
    assert len(server.passes) == count
    for own in server.passes:
        gaps = [later - earlier for earlier, later in pairwise(own)]
        assert sum(gaps) >= TOKENS - 1 - MOST
        assert max(gaps) <= MOST, gaps
