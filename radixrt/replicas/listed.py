"""The requests of a list of prompts, each made when it is first wanted: replicas begin before all are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeGuard, overload

import numpy as np

from radixrt.arrays import Int32Array, Int64Array
from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.request_builder import OnError, Params, Prompt, RequestBuilder, one_each, read_params
from radixrt.output import RequestOutput
from radixrt.planning.demands import Demands
from radixrt.planning.token_store import TokenStore
from radixrt.processors import usable_processors
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request

COPIED_AT_ONCE = 1 << 20  # tokens, by a thread: fewer take less time than to start one
MOST_THREADS = 8


@dataclass(frozen=True)
class Listed:
    """Requests, with what a plan must know of them: the N prompts, and what they ask for."""

    requests: Sequence[Request]
    store: TokenStore
    demands: Demands


def listed_requests(
    builder: RequestBuilder,
    prompts: Sequence[Prompt],
    params: Params | Iterable[Params],
    on_error: OnError,
    call: int,
) -> tuple[list[RequestOutput], Listed]:
    """What `RequestBuilder.build_all` makes of a list, or raises. Requests are made when they are wanted."""
    given = list(one_each(params, len(prompts), many=True))  # some can be read once only
    can_begin = bool(prompts) and on_error in ("raise", "return")
    if can_begin and (found := _all_sound(builder, prompts, given, call)) is not None:
        return [], found
    outputs, requests = builder.build_all(prompts, given, True, None, None, on_error, call=call)
    return outputs, Listed(requests, TokenStore.of(each.prompt_ids for each in requests), demands_of(requests))


def demands_of(requests: Sequence[Request]) -> Demands:
    """What requests ask for, if each answer has its maximum of tokens."""
    lengths = np.array([request.prompt_len for request in requests], np.int64)
    return Demands.of(
        lengths,
        np.array([request.max_new_tokens for request in requests], np.int64),
        np.array([request.params.n for request in requests], np.int64),
        np.array([request.params.match_limit(request.prompt_len) for request in requests], np.int64),
    )


def _all_sound(
    builder: RequestBuilder, prompts: Sequence[Prompt], params: Sequence[Params], call: int
) -> Listed | None:
    """The requests of a list without errors. None where there is one, or might be."""
    try:
        kinds, kind = _kinds(builder, params)
        if any(each.truncate_prompt_tokens is not None or each.prompt_logprobs is not None for each in kinds):
            return None  # what these allow depends on each prompt
        ids: list[Int32Array] = [prompt if _is_plain(prompt) else builder.token_ids(prompt) for prompt in prompts]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        # Of those with equal parameters, what the longest one may do the others may, too.
        by_kind = np.lexsort((lengths, kind))
        longest = by_kind[np.append(np.flatnonzero(np.diff(kind[by_kind])), len(kind) - 1)]
        models = [
            builder.build(ids[i], own, index=i, call=call) for i, own in zip(longest.tolist(), kinds, strict=True)
        ]
    except (PromptError, ParameterError):
        return None
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens, greatest = _joined(ids, offsets)
    if greatest >= builder.config.vocab_size:
        return None
    most = np.array([own.max_new_tokens for own in kinds], np.int64)[kind]
    num_answers = np.array([own.n for own in kinds], np.int64)[kind]
    store = TokenStore(tokens, offsets)
    demands = Demands.of(lengths, np.minimum(most, builder.context_length - lengths), num_answers)
    return Listed(_Requests(builder, store, models, kind.tolist(), call), store, demands)


def _kinds(builder: RequestBuilder, params: Sequence[Params]) -> tuple[list[SamplingParams], Int64Array]:
    """Distinct parameters, and which of them each prompt has, `[N]`."""
    kinds: list[SamplingParams] = []
    by_identity: dict[int, int] = {}  # of what was given
    by_value: dict[SamplingParams, int] = {}
    for given in params:
        if id(given) not in by_identity:
            own = read_params(given, builder.defaults)
            is_last = bool(kinds) and vars(own) == vars(kinds[-1])  # faster than a hash
            place = len(kinds) - 1 if is_last else by_value.setdefault(own, len(kinds))
            if place == len(kinds):
                kinds.append(own)
            by_identity[id(given)] = place
    return kinds, np.array([by_identity[id(given)] for given in params], np.int64)


def _is_plain(prompt: object) -> TypeGuard[Int32Array]:
    """Whether a prompt is token ids as they are kept."""
    return isinstance(prompt, np.ndarray) and prompt.dtype == np.int32 and prompt.ndim == 1 and len(prompt) > 0


def _joined(ids: Sequence[Int32Array], offsets: Int64Array) -> tuple[Int32Array, int]:
    """A copy of all ids, one after the other, and the greatest; negative ones count as greater than all others."""
    tokens = np.empty(int(offsets[-1]), np.int32)
    bounds = np.searchsorted(offsets, np.arange(0, len(tokens), COPIED_AT_ONCE)[1:])
    bounds = np.unique(np.concatenate([[0], bounds, [len(ids)]]))

    def copy(begin: int, end: int) -> int:
        own = tokens[offsets[begin] : offsets[end]]
        np.concatenate(ids[begin:end], out=own)
        return int(own.view(np.uint32).max())

    parts = bounds[:-1].tolist(), bounds[1:].tolist()
    if len(bounds) == 2:
        return tokens, copy(0, len(ids))
    with ThreadPoolExecutor(min(MOST_THREADS, usable_processors())) as threads:
        return tokens, max(threads.map(copy, *parts))


class _Requests(Sequence[Request]):
    """Requests of N prompts; each is like a model with its parameters, and made when it is first wanted."""

    def __init__(
        self, builder: RequestBuilder, store: TokenStore, models: Sequence[Request], kind: list[int], call: int
    ) -> None:
        self._builder, self._store, self._models, self._kind, self._call = builder, store, models, kind, call
        self._made: list[Request | None] = [None] * len(kind)

    def __len__(self) -> int:
        return len(self._kind)

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        made = self._made[index]
        if made is None:
            index %= len(self)
            model, ids = self._models[self._kind[index]], self._store[index].copy()  # outputs keep it
            made = self._made[index] = self._builder.alike(model, ids, index, self._call)
        return made
