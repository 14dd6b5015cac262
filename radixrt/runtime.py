"""`Runtime`: takes prompts and gives outputs. torch is not imported before a model is loaded."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from typing_extensions import Unpack

from radixrt.cache.cache_stats import CacheStats
from radixrt.checks import check_int
from radixrt.config import RuntimeConfig
from radixrt.engine.calls import OutputCall, StreamCall
from radixrt.engine.driver import Driver
from radixrt.engine.live_stream import LiveStream
from radixrt.engine.parts import Parts
from radixrt.engine.session import Session
from radixrt.engine.signals import deferred
from radixrt.errors import ParameterError, PassError, PromptError, RadixrtError
from radixrt.form_spec import FormSpec
from radixrt.frontend.arguments import (
    Call,
    CallOptions,
    Choices,
    Continuation,
    OnError,
    Params,
    Prompt,
    ScoreOptions,
    StreamOptions,
    are_built_soon,
    as_list,
    check_options,
    is_token_ids,
    listed_prompts,
)
from radixrt.output import RequestOutput, ScoreOutput, StreamChunk
from radixrt.request_list import request_list
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.request import Request

if TYPE_CHECKING:
    from rich.console import Console

    from radixrt.batch.options import BatchOptions
    from radixrt.cache.radix_tree import RadixTree
    from radixrt.models.weight_files import WeightSource
    from radixrt.report.batch_report import BatchReport

_Built = tuple[list[RequestOutput], Sequence[Request]]  # of prompts that cannot run, and for those that can
_Init = Callable[["Runtime", RuntimeConfig], None]
P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


def _with_arguments_of(
    config: Callable[P, RuntimeConfig],
) -> Callable[[_Init], Callable[Concatenate[Runtime, P], None]]:
    """Decorates an `__init__` that takes a config: `Runtime` takes the config's fields."""

    def decorated(init: _Init) -> Callable[Concatenate[Runtime, P], None]:
        def __init__(self: Runtime, /, *args: P.args, **options: P.kwargs) -> None:
            init(self, config(*args, **options))

        return __init__

    return decorated


class Runtime:
    """A model with its prefix cache. Use it as a context manager, or call `close`.

        with Runtime() as runtime:
            output = runtime.generate("Mira likes Oslo.\\nQ: Mira likes?\\nA:", SamplingParams(temperature=0))

    Several Runtimes live in one process without knowing of each other. The calling thread does the work. Its
    arguments are the fields of `radixrt.config.RuntimeConfig`, which says what they mean and which it refuses.

    Attributes:
        config, device, tokenizer: of the model; tokenizer is None if it has none.
        context_length: most tokens of a prompt with its answer.
        seed, limits: of the run.
        reuses_prefixes: whether what prompts share is computed once.
        start_up: seconds: "weights", "products" (comparing them; only if deterministic), "memory" (running the
            largest pass, to measure it), "graphs" (capturing the largest), and "total".
        products: if deterministic, a `ProductTable` for each shape of weights: the numbers of rows at which
            torch's product has the right bits, and those at which another one stands in.

    Raises:
        ParameterError: an option does not go with the device, the model or the memory.
        ModelError, TokenizerError: the model cannot be used.
    """

    __signature__ = inspect.signature(RuntimeConfig)  # for `help`

    @_with_arguments_of(RuntimeConfig)
    def __init__(self, config: RuntimeConfig) -> None:
        from radixrt.assembly import assemble  # it takes torch with it

        self._set(assemble(config))

    @classmethod
    def from_parts(cls, parts: Parts) -> Runtime:
        """Make a Runtime of other parts, such as those of `radixrt.planning.simulated`."""
        runtime = cls.__new__(cls)
        runtime._set(parts)
        return runtime

    def _set(self, parts: Parts) -> None:
        self._parts: Parts | None = parts  # None once it is closed
        # Also of one that is dropped. At the process's exit other processes end by themselves.
        self._end_processes = weakref.finalize(self, parts.close)
        self._end_processes.atexit = False
        self._driver = Driver(parts.engine, parts.output_of)
        self._loose = OutputCall("return")  # requests that came through `submit`
        self._calls = itertools.count()  # numbers of the calls that answer prompts
        self._builder = parts.builder
        self._turns: tuple[asyncio.AbstractEventLoop | None, asyncio.Semaphore] = None, asyncio.Semaphore()
        self.config, self.device = parts.builder.config, parts.model.device
        self.tokenizer, self.context_length = parts.builder.tokenizer, parts.builder.context_length
        self.seed, self.limits = parts.config.run_seed, parts.limits
        self.start_up, self.products = parts.start_up, parts.products
        self.reuses_prefixes = parts.config.enable_prefix_cache and not parts.config.force_miss

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of calls that give none: SamplingParams(), or the model's own (`generation_config`)."""
        return self._builder.defaults

    def form_refusal(self, asked: FormSpec) -> str | None:
        """Why answers cannot have a form, or None; from any thread."""
        return self._builder.form_refusal(asked)

    @property
    def parts(self) -> Parts:
        """Its parts, for measurements and tests. Raises RadixrtError if it is closed."""
        if self._parts is None:
            raise RadixrtError("the runtime is closed")
        return self._parts

    # -- prompts in, outputs out ---------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self,
        prompts: Prompt,
        sampling_params: Params = None,
        *,
        progress: bool = False,
        **options: Unpack[CallOptions],
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        *,
        progress: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        *,
        progress: bool = False,
        **options: Unpack[CallOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a prompt with an output, or a list of prompts with a list in their order.

        Calls from several threads run together. Ctrl-C ends the call's requests after the current pass and raises
        KeyboardInterrupt. finish_reason is "error" where the model computed values that are not finite.

        Args:
            prompts: each a string, a list of token ids, a chat, or a dict as vLLM takes, {"prompt": ...} or
                {"prompt_token_ids": ...}. A chat is a list of messages ({"role", "content"}), or a dict of
                "messages" and, as the model's template takes them, "tools", "chat_template_kwargs" and
                "continue_final_message". Many prompts come as a list, or from anything else that yields them: a
                generator, an array, a column of a table.
            sampling_params: one for all prompts, or one each: a SamplingParams or a dict in the spelling of SGLang
                or vLLM; None is SamplingParams().
            tenant: prefixes are shared only between calls of one tenant.
            request_ids: ids of your own for `abort`, each unique among unfinished requests; None: numbers that
                nobody guesses.
            priority: one for all prompts, or one each. Lower ones are served first, equal ones in the order of
                `schedule_policy`. Where memory runs short, the least urgent, and of these the latest, yield.
            on_error: "raise": one bad prompt, or one failed pass, raises. "return": it becomes that output's
                error, and the others run.
            progress: show a bar on stderr.

        Raises:
            PromptError: names every prompt that cannot be run. Nothing is returned then; of a long list of texts,
                which are encoded meanwhile, some may have run.
            ParameterError: sampling_params or request_ids do not go with the prompts, or an id is taken.
            PassError: a pass failed, out of memory for instance. All other requests of the call are ended.
            DeviceLostError: a pass failed, and the device works no more: go on in a new process.
        """
        check_options(options, CallOptions)
        listed, many = listed_prompts(prompts)
        call = Call(next(self._calls), many, **options)
        built = partial(self._late, listed, sampling_params, call)
        outputs = sorted(self._iterate(built, call.on_error, progress), key=attrgetter("index"))
        return outputs if many else outputs[0]

    def generate_iter(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        *,
        progress: bool = False,
        **options: Unpack[CallOptions],
    ) -> Generator[RequestOutput, None, None]:
        """`generate` for a list: yields each output once it is complete. Leaving the loop early ends the rest.

        Of a long list of texts, which are encoded meanwhile, some outputs may come before PromptError is raised.
        """
        check_options(options, CallOptions)

        def outputs() -> Generator[RequestOutput, None, None]:
            listed, _ = listed_prompts(prompts)
            call = Call(next(self._calls), **options)
            yield from self._iterate(partial(self._late, listed, sampling_params, call), call.on_error, progress)

        return outputs()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        stream_interval: int = 1,
        **options: Unpack[StreamOptions],
    ) -> Generator[StreamChunk, None, None]:
        """`generate` for one prompt: yields a chunk of an answer whenever tokens of it have come.

        The last chunk has the whole output. The texts of an answer's chunks join to its text: none holds half a
        character, or the beginning of a stop string. The first comes with its first token, each other one after
        `stream_interval` more, and the last one when it has ended. Leaving the loop early ends the request.
        """
        check_options(options, StreamOptions)

        def chunks() -> Generator[StreamChunk, None, None]:
            number = next(self._calls)
            with self._driver.opened(StreamCall(stream_interval, self.tokenizer)) as call:
                request = self._builder.build_streamed(prompt, sampling_params, number, **options)
                self._driver.submit([request], call)
                while not call.is_over:
                    yield from call.chunks(self._driver.news(call))

        return chunks()

    @overload
    async def async_generate(  # type: ignore[overload-overlap]  # as `generate`
        self, prompts: Prompt, sampling_params: Params = None, **options: Unpack[CallOptions]
    ) -> RequestOutput: ...

    @overload
    async def async_generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]: ...

    async def async_generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        **options: Unpack[CallOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """`generate` for asyncio: the work is done in other threads. Calls run together; a cancelled one ends."""
        check_options(options, CallOptions)
        listed, many = listed_prompts(prompts)
        call = Call(next(self._calls), many, **options)
        outputs = await self._async_outputs(partial(self._late, listed, sampling_params, call), call.on_error)
        outputs.sort(key=attrgetter("index"))
        return outputs if many else outputs[0]

    def async_stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        stream_interval: int = 1,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[StreamChunk, None]:
        """`stream` for asyncio, as `async_generate`."""
        check_options(options, StreamOptions)
        build = partial(self._builder.build_streamed, prompt, sampling_params, next(self._calls), **options)
        return self._async_chunks(lambda: [build()], stream_interval)

    def async_stream_all(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        *,
        tenant: str | None = None,
    ) -> AsyncGenerator[StreamChunk, None]:
        """`async_stream` for a list: chunks of all answers as they come, with the `prompt_index` of each.

        The last chunk of each prompt has its output. Arguments and errors are those of `generate`.
        """
        listed, _ = listed_prompts(prompts)
        return self._async_chunks(self._streamed(listed, sampling_params, tenant), 1)

    @asynccontextmanager
    async def live_stream(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        *,
        tenant: str | None = None,
    ) -> AsyncIterator[LiveStream]:
        """`async_stream_all` for a server of many streams: it takes chunks from a `LiveStream`, also by a function
        that is called with each pass. Leaving the context ends what has not ended. Requests for few token ids are
        made in the loop's thread, as to hand them to another one takes about as long.
        """
        listed, _ = listed_prompts(prompts)
        built = self._streamed(listed, sampling_params, tenant)
        with self._driver.opened(StreamCall(1, self.tokenizer), by_task=True) as call:
            soon = are_built_soon(listed, sampling_params)
            self._driver.submit(built() if soon else await self._in_thread(built), call)
            yield LiveStream(self._driver, call)

    def _streamed(
        self, listed: list[Prompt], sampling_params: Params | Iterable[Params], tenant: str | None
    ) -> Callable[[], list[Request]]:
        call = Call(next(self._calls), streams=True, tenant=tenant)
        return lambda: self._builder.build_all(listed, sampling_params, call)[1]

    async def _async_chunks(
        self, built: Callable[[], list[Request]], interval: int
    ) -> AsyncGenerator[StreamChunk, None]:
        with self._driver.opened(StreamCall(interval, self.tokenizer), by_task=True) as call:
            self._driver.submit(await self._in_thread(built), call)
            while not call.is_over:
                for chunk in call.chunks(await self._driver.async_news(call)):
                    yield chunk

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self, prompts: Iterable[Prompt], continuations: Iterable[Continuation], **options: Unpack[ScoreOptions]
    ) -> list[ScoreOutput]: ...

    @overload
    def score(
        self,
        prompts: Iterable[Prompt],
        continuations: Iterable[Sequence[Continuation]],
        **options: Unpack[ScoreOptions],
    ) -> list[list[ScoreOutput]]: ...

    @overload
    def score(
        self, prompts: Iterable[Prompt], continuations: Iterable[Choices], **options: Unpack[ScoreOptions]
    ) -> list[ScoreOutput | list[ScoreOutput]]: ...

    def score(
        self,
        prompts: Iterable[Prompt],
        continuations: Iterable[Choices],
        *,
        tenant: str | None = None,
        progress: bool = False,
    ) -> list[ScoreOutput] | list[list[ScoreOutput]] | list[ScoreOutput | list[ScoreOutput]]:
        """Score how likely the model finds continuations of prompts; shared contexts are computed once.

        For each prompt a continuation (text after a text prompt, else token ids) gives a ScoreOutput, and a list
        of them (multiple choice) a list. Other arguments and errors are those of `generate`; PassError is raised
        also where the model computed values that are not finite, or a request was aborted.
        """
        listed, choices = as_list(prompts), as_list(continuations)
        requests = self._builder.build_scored(listed, choices, tenant)
        return _scores(self._iterate(lambda: ([], requests), "return", progress), choices)

    @overload
    async def async_score(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self, prompts: Iterable[Prompt], continuations: Iterable[Continuation], *, tenant: str | None = None
    ) -> list[ScoreOutput]: ...

    @overload
    async def async_score(
        self,
        prompts: Iterable[Prompt],
        continuations: Iterable[Sequence[Continuation]],
        *,
        tenant: str | None = None,
    ) -> list[list[ScoreOutput]]: ...

    @overload
    async def async_score(
        self, prompts: Iterable[Prompt], continuations: Iterable[Choices], *, tenant: str | None = None
    ) -> list[ScoreOutput | list[ScoreOutput]]: ...

    async def async_score(
        self, prompts: Iterable[Prompt], continuations: Iterable[Choices], *, tenant: str | None = None
    ) -> list[ScoreOutput] | list[list[ScoreOutput]] | list[ScoreOutput | list[ScoreOutput]]:
        """`score` for asyncio, as `async_generate`."""
        listed, choices = as_list(prompts), as_list(continuations)
        outputs = await self._async_outputs(
            lambda: ([], self._builder.build_scored(listed, choices, tenant)), "return"
        )
        return _scores(outputs, choices)

    def run_batch(
        self, input_path: str | Path, output_path: str | Path, **options: Unpack[BatchOptions]
    ) -> BatchReport:
        """Answer a file of prompts with a file of records, as `radixrt batch` does; "-" is stdin or stdout.

        Finished answers are never lost; the same call resumes a run that was ended. Options are the fields of
        `radixrt.batch.options.BatchConfig`; errors are those that `radixrt.batch.job.Batch` names, of which
        BatchInterrupted is a KeyboardInterrupt with the report.
        """
        from radixrt.batch.job import run_batch  # rich, for its report, takes a tenth of a second to import

        return run_batch(self, input_path, output_path, **options)

    # -- pass by pass --------------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        index: int = 0,
        tenant: str | None = None,
        priority: int = 0,
        yields: bool = False,
        keep: int | None = None,
    ) -> Request:
        """Make a request for `submit`, with the arguments and errors of `generate`.

        `index` comes back in its output, and with the Runtime's seed, but no call's number, gives the request's
        own: it draws what the line of this number of a batch draws. Later prompts begin with its first `keep`
        tokens: the rest leaves the cache when it has ended. None: all of it may be reused. One that `yields` makes
        way for more urgent ones also while it runs: it waits once more, and goes on from what it has computed.
        """
        self._driver.check_open()
        index = check_int("index", index, -1, 2**63 - 1)  # -1: of no list
        if not isinstance(yields, bool):
            raise ParameterError(f"yields is {yields!r}; it must be True or False")
        request = self._builder.build(prompt, sampling_params, index=index, tenant=tenant, priority=priority)
        if keep is None and not yields:  # `replace` takes a while
            return request
        kept = None if keep is None else check_int("keep", keep, 0, 2**31 - 1)
        return replace(request, reusable_len=kept, yields=yields)

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        """Queue requests of `prepare`, best all that are known; with `in_order` they are served in this order."""
        self._driver.submit(requests, self._loose, in_order=in_order)

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one pass. Returns the outputs of those of `submit` that have ended."""
        self._driver.step()
        return list(self._loose.take())

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Requests of `prepare` beside those of all other callers, whose outputs come to this one alone."""
        with self._driver.opened(OutputCall("return")) as call:
            yield Session(self._driver, call)

    def abort(self, request: Request | int | str) -> bool:
        """End a submitted request, given or named, at the next step; from any thread. False if it has ended.

        Raises ParameterError for what is no request and no id.
        """
        own_id = request.id if isinstance(request, Request) else request
        if isinstance(own_id, bool) or not isinstance(own_id, (str, int, np.integer)):
            raise ParameterError(f"a request is {own_id!r}; it must be a Request or its id")
        return self._driver.abort(own_id if isinstance(own_id, str) else int(own_id))

    def abort_all(self) -> int:
        """`abort` every request that has not ended, of all calls. Returns how many these are."""
        return self._driver.abort_all()

    def has_begun(self, request: Request) -> bool:
        """Whether a pass has computed some of a submitted request; True if it has ended."""
        return self._driver.has_begun(request.id)

    def check_whole(self) -> None:
        """Raise what the next pass would if there can be none: DeviceLostError, SchedulerError, or RadixrtError if
        it is closed.
        """
        self._driver.check_whole()

    @property
    def has_work(self) -> bool:
        """Whether submitted requests have not ended."""
        return self._driver.has_work

    @property
    def num_running(self) -> int:
        """Answers that are admitted and have not ended."""
        return self.parts.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet, or wait again after a retraction."""
        return self._driver.num_waiting

    def activity(self) -> Activity:
        """Work and time of all passes up to the end of the last step; from any thread. Two of them subtract."""
        return self.parts.engine.activity

    def capture_graphs(self) -> None:
        """Capture the graphs of all passes that will have one, some seconds' work, while no pass runs.

        By itself a Runtime captures each at the first pass that needs it, which then takes some hundredths of a
        second more. Servers and measurements do so before the first request. From any thread; requests that run go
        on between two graphs. Without graphs, as on a CPU, and again: nothing.
        """
        parts = self.parts

        def capture_next() -> bool:
            parts.engine.start_draws()
            return parts.capture_next()

        are_left = True
        while are_left:
            with deferred():
                are_left = self._driver.between_passes(capture_next)

    # -- the cache, the weights and the end ----------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What answers depend on, but for prompts, parameters, seed and how a GPU rounds, as JSON values: a hash
        of the weights, dtypes, rope.
        """
        return self._driver.while_idle(lambda: self.parts.model.identity())

    def cache_stats(self) -> CacheStats:
        """Token counts since the Runtime was made, and the state of the pool."""
        return self.parts.cache.stats()

    def cached_len(self, prompt_ids: Prompt) -> int:
        """Leading tokens of a prompt that are cached now, in either tier, for requests without a tenant.

        Where layers keep states: up to the last one. Raises PromptError as `generate` does.
        """
        cache = self.parts.cache
        try:
            ids = self._builder.token_ids(prompt_ids)
        except PromptError as error:
            raise type(error)(f"the prompt {error}") from error
        return cache.usable(cache.match(self._builder.namespace(None), ids, len(ids))).length

    def print_tree(self, *, max_nodes: int = 200, console: Console | None = None) -> None:
        """Print the cached prefixes as a tree, the latest used first."""
        from rich.console import Console  # a tenth of a second to import

        from radixrt.cache.tree_view import view_tree

        def show(tokens: NDArray[np.int32]) -> str:
            if self.tokenizer is None:
                return " ".join(map(str, tokens.tolist()))
            return self.tokenizer.decode(tokens, skip_special_tokens=False)

        most = check_int("max_nodes", max_nodes, 1, 2**31 - 1)
        view = self.read_tree(lambda tree: view_tree(tree, show, max_nodes=most))
        (console or Console()).print(view)

    def read_tree(self, read: Callable[[RadixTree], T]) -> T:
        """What `read` returns of the tree of prefixes, after the current pass; from any thread.

        Passes wait for it: it is to be quick, and to change nothing.
        """
        return self._driver.between_passes(lambda: read(self.parts.cache.tree))

    def flush_cache(self) -> int:
        """Forget all prefixes that no running request uses. Returns how many tokens were forgotten."""
        with deferred():
            return self._driver.between_passes(lambda: self.parts.cache.flush())

    def update_weights(self, source: WeightSource) -> None:
        """Load other weights of the same model, after the running requests, and forget all prefixes.

        Args:
            source: a folder or hub id, as a model's; one safetensors file; or tensors by the names that files of
                the model have, on any device, such as a training loop's `state_dict()`. The last two hold all
                tensors of the model, and its config stays.

        Raises ModelError if the source is not a checkpoint of this model; nothing has changed then. Any other
        error, such as that of an unreadable file, leaves weights of both: call this again. But DeviceLostError, if
        a rank is lost, is the end.
        """

        def forget() -> None:
            # Before the first weight changes: whatever fails from then on, nothing that was computed is found.
            with deferred():
                self._builder.weights_version += 1
                self.parts.cache.flush()

        self._driver.while_idle(lambda: self.parts.model.reload(source, before_change=forget))

    def save_cache(self, path: str | Path, *, progress: bool = False) -> int:
        """Write all cached prefixes, of all tenants and tiers, with KV and states to a file for `load_cache`.

        Running requests end first, and new ones wait. The file is safetensors, in a folder that exists. It is
        written beside `path` and renamed when it is whole and durable: `path` always holds the old or the new one.

        Returns how many tokens were saved. Raises CacheFileError if the file cannot be written, or `path` is a
        link or has content that is no kept cache; DeviceLostError if a rank is lost.
        """
        self.check_keeps_a_cache("save_cache")
        saved = self._driver.while_idle(
            lambda: self.parts.model.save_cache(Path(path), self._builder.weights_version, progress=progress)
        )
        return saved.tokens

    def load_cache(self, path: str | Path, *, progress: bool = False) -> int:
        """Load the prefixes of a file that a Runtime of the same weights, dtype and rope wrote with `save_cache`.

        Running requests end first, and new ones wait. Prefixes go to free slots, their states to free ones, the
        last used first, and evict nothing; they are the first to be evicted, to the host if there is a tier. Any
        number of ranks may have saved them.

        Returns how many tokens were loaded; too few slots or states are logged as a warning. Raises CacheFileError
        if the file is missing, cut short or altered, or of another model; nothing of it is used then. Raises
        DeviceLostError if a rank is lost.
        """
        self.check_keeps_a_cache("load_cache")
        loaded = self._driver.while_idle(
            lambda: self.parts.model.load_cache(Path(path), self._builder.weights_version, progress=progress)
        )
        for what, count, left_out in (
            ("tokens", loaded.tokens, loaded.left_out),
            ("states", loaded.states, loaded.left_out_states),
        ):
            if left_out:
                room = "slots" if what == "tokens" else what
                left = f"{left_out:,} are left out for lack of free {room}"
                _log.warning("%s: %s of its %s are loaded, %s", path, f"{count:,}", what, left)
        return loaded.tokens

    def check_keeps_a_cache(self, name: str) -> None:
        """Raise ParameterError where `save_cache` or `load_cache`, by `name`, would."""
        if not self.parts.cache.enabled:
            raise ParameterError(f"{name} needs a prefix cache, but enable_prefix_cache is False")

    def close(self) -> None:
        """End all requests and free the model, from any thread; again: nothing.

        Calls that wait in other threads raise RadixrtError, or return outputs that end with "abort".
        """
        if self._driver.is_forked:
            return  # what it has is its parent's
        self._driver.close()
        parts, self._parts = self._parts, None
        self._end_processes()
        if parts is not None and not parts.engine.is_lost:
            free_device = parts.free_device
            del parts  # what it holds is unused now
            free_device()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------

    def _late(self, prompts: list[Prompt], params: Params | Iterable[Params], call: Call) -> _Built:
        """`RequestBuilder.build_all`, but the requests of a long list are made while the device computes, and its
        texts encoded.
        """
        return request_list(self._builder, prompts, params, call, sorts=self.parts.scheduler.sorts)

    async def _in_thread(self, build: Callable[[], T]) -> T:
        """Run two of a loop's tasks beside it, a long one and short ones; the next waits until the loop looks."""
        loop = asyncio.get_running_loop()
        if self._turns[0] is not loop:
            self._turns = loop, asyncio.Semaphore(2)
        async with self._turns[1]:
            return await asyncio.to_thread(build)

    def _iterate(self, build: Callable[[], _Built], on_error: OnError, progress: bool) -> Iterator[RequestOutput]:
        """Build requests and run them as one call; outputs come as they are complete."""
        with self._driver.opened(OutputCall(on_error)) as call:
            outputs, requests = build()
            yield from outputs
            self._driver.submit(requests, call)
            tokens, count = 0, len(requests)
            del requests  # what they share need not be kept as long as the last of them
            with tqdm(total=count, unit=" requests", disable=not progress, file=sys.stderr) as bar:
                while not call.is_over:
                    for output in self._driver.news(call):
                        if progress:
                            tokens += output.usage.completion_tokens
                            rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                            hits = self.parts.cache.hit_rate
                            bar.set_postfix_str(f"{rate:,.0f} tokens/s, hit rate {hits:.1%}", refresh=False)
                            bar.update()
                        yield output

    async def _async_outputs(self, build: Callable[[], _Built], on_error: OnError) -> list[RequestOutput]:
        """All outputs of a call of a task, in any order."""
        with self._driver.opened(OutputCall(on_error), by_task=True) as call:
            outputs, requests = await self._in_thread(build)
            self._driver.submit(requests, call)
            del requests  # as in `_iterate`
            while not call.is_over:
                outputs += await self._driver.async_news(call)
        return outputs


def _scores(outputs: Iterable[RequestOutput], choices: Sequence[Choices]) -> list[ScoreOutput | list[ScoreOutput]]:
    """Scores of each prompt's continuations, one or a list, from outputs in any order. Raises PassError."""
    scores: list[ScoreOutput | list[ScoreOutput]] = []
    in_order = iter(sorted(outputs, key=attrgetter("index")))
    for place, given in enumerate(choices):
        is_one = isinstance(given, str) or is_token_ids(given)
        own: list[ScoreOutput] = []
        for output in itertools.islice(in_order, 1 if is_one else len(given)):
            if (failure := output.failure) is not None:
                raise PassError(f"prompt {place} cannot be scored: {failure}") from output.cause
            own.append(ScoreOutput.of(output))
        scores.append(own[0] if is_one else own)
    return scores
