"""From a request whose answers have ended to its `RequestOutput`."""

from __future__ import annotations

from dataclasses import replace

from radixrt.output import CompletionOutput, FinishReason, RequestOutput
from radixrt.schedule.answer import Answer
from radixrt.text.builder import TextBuilder
from radixrt.text.tokenizer import Tokenizer


def request_output(first: Answer, tokenizer: Tokenizer | None) -> RequestOutput:
    """The output of a request whose answers have all ended; without a tokenizer it has no text."""
    request = first.request
    outputs = [_completion(answer, tokenizer) for answer in first.family]
    # Where it ended before its answers' first tokens were drawn, all have ended so.
    outputs += [replace(outputs[0], index=index) for index in range(len(outputs), request.params.n)]
    return RequestOutput(
        index=request.index,
        id=request.id,
        outputs=tuple(outputs),
        usage=first.usage(),
        timings=first.timings(),
        prompt_ids=request.prompt_ids,
        prompt_logprobs=None if request.params.prompt_logprobs is None else tuple(first.log.prompt_logprobs),
        cause=next((answer.log.cause for answer in first.family if answer.log.cause is not None), None),
    )


def _completion(answer: Answer, tokenizer: Tokenizer | None) -> CompletionOutput:
    reason, matched, stop = answer.log.finish_reason, answer.log.matched, answer.text_stop
    params = answer.request.params
    assert reason is not None  # it has ended
    ids = tuple(answer.output_ids().tolist())
    if isinstance(stop, TextBuilder):
        text = stop.finish()
    elif tokenizer is None:
        text = ""
    else:
        at_stop_token = reason is FinishReason.STOP and isinstance(matched, int)
        text = tokenizer.decode(ids[:-1] if at_stop_token else ids, params.skip_special_tokens)
    if reason is FinishReason.LENGTH and stop is not None and stop.matched:
        reason, matched = FinishReason.STOP, stop.matched  # completed by the last token's rest
    return CompletionOutput(
        index=answer.sample_index,
        text=text,
        token_ids=ids,
        finish_reason=reason,
        matched=matched,
        logprobs=None if params.logprobs is None else tuple(answer.log.logprobs),
        error=answer.log.error,
    )
