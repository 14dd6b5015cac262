"""What a group and its replicas tell each other, as messages and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from radixrt import errors
from radixrt.batch.scan import parameters_as_json
from radixrt.cache.cache_stats import CacheStats
from radixrt.cache.radix_tree import common_prefix
from radixrt.errors import PassError
from radixrt.frontend.arguments import about
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings, TokenLogprob, Usage
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.request import Request
from radixrt.workers.channel import Message


class Prepares(Protocol):
    """What makes requests of prompts: a `Runtime`."""

    def prepare(self, prompt: Any, sampling_params: SamplingParams | None = None, *, index: int) -> Request: ...


def requests_message(requests: Sequence[Request]) -> Message:
    """Requests for a replica, without what it knows itself. Equal parameters are sent once, and so are the leading
    tokens that a prompt shares with the one before it.
    """
    by_identity: dict[int, int] = {}  # often all are the same, and to hash them takes long
    by_value: dict[SamplingParams, int] = {}
    params: list[dict[str, Any]] = []
    listed, own = [], [np.zeros(0, np.int32)]
    before = own[0]
    for request in requests:
        if (nth := by_identity.get(id(request.params))) is None:
            nth = by_identity[id(request.params)] = by_value.setdefault(request.params, len(params))
            if nth == len(params):
                params.append(parameters_as_json(request.params))
        most = min(len(before), request.prompt_len)
        shared = common_prefix(before[:most], request.prompt_ids[:most]) if most else 0
        before = request.prompt_ids
        own.append(before[shared:])
        listed.append(
            [
                request.id,
                request.index,
                shared,
                request.prompt_len - shared,
                nth,
                request.seed,
                request.reusable_len,
                request.priority,
                request.first_answer,
            ]
        )
    return Message({"run": listed, "params": params}, np.concatenate(own))


def requests_of(message: Message, runtime: Prepares) -> Iterator[Request | RequestOutput]:
    """The requests of such a message; an output in place of one that this runtime cannot run."""
    params = [SamplingParams(**given) for given in message.body["params"]]
    begin, ids = 0, message.numbers[:0]
    for own_id, index, shared, length, nth, seed, keep, priority, first_answer in message.body["run"]:
        own, begin = message.numbers[begin : begin + length], begin + length
        ids = np.concatenate([ids[:shared], own]) if shared else own
        try:
            request = runtime.prepare(ids, params[nth], index=index)
        except (errors.PromptError, errors.ParameterError) as error:
            yield RequestOutput.refused(index, about("the prompt", error), own_id)
        else:
            yield replace(
                request,
                id=own_id,
                seed=seed,
                priority=priority,
                first_answer=first_answer,
                reusable_len=keep,
            )


class Ended(NamedTuple):
    """An output from a replica, without its prompt."""

    id: int | str
    answers: list[list[Any]]
    token_ids: list[tuple[int, ...]]  # of each answer
    usage: Usage
    timings: Timings
    prompt_logprobs: list[list[Any]] | None
    cause: str | None


def ended_message(outputs: Sequence[RequestOutput], others: Mapping[str, Any]) -> Message:
    """Outputs without their prompts, which the group has, and other JSON values. Numbers of each output, and token
    ids, are no JSON: it takes longer to write and to read.
    """
    timings = np.array([_values(output.timings) for output in outputs], "<f8")  # None is not a number
    usages = np.array([_values(output.usage) for output in outputs], np.int32)
    ids = [token for output in outputs for answer in output.outputs for token in answer.token_ids]
    numbers = np.concatenate([timings.ravel().view("<i4"), usages.ravel(), np.array(ids, np.int32)])
    return Message({"ended": list(map(_output_as_json, outputs)), **others}, numbers.astype(np.int32, copy=False))


def ended_of(message: Message) -> Iterator[Ended]:
    """The outputs of such a message."""
    listed, numbers = message.body["ended"], message.numbers
    bits, counts, ids = np.split(numbers, [6 * len(listed), 11 * len(listed)])
    seconds = bits.astype("<i4", copy=False).view("<f8").reshape(-1, 3).tolist()
    usages, tokens, at = counts.reshape(-1, 5).tolist(), ids.tolist(), 0
    for (own_id, answers, *others), (queue, first, total), usage in zip(listed, seconds, usages, strict=True):
        token_ids: list[tuple[int, ...]] = []
        for answer in answers:
            token_ids.append(tuple(tokens[at : at + answer[2]]))
            at += answer[2]
        timings = Timings(queue, None if math.isnan(first) else first, total)
        yield Ended(own_id, answers, token_ids, Usage(*usage), timings, *others)


def _output_as_json(output: RequestOutput) -> list[Any]:
    return [
        output.id,
        [
            [o.index, o.text, len(o.token_ids), str(o.finish_reason), o.matched, _logprobs(o.logprobs), o.error]
            for o in output.outputs
        ],
        _logprobs(output.prompt_logprobs),
        None if output.cause is None else f"{type(output.cause).__name__}: {output.cause}",
    ]


def output_of(ended: Ended, request: Request) -> RequestOutput:
    """The output of a request."""
    answers = [
        CompletionOutput(index, text, ids, FinishReason(reason), matched, _logprobs_of(logprobs), error)
        for ids, (index, text, _, reason, matched, logprobs, error) in zip(
            ended.token_ids, ended.answers, strict=True
        )
    ]
    return RequestOutput(
        index=request.index,
        id=request.id,
        outputs=tuple(answers),
        usage=ended.usage,
        timings=ended.timings,
        prompt_ids=request.prompt_ids,
        prompt_logprobs=_logprobs_of(ended.prompt_logprobs),
        cause=None if ended.cause is None else PassError(ended.cause),
    )


def state_as_json(activity: Activity, stats: CacheStats, num_running: int) -> dict[str, Any]:
    """Counters of a replica."""
    return {"activity": _values(activity), "stats": _values(stats), "running": num_running}


def _values(numbers: Usage | Timings | Activity | CacheStats) -> list[Any]:
    """Those of all fields, which are plain numbers: `astuple` would copy each."""
    return list(vars(numbers).values())


def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> list[list[Any]] | None:
    return None if logprobs is None else [[t.token_id, t.logprob, t.rank, t.top] for t in logprobs]


def _logprobs_of(value: Sequence[Sequence[Any]] | None) -> tuple[TokenLogprob, ...] | None:
    if value is None:
        return None
    return tuple(
        TokenLogprob(token, logprob, rank, tuple((i, lp) for i, lp in top)) for token, logprob, rank, top in value
    )
