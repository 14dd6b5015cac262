"""From a request whose answers have ended to its `RequestOutput`."""

from __future__ import annotations

from dataclasses import replace

from radixrt.output import CompletionOutput, FinishReason, RequestOutput
from radixrt.schedule.request import Request
from radixrt.text.builder import TextBuilder
from radixrt.text.tokenizer import Tokenizer


def request_output(first: Request, tokenizer: Tokenizer | None) -> RequestOutput:
    """The output of a request whose answers have all ended; without a tokenizer it has no text."""
    answers = [_answer(answer, tokenizer) for answer in first.family]
    # Where it ended before its answers' first tokens were drawn, all have ended so.
    answers += [replace(answers[0], index=index) for index in range(len(answers), first.params.n)]
    return RequestOutput(
        index=first.index,
        id=first.id,
        outputs=tuple(answers),
        usage=first.usage(),
        timings=first.timings(),
        prompt_ids=first.prompt_ids,
        prompt_logprobs=None if first.params.prompt_logprobs is None else tuple(first.prompt_logprobs),
        cause=next((answer.cause for answer in first.family if answer.cause is not None), None),
    )


def _answer(request: Request, tokenizer: Tokenizer | None) -> CompletionOutput:
    assert request.finish_reason is not None  # it has ended
    reason, matched, stop = request.finish_reason, request.matched, request.text_stop
    ids = tuple(request.output_ids().tolist())
    if isinstance(stop, TextBuilder):
        text = stop.finish()
    elif tokenizer is None:
        text = ""
    else:
        at_stop_token = reason is FinishReason.STOP and isinstance(matched, int)
        text = tokenizer.decode(ids[:-1] if at_stop_token else ids, request.params.skip_special_tokens)
    if reason is FinishReason.LENGTH and stop is not None and stop.matched:
        reason, matched = FinishReason.STOP, stop.matched  # completed by the last token's rest
    return CompletionOutput(
        index=request.sample_index,
        text=text,
        token_ids=ids,
        finish_reason=reason,
        matched=matched,
        logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
        error=request.error,
    )
