"""Logits processors: penalties, bias, bans and allow-lists that change logits before a token is drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.arrays import Int32Array
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import NO_TOKEN, Arrays
from radixrt.schedule.request import Request

NEVER = int(np.iinfo(np.int64).max)  # a position that no answer reaches


@dataclass(frozen=True)
class BadWords:
    """Bad words by the tokens of a history that must be known before their last token is banned."""

    # `[N, 2]`: a token, and the last token after which it is banned; NO_TOKEN: any.
    always: Int32Array
    # The other words, by the last token that must be known: all that must be, and a row as above.
    begun_by: dict[int, list[tuple[tuple[int, ...], tuple[int, int]]]]

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]], last_is_unknown: bool) -> BadWords:
        """Those for histories whose last token is known, or is not."""
        always: list[tuple[int, int]] = []
        begun_by: defaultdict[int, list[tuple[tuple[int, ...], tuple[int, int]]]] = defaultdict(list)
        for *before, last in words:
            after = before.pop() if last_is_unknown and before else NO_TOKEN
            if before:
                begun_by[before[-1]].append((tuple(before), (last, after)))
            else:
                always.append((last, after))
        return cls(_bans(always), dict(begun_by))

    def bans(self, known: Int32Array) -> Int32Array:
        """`[N, 2]` after the known tokens `[n >= 1]` of a history; as in transformers, of the prompt too."""
        begun = [
            ban
            for before, ban in self.begun_by.get(int(known[-1]), ())
            if tuple(known[-len(before) :].tolist()) == before
        ]
        return np.concatenate([self.always, _bans(begun)]) if begun else self.always


@dataclass(frozen=True)
class LogitsProcessors:
    """Those of one request, prepared once, when an answer is admitted."""

    params: SamplingParams
    prompt_len: int
    bias_ids: Int32Array  # `[N]`
    biases: NDArray[np.float32]  # `[N]`, added to their logits
    allowed_ids: Int32Array  # `[N]`, the only tokens that may be drawn, if params name some
    stop_bans: Int32Array  # `[N, 2]` as in `BadWords`, bans of what ends answers at positions below `stops_from`
    stops_from: int
    bad_words: tuple[BadWords, BadWords]  # for histories whose last token is known, and is not
    end: int  # position from which on nothing is changed
    has_lists: bool  # `processor_arrays` has something of it, at some position

    @classmethod
    def of(cls, request: Request) -> LogitsProcessors | None:
        """None if all tokens are drawn from the model's own logits, and nobody wants to know from what."""
        params, words = request.params, request.bad_words
        late_ids = request.stop_ids | request.late_ids
        stops_from = request.prompt_len + params.min_new_tokens if late_ids else 0
        has_lists = (
            params.has_penalties or bool(params.logit_bias or words) or params.allowed_token_ids is not None
        )
        is_endless = has_lists or params.wants_processed_logprobs
        end = NEVER if is_endless else stops_from
        if end <= request.prompt_len:
            return None
        return cls(
            params=params,
            prompt_len=request.prompt_len,
            bias_ids=_ids([token for token, _ in params.logit_bias]),
            biases=np.array([bias for _, bias in params.logit_bias], dtype=np.float32),
            allowed_ids=_ids(params.allowed_token_ids or ()),
            stop_bans=_bans([(token, NO_TOKEN) for token in late_ids]),
            stops_from=stops_from,
            bad_words=(BadWords.of(words, False), BadWords.of(words, True)),
            end=end,
            has_lists=has_lists or stops_from > request.prompt_len,
        )


@dataclass(frozen=True)
class ProcessedDraw:
    """A token to be drawn from processed logits."""

    processors: LogitsProcessors
    row: int
    position: int
    known: Int32Array  # tokens of its history

    @property
    def last_is_unknown(self) -> bool:
        """Whether only the device knows the token before it, in `last_token[row]`."""
        return self.position > len(self.known)

    def history(self) -> Int32Array:
        """The tokens before it that penalties count, as in `Pass.input_ids`; none where there are no penalties."""
        if not self.processors.params.has_penalties:
            return _ids([])
        return np.append(self.known, np.int32(-(self.row + 1))) if self.last_is_unknown else self.known

    def bans(self) -> Int32Array:
        """`[N, 2]` as in `BadWords`: tokens that must not come next."""
        processors = self.processors
        bans = processors.bad_words[self.last_is_unknown].bans(self.known)
        return np.concatenate([bans, processors.stop_bans]) if self.position < processors.stops_from else bans


def processor_arrays(draws: Sequence[ProcessedDraw]) -> Arrays:
    """The arrays that the processors of X draws read on the device, by name: a number for each draw or token."""
    own = [draw.processors for draw in draws]
    params = [processors.params for processors in own]
    bans = [draw.bans() for draw in draws]
    histories = [draw.history() for draw in draws]
    penalties = _tokens("penalty", histories)
    if penalties:
        outputs = [np.arange(len(one)) >= owner.prompt_len for one, owner in zip(histories, own, strict=True)]
        penalties["penalty_is_output"] = np.concatenate(outputs).astype(np.int32)
        for name in ("repetition", "presence", "frequency"):
            penalties[name] = np.array([getattr(one, f"{name}_penalty") for one in params], dtype=np.float32)
    bias = _tokens("bias", [processors.bias_ids for processors in own])
    if bias:
        bias["biases"] = np.concatenate([processors.biases for processors in own])
    banned = _tokens("banned", [pairs[:, 0] for pairs in bans])
    if banned:
        banned["banned_after"] = np.concatenate([pairs[:, 1] for pairs in bans])
        banned["banned_last_row"] = _ids([draw.row for draw in draws])[banned["banned_rows"]]
    allowed = _tokens("allowed", [processors.allowed_ids for processors in own])
    if allowed:
        allowed["is_restricted"] = _ids([one.allowed_token_ids is not None for one in params])
    return penalties | bias | banned | allowed


def _tokens(name: str, ids: Sequence[Int32Array]) -> Arrays:
    """Tokens of X draws, and the draw that each is of; nothing if there are none."""
    if not any(map(len, ids)):
        return {}
    rows = np.repeat(np.arange(len(ids), dtype=np.int32), [len(own) for own in ids])
    return {f"{name}_rows": rows, f"{name}_ids": np.concatenate(ids)}


def _bans(pairs: Sequence[tuple[int, int]]) -> Int32Array:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def _ids(tokens: Sequence[int]) -> Int32Array:
    return np.array(tokens, dtype=np.int32)
