"""`Runtime`: takes prompts and gives outputs. torch is not imported before a model is loaded."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, overload

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from radixrt.cache.prefix_cache import CacheStats
from radixrt.config import RuntimeConfig
from radixrt.engine.calls import OutputCall, StreamCall
from radixrt.engine.driver import Driver
from radixrt.engine.gc_control import old_objects_left_alone
from radixrt.engine.parts import Parts
from radixrt.engine.signals import deferred
from radixrt.engine.tasks import Workshop
from radixrt.errors import ParameterError, PassError, RadixrtError
from radixrt.frontend.request_builder import Continuation, OnError, Params, Prompt, is_token_ids, listed_prompts
from radixrt.output import RequestOutput, ScoreOutput, StreamChunk
from radixrt.schedule.activity import Activity
from radixrt.schedule.request import Request

if TYPE_CHECKING:
    from rich.console import Console
    from typing_extensions import Unpack

    from radixrt.batch.options import BatchOptions
    from radixrt.report.batch_report import BatchReport

_Built = tuple[list[RequestOutput], list[Request]]  # of prompts that cannot run, and for those that can
_Init = Callable[["Runtime", RuntimeConfig], None]
P = ParamSpec("P")

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
    arguments are the fields of `radixrt.config.RuntimeConfig`, which says what they mean.

    Attributes:
        config, device: of the model.
        tokenizer: None if the model has none.
        context_length: most tokens of a prompt with its answer.
        seed: of the run.
        limits: of the KV pool, and of a pass.
        reuses_prefixes: whether what prompts share is computed once.
        start_up: seconds: "weights", "memory" (running the largest pass, to measure it), "graphs", and "total".

    Raises:
        ParameterError: an option is outside its bounds, or does not go with the device or the model.
        ModelError, TokenizerError: the model cannot be used.
    """

    __signature__ = inspect.signature(RuntimeConfig)  # for `help`

    @_with_arguments_of(RuntimeConfig)
    def __init__(self, config: RuntimeConfig) -> None:
        from radixrt.assembly import assemble  # it takes torch and transformers with it

        self._set(assemble(config))

    @classmethod
    def from_parts(cls, parts: Parts) -> Runtime:
        """Make a Runtime of other parts, such as those of `radixrt.planning.simulated`."""
        runtime = cls.__new__(cls)
        runtime._set(parts)
        return runtime

    def _set(self, parts: Parts) -> None:
        self._parts: Parts | None = parts  # None once it is closed
        self._driver = Driver(parts.engine, parts.output_of)
        self._loose = OutputCall()  # requests that came through `submit`
        self._builder, self._workshop = parts.builder, Workshop()
        self.config, self.device = parts.builder.config, parts.model.device
        self.tokenizer, self.context_length = parts.builder.tokenizer, parts.builder.context_length
        self.seed, self.limits, self.start_up = parts.config.seed, parts.limits, parts.start_up
        self.reuses_prefixes = parts.config.enable_prefix_cache and not parts.config.force_miss

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
        prompts: str | Sequence[int] | NDArray[np.integer[Any]] | Sequence[dict[str, Any]],
        sampling_params: Params = None,
        *,
        tenant: str | None = None,
        request_ids: str | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        tenant: str | None = None,
        request_ids: Sequence[str] | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        tenant: str | None = None,
        request_ids: str | Sequence[str] | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one prompt, or a list of prompts, together.

        Ctrl-C ends the call's requests after the current pass and raises KeyboardInterrupt. Calls from several
        threads run together.

        Args:
            prompts: a prompt is a string, a list of token ids, or a list of chat messages ({"role", "content"}).
            sampling_params: one for all prompts, or one each: a SamplingParams or a dict in the spelling of SGLang
                or vLLM; None is SamplingParams().
            tenant: prefixes are shared only between calls of one tenant.
            request_ids: ids of your own for `abort`, each unique among unfinished requests; None: numbers.
            on_error: "raise": one bad prompt, or one failed pass, raises. "return": it becomes that output's
                error, and the others run.
            progress: show a bar on stderr.

        Returns:
            One output for one prompt, a list in the prompts' order for a list. finish_reason is "error" where
            the model computed values that are not finite.

        Raises:
            PromptError: names every prompt that cannot be run; nothing has run then.
            ParameterError: sampling_params or request_ids do not go with the prompts, or an id is taken.
            PassError: a pass failed, out of memory for instance. All other requests of the call are ended.
            DeviceLostError: a pass failed, and the device works no more: go on in a new process.
        """
        listed, many = listed_prompts(prompts)
        built = partial(self._builder.build_all, listed, sampling_params, many, tenant, request_ids, on_error)
        outputs = sorted(self._iterate(built, on_error, progress), key=attrgetter("index"))
        return outputs if many else outputs[0]

    def generate_iter(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        tenant: str | None = None,
        request_ids: Sequence[str] | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> Iterator[RequestOutput]:
        """`generate` for a list: yields each output, with its prompt's `index`, once it is complete. Leaving the
        loop early ends what is left.
        """
        listed, _ = listed_prompts(prompts)
        built = partial(self._builder.build_all, listed, sampling_params, True, tenant, request_ids, on_error)
        yield from self._iterate(built, on_error, progress)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        tenant: str | None = None,
        request_id: str | None = None,
    ) -> Iterator[StreamChunk]:
        """Answer one prompt piece by piece; arguments and errors are those of `generate`, and n must be 1.

        Yields a chunk whenever tokens have come; the last one has the whole output. The chunks' texts join to the
        output's: none holds half a character, or the beginning of a stop string. Leaving the loop early ends the
        request. Streams of several threads advance together.
        """
        request, call = self._builder.build_streamed(prompt, sampling_params, tenant, request_id), StreamCall()
        try:
            self._driver.submit([request], call)
            while not call.is_over:
                for chunk in self._driver.news(call):
                    _check(chunk.output)
                    yield chunk
        finally:
            self._driver.abandon(call)

    async def async_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        tenant: str | None = None,
        request_ids: str | Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> RequestOutput | list[RequestOutput]:
        """`generate` for asyncio. Calls that wait at the same time run together; a cancelled one ends. Threads of
        the event loop's executor build the requests and run the passes.
        """
        listed, many = listed_prompts(prompts)
        built = partial(self._builder.build_all, listed, sampling_params, many, tenant, request_ids, on_error)
        outputs, requests = await self._workshop.run(built)
        call = OutputCall()
        try:
            self._driver.submit(requests, call)
            while not call.is_over:
                for output in await self._driver.async_news(call):
                    _check(output, on_error)
                    outputs.append(output)
        finally:
            self._driver.abandon_soon(call)
        outputs.sort(key=attrgetter("index"))
        return outputs if many else outputs[0]

    async def async_stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        tenant: str | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[StreamChunk]:
        """`stream` for asyncio, with the threads of `async_generate`."""
        built = partial(self._builder.build_streamed, prompt, sampling_params, tenant, request_id)
        request, call = await self._workshop.run(built), StreamCall()
        try:
            self._driver.submit([request], call)
            while not call.is_over:
                for chunk in await self._driver.async_news(call):
                    _check(chunk.output)
                    yield chunk
        finally:
            self._driver.abandon_soon(call)

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Continuation | Sequence[Continuation]],
        *,
        tenant: str | None = None,
        progress: bool = False,
    ) -> list[ScoreOutput | list[ScoreOutput]]:
        """Score how likely the model finds continuations of prompts; shared contexts are computed once.

        Takes for each prompt a continuation (text after a text prompt, else token ids) or a list of them (multiple
        choice), and returns for each prompt a ScoreOutput or a list of them. Other arguments and errors are those
        of `generate`; PassError is raised also where the model computed values that are not finite.
        """
        requests, owners = self._builder.build_scored(prompts, continuations, tenant)
        scores: list[list[ScoreOutput]] = [[] for _ in prompts]
        outputs = sorted(self._run(requests, "return", progress), key=attrgetter("index"))
        for owner, output in zip(owners, outputs, strict=True):
            if output.error is not None:
                raise PassError(f"prompt {owner} cannot be scored: {output.error}") from output.cause
            scores[owner].append(ScoreOutput.of(output))
        return [
            own[0] if isinstance(given, str) or is_token_ids(given) else own
            for own, given in zip(scores, continuations, strict=True)
        ]

    def run_batch(
        self, input_path: str | Path, output_path: str | Path, **options: Unpack[BatchOptions]
    ) -> BatchReport:
        """Answer a file of prompts with a file of records, as `radixrt batch` does; "-" is stdin or stdout.

        Finished answers are never lost; the same call resumes a run that was ended. The options are the fields of
        `radixrt.batch.options.BatchConfig`, such as overwrite, strict and report. The errors are those that
        `radixrt.batch.job.Batch` names; of them BatchInterrupted is a KeyboardInterrupt with the report.
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
        keep: int | None = None,
    ) -> Request:
        """Make a request for `submit`. Arguments and errors are those of `generate`, and these:

        Args:
            index: comes back in its output; with the Runtime's seed it also gives the request's own.
            keep: leading tokens of the prompt that later prompts begin with: the rest leaves the cache when the
                request has ended. None: all of it may be reused.
        """
        self._driver.check_open()
        request = self._builder.build(prompt, sampling_params, index=index, tenant=tenant)
        return replace(request, reusable_len=keep)

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        """Queue requests of `prepare`, best all that are known; with `in_order` they are served in this order."""
        self._driver.submit(requests, self._loose, in_order=in_order)

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one pass. Returns the outputs of those of `submit` that have ended."""
        self._driver.step()
        return self._loose.take()

    def abort(self, request: Request | int | str) -> bool:
        """End a request, given itself or its id, at the next step; from any thread. False if it has ended, or has
        not been submitted.
        """
        own_id = request.id if isinstance(request, Request) else request
        return self._driver.abort(own_id if isinstance(own_id, str) else int(own_id))

    def has_begun(self, request: Request) -> bool:
        """Whether a pass has computed some of a submitted request; True if it has ended."""
        return self._driver.has_begun(request.id)

    @property
    def has_work(self) -> bool:
        """Whether submitted requests have not ended."""
        return self._driver.has_work

    @property
    def num_running(self) -> int:
        """Answers that are admitted and have not ended."""
        return len(self.parts.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet, or wait again after a retraction."""
        return self._driver.num_waiting

    def activity(self) -> Activity:
        """Work and time of all passes, as of the end of the last step; from any thread. `later - earlier` is
        the activity between two calls.
        """
        return self.parts.engine.activity

    # -- the cache, the weights and the end ----------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What answers depend on besides prompts, parameters and seed, as JSON values: a hash of the weights,
        dtypes, rope. Runtimes with equal ones give the same answers, but for how a GPU rounds.
        """
        return self._driver.while_idle(lambda: self.parts.model.identity())

    def cache_stats(self) -> CacheStats:
        """Token counts since the Runtime was made, and the state of the pool."""
        return self.parts.cache.stats()

    def print_tree(self, *, max_nodes: int = 200, console: Console | None = None) -> None:
        """Print the cached prefixes as a tree, the latest used first."""
        from rich.console import Console  # a tenth of a second to import

        from radixrt.cache.tree_view import view_tree

        def show(tokens: NDArray[np.int32]) -> str:
            if self.tokenizer is None:
                return " ".join(map(str, tokens.tolist()))
            return self.tokenizer.decode(tokens, skip_special_tokens=False)

        tree = self.parts.cache.tree
        view = self._driver.between_passes(partial(view_tree, tree, show, max_nodes=max_nodes))
        (console or Console()).print(view)

    def flush_cache(self) -> int:
        """Forget all prefixes that no running request uses. Returns how many tokens were forgotten."""
        with deferred():
            return self._driver.between_passes(lambda: self.parts.cache.flush())

    def update_weights(self, source: str | Path) -> None:
        """Load other weights of the same model, after the running requests, and forget all prefixes.

        Raises:
            ModelError: the source is not a checkpoint of this model; nothing has changed.
            Exception: anything else, such as an unreadable file, leaves weights of both: call this again.
        """

        def forget() -> None:
            # Before the first weight changes: whatever fails from then on, nothing that was computed is found.
            with deferred():
                self._builder.weights_version += 1
                self.parts.cache.flush()

        self._driver.while_idle(lambda: self.parts.model.reload(source, before_change=forget))

    def save_cache(self, path: str | Path, *, progress: bool = False) -> int:
        """Write all cached prefixes, of all tenants and tiers, with their KV to a file that `load_cache` reads.

        Running requests end first, and new ones wait. The file, in a folder that exists, is safetensors. It is
        written beside `path` and renamed when it is whole and durable, so that `path` always holds the old file or
        the new one. With `progress` a bar is shown on stderr.

        Returns how many tokens were saved. Raises CacheFileError if the file cannot be written.
        """
        self._check_keeps_a_cache("save_cache")
        return self._driver.while_idle(
            lambda: self.parts.model.save_cache(Path(path), self._builder.weights_version, progress=progress)
        )

    def load_cache(self, path: str | Path, *, progress: bool = False) -> int:
        """Load the prefixes of a file that a Runtime of the same weights, dtype and rope wrote with `save_cache`.

        Running requests end first, and new ones wait. Prefixes go to free slots, the last used first, and evict
        nothing; they are the first to be evicted, to the host if there is a tier. A warning is logged where there
        are too few slots. With `progress` a bar is shown on stderr.

        Returns how many tokens were loaded. Raises CacheFileError if the file is missing, cut short or altered, or
        of another model, and says how; nothing of it is used then.
        """
        self._check_keeps_a_cache("load_cache")
        loaded, left_out = self._driver.while_idle(
            lambda: self.parts.model.load_cache(Path(path), self._builder.weights_version, progress=progress)
        )
        if left_out:
            shares = f"{loaded:,} of its tokens are loaded, {left_out:,} are left out for lack of free slots"
            _log.warning("%s: %s", path, shares)
        return loaded

    def close(self) -> None:
        """End all requests and free the model, from any thread. A second call does nothing.

        Calls that wait in other threads raise RadixrtError, or return outputs that end with "abort".
        """
        self._driver.close()
        parts, self._parts = self._parts, None
        if parts is not None and not parts.engine.is_lost:
            free_device = parts.free_device
            del parts  # what it holds is unused now
            free_device()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------

    def _check_keeps_a_cache(self, name: str) -> None:
        if not self.parts.cache.enabled:
            raise ParameterError(f"{name} needs a prefix cache, but enable_prefix_cache is False")

    def _iterate(self, built: Callable[[], _Built], on_error: OnError, progress: bool) -> Iterator[RequestOutput]:
        with old_objects_left_alone():
            refused, requests = built()
            yield from refused
            yield from self._run(requests, on_error, progress)

    def _run(self, requests: list[Request], on_error: OnError, progress: bool) -> Iterator[RequestOutput]:
        """Run requests as one call; outputs come as they are complete."""
        call, tokens = OutputCall(), 0
        with tqdm(total=len(requests), unit=" requests", disable=not progress, file=sys.stderr) as bar:
            try:
                self._driver.submit(requests, call)
                while not call.is_over:
                    for output in self._driver.news(call):
                        if progress:
                            tokens += output.usage.completion_tokens
                            rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                            hits = self.parts.cache.hit_rate
                            bar.set_postfix_str(f"{rate:,.0f} tokens/s, hit rate {hits:.1%}", refresh=False)
                            bar.update()
                        _check(output, on_error)
                        yield output
            finally:
                self._driver.abandon(call)


def _check(output: RequestOutput | None, on_error: OnError = "raise") -> None:
    """Raise PassError if there is an output, its pass failed, and errors are to be raised."""
    if output is not None and output.cause is not None and on_error == "raise":
        raise PassError(f"prompt {output.index}: {output.error}") from output.cause
