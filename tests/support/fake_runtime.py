"""A Runtime without a model: what comes out of a request depends on that request alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixrt.cache.cache_stats import CacheStats
from radixrt.errors import PromptError
from radixrt.frontend.arguments import Prompt
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.limits import RunLimits
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings, Usage
from radixrt.planning.simulated import NoWeights
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.request import Request
from radixrt.text.chat import Chat, is_chat
from radixrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from layers.products import ProductTable  # imports torch

VOCAB_SIZE = 1000
CONTEXT_LENGTH = 50
CAPACITY = 500


class BytesBuilder(RequestBuilder):
    """Text is its bytes in UTF-8."""

    def token_ids(self, prompt: Prompt, *, is_cut: bool = False) -> npt.NDArray[np.int32]:
        if is_chat(prompt):
            prompt = "".join(message["content"] for message in Chat.of(prompt).messages)
        if isinstance(prompt, str):
            try:
                prompt = list(prompt.encode())
            except UnicodeEncodeError as error:
                raise PromptError(f"cannot be encoded: {error}") from None
        return super().token_ids(prompt, is_cut=is_cut)


class FakeRuntime:
    """Ends one request a step: the one that `choose` picks among so many. A step is a pass of no time.

    Attributes:
        on_step: called at the beginning of each step.
        on_output: called with each output.
    """

    default_params = SamplingParams()

    def __init__(self, choose: Callable[[int], int] = lambda count: 0) -> None:
        self.choose = choose
        self.on_step: Callable[[], None] = lambda: None
        self.on_output: Callable[[RequestOutput], object] = lambda output: None
        self.failing: set[int] = set()  # indices of requests whose run fails
        self.running: list[Request] = []
        self.aborted: list[Request] = []
        self.begun: list[Request] = []
        self.builder = BytesBuilder(
            NoWeights(VOCAB_SIZE).config, None, context_length=CONTEXT_LENGTH, seed=0, refusal=lambda request: None
        )
        self.tokenizer: Tokenizer | None = None
        self.context_length = CONTEXT_LENGTH
        self.seed = 0
        self.limits = RunLimits(pool_tokens=100_000)
        self.reuses_prefixes = True
        self.products: tuple[ProductTable, ...] = ()
        self.weights = "those"
        self.passed = Activity()
        self.prompt_tokens = self.cached_tokens = 0

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    @property
    def num_running(self) -> int:
        return min(1, len(self.running))

    @property
    def num_waiting(self) -> int:
        return len(self.running) - self.num_running

    def activity(self) -> Activity:
        return self.passed

    def cache_stats(self) -> CacheStats:
        cached = min(CAPACITY, self.prompt_tokens)
        return CacheStats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=0,
            evicted_tokens=0,
            capacity=CAPACITY,
            free=CAPACITY - cached,
            evictable=cached,
            locked=0,
            private=0,
            pending=0,
            arriving=0,
        )

    def identity(self) -> dict[str, str]:
        return {"weights": self.weights}

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        keep: int | None = None,
    ) -> Request:
        request = self.builder.build(prompt, sampling_params, index=index)
        return replace(request, reusable_len=keep)

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        self.running += requests

    def abort(self, request: Request) -> None:
        self.aborted.append(request)

    def cached_len(self, prompt_ids: npt.NDArray[np.int32]) -> int:
        return 0

    def has_begun(self, request: Request) -> bool:
        return request in self.begun

    def step(self) -> list[RequestOutput]:
        self.on_step()
        if self.aborted:
            self.running = [request for request in self.running if request not in self.aborted]
            self.aborted = []
            return []
        request = self.running.pop(self.choose(len(self.running)))
        failed = request.index in self.failing
        ids = (int(request.prompt_ids.sum()), request.params.max_new_tokens)
        cached = len(request.prompt_ids) // 2
        computed = len(request.prompt_ids) - cached
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += cached
        self.passed = replace(
            self.passed,
            passes=self.passed.passes + 1,
            extend_passes=self.passed.extend_passes + 1,
            extended_tokens=self.passed.extended_tokens + computed,
            decoded_tokens=self.passed.decoded_tokens + len(ids),
        )
        output = RequestOutput(
            index=request.index,
            id=request.id,
            outputs=(
                CompletionOutput(
                    index=0,
                    text=f"{ids[0]} é\u2028",
                    token_ids=ids,
                    finish_reason=FinishReason.ERROR if failed else FinishReason.LENGTH,
                    error="the pass failed" if failed else None,
                ),
            ),
            usage=Usage(len(request.prompt_ids), cached, computed, len(ids)),
            timings=Timings(queue=0.25, first_token=None if failed else 0.5, total=1.0),
            prompt_ids=request.prompt_ids,
        )
        self.on_output(output)
        return [output]
