"""The endpoints of a server, over one Runtime."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from radixrt.checks import check_kind, check_prompt
from radixrt.errors import RadixrtError
from radixrt.frontend.openai import CHAT, COMPLETIONS, asked_prompt
from radixrt.runtime import Runtime
from radixrt.server.answering import Answering
from radixrt.server.asked import Asked, read_asked
from radixrt.server.body import read_object
from radixrt.server.limits import Limits
from radixrt.server.metrics import CONTENT_TYPE, Metrics
from radixrt.server.refusal import Refusal, refusal_of
from radixrt.server.tenants import Tenants
from radixrt.version import __version__

Endpoint = Callable[[Request, str | None], Awaitable[Response]]


class Server:
    """Takes requests, and answers them with a Runtime, as long as it is not `draining`.

    Attributes:
        name: of the model, for clients; bodies may call it anything.
        draining: whether new work is refused, as the process is to end once what runs has ended.
    """

    def __init__(
        self, runtime: Runtime, name: str, *, tenants: Tenants | None = None, limits: Limits | None = None
    ):
        self.runtime, self.name = runtime, name
        self.draining = False
        self._tenants, self._limits = tenants or Tenants(), limits or Limits()
        self._answering, self._metrics = Answering(runtime), Metrics(runtime)
        self._began = int(time.time())
        self._last_pass = runtime.activity().passes, time.monotonic()

    def app(self) -> FastAPI:
        """As an ASGI server runs it."""
        app = FastAPI(title="radixrt", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        for method, path, endpoint in (
            ("POST", CHAT, self._chat),
            ("POST", COMPLETIONS, self._completions),
            ("GET", "/v1/models", self._models),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
        ):
            app.add_api_route(path, self._guarded(path, endpoint), methods=[method])
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/metrics", self._guarded("/metrics", self._numbers), methods=["GET"])
        app.add_exception_handler(404, _unknown)
        app.add_exception_handler(405, _unknown)
        return app

    def _guarded(self, path: str, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint for known tenants, whose errors are told, and that is counted."""

        async def answered(request: Request) -> Response:
            began = time.perf_counter()
            try:
                response = await endpoint(request, self._tenants.of(request.headers.get("authorization")))
            except (Refusal, RadixrtError, ValueError) as error:
                refusal = error if isinstance(error, Refusal) else refusal_of(error)
                response = JSONResponse(refusal.body(), refusal.status, refusal.headers)
            self._metrics.responses.labels(path, str(response.status_code)).inc()
            if not isinstance(response, StreamingResponse):
                self._metrics.seconds.labels(path).observe(time.perf_counter() - began)
            return response

        return answered

    # -- answers -------------------------------------------------------------------------------------------

    async def _chat(self, request: Request, tenant: str | None) -> Response:
        return await self._answer(CHAT, request, tenant)

    async def _completions(self, request: Request, tenant: str | None) -> Response:
        return await self._answer(COMPLETIONS, request, tenant)

    async def _answer(self, url: str, request: Request, tenant: str | None) -> Response:
        self._check_room()
        given = await read_object(request.stream(), self._limits)
        asked = await asyncio.to_thread(read_asked, url, given, self.runtime.default_params, self._limits)
        if not asked.is_streamed:
            body = await _while_connected(request, self._answering.body(asked, tenant))
            return JSONResponse(body)
        events = self._timed(asked, self._answering.events(asked, tenant))
        first = await anext(events)  # a prompt that cannot be run is refused before a stream begins
        return StreamingResponse(_chained(first, events), media_type="text/event-stream")

    async def _timed(self, asked: Asked, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        began, count = time.perf_counter(), 0
        async for event in events:
            count += 1
            if count == (2 if asked.url == CHAT else 1):
                self._metrics.first_token_seconds.labels(asked.url).observe(time.perf_counter() - began)
            yield event
        self._metrics.seconds.labels(asked.url).observe(time.perf_counter() - began)

    def _check_room(self) -> None:
        if self.draining:
            raise Refusal(
                503, "the server is to end, and takes no more requests", "draining", {"Retry-After": "10"}
            )
        if (count := self.runtime.num_waiting) >= self._limits.waiting:
            raise Refusal(429, f"{count} requests wait; come again", "too_many_requests", {"Retry-After": "1"})

    # -- the rest ------------------------------------------------------------------------------------------

    async def _models(self, request: Request, tenant: str | None) -> Response:
        own = {"id": self.name, "object": "model", "created": self._began, "owned_by": "radixrt"}
        length = {"max_model_len": self.runtime.context_length}  # vLLM's
        return JSONResponse({"object": "list", "data": [{**own, **length}]})

    async def _tokenize(self, request: Request, tenant: str | None) -> Response:
        """vLLM's: of `prompt`, or of `messages` by the chat template."""
        given = await read_object(request.stream(), self._limits)
        if unknown := given.keys() - {"model", "prompt", "messages"}:
            raise ValueError(f"unknown parameter {', '.join(sorted(unknown))}; give prompt or messages")
        if self.runtime.tokenizer is None:
            raise ValueError("the model has no tokenizer")
        tokenizer = self.runtime.tokenizer
        prompt = asked_prompt(CHAT if "messages" in given else COMPLETIONS, given)
        if isinstance(prompt, list):
            raise ValueError("prompt is a list; it must be a string")
        encode = tokenizer.encode if isinstance(prompt, str) else tokenizer.encode_chat
        tokens = (await asyncio.to_thread(encode, prompt)).tolist()  # type: ignore[arg-type]
        return JSONResponse({"count": len(tokens), "max_model_len": self.runtime.context_length, "tokens": tokens})

    async def _detokenize(self, request: Request, tenant: str | None) -> Response:
        given = await read_object(request.stream(), self._limits)
        if unknown := given.keys() - {"model", "tokens"}:
            raise ValueError(f"unknown parameter {', '.join(sorted(unknown))}; give tokens")
        tokens = check_kind("tokens", given.get("tokens"), list, "a list of token ids")
        if self.runtime.tokenizer is None:
            raise ValueError("the model has no tokenizer")
        ids = check_prompt("tokens", tokens) if tokens else []
        if isinstance(ids, str) or any(not 0 <= token < self.runtime.tokenizer.vocab_size for token in ids):
            raise ValueError(f"tokens must be ids from 0 to {self.runtime.tokenizer.vocab_size - 1}")
        text = await asyncio.to_thread(self.runtime.tokenizer.decode, ids, False)
        return JSONResponse({"prompt": text})

    async def _health(self) -> Response:
        """200 while passes advance, or nothing is to do; 503 otherwise, and while the server drains."""
        passes, now = self.runtime.activity().passes, time.monotonic()
        if passes != self._last_pass[0] or not self.runtime.has_work:
            self._last_pass = passes, now
        stalled = now - self._last_pass[1]
        if self.draining or stalled > self._limits.stalled_seconds:
            state = "draining" if self.draining else f"no pass for {stalled:.0f} s"
            return JSONResponse({"status": state}, 503)
        return JSONResponse({"status": "ok"})

    async def _numbers(self, request: Request, tenant: str | None) -> Response:
        return Response(await asyncio.to_thread(self._metrics.text), media_type=CONTENT_TYPE)


async def _while_connected(request: Request, work: Awaitable[dict[str, object]]) -> dict[str, object]:
    """What `work` returns; it is cancelled where the client goes away before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "the client has gone away", "gone")  # nobody reads it; it is counted
        return task.result()
    finally:
        gone.cancel()
        if task.cancel():
            with suppress(asyncio.CancelledError):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


async def _unknown(request: Request, error: Any) -> Response:
    known = "/v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /metrics"
    message = f"{request.method} {request.url.path[:200]} is not known; these are: {known}"
    return JSONResponse(Refusal(error.status_code, message, "unknown_url").body(), error.status_code)
