"""`Parts`: what a `Runtime` is made of; and the `RequestOutput` of answers that have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.snapshot import Loaded, Saved
from radixrt.config import RuntimeConfig
from radixrt.engine.engine import Engine
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.limits import RunLimits
from radixrt.output import CompletionOutput, FinishReason, RequestOutput
from radixrt.schedule.answer import Answer
from radixrt.schedule.scheduler import Scheduler
from radixrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from layers.products import ProductTable
    from radixrt.models.weight_files import WeightSource


class ServedModel(Protocol):
    """A model on its device, with all that does not concern its passes: the methods of `Runtime` of these names.

    `reload` calls `before_change` before the first weight changes.
    """

    @property
    def device(self) -> torch.device: ...
    def identity(self) -> dict[str, Any]: ...
    def reload(self, source: WeightSource, *, before_change: Callable[[], None]) -> None: ...
    def save_cache(self, path: Path, weights_version: int, *, progress: bool) -> Saved: ...
    def load_cache(self, path: Path, weights_version: int, *, progress: bool) -> Loaded: ...


@dataclass(frozen=True)
class Parts:
    """What a Runtime is made of: `assemble` makes it for a model, `simulated_parts` for another runner."""

    config: RuntimeConfig
    limits: RunLimits
    engine: Engine
    builder: RequestBuilder
    model: ServedModel
    output_of: Callable[[Answer], RequestOutput]  # of the first answer to a prompt, once all have ended
    start_up: Mapping[str, float] = field(default_factory=dict)  # seconds, as in Runtime
    products: tuple[ProductTable, ...] = ()  # of a deterministic model
    # Captures more graphs, between passes whose draws have begun; False: none are left. As in ModelRunner.
    capture_next: Callable[[], bool] = lambda: False
    free_device: Callable[[], None] = lambda: None  # gives unused memory back to the device
    close: Callable[[], None] = lambda: None  # ends other processes of the model

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def cache(self) -> PrefixCache:
        return self.engine.scheduler.cache


def request_output(first: Answer, tokenizer: Tokenizer | None) -> RequestOutput:
    """The output of a request whose answers have all ended; without a tokenizer it has no text."""
    request, cause = first.request, first.log.cause
    outputs = [_completion(first, tokenizer)]
    for answer in first.children:
        outputs.append(_completion(answer, tokenizer))
        cause = answer.log.cause if cause is None else cause
    # Where it ended before its answers' first tokens were drawn, all have ended so.
    for nth in range(len(outputs), request.params.n):
        outputs.append(replace(outputs[0], index=request.first_answer + nth))
    return RequestOutput(
        index=request.index,
        id=request.id,
        outputs=tuple(outputs),
        usage=first.usage(),
        timings=first.timings(),
        prompt_ids=request.prompt_ids,
        prompt_logprobs=None if request.params.prompt_logprobs is None else tuple(first.log.prompt_logprobs),
        cause=cause,
    )


def _completion(answer: Answer, tokenizer: Tokenizer | None) -> CompletionOutput:
    params = answer.request.params
    ids = tuple(answer.output_ids().tolist())
    text = "" if answer.text is None else answer.text.finish()
    reason, matched = answer.ending()
    assert reason is not None  # it has ended
    if answer.text is None and tokenizer is not None and params.detokenize:
        at_stop_token = reason is FinishReason.STOP and isinstance(matched, int)
        leaves_out = at_stop_token and not params.include_stop_str
        text = tokenizer.decode(ids[:-1] if leaves_out else ids, params.skip_special_tokens)
    return CompletionOutput(
        index=answer.sample_index,
        text=text,
        token_ids=ids,
        finish_reason=reason,
        matched=matched,
        logprobs=None if params.logprobs is None else tuple(answer.log.logprobs),
        error=answer.log.error,
    )
