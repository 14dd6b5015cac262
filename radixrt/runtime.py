"""`Runtime`: what users hold. It loads a model, takes prompts and gives outputs."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.bounds import real, whole
from radixrt.builtin import MODEL_PATH
from radixrt.cache.prefix_cache import CacheStats, PrefixCache
from radixrt.cache.radix_tree import Namespace
from radixrt.engine import Engine
from radixrt.errors import ParameterError, PassError, PromptError, RadixrtError, TokenizerError
from radixrt.execution.device import choose_device, pool_slots
from radixrt.execution.model_runner import ModelRunner
from radixrt.interrupt import first_interrupt
from radixrt.models.loader import LoadFormat, load_model
from radixrt.output import FinishReason, RequestOutput
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.policy import SchedulePolicy
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from radixrt.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
_NAMED = 8  # bad prompts that one error spells out


@dataclass(frozen=True)
class _Defaults:
    """What a Runtime chooses by its kind of device."""

    memory_fraction: float
    max_running_requests: int
    chunked_prefill_size: int


GPU_DEFAULTS = _Defaults(memory_fraction=0.85, max_running_requests=512, chunked_prefill_size=8192)
CPU_DEFAULTS = _Defaults(memory_fraction=0.25, max_running_requests=64, chunked_prefill_size=2048)


class Runtime:
    """A model with its prefix cache. Use it as a context manager, or call `close`.

        with Runtime() as runtime:
            output = runtime.generate("Mira likes Oslo.\\nQ: Mira likes?\\nA:", SamplingParams(temperature=0))

    Several Runtimes live in one process without knowing of each other. The calling thread does the work.

    Args:
        model: folder or hub id of a model in Hugging Face format; None is the small built-in model.
        dtype: "auto" (the checkpoint's; float32 on a CPU), "float32", "bfloat16" or "float16".
        device: such as "cpu", "cuda" or "cuda:1"; None is CUDA where there is a GPU.
        memory_fraction: share of the memory that is free after the weights are loaded which the KV pool takes,
            above 0, at most 1; None is 0.85 on a GPU and 0.25 of the machine's memory on a CPU.
        max_total_tokens: tokens that the KV pool holds, whatever is free; None: see memory_fraction.
        max_running_requests: requests that run at once; None is 512 on a GPU and 64 on a CPU.
        context_length: most tokens of a prompt with its answer; None is the model's own, which is the limit too
            unless its rope is made to reach farther (docs/models.md).
        chunked_prefill_size: prompt tokens that one pass computes; longer prompts take several passes. None is
            8192 on a GPU and 2048 on a CPU.
        schedule_policy: "lpm", longest matched prefix first, with ageing; or "fcfs", first come, first served.
        enable_prefix_cache: False: nothing is reused and nothing is kept.
        force_miss: find nothing in the cache, but run through the same code: for measurements.
        load_format: "auto" reads safetensors, "dummy" makes random weights from config.json alone.
        seed: of the run: requests without a seed of their own derive theirs from it and from their index; also
            of dummy weights.

    Raises:
        ParameterError: a parameter is outside its bounds.
        ModelError, TokenizerError: the model cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        memory_fraction: float | None = None,
        max_total_tokens: int | None = None,
        max_running_requests: int | None = None,
        context_length: int | None = None,
        chunked_prefill_size: int | None = None,
        schedule_policy: str | SchedulePolicy = SchedulePolicy.LPM,
        enable_prefix_cache: bool = True,
        force_miss: bool = False,
        load_format: LoadFormat = "auto",
        seed: int = 0,
    ) -> None:
        self.device = choose_device(device)
        default = GPU_DEFAULTS if self.device.type == "cuda" else CPU_DEFAULTS
        if memory_fraction is None:
            memory_fraction = default.memory_fraction
        if max_running_requests is None:
            max_running_requests = default.max_running_requests
        if chunked_prefill_size is None:
            chunked_prefill_size = default.chunked_prefill_size
        real("memory_fraction", memory_fraction, 0.0, 1.0, above=True)
        whole("max_running_requests", max_running_requests, 1, 2**16)
        whole("chunked_prefill_size", chunked_prefill_size, 1, 2**20)
        self.seed = whole("seed", seed, 0, 2**63 - 1)
        try:
            policy = SchedulePolicy(schedule_policy)
        except ValueError:
            known = ", ".join(SchedulePolicy)
            raise ParameterError(f"schedule_policy is {schedule_policy!r}; it must be one of: {known}") from None

        source = MODEL_PATH if model is None else model
        decoder, self.config = load_model(
            source,
            dtype=dtype,
            device=self.device,
            context_length=context_length,
            load_format=load_format,
            seed=self.seed,
        )
        self.tokenizer = _tokenizer(source)
        self.context_length = self.config.context_length

        weights_dtype = next(decoder.parameters()).dtype
        shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        slots = pool_slots(
            self.device,
            TokenToKVPool.bytes_per_slot(*shape, weights_dtype),
            memory_fraction=memory_fraction,
            max_total_tokens=max_total_tokens,
        )
        # A request that has ended keeps its row until the passes in flight have ended too: hence some more.
        num_rows = max_running_requests + max_running_requests // 4 + 1
        self._rows = ReqToTokenPool(num_rows, self.context_length)
        self._kv_pool = TokenToKVPool(slots, *shape, dtype=weights_dtype, device=self.device)
        self._cache = PrefixCache(
            self._rows, self._kv_pool.allocator, enabled=enable_prefix_cache, force_miss=force_miss
        )
        self._scheduler = Scheduler(
            self._cache,
            max_running_requests=max_running_requests,
            chunked_prefill_size=chunked_prefill_size,
            policy=policy,
        )
        self._engine: Engine | None = Engine(
            self._scheduler, ModelRunner(decoder, self._rows, self._kv_pool, self.device)
        )
        self._lock = threading.Lock()  # one call of generate at a time

    # -- prompts in, outputs out ---------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self,
        prompts: str,
        sampling_params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        progress: bool = False,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tenant: str | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[int] | NDArray[np.integer[Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        progress: bool = False,
    ) -> RequestOutput: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tenant: str | None = None,
        progress: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one prompt, or a list of prompts, together, in any order; outputs are in the prompts' order.

        Ctrl-C ends all requests of the call after the current pass and raises KeyboardInterrupt.

        Args:
            prompts: a prompt is a string or a list of token ids. One gives one output, a list gives a list, and
                [] gives [].
            sampling_params: one for all prompts, or one each; None is SamplingParams().
            tenant: prefixes are shared only between calls of one tenant.
            progress: show a bar on stderr.

        Returns:
            Each request's output. finish_reason is "error" where the model computed values that are not finite.

        Raises:
            PromptError: names every prompt that cannot be run; nothing has run then.
            PassError: a pass failed, out of memory for instance. All other requests of the call are ended.
        """
        many = not isinstance(prompts, (str, np.ndarray)) and not _is_token_ids(prompts)
        listed: Sequence[Prompt] = prompts if many else [prompts]  # type: ignore[list-item, assignment]
        params = _one_each(sampling_params, len(listed), many)
        with self._lock:
            engine = self._open()
            if engine.has_work:
                raise RadixrtError("the runtime has other requests; finish them with step() first")
            requests = self._prepare_all(listed, params, tenant)
            outputs = self._run(requests, progress)
        return outputs if many else outputs[0]

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        tenant: str | None = None,
    ) -> Request:
        """Make a request for `submit`.

        Args:
            index: comes back in its output; with the Runtime's seed it also gives the request's own.

        Raises:
            PromptError: the prompt cannot be run.
            ParameterError: its parameters ask for what this model does not have.
        """
        self._open()
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"sampling_params is {params!r}; it must be a SamplingParams")
        unknown = [i for i in params.stop_token_ids if i >= self.config.vocab_size]
        if unknown:
            raise ParameterError(
                f"stop_token_ids holds {unknown[0]}; the model's ids are below {self.config.vocab_size}"
            )
        ids = self._token_ids(prompt)
        if len(ids) >= self.context_length:
            raise PromptError(
                f"has {len(ids)} tokens; with a context of {self.context_length} it may have at most "
                f"{self.context_length - 1}"
            )
        request = Request(
            index=index,
            prompt_ids=ids,
            params=params,
            max_new_tokens=min(params.max_new_tokens, self.context_length - len(ids)),
            seed=_derived_seed(self.seed, index) if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_token_ids)
            | frozenset(() if params.ignore_eos else self.config.eos_token_ids),
            namespace=Namespace(tenant=tenant),
        )
        refusal = self._scheduler.refusal(request)
        if refusal is not None:
            raise PromptError(refusal)
        return request

    def submit(self, request: Request) -> None:
        """Queue a request that `prepare` has made; `step` advances it."""
        self._open().submit(request)

    def step(self) -> list[RequestOutput]:
        """Advance all requests by one pass. Returns the outputs of those that have ended, failed ones too."""
        return [self._output(request) for request in self._open().step()]

    def abort(self, request: Request) -> None:
        """End a request at the next step. May be called from any thread, and for a request that has ended."""
        self._open().abort(request)

    @property
    def has_work(self) -> bool:
        """Whether submitted requests have not ended."""
        return self._open().has_work

    # -- the cache and the end -----------------------------------------------------------------------------

    def cache_stats(self) -> CacheStats:
        """Token counts since the Runtime was made, and the state of the pool."""
        self._open()
        return self._cache.stats()

    def flush_cache(self) -> int:
        """Forget all prefixes that no running request uses. Returns how many tokens were forgotten."""
        self._open()
        return self._cache.flush()

    def close(self) -> None:
        """Free the model and the pools. The Runtime cannot be used any more; a second call does nothing."""
        if self._engine is None:
            return
        self._engine = None
        del self._scheduler, self._cache, self._kv_pool, self._rows
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------

    def _open(self) -> Engine:
        if self._engine is None:
            raise RadixrtError("the runtime is closed")
        return self._engine

    def _token_ids(self, prompt: Prompt) -> NDArray[np.int32]:
        """The prompt as int32 `[n >= 1]`, every id inside the model's vocabulary."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError("is text, but the model's folder has no tokenizer: give token ids")
            try:
                ids: NDArray[Any] = self.tokenizer.encode(prompt)
            except TokenizerError as error:
                raise PromptError(f"cannot be encoded: {error}") from error
        elif _is_token_ids(prompt):
            ids = np.array([int(i) for i in prompt], dtype=np.object_)  # whole numbers of any size
        else:
            raise PromptError("is neither a string nor a list of token ids")
        if len(ids) == 0:
            raise PromptError("is empty: it has no tokens")
        outside = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if len(outside):
            raise PromptError(
                f"holds token id {outside[0]}; the model's ids are 0 to {self.config.vocab_size - 1}"
            )
        return ids.astype(np.int32)

    def _prepare_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], tenant: str | None
    ) -> list[Request]:
        requests, bad = [], []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.prepare(prompt, own, index=index, tenant=tenant))
            except (PromptError, ParameterError) as error:
                bad.append(f"prompt {index} {error}")
        if bad:
            more = f"\n... and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            listed = "\n".join(bad[:_NAMED])
            raise PromptError(f"{len(bad)} of {len(prompts)} prompts cannot be run:\n{listed}{more}")
        return requests

    def _run(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        engine = self._open()
        outputs: dict[int, RequestOutput] = {}
        bar = tqdm(total=len(requests), unit=" requests", disable=not progress, file=sys.stderr)
        try:
            with bar, first_interrupt() as interrupted:
                for request in requests:
                    engine.submit(request)
                tokens = 0
                while engine.has_work:
                    for request in engine.step():
                        if request.cause is not None:
                            raise PassError(f"prompt {request.index}: {request.error}") from request.cause
                        outputs[request.index] = self._output(request)
                        tokens += request.num_output
                        bar.update()
                        bar.set_postfix_str(
                            f"{tokens / max(bar.format_dict['elapsed'], 1e-9):,.0f} tokens/s, "
                            f"hit rate {self._cache.stats().hit_rate:.1%}",
                            refresh=False,
                        )
                    if interrupted.is_set():
                        raise KeyboardInterrupt
        finally:
            for request in requests:
                if not request.finished:
                    engine.abort(request)
            while engine.has_work:  # nothing of this call stays behind
                engine.step()
        return [outputs[index] for index in range(len(requests))]

    def _output(self, request: Request) -> RequestOutput:
        assert request.finish_reason is not None  # it has ended
        ids = tuple(request.output_ids().tolist())
        shown = ids[:-1] if request.finish_reason is FinishReason.STOP else ids
        return RequestOutput(
            index=request.index,
            text="" if self.tokenizer is None else self.tokenizer.decode(shown),
            token_ids=ids,
            finish_reason=request.finish_reason,
            usage=request.usage(),
            timings=request.timings(),
            error=request.error,
        )


def _is_token_ids(prompt: object) -> bool:
    """Whether a value is one prompt of token ids; an empty list is not: it is no prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer)
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in prompt)
    )


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, many: bool
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not many or isinstance(params, str) or not isinstance(params, Sequence):
        raise ParameterError(f"sampling_params is {params!r}; it must be a SamplingParams, or a list of one each")
    if len(params) != count:
        raise ParameterError(f"there are {len(params)} sampling_params for {count} prompts; give one, or one each")
    return params


def _derived_seed(run_seed: int, index: int) -> int:
    """A request's own seed: 63 bits that differ for every run seed and index."""
    digest = hashlib.blake2b(f"{run_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _tokenizer(source: str | Path) -> Tokenizer | None:
    """The model's tokenizer; None for a folder without any: its prompts are token ids."""
    folder = Path(source)
    if folder.is_dir() and not any(list(folder.glob(name)) for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer(source)
