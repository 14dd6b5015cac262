"""The endpoints of a server, over one Runtime."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from radixrt.checks import check_kind, check_prompt, short
from radixrt.engine.live_stream import LiveStream
from radixrt.errors import ParameterError, PromptError, RadixrtError
from radixrt.frontend.arguments import Prompt
from radixrt.frontend.openai import CHAT, COMPLETIONS, asked_prompt
from radixrt.frontend.sampling_aliases import chosen_length
from radixrt.output import RequestOutput, Usage
from radixrt.parsers.choosing import Parsers, chosen
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.server.answer_events import AnswerEvents, OnEnd
from radixrt.server.answering import Answering
from radixrt.server.batches.endpoints import BATCHES
from radixrt.server.batches.service import Batches
from radixrt.server.body import gone, object_in, read_body
from radixrt.server.connected import ClientGone, while_connected
from radixrt.server.event_frame import json_bytes
from radixrt.server.event_stream import EventStream
from radixrt.server.files.endpoints import FILES, Endpoint, Route
from radixrt.server.hosts import KnownHosts
from radixrt.server.limits import Limits
from radixrt.server.metrics import CONTENT_TYPE, Metrics
from radixrt.server.openai_request import OpenAIRequest, check_known, is_read_soon, read_request
from radixrt.server.page import page
from radixrt.server.pending import Pending
from radixrt.server.recent import Recent
from radixrt.server.refusal import Refusal, refusal_of
from radixrt.server.responses import JsonResponse, failed, refused
from radixrt.server.route import route_of
from radixrt.server.scoring import read_scores, scores_body, usage_of
from radixrt.server.sglang import GENERATE, Generating, read_generate
from radixrt.server.state import States
from radixrt.server.tenants import Tenants
from radixrt.server.writers.writers import StreamWriters
from radixrt.text.tokenizer import Tokenizer

T = TypeVar("T")
A = TypeVar("A", bound="WantsAnswers")
A_contra = TypeVar("A_contra", bound="WantsAnswers", contravariant=True)


class WantsAnswers(Protocol):
    """What a body asks for, of any protocol."""

    @property
    def url(self) -> str: ...

    @property
    def prompts(self) -> Sequence[Prompt]: ...

    @property
    def params(self) -> SamplingParams | Sequence[SamplingParams]: ...

    @property
    def num_answers(self) -> int: ...

    @property
    def is_streamed(self) -> bool: ...


class Answers(Protocol[A_contra]):
    """Answers the bodies of a protocol: see `Answering`."""

    async def outputs(self, asked: A_contra, tenant: str | None) -> list[RequestOutput]: ...

    def body(self, asked: A_contra, outputs: list[RequestOutput]) -> tuple[str, object]: ...

    def events(self, asked: A_contra, on_end: OnEnd) -> AnswerEvents: ...


_READ_AT_ONCE = 2**15  # bytes of a body, such as 4,000 token ids: in less than a millisecond
_THREADS = 2  # that read bodies, encode and write answers: not the event loop's own, which step the engine


class Server:
    """Takes requests, and answers them with a Runtime, as long as it is not `draining`.

    Attributes:
        name: of the model, for clients; bodies may call it anything.
        limits: of what it takes.
        draining: whether new work is refused, as the process is to end once what runs has ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        *,
        tenants: Tenants | None = None,
        hosts: Iterable[str] | None = None,
        limits: Limits | None = None,
        parsers: Parsers | None = None,
        chat_max_tokens: int | None = None,
        batches: Batches | None = None,
        writers: StreamWriters | None = None,
    ):
        """With `hosts` it answers to these names alone. `parsers` are those of the model's chats; None: those that
        its chat template tells. Chats that give no maximum have `chat_max_tokens`; None: what the Runtime's
        defaults have chosen, or all that the context leaves. `batches` are begun here, and ended by who has made
        them.
        """
        self.runtime, self.name = runtime, name
        self.limits = limits or Limits()
        self.draining = False
        self._parsers = chosen(runtime.tokenizer) if parsers is None else parsers
        self._chat_max_tokens = chat_max_tokens or chosen_length(None, runtime.default_params)
        self._tenants, self._hosts = tenants or Tenants(), hosts
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="radixrt-server")
        self._answering, self._metrics = Answering(runtime), Metrics(runtime)
        self._pending, self._recent = Pending(self.limits.pending), Recent()
        self._states = States(runtime, name, self._recent, has_tenants=bool(self._tenants), status=self._status)
        self._began = int(time.time())
        self._work_began = time.monotonic()
        self._last_pass = runtime.activity().passes, time.monotonic()  # their number, and when it was new
        self._batches, self._writers = batches, writers
        if batches is not None:
            batches.start(self._parsers, self._begin_work, self._chat_max_tokens)

    def app(self) -> Starlette:
        """As an ASGI server runs it."""
        routes = [route_of("GET", "/health", self._health), route_of("GET", "/", self._shown)]
        for method, path, endpoint in (
            ("POST", CHAT, self._chat),
            ("POST", COMPLETIONS, self._completions),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
            ("POST", GENERATE, self._generate),
            ("POST", "/v1/score", self._score),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/metrics", self._numbers),
            ("GET", "/state", self._state),
            *self._kept(),
        ):
            routes.append(route_of(method, path, self._guarded(path, endpoint)))
        app = Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown, Exception: failed})
        if self._hosts is not None:
            app.add_middleware(KnownHosts, names=self._hosts)
        return app

    def _kept(self) -> list[Route]:
        """What is kept from request to request, or says that nothing is."""
        if self._batches is not None:
            return self._batches.routes(self.name, self._object)
        methods = ("GET", "POST", "DELETE")
        paths = [f"{path}{more}" for path in (FILES, BATCHES) for more in ("", "/{name:path}")]
        return [(method, path, _nothing_is_kept) for method in methods for path in paths]

    def drain(self) -> None:
        """Take no more work, as the process is to end once what runs has ended: batches go on in another one."""
        self.draining = True
        if self._batches is not None:
            self._batches.stop()

    def _guarded(self, path: str, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint for known tenants, whose errors are told, and that is counted."""

        async def answered(request: Request) -> Response:
            began, status = time.perf_counter(), 500
            try:
                response = await endpoint(request, self._tenants.of(request.headers.get("authorization")))
                status = response.status_code
            except (Refusal, RadixrtError) as error:
                response = refused(refusal := refusal_of(error))
                status = refusal.status
            finally:
                self._metrics.responses.labels(path, str(status)).inc()
            if not isinstance(response, EventStream):
                self._metrics.seconds.labels(path).observe(time.perf_counter() - began)
            return response

        return answered

    # -- answers -------------------------------------------------------------------------------------------

    async def _chat(self, request: Request, tenant: str | None) -> Response:
        return await self._answer(self._answering, self._reader(CHAT), request, tenant)

    async def _completions(self, request: Request, tenant: str | None) -> Response:
        return await self._answer(self._answering, self._reader(COMPLETIONS), request, tenant)

    def _reader(self, url: str) -> Callable[..., OpenAIRequest]:
        return partial(
            read_request,
            url,
            parsers=self._parsers,
            tokenizer=self.runtime.tokenizer,
            name=self.name,
            chat_max_tokens=self._chat_max_tokens,
            refusal=self.runtime.form_refusal,
        )

    async def _generate(self, request: Request, tenant: str | None) -> Response:
        return await self._answer(Generating(self.runtime), read_generate, request, tenant)

    async def _answer(
        self, answering: Answers[A], read: Callable[..., A], request: Request, tenant: str | None
    ) -> Response:
        asked = await self._read(request, partial(read, defaults=self.runtime.default_params, limits=self.limits))
        began = time.perf_counter()
        if not asked.is_streamed:
            with self._pending.held(asked.num_answers):
                self._begin_work()
                outputs = await _until_gone(request, answering.outputs(asked, tenant))
                on_end = partial(self._note, tenant, began)
                return JsonResponse(await self._in_thread(_told, answering, asked, outputs, on_end))
        events = partial(answering.events, asked, partial(self._note, tenant, began))
        return await self._stream(request, asked, events, tenant)

    async def _stream(
        self, request: Request, asked: WantsAnswers, make_events: Callable[[], AnswerEvents], tenant: str | None
    ) -> EventStream:
        """The response to a body, once there is a first event: a prompt that cannot be run is refused before."""

        async def begun() -> tuple[LiveStream, bytes]:
            opened = self.runtime.live_stream(list(asked.prompts), asked.params, tenant=tenant)
            stream, first = await holding.enter_async_context(opened), b""
            while not first:
                first = events.of(await stream.news())
            return stream, first

        began = time.perf_counter()
        observe_first, observe = (
            histogram.labels(asked.url).observe
            for histogram in (self._metrics.first_token_seconds, self._metrics.seconds)
        )
        async with AsyncExitStack() as holding:
            holding.enter_context(self._pending.held(asked.num_answers))
            self._begin_work()
            events = make_events()
            stream, first = await _until_gone(request, begun())
            observe_first(time.perf_counter() - began)
            return EventStream(
                first,
                events,
                stream,
                writers=self._writers,
                close=holding.pop_all().aclose,
                on_written=lambda: observe(time.perf_counter() - began),
            )

    def _note(self, tenant: str | None, began: float, answer_id: str, usages: list[Usage]) -> None:
        self._recent.note(tenant, answer_id, usages, time.perf_counter() - began)

    async def _read(self, request: Request, read: Callable[[dict[str, Any]], T]) -> T:
        """What `read` makes of the object of a request's body, in a thread unless that is soon done.
        Raises Refusal, or RadixrtError also where nothing can be answered.
        """
        self._check_works()
        body = await read_body(request, self.limits)
        if len(body) > _READ_AT_ONCE:
            return await self._in_thread(lambda: read(object_in(body, self.limits)))
        given = object_in(body, self.limits)
        return read(given) if is_read_soon(given) else await self._in_thread(read, given)

    async def _object(self, request: Request) -> dict[str, Any]:
        return await self._read(request, lambda given: given)

    def _check_works(self) -> None:
        if self.draining:
            raise Refusal(503, "the server ends, and takes no more requests", "draining", {"Retry-After": "10"})
        self.runtime.check_whole()

    def _begin_work(self) -> None:
        if not self.runtime.has_work:
            self._work_began = time.monotonic()

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def _score(self, request: Request, tenant: str | None) -> Response:
        asked = await self._read(request, partial(read_scores, limits=self.limits, name=self.name))
        began = time.perf_counter()
        with self._pending.held(asked.num_scores):
            self._begin_work()
            labels = [[[label] for label in asked.labels]] * len(asked.prompts)
            work = self.runtime.async_score(asked.prompts, labels, tenant=tenant)
            scored: Any = await _until_gone(request, work)
        body = await self._in_thread(scores_body, asked, scored)
        self._note(tenant, began, str(body["id"]), [usage_of(scored)])
        return JsonResponse(body)

    # -- the rest ------------------------------------------------------------------------------------------

    async def _models(self, request: Request, tenant: str | None) -> Response:
        return JsonResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request, tenant: str | None) -> Response:
        if (name := request.path_params["name"]) != self.name:
            raise Refusal(404, f"there is no model {short(name)!r}; this is {self.name!r}", "model_not_found")
        return JsonResponse(self._described())

    def _described(self) -> dict[str, object]:
        own = {"id": self.name, "object": "model", "created": self._began, "owned_by": "radixrt"}
        return {**own, "max_model_len": self.runtime.context_length}  # the last is vLLM's

    async def _tokenize(self, request: Request, tenant: str | None) -> Response:
        """vLLM's: of `prompt`, or of `messages` by the chat template."""
        given = await self._object(request)
        check_known(given, "prompt", "messages")
        if given.keys() >= {"prompt", "messages"}:
            raise ParameterError("prompt and messages are both given; give one of them")
        tokenizer = self._tokenizer()
        prompt = asked_prompt(CHAT if "messages" in given else COMPLETIONS, given)
        if isinstance(prompt, list):
            raise PromptError("prompt is a list; it must be a string")
        encode: Any = tokenizer.encode if isinstance(prompt, str) else tokenizer.encode_chat
        tokens = (await self._in_thread(encode, prompt)).tolist()
        return JsonResponse({"count": len(tokens), "max_model_len": self.runtime.context_length, "tokens": tokens})

    async def _detokenize(self, request: Request, tenant: str | None) -> Response:
        given = await self._object(request)
        check_known(given, "tokens")
        tokens = check_kind("tokens", given.get("tokens"), list, "a list of token ids")
        tokenizer = self._tokenizer()
        ids = check_prompt("tokens", tokens) if tokens else []
        if isinstance(ids, str) or any(not 0 <= token < tokenizer.vocab_size for token in ids):
            raise PromptError(f"tokens must be ids from 0 to {tokenizer.vocab_size - 1}")
        return JsonResponse({"prompt": await self._in_thread(tokenizer.decode, ids, False)})

    def _tokenizer(self) -> Tokenizer:
        if self.runtime.tokenizer is None:
            raise ParameterError("the model has no tokenizer")
        return self.runtime.tokenizer

    async def _health(self, request: Request) -> Response:
        """200 while passes advance, or nothing is to do; 503 otherwise, and while the server drains."""
        status = self._status()
        return JsonResponse({"status": status}, 200 if status == "ok" else 503)

    def _status(self) -> str:
        passes, now = self.runtime.activity().passes, time.monotonic()
        if passes != self._last_pass[0]:
            self._last_pass = passes, now
        try:
            self._check_works()
            stalled = now - max(self._last_pass[1], self._work_began) if self.runtime.has_work else 0.0
        except (Refusal, RadixrtError) as error:
            return str(error)
        return f"no pass for {stalled:.0f} s" if stalled > self.limits.stalled_seconds else "ok"

    async def _shown(self, request: Request) -> Response:
        """The page, which needs no key: it asks for one, and for `/state` with it."""
        return page()

    async def _state(self, request: Request, tenant: str | None) -> Response:
        return JsonResponse(await self._states.of(tenant), headers={"Cache-Control": "no-store"})

    async def _numbers(self, request: Request, tenant: str | None) -> Response:
        return Response(await self._in_thread(self._metrics.text), media_type=CONTENT_TYPE)


def _told(answering: Answers[A], asked: A, outputs: list[RequestOutput], on_end: OnEnd) -> bytes:
    """The JSON of a whole answer."""
    answer_id, body = answering.body(asked, outputs)
    on_end(answer_id, [output.usage for output in outputs])
    return json_bytes(body)


async def _until_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns. Raises Refusal where the client goes away before."""
    try:
        return await while_connected(request.receive, work)
    except ClientGone:
        raise gone() from None


async def _nothing_is_kept(request: Request, tenant: str | None) -> Response:
    raise Refusal(404, "this server keeps no files: start it with --files-dir FOLDER", "no_files")


async def _unknown(request: Request, error: Any) -> Response:
    known = (
        "/v1/chat/completions, /v1/completions, /v1/models, /v1/score, /v1/files, /v1/batches, /generate, "
        "/tokenize, /detokenize, /health, /metrics, /, /state"
    )
    message = f"{request.method} {request.url.path[:200]} is not known; these are: {known}"
    return refused(Refusal(error.status_code, message, "unknown_url"))
