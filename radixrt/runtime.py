"""`Runtime`: what users hold. It loads a model, takes prompts and gives outputs."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from tqdm import tqdm

from memory_pool.host_kv_pool import HostKVPool
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.builtin import MODEL_PATH
from radixrt.cache.prefix_cache import CacheStats, PrefixCache
from radixrt.cache.tree_view import view_tree
from radixrt.checks import check_float, check_int
from radixrt.engine.driver import Call, Driver
from radixrt.engine.engine import LAG, Engine
from radixrt.engine.gc_control import old_objects_left_alone
from radixrt.engine.signals import uninterrupted
from radixrt.errors import ParameterError, PassError, PromptError
from radixrt.execution.device import (
    check_impl,
    check_kv_dtype,
    choose_device,
    host_pool_slots,
    pool_slots,
    started_meanwhile,
)
from radixrt.execution.kv_scales import calibrated_scales
from radixrt.execution.memory_budget import PassLimits, measured_pass_memory, room_for_passes
from radixrt.execution.model_runner import ModelRunner
from radixrt.frontend.request_builder import (
    Params,
    Prompt,
    RequestBuilder,
    is_token_ids,
    listed_prompts,
    named_together,
    one_each,
    own_ids,
)
from radixrt.kept_cache.fingerprint import weight_fingerprint
from radixrt.kept_cache.identity import cache_identity
from radixrt.kept_cache.storage import CacheStorage, Loaded
from radixrt.limits import RunLimits
from radixrt.models.loader import LoadFormat, load_model, reload_weights
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, ScoreOutput, StreamChunk
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.answer import Answer
from radixrt.schedule.policy import SchedulePolicy, SchedulerConfig
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from radixrt.text.builder import TextBuilder
from radixrt.text.tokenizer import tokenizer_of
from triton_ops.implementation import Impl, runs_triton
from triton_ops.kv.e4m3 import E4M3

if TYPE_CHECKING:
    from radixrt.report.batch_report import BatchReport

OnError = Literal["raise", "return"]
Continuation = str | Sequence[int]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Defaults:
    """What a Runtime chooses by its kind of device."""

    memory_fraction: float
    max_running_requests: int
    chunked_prefill_size: int


GPU_DEFAULTS = _Defaults(memory_fraction=0.95, max_running_requests=512, chunked_prefill_size=16384)
CPU_DEFAULTS = _Defaults(memory_fraction=0.25, max_running_requests=64, chunked_prefill_size=2048)


class Runtime:
    """A model with its prefix cache. Use it as a context manager, or call `close`.

        with Runtime() as runtime:
            output = runtime.generate("Mira likes Oslo.\\nQ: Mira likes?\\nA:", SamplingParams(temperature=0))

    Several Runtimes live in one process without knowing of each other. The calling thread does the work.

    Args:
        model: folder or hub id of a model in Hugging Face format; None is the small built-in model.
        dtype: "auto" (the checkpoint's; float32 on a CPU), "float32", "bfloat16" or "float16".
        kv_dtype: of keys and values: "auto" (that of the weights), or "fp8": e4m3, 8 bits, so that the pool holds
            twice as many tokens as in 16. It is less precise (docs/architecture.md), and a GPU needs compute
            capability 8.9 for it.
        device: such as "cpu", "cuda" or "cuda:1"; None is CUDA where there is a GPU.
        memory_fraction: share of the free memory which the KV pool takes, above 0, at most 1. On a GPU it is the
            memory that neither weights nor the largest pass and its graphs need, and None is 0.95; on a CPU None
            is 0.25. Several Runtimes on one GPU each want a share of their own here.
        max_total_tokens: tokens that the KV pool holds, whatever is free; None: see memory_fraction.
        host_memory_gb: gigabytes (10^9 bytes) of the host's memory for a second tier of the prefix cache: what
            has to leave the KV pool goes there, and comes back when a prompt begins with it. They are page-locked
            where the device is a GPU. None or 0: what leaves the pool is forgotten.
        max_running_requests: requests that run at once; None is 512 on a GPU and 64 on a CPU.
        context_length: most tokens of a prompt with its answer; None is the model's own, which is the limit too
            unless its rope is made to reach farther (docs/models.md).
        chunked_prefill_size: prompt tokens that one pass computes; longer prompts take several passes. None is
            16384 on a GPU and 2048 on a CPU.
        schedule_policy: "lpm", longest matched prefix first, with ageing; or "fcfs", first come, first served.
        enable_prefix_cache: False: nothing is reused and nothing is kept.
        force_miss: find nothing in the cache, but run through the same code: for measurements.
        overlap: plan a pass while the one before it is computed. False: one after the other, with the same
            outputs: for measurements.
        cuda_graphs: replay passes as captured graphs; None: where kernels run on a GPU.
            Capturing them takes seconds and some memory.
        attention: how requests of a pass read the KV that they share. "tree": once for all of them, wherever that
            is cheaper; that needs the Triton kernels: references, as on a CPU, read it once for each. "flat": each
            request by itself, for comparison.
        load_format: "auto" reads safetensors, "dummy" makes random weights from config.json alone.
        seed: of the run: requests without a seed of their own derive theirs from it and from their index; also
            of dummy weights.
        impl: what computes the model's operations: "triton", kernels; "torch", the references that say what they
            mean; "auto" is kernels on a GPU where Triton is installed, else references.

    Attributes:
        limits: tokens of the KV pool, requests that run at once, and prompt tokens of a pass.
        reuses_prefixes: whether what prompts share is computed once.
        start_up: seconds that making this took: "weights", "memory" (running the largest pass, to know what it
            takes), "graphs", and "total" with all else.

    Raises:
        ParameterError: a parameter is outside its bounds.
        ModelError, TokenizerError: the model cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        kv_dtype: str = "auto",
        device: str | torch.device | None = None,
        memory_fraction: float | None = None,
        max_total_tokens: int | None = None,
        host_memory_gb: float | None = None,
        max_running_requests: int | None = None,
        context_length: int | None = None,
        chunked_prefill_size: int | None = None,
        schedule_policy: str | SchedulePolicy = SchedulePolicy.LPM,
        enable_prefix_cache: bool = True,
        force_miss: bool = False,
        overlap: bool = True,
        cuda_graphs: bool | None = None,
        attention: Literal["tree", "flat"] = "tree",
        load_format: LoadFormat = "auto",
        seed: int = 0,
        impl: Impl = "auto",
    ) -> None:
        began = time.perf_counter()
        self.device = choose_device(device)
        check_impl(impl, self.device)
        runs_kernels = self.device.type == "cuda" and runs_triton(impl, self.device)
        can_capture = runs_kernels and os.environ.get("TRITON_INTERPRET") != "1"
        if cuda_graphs and not can_capture:
            raise ParameterError(
                f"cuda_graphs is True, but only kernels on a GPU can be captured; device is {device!r}"
            )
        if cuda_graphs is None:
            cuda_graphs = can_capture
        if attention not in ("tree", "flat"):
            raise ParameterError(f"attention is {attention!r}; it must be 'tree' or 'flat'")
        tree = attention == "tree"
        check_kv_dtype(kv_dtype, impl, self.device)
        default = GPU_DEFAULTS if self.device.type == "cuda" else CPU_DEFAULTS
        if memory_fraction is None:
            memory_fraction = default.memory_fraction
        if max_running_requests is None:
            max_running_requests = default.max_running_requests
        if chunked_prefill_size is None:
            chunked_prefill_size = default.chunked_prefill_size
        check_float("memory_fraction", memory_fraction, 0.0, 1.0, above=True)
        check_int("max_running_requests", max_running_requests, 1, 2**16)
        check_int("chunked_prefill_size", chunked_prefill_size, 1, 2**20)
        self.seed = check_int("seed", seed, 0, 2**63 - 1)
        try:
            policy = SchedulePolicy(schedule_policy)
        except ValueError:
            known = ", ".join(SchedulePolicy)
            raise ParameterError(f"schedule_policy is {schedule_policy!r}; it must be one of: {known}") from None

        source = MODEL_PATH if model is None else model
        with started_meanwhile(self.device):
            decoder, self.config = load_model(
                source,
                dtype=dtype,
                device=self.device,
                context_length=context_length,
                load_format=load_format,
                seed=self.seed,
                impl=impl,
            )
        weights_seconds = time.perf_counter() - began
        self.tokenizer = tokenizer_of(source)
        self.context_length = self.config.context_length

        weights_dtype = next(decoder.parameters()).dtype
        pool_dtype = E4M3 if kv_dtype == "fp8" else weights_dtype
        if pool_dtype == E4M3 and self.config.head_dim % 2:
            raise ParameterError(f"kv_dtype is 'fp8', which wants an even head_dim; it is {self.config.head_dim}")
        # Before the pool takes what is free: this needs some memory, too.
        scales = calibrated_scales(decoder, self.device) if pool_dtype == E4M3 else None
        shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        bytes_per_slot = TokenToKVPool.bytes_per_slot(*shape, pool_dtype)
        # A request that has ended keeps its row until the passes in flight have ended too: hence some more.
        num_rows = max_running_requests + max_running_requests // 2 + 1
        self._rows = ReqToTokenPool(num_rows, self.context_length)
        limits = PassLimits(max_running_requests, chunked_prefill_size)
        memory_began, promised = time.perf_counter(), 0
        if runs_kernels and max_total_tokens is None:  # references are not for passes of any size
            with room_for_passes():
                promised = measured_pass_memory(
                    decoder, self._rows, limits, pool_dtype, captures=cuda_graphs, tree=tree
                )
        memory_seconds = time.perf_counter() - memory_began
        slots = pool_slots(
            self.device,
            bytes_per_slot,
            memory_fraction=memory_fraction,
            max_total_tokens=max_total_tokens,
            promised=promised,
        )
        self._kv_pool = TokenToKVPool(slots, *shape, dtype=pool_dtype, device=self.device)
        if scales is not None:
            self._kv_pool.set_scales(scales)
        host_pool = None
        on_host = slots * bytes_per_slot if self.device.type == "cpu" else 0
        if host_slots := host_pool_slots(host_memory_gb, bytes_per_slot, promised=on_host):
            if not enable_prefix_cache:
                raise ParameterError(
                    f"host_memory_gb is {host_memory_gb:g} and enable_prefix_cache is False: nothing is kept that "
                    "could go to the host"
                )
            try:
                host_pool = HostKVPool(host_slots, *shape, dtype=self._kv_pool.buffer.dtype, device=self.device)
            except RuntimeError as error:
                raise ParameterError(f"host_memory_gb is {host_memory_gb:g}: {error}") from error
        self._cache = PrefixCache(
            self._rows,
            self._kv_pool.allocator,
            host_slots=None if host_pool is None else host_pool.allocator,
            enabled=enable_prefix_cache,
            force_miss=force_miss,
        )
        self.reuses_prefixes = enable_prefix_cache and not force_miss
        self.limits = RunLimits(slots, max_running_requests, chunked_prefill_size)
        self._scheduler = Scheduler(
            self._cache,
            SchedulerConfig(max_running_requests, chunked_prefill_size, policy, limits.max_samples),
        )
        self._storage = CacheStorage(self._cache, self._kv_pool, host_pool, impl=impl)
        self._fingerprint: str | None = None  # of the weights, once somebody has asked
        self._model = decoder
        self._requests = RequestBuilder(
            self.config,
            self.tokenizer,
            context_length=self.context_length,
            seed=self.seed,
            refusal=self._scheduler.refusal,
        )
        runner = ModelRunner(
            decoder,
            self._rows,
            self._kv_pool,
            self.device,
            host_pool,
            max_captured_batch=max_running_requests if cuda_graphs else 0,
            max_captured_tokens=chunked_prefill_size if cuda_graphs else 0,
            tree=tree,
        )
        graphs_began = time.perf_counter()
        with room_for_passes():
            runner.capture_graphs()
        self._driver = Driver(Engine(self._scheduler, runner, lag=LAG if overlap else 0), self._output)
        self._loose = Call()  # requests that came through `submit`
        ended = time.perf_counter()
        self.start_up: Mapping[str, float] = {
            "weights": weights_seconds,
            "memory": memory_seconds,
            "graphs": ended - graphs_began,
            "total": ended - began,
        }

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
        """Answer one prompt, or a list of prompts, together, in any order; outputs are in the prompts' order.

        Ctrl-C ends all requests of the call after the current pass and raises KeyboardInterrupt. Calls from
        several threads run together.

        Args:
            prompts: a prompt is a string, a list of token ids, or a list of chat messages ({"role", "content"}).
                One gives one output, a list gives a list, and [] gives [].
            sampling_params: one for all prompts, or one each: a SamplingParams or a dict in the spelling of SGLang
                or vLLM; None is SamplingParams().
            tenant: prefixes are shared only between calls of one tenant.
            request_ids: ids of your own for `abort`, one for one prompt, a list for a list. No two requests that
                have not ended may have the same. None: numbers, which only outputs and chunks tell.
            on_error: "raise": one bad prompt, or one failed pass, raises. "return": it becomes that output's
                error, and the others run.
            progress: show a bar on stderr.

        Returns:
            Each request's output. finish_reason is "error" where the model computed values that are not finite.

        Raises:
            PromptError: names every prompt that cannot be run; nothing has run then.
            ParameterError: sampling_params or request_ids do not go with the prompts, or an id is taken.
            PassError: a pass failed, out of memory for instance. All other requests of the call are ended.
            DeviceLostError: a pass failed, and the device works no more: go on in a new process.
        """
        listed, many = listed_prompts(prompts)
        params = one_each(sampling_params, len(listed), many)
        names = own_ids(request_ids, len(listed), many)
        outputs: dict[int, RequestOutput] = {}
        for output in self._iterate(listed, params, names, tenant, on_error, progress):
            outputs[output.index] = output
        in_order = [outputs[index] for index in range(len(listed))]
        return in_order if many else in_order[0]

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
        """As `generate` with a list, but outputs come as they are complete; `index` says which prompt's.

        Leaving the loop early ends what is left.
        """
        listed, _ = listed_prompts(prompts)
        params = one_each(sampling_params, len(listed), True)
        names = own_ids(request_ids, len(listed), True)
        yield from self._iterate(listed, params, names, tenant, on_error, progress)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        tenant: str | None = None,
        request_id: str | None = None,
    ) -> Iterator[StreamChunk]:
        """Answer one prompt piece by piece.

        Yields a chunk whenever tokens have come; the last one has the whole output. The texts of all chunks
        together are the output's text: none holds half a character, or the beginning of a stop string. Leaving
        the loop early ends the request.

        Raises:
            PromptError, ParameterError: the prompt cannot be run, or n is not 1.
            PassError: a pass failed.
        """
        request = self._stream_request(prompt, sampling_params, tenant)
        call = Call(own_ids(request_id, 1, False))
        try:
            (answer,) = self._driver.submit([request], call)
            seen = 0
            while True:
                self._driver.advance(call)
                chunk = self._driver.look(partial(self._chunk, answer, call, seen))
                if chunk is not None:
                    seen += len(chunk.token_ids)
                    yield chunk
                    if chunk.output is not None:
                        return
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
        """`generate` for asyncio. Calls that wait at the same time run together; a cancelled one ends."""
        listed, many = listed_prompts(prompts)
        params, call = one_each(sampling_params, len(listed), many), Call(own_ids(request_ids, len(listed), many))
        outputs, requests = self._built(listed, params, call.names, tenant, on_error)
        try:
            self._driver.submit(requests, call)
            while call.answers or call.ready:
                await asyncio.to_thread(self._driver.advance, call)
                while call.ready:
                    output = self._checked(call.ready.popleft(), on_error)
                    outputs[output.index] = output
        finally:
            self._driver.abandon(call)
        in_order = [outputs[index] for index in range(len(listed))]
        return in_order if many else in_order[0]

    async def async_stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        tenant: str | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[StreamChunk]:
        """`stream` for asyncio."""
        request = self._stream_request(prompt, sampling_params, tenant)
        call = Call(own_ids(request_id, 1, False))
        try:
            (answer,) = self._driver.submit([request], call)
            seen = 0
            while True:
                await asyncio.to_thread(self._driver.advance, call)
                chunk = self._driver.look(partial(self._chunk, answer, call, seen))
                if chunk is not None:
                    seen += len(chunk.token_ids)
                    yield chunk
                    if chunk.output is not None:
                        return
        finally:
            self._driver.abandon(call)

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Continuation | Sequence[Continuation]],
        *,
        tenant: str | None = None,
        progress: bool = False,
    ) -> list[ScoreOutput | list[ScoreOutput]]:
        """How likely the model finds continuations of prompts. Each shared context is computed once.

        Args:
            prompts: what comes before.
            continuations: for each prompt a continuation (text after a text prompt, else token ids), or a list of
                them (multiple choice).

        Returns:
            For each prompt a ScoreOutput, or a list of them.

        Raises:
            PromptError: names every prompt that cannot be scored; nothing has run then.
            PassError: a pass failed, or the model computed values that are not finite.
        """
        for name, given in (("prompts", prompts), ("continuations", continuations)):
            if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
                raise PromptError(f"{name} are a {type(given).__name__}; they must be a list, one for each prompt")
        if len(prompts) != len(continuations):
            raise ParameterError(f"there are {len(continuations)} continuations for {len(prompts)} prompts")
        requests: list[Request] = []
        owners: list[int] = []  # for each request the place of its prompt
        errors: dict[int, Exception] = {}
        for i, (prompt, own) in enumerate(zip(prompts, continuations, strict=True)):
            try:
                for choice in _choices(own):
                    ids, start = self._joined(prompt, choice)
                    params = SamplingParams(max_new_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
                    requests.append(self._requests.build(ids, params, index=len(requests), tenant=tenant))
                    owners.append(i)
            except (PromptError, ParameterError) as error:
                errors[i] = error
        if errors:
            raise named_together(errors, len(prompts))
        scores: list[list[ScoreOutput]] = [[] for _ in prompts]
        for output in sorted(self._drive(requests, Call(), "return", progress), key=lambda output: output.index):
            owner = owners[output.index]
            if output.error is not None:
                raise PassError(f"prompt {owner} cannot be scored: {output.error}") from output.cause
            scores[owner].append(_score(output))
        return [
            own[0] if isinstance(given, str) or is_token_ids(given) else own
            for own, given in zip(scores, continuations, strict=True)
        ]

    def run_batch(self, input_path: str | Path, output_path: str | Path, **options: Any) -> BatchReport:
        """Answer a file of prompts with a file of records, as `radixrt batch` does: nothing of what is finished is
        lost, and the same call goes on where an earlier one was ended.

        Args:
            input_path, output_path: "-" is standard input or output.
            options: those of `radixrt.batch.job.Batch`, such as overwrite, strict, max_error_rate and report.

        Returns:
            The batch's figures.

        Raises:
            BatchFileError, JournalError: a file cannot be used, or the disk failed.
            ParameterError, ErrorRateError, DeviceLostError: as of `radixrt.batch.job.Batch`.
            BatchInterrupted: a KeyboardInterrupt with the report: Ctrl-C or SIGTERM ended it.
        """
        from radixrt.batch.job import run_batch  # rich takes it a tenth of a second

        return run_batch(self, input_path, output_path, **options)

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        index: int = 0,
        tenant: str | None = None,
        keep: int | None = None,
    ) -> Request:
        """Make a request for `submit`.

        Args:
            index: comes back in its output; with the Runtime's seed it also gives the request's own.
            keep: leading tokens of the prompt that are wanted again: when it has ended, the rest of it leaves the
                cache at once. None: all of it may be wanted.

        Raises:
            PromptError: the prompt cannot be run.
            ParameterError: its parameters ask for what this model does not have.
        """
        self._driver.check_open()
        request = self._requests.build(prompt, sampling_params, index=index, tenant=tenant)
        return replace(request, reusable_len=keep)

    def identity(self) -> dict[str, Any]:
        """What answers depend on besides prompts, parameters and seed: a hash of the weights, dtypes, rope and the
        like, as JSON values. Runtimes with equal ones give the same answers, but for how a GPU rounds.
        """
        return self._driver.while_idle(self._identity)

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        """Queue requests that `prepare` has made, best all that are known; `step` advances them.

        `in_order`: they are served first come, first served, as they are given here, whatever the policy.
        """
        self._driver.submit(requests, self._loose, in_order=in_order)

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one pass. Returns what has ended of those from `submit`, failed ones too."""
        self._driver.step()
        ready = list(self._loose.ready)
        self._loose.ready.clear()
        return ready

    def abort(self, request: Request | int | str) -> bool:
        """End a request, given itself or its id, at the next step, from any thread.

        False if it has ended, or has not been submitted yet.
        """
        if isinstance(request, Request):
            return self._driver.abort(request.id)
        return self._driver.abort(request if isinstance(request, str) else int(request))

    def has_begun(self, request: Request) -> bool:
        """Whether a pass has computed some of a request that was submitted and has not ended."""
        return self._driver.has_begun(request.id)

    @property
    def has_work(self) -> bool:
        """Whether submitted requests have not ended."""
        return self._driver.has_work

    @property
    def num_running(self) -> int:
        """Requests that are admitted and have not ended; of n answers to a prompt each is one."""
        self._driver.check_open()
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Submitted requests that are not admitted yet, or wait again after a retraction."""
        self._driver.check_open()
        return len(self._scheduler.waiting)

    def activity(self) -> Activity:
        """What passes have computed since the Runtime was made, and where the time went: on the device in prefill
        and in decode, on the host in scheduling. `later - earlier` is what came between two calls.

        It stands as it was at the end of the last step. Any thread may ask.
        """
        return self._driver.check_open().activity

    # -- the cache, the weights and the end ----------------------------------------------------------------

    def cache_stats(self) -> CacheStats:
        """Token counts since the Runtime was made, and the state of the pool."""
        self._driver.check_open()
        return self._cache.stats()

    def print_tree(self, *, max_nodes: int = 200, console: Console | None = None) -> None:
        """Print the cached prefixes as a tree, the latest used first."""

        def show(tokens: NDArray[np.int32]) -> str:
            if self.tokenizer is None:
                return " ".join(map(str, tokens.tolist()))
            return self.tokenizer.decode(tokens, skip_special_tokens=False)

        view = self._driver.look(partial(view_tree, self._cache.tree, show, max_nodes=max_nodes))
        (console or Console()).print(view)

    def flush_cache(self) -> int:
        """Forget all prefixes that no running request uses. Returns how many tokens were forgotten."""
        with uninterrupted():
            return self._driver.look(self._cache.flush)

    def update_weights(self, source: str | Path) -> None:
        """Take other weights of the same model: running requests end first, and no cached prefix outlives this.

        Raises:
            ModelError: the source is not a checkpoint of this model. Its weights have not changed then.
            Exception: anything else, such as a file that cannot be read to its end, leaves weights of both: call
                this again before anything else.
        """

        def forget() -> None:
            # Before the first weight changes: whatever fails from then on, nothing that was computed is found.
            with uninterrupted():
                self._requests.weights_version += 1
                self._fingerprint = None
                self._cache.flush()

        def swap() -> None:
            reload_weights(self._model, self.config, source, before_change=forget)
            if self._kv_pool.scales is not None:
                # Nothing is cached now, so nothing is read with other scales than it was stored with.
                self._kv_pool.set_scales(calibrated_scales(self._model, self.device))

        self._driver.while_idle(swap)

    def save_cache(self, path: str | Path, *, progress: bool = False) -> int:
        """Write all cached prefixes, of all tenants and tiers, with their KV to a file that `load_cache` reads.

        Running requests end first, and new ones wait. The file is written beside `path` and renamed when it is
        whole and durable: whatever happens, the process being killed included, `path` holds the old file or the
        new one.

        Args:
            path: a safetensors file in a folder that exists; replaced if it is there.
            progress: show a bar on stderr.

        Returns:
            How many tokens were saved.

        Raises:
            CacheFileError: the file cannot be written.
        """
        self._check_keeps_a_cache("save_cache")

        def save() -> int:
            version = self._requests.weights_version
            return self._storage.save(Path(path), version, self._identity(), progress=progress)

        return self._driver.while_idle(save)

    def load_cache(self, path: str | Path, *, progress: bool = False) -> int:
        """Take the prefixes of a file that `save_cache` wrote, so that prompts find them in the cache.

        Running requests end first, and new ones wait. What is cached already stays; the rest goes to free slots,
        what was used last first, and nothing is evicted for it. It is the first to go when slots are wanted, to
        the host if there is a tier. A warning is logged where there are too few.

        Args:
            path: the file. It must have been written by a Runtime with the same weights, dtype and rope.
            progress: show a bar on stderr.

        Returns:
            How many tokens were loaded.

        Raises:
            CacheFileError: there is no such file, it has been cut short or altered, or it is of other weights,
                another dtype or another rope, which the message names. Nothing of it is used then.
        """
        self._check_keeps_a_cache("load_cache")

        def load() -> Loaded:
            version, vocab_size = self._requests.weights_version, self.config.vocab_size
            return self._storage.load(Path(path), version, self._identity(), vocab_size, progress=progress)

        found = self._driver.while_idle(load)
        if found.left_out:
            _log.warning(
                "%s: %s of its tokens are loaded, %s are left out for lack of free slots",
                path,
                f"{found.loaded:,}",
                f"{found.left_out:,}",
            )
        return found.loaded

    def close(self) -> None:
        """End all requests and let go of the model, from any thread. A second call does nothing.

        Calls that wait in other threads raise RadixrtError, or return outputs that end with "abort".
        """
        self._driver.close()
        self.__dict__.pop("_model", None)
        self.__dict__.pop("_kv_pool", None)
        self.__dict__.pop("_storage", None)
        if self.device.type == "cuda" and not self._driver.device_lost:
            gc.collect()  # graphs hold on to their memory
            torch.cuda.empty_cache()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------

    def _check_keeps_a_cache(self, name: str) -> None:
        self._driver.check_open()
        if not self._cache.enabled:
            raise ParameterError(f"{name} needs a prefix cache, but enable_prefix_cache is False")

    def _identity(self) -> dict[str, Any]:
        if self._fingerprint is None:
            self._fingerprint = weight_fingerprint(self._model)
        dtype = next(self._model.parameters()).dtype
        return cache_identity(self.config, self._fingerprint, dtype, self._storage.format, self._kv_pool.scales)

    def _built(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        names: Mapping[int, str],
        tenant: str | None,
        on_error: OnError,
    ) -> tuple[dict[int, RequestOutput], list[Request]]:
        """Outputs of prompts that cannot run (if errors are to be returned), and requests for the others."""
        if on_error not in ("raise", "return"):
            raise ParameterError(f"on_error is {on_error!r}; it must be 'raise' or 'return'")
        built = self._requests.build_all(prompts, params, tenant)
        errors = {i: one for i, one in enumerate(built) if not isinstance(one, Request)}
        if errors and on_error == "raise":
            raise named_together(errors, len(prompts))
        refused = {
            index: RequestOutput.refused(index, f"the prompt {error}", names.get(index, -1))
            for index, error in errors.items()
        }
        return refused, [one for one in built if isinstance(one, Request)]

    def _iterate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        names: Mapping[int, str],
        tenant: str | None,
        on_error: OnError,
        progress: bool,
    ) -> Iterator[RequestOutput]:
        with old_objects_left_alone():
            refused, requests = self._built(prompts, params, names, tenant, on_error)
            yield from refused.values()
            yield from self._drive(requests, Call(names), on_error, progress)

    def _drive(
        self, requests: list[Request], call: Call, on_error: OnError, progress: bool
    ) -> Iterator[RequestOutput]:
        """Run requests as one call; outputs come as they are complete."""
        bar = tqdm(total=len(requests), unit=" requests", disable=not progress, file=sys.stderr)
        with bar:
            try:
                self._driver.submit(requests, call)
                tokens = 0
                while call.answers or call.ready:
                    self._driver.advance(call)
                    while call.ready:
                        output = self._checked(call.ready.popleft(), on_error)
                        if progress:
                            tokens += output.usage.completion_tokens
                            rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                            hits = self._cache.hit_rate
                            bar.set_postfix_str(f"{rate:,.0f} tokens/s, hit rate {hits:.1%}", refresh=False)
                            bar.update()
                        yield output
            finally:
                self._driver.abandon(call)

    def _checked(self, output: RequestOutput, on_error: OnError) -> RequestOutput:
        """The output, unless its pass failed and errors are to be raised."""
        if output.cause is not None and on_error == "raise":
            raise PassError(f"prompt {output.index}: {output.error}") from output.cause
        return output

    def _stream_request(self, prompt: Prompt, sampling_params: Params, tenant: str | None) -> Request:
        try:
            request = self._requests.build(prompt, sampling_params, tenant=tenant, streams=True)
        except PromptError as error:
            raise PromptError(f"the prompt {error}") from error
        if request.params.n != 1:
            raise ParameterError(f"n is {request.params.n}; a stream gives one answer")
        return request

    def _chunk(self, answer: Answer, call: Call, seen: int) -> StreamChunk | None:
        """What has come of a streamed request beyond its first `seen` tokens, if anything has."""
        output = self._checked(call.ready.popleft(), "raise") if call.ready else None
        ids = tuple(answer.output_ids()[seen:].tolist())
        if output is None and not ids:
            return None
        builder = answer.text_stop
        assert isinstance(builder, TextBuilder)  # it streams
        return StreamChunk(builder.delta(), ids, output, call.id_of(answer.request))

    def _joined(self, prompt: Prompt, continuation: Continuation) -> tuple[NDArray[np.int32], int]:
        """Token ids of a prompt with a continuation, and where the continuation begins. Raises PromptError."""
        before = self._requests.token_ids(prompt)
        if isinstance(continuation, str) and isinstance(prompt, str):
            # The border may fall inside a token: what it changes belongs to the continuation.
            joined = self._requests.token_ids(prompt + continuation)
            shared = min(len(before), len(joined))
            differs = np.flatnonzero(before[:shared] != joined[:shared])
            start = int(differs[0]) if len(differs) else shared
        elif is_token_ids(continuation):
            joined = np.concatenate([before, self._requests.token_ids(continuation)])
            start = len(before)
        else:
            raise PromptError("must be text with a text continuation, or have token ids as its continuation")
        if start >= len(joined):
            raise PromptError("has an empty continuation")
        if start == 0:
            raise PromptError("has no token before its continuation")
        return joined, start

    def _output(self, first: Answer) -> RequestOutput:
        """The output of a request whose answers have all ended."""
        request = first.request
        answers = [self._completion(answer) for answer in first.family]
        # Where it ended before its answers' first tokens were drawn, all have ended so.
        answers += [replace(answers[0], index=index) for index in range(len(answers), request.params.n)]
        return RequestOutput(
            index=request.index,
            id=request.id,
            outputs=tuple(answers),
            usage=first.usage(),
            timings=first.timings(),
            prompt_ids=request.prompt_ids,
            prompt_logprobs=None if request.params.prompt_logprobs is None else tuple(first.log.prompt_logprobs),
            cause=next((answer.log.cause for answer in first.family if answer.log.cause is not None), None),
        )

    def _completion(self, answer: Answer) -> CompletionOutput:
        params, text_stop = answer.request.params, answer.text_stop
        reason, matched = answer.log.finish_reason, answer.log.matched
        assert reason is not None  # it has ended
        ids = tuple(answer.output_ids().tolist())
        at_stop_token = reason is FinishReason.STOP and isinstance(matched, int)
        if isinstance(text_stop, TextBuilder):
            text = text_stop.finish()
        elif self.tokenizer is None:
            text = ""
        else:
            text = self.tokenizer.decode(ids[:-1] if at_stop_token else ids, params.skip_special_tokens)
        if reason is FinishReason.LENGTH and text_stop is not None and text_stop.matched:
            reason, matched = FinishReason.STOP, text_stop.matched  # completed by the last token's rest
        return CompletionOutput(
            index=answer.sample_index,
            text=text,
            token_ids=ids,
            finish_reason=reason,
            matched=matched,
            logprobs=None if params.logprobs is None else tuple(answer.log.logprobs),
            error=answer.log.error,
        )


def _choices(own: Continuation | Sequence[Continuation]) -> Sequence[Continuation]:
    """A continuation, or the choices among several, as a list. Raises PromptError if there are none."""
    if isinstance(own, str) or is_token_ids(own):
        return [cast("Continuation", own)]
    if not isinstance(own, Sequence) or isinstance(own, (bytes, Mapping)) or not own:
        raise PromptError("has no continuations: give text, token ids, or a list of these")
    return cast("Sequence[Continuation]", own)


def _score(output: RequestOutput) -> ScoreOutput:
    scored = output.prompt_logprobs or ()
    return ScoreOutput(
        logprob=sum(token.logprob for token in scored),
        is_greedy=all(token.rank == 1 for token in scored),
        tokens=scored,
        usage=output.usage,
    )
