"""The requests of a list of prompts, each made when it is wanted: a device begins before all are there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeGuard, cast

import numpy as np

from radixrt.arrays import Int32Array, Int64Array
from radixrt.cpu_count import usable_cpus
from radixrt.errors import ParameterError, PromptError, RadixrtError, TokenizerError
from radixrt.frontend.arguments import Call, Params, Prompt, named_together, read_params
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.output import RequestOutput
from radixrt.pauses import with_pauses
from radixrt.planning.demands import Demands
from radixrt.planning.token_store import TokenStore
from radixrt.prefixes.order import prefix_order
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import LazyRequests, Request
from radixrt.text.chat import check_unicode
from radixrt.text.excess import may_exceed
from radixrt.text.text_tree import TextTree

COPIED_AT_ONCE = 1 << 20  # tokens, by a thread: fewer take less time than to start one
MOST_THREADS = 8
_INT32 = np.dtype(np.int32)

FEWEST = 64  # prompts: requests for fewer are made at once


def request_list(
    builder: RequestBuilder,
    prompts: Sequence[Prompt],
    params: Params | Iterable[Params],
    call: Call,
    *,
    sorts: bool = False,
) -> tuple[list[RequestOutput], Sequence[Request]]:
    """What `RequestBuilder.build_all` makes or raises. Those of a long list without errors are `TokenRequests`.

    If whoever serves them `sorts`, they come in an order that suits prefixes; those of texts are `TextRequests`.
    """
    is_long = call.many and len(prompts) >= FEWEST and not isinstance(call.priority, Iterable)
    if not is_long or call.on_error not in ("raise", "return"):
        return builder.build_all(prompts, params, call)
    given = list(call.params_each(params, len(prompts)))  # some can be read once only
    own = list(call.own_ids(len(prompts)).values())
    if sorts and call.on_error == "raise":
        texts = _text_requests(builder, prompts, given, call, own)
        if texts is not None:
            return [], texts
    read = list(prompts)  # token ids in the place of each once they are known: nothing is encoded twice
    found = _all_sound(builder, read, given, call, own)
    if found is not None:
        return [], found.in_order() if sorts else found
    return builder.build_all(read, given, replace(call, request_ids=own or None))


def store_of(requests: Sequence[Request]) -> tuple[TokenStore, Demands]:
    """The prompts of requests, and what they ask for: what a plan must know of them."""
    if isinstance(requests, TokenRequests):
        return requests.store, requests.demands
    return TokenStore.of(request.prompt_ids for request in requests), demands_of(requests)


def demands_of(requests: Sequence[Request]) -> Demands:
    """What requests ask for, if each answer has its maximum of tokens."""
    lengths = np.array([request.prompt_len for request in requests], np.int64)
    return Demands.of(
        lengths,
        np.array([request.max_new_tokens for request in requests], np.int64),
        np.array([request.params.n for request in requests], np.int64),
        np.array([request.params.match_limit(request.prompt_len) for request in requests], np.int64),
    )


def _text_requests(
    builder: RequestBuilder,
    prompts: Sequence[Prompt],
    params: Sequence[Params],
    call: Call,
    own: Sequence[str],
) -> TextRequests | None:
    """The requests of a list of texts, which are encoded while others run.

    None where not all are texts, or one has an error that shows before: whoever encodes them first tells it.
    """
    tokenizer = builder.tokenizer
    if tokenizer is None or not all(isinstance(prompt, str) for prompt in prompts):
        return None
    texts = cast("Sequence[str]", prompts)
    if may_exceed(max(map(len, texts)), builder.context_length) or (tree := tokenizer.text_tree(texts)) is None:
        return None
    try:
        for place, text in enumerate(texts):
            check_unicode(f"text {place}", text)
        kinds, kind = _kinds(builder, params)
        if _depends_on_prompts(kinds):
            return None
        models = [_model(builder, [0], each, call) for each in kinds]
    except (PromptError, ParameterError, TokenizerError):
        return None
    ids = own or builder.new_ids(len(texts))
    return TextRequests(builder, tree, texts, models, kind.tolist(), ids, call.number)


def _depends_on_prompts(kinds: Iterable[SamplingParams]) -> bool:
    """Whether it depends on each prompt what some of these allow."""
    return any(each.truncate_prompt_tokens is not None or each.prompt_logprobs is not None for each in kinds)


def _all_sound(
    builder: RequestBuilder,
    prompts: list[Prompt],
    params: Sequence[Params],
    call: Call,
    own: Sequence[str],
) -> TokenRequests | None:
    """The requests of a list without errors. None where there is one, or might be. `prompts` become token ids."""
    try:
        kinds, kind = _kinds(builder, params)
        if _depends_on_prompts(kinds):
            return None
        others = [i for i, prompt in enumerate(prompts) if not _is_plain(prompt)]
        is_sound = True
        for i, read in zip(others, builder.all_token_ids([prompts[i] for i in others]), strict=True):
            if isinstance(read, PromptError):
                is_sound = False
            else:
                prompts[i] = read
        if not is_sound:
            return None
        ids = cast("list[Int32Array]", prompts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        # Of those with equal parameters, what the longest one may do the others may, too.
        by_kind = np.lexsort((lengths, kind))
        longest = by_kind[np.append(np.flatnonzero(np.diff(kind[by_kind])), len(kind) - 1)]
        models = [
            _model(builder, ids[i], each, call, index=i) for i, each in zip(longest.tolist(), kinds, strict=True)
        ]
    except (PromptError, ParameterError):
        return None
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens, greatest = _joined(ids, offsets)
    if greatest >= builder.config.vocab_size:
        return None
    most = np.array([each.max_new_tokens for each in kinds], np.int64)[kind]
    is_open = np.array([each.is_open for each in kinds])[kind]
    num_answers = np.array([each.n for each in kinds], np.int64)[kind]
    room = builder.context_length - lengths
    room = np.where(is_open, np.minimum(room, (builder.pool_tokens - lengths + 1).clip(min=1)), room)
    demands = Demands.of(lengths, np.minimum(most, room), num_answers)
    store, request_ids = TokenStore(tokens, offsets), own or builder.new_ids(len(ids))
    return TokenRequests(builder, store, demands, models, kind.tolist(), request_ids, call.number)


def _model(builder: RequestBuilder, prompt: Prompt, params: SamplingParams, call: Call, index: int = 0) -> Request:
    """A request of a list whose prompts have one priority."""
    priority = cast("int", call.priority)
    return builder.build(prompt, params, index=index, tenant=call.tenant, priority=priority, call=call.number)


def _kinds(builder: RequestBuilder, params: Sequence[Params]) -> tuple[list[SamplingParams], Int64Array]:
    """Distinct parameters, and which of them each prompt has, `[N]`."""
    kinds: list[SamplingParams] = []
    which: list[int] = []
    by_identity: dict[int, int] = {}  # of what was given
    by_value: dict[SamplingParams, int] = {}
    before, last = -1, tuple[object, ...]()  # the latest: to compare with it is faster than a hash
    for given in params:
        place = by_identity.get(id(given))
        if place is None:
            own = read_params(given, builder.defaults)
            place = before
            if (values := tuple(vars(own).values())) != last:
                place, last = by_value.setdefault(own, len(kinds)), values
                if place == len(kinds):
                    kinds.append(own)
            before = by_identity[id(given)] = place
        which.append(place)
    return kinds, np.array(which, np.int64)


def _is_plain(prompt: object) -> TypeGuard[Int32Array]:
    """Whether a prompt is token ids as they are kept."""
    return isinstance(prompt, np.ndarray) and prompt.dtype == _INT32 and prompt.ndim == 1 and len(prompt) > 0


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
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cpus())) as threads:
        return tokens, max(threads.map(copy, *parts))


class TokenRequests(LazyRequests):
    """Requests of N prompts; each is like a model with its parameters, and none is kept here.

    Attributes:
        store, demands: the prompts, and what they ask for, if each answer has its maximum of tokens.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        store: TokenStore,
        demands: Demands,
        models: Sequence[Request],
        kind: Sequence[int],
        ids: Sequence[int | str],
        call: int,
    ) -> None:
        self._builder, self.store, self.demands, self._models, self._kind = builder, store, demands, models, kind
        self._ids, self._call = ids, call
        self.priority = models[0].priority

    @property
    def ids(self) -> Sequence[int | str]:
        return self._ids

    def __len__(self) -> int:
        return len(self._kind)

    def make(self, index: int) -> Request:
        model, ids = self._models[self._kind[index]], self.store[index].copy()  # outputs keep it
        return self._builder.alike(model, ids, index, self._call, self._ids[index])

    def in_order(self) -> LazyRequests:
        """In lexicographic order of their tokens."""
        offsets = self.store.offsets
        return _Ordered(self, prefix_order(self.store.tokens, offsets[:-1], offsets[1:]).order.tolist())


class TextRequests(LazyRequests):
    """Requests of N texts, in the lexicographic order of the texts, which a thread encodes.

    If it finds some that cannot run, no more than those before them are known, and `failure` names them once the
    last text is encoded.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        tree: TextTree,
        texts: Sequence[str],
        models: Sequence[Request],
        kind: Sequence[int],
        ids: Sequence[int | str],
        call: int,
    ) -> None:
        self._builder, self._tree, self._texts = builder, tree, texts
        self._models, self._kind, self._own_ids, self._call = models, kind, ids, call
        self.priority = models[0].priority
        tokenizer = builder.tokenizer
        self._may_be_unknown = tokenizer is None or tokenizer.vocab_size > builder.config.vocab_size
        self._encoded: list[Int32Array] = []  # by place, up to the first that cannot run
        self._errors: dict[int, Exception] = {}
        self._has_begun = self._is_over = False
        self._news = threading.Condition()

    @property
    def ids(self) -> Sequence[int | str]:
        return [self._own_ids[i] for i in self._tree.order]

    def __len__(self) -> int:
        return len(self._kind)

    def make(self, index: int) -> Request:
        number = self._tree.order[index]
        model = self._models[self._kind[number]]
        return self._builder.alike(model, self._encoded[index], number, self._call, self._own_ids[number])

    def known(self, after: int | None = None, seconds: float = 0.0) -> int:
        """The thread begins when this is first asked: texts that are not submitted are not encoded."""
        with self._news:
            if not self._has_begun:
                self._has_begun = True
                threading.Thread(target=self._encode, name="radixrt-encoding", daemon=True).start()
            if after is not None:
                self._news.wait_for(lambda: self._is_over or len(self._encoded) > after, seconds)
            return len(self._encoded)

    @property
    def is_over(self) -> bool:
        return self._is_over

    def stop(self) -> None:
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def _encode(self) -> None:
        tokenizer = self._builder.tokenizer
        assert tokenizer is not None
        longest = [model.prompt_len for model in self._models]  # of each kind, that can run
        place = 0
        failure: Exception | None
        failure = lost = RadixrtError("texts are not encoded: their thread has ended")
        try:
            for block in self._tree.encoded(tokenizer.codec.encode, tokenizer.lead, with_pauses):
                self._check(place, block, longest)
                place += len(block)
                if self._is_over:
                    return
            failure = named_together(dict(sorted(self._errors.items())), len(self)) if self._errors else None
        except Exception as error:  # the package tokenizers raises nothing narrower
            failure = self._cause() or error
        except BaseException as error:  # for who waits: this thread has no one else to tell
            lost.__cause__ = error
        finally:
            with self._news:
                self.failure, self._is_over = failure, True
                self._news.notify_all()

    def _check(self, place: int, block: Sequence[Int32Array], longest: list[int]) -> None:
        """Take the ids of texts from a place on."""
        sound: list[Int32Array] = []
        for number, ids in with_pauses(zip(self._tree.order[place:], block, strict=False)):
            kind = self._kind[number]
            try:
                if not len(ids) or self._may_be_unknown:
                    self._builder.check_ids(ids)
                if len(ids) > longest[kind]:
                    self._builder.build(ids, self._models[kind].params, index=number)
                    longest[kind] = len(ids)
                if not self._errors:
                    sound.append(ids)
            except (PromptError, ParameterError) as error:
                self._errors[number] = error
        with self._news:
            self._encoded += sound
            self._news.notify_all()

    def _cause(self) -> PromptError | None:
        """Which texts cannot be encoded, one by one."""
        found = self._builder.all_token_ids(self._texts)
        errors = {number: one for number, one in enumerate(found) if isinstance(one, PromptError)}
        return named_together(errors, len(self)) if errors else None


class _Ordered(LazyRequests):
    """Late requests in another order."""

    def __init__(self, requests: LazyRequests, order: Sequence[int]) -> None:
        self._requests, self._order, self.priority = requests, order, requests.priority

    @property
    def ids(self) -> Sequence[int | str]:
        ids = self._requests.ids
        return [ids[i] for i in self._order]

    def __len__(self) -> int:
        return len(self._order)

    def make(self, index: int) -> Request:
        return self._requests.make(self._order[index])
