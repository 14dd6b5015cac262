"""A Runtime without a model: what comes out of a request depends on that request alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from radixrt.cache.prefix_cache import CacheStats
from radixrt.errors import ParameterError, PromptError
from radixrt.limits import RunLimits
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings, Usage
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.text.chat import is_chat
from radixrt.text.tokenizer import Tokenizer

VOCAB_SIZE = 1000
CONTEXT_LENGTH = 50
CAPACITY = 500


@dataclass(eq=False)
class FakeRequest:
    index: int
    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    keep: int | None = None

    @property
    def id(self) -> int:
        return self.index

    @property
    def max_new_tokens(self) -> int:
        return self.params.max_new_tokens


class FakeRuntime:
    """Ends one request a step: the one that `choose` picks among so many. A step is a pass of no time.

    Attributes:
        on_step: called at the beginning of each step.
        on_output: called with each output.
    """

    def __init__(self, choose: Callable[[int], int] = lambda count: 0) -> None:
        self.choose = choose
        self.on_step: Callable[[], None] = lambda: None
        self.on_output: Callable[[RequestOutput], object] = lambda output: None
        self.failing: set[int] = set()  # indices of requests whose run fails
        self.running: list[FakeRequest] = []
        self.aborted: list[FakeRequest] = []
        self.begun: list[FakeRequest] = []
        self.tokenizer: Tokenizer | None = None
        self.seed = 0
        self.limits = RunLimits(pool_tokens=100_000)
        self.reuses_prefixes = True
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
        prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        keep: int | None = None,
    ) -> FakeRequest:
        if is_chat(prompt):
            prompt = "".join(message["content"] for message in prompt)
        try:
            ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        except UnicodeEncodeError as error:
            raise PromptError(f"cannot be encoded: {error}") from None
        if max(ids) >= VOCAB_SIZE:
            raise PromptError(f"holds token id {max(ids)}; the model's are below {VOCAB_SIZE}")
        if len(ids) >= CONTEXT_LENGTH:
            raise PromptError(f"has {len(ids)} tokens; at most {CONTEXT_LENGTH - 1} fit")
        params = sampling_params or SamplingParams()
        if any(token >= VOCAB_SIZE for token in params.stop_token_ids):
            raise ParameterError("stop_token_ids holds an id that the model does not have")
        return FakeRequest(index, np.array(ids, dtype=np.int32), params, keep)

    def submit(self, *requests: FakeRequest, in_order: bool = False) -> None:
        self.running += requests

    def abort(self, request: FakeRequest) -> None:
        self.aborted.append(request)

    def has_begun(self, request: FakeRequest) -> bool:
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
            id=request.index,
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
