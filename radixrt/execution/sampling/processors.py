"""What a request does to the model's logits before its tokens are drawn: penalties, bias, bans, allowed tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.schedule.request import Request

Int32Array = NDArray[np.int32]

NO_TOKEN = -1
NEVER = int(np.iinfo(np.int64).max)  # a position that no request reaches


@dataclass(frozen=True)
class TokenBans:
    """Tokens that must not come next: N pairs of a token and the last token after which it is banned.

    Attributes:
        ids: int32 `[N]`.
        afters: int32 `[N]`; NO_TOKEN: whatever the last token is.
    """

    ids: Int32Array
    afters: Int32Array

    def __add__(self, other: TokenBans) -> TokenBans:
        return TokenBans(np.append(self.ids, other.ids), np.append(self.afters, other.afters))


@dataclass(frozen=True)
class BadWords:
    """Bad words by what has to be known of a history before their last token is banned.

    Attributes:
        always: bans of the words of which nothing has to be known.
        begun_by: the other words by the last of the tokens that have to be known: all these tokens, the token that
            must not come, and after which token that nobody knows yet, or NO_TOKEN.
    """

    always: TokenBans
    begun_by: Mapping[int, Sequence[tuple[tuple[int, ...], int, int]]]

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]], last_is_unknown: bool) -> BadWords:
        """Those for histories of which the last token is known, or of which it is not."""
        always: list[tuple[int, int]] = []
        begun_by: defaultdict[int, list[tuple[tuple[int, ...], int, int]]] = defaultdict(list)
        for *before, last in words:
            after = before.pop() if last_is_unknown and before else NO_TOKEN
            if before:
                begun_by[before[-1]].append((tuple(before), last, after))
            else:
                always.append((last, after))
        return cls(_bans(always), dict(begun_by))

    def bans(self, known: Int32Array) -> TokenBans:
        """Those after the known tokens `[n >= 1]` of a history. As in transformers, the prompt is part of it."""
        begun = [
            (last, after)
            for before, last, after in self.begun_by.get(int(known[-1]), ())
            if tuple(known[-len(before) :].tolist()) == before
        ]
        return self.always + _bans(begun) if begun else self.always


@dataclass(frozen=True)
class LogitChanges:
    """The changes of one request, made ready once, when it is admitted.

    Attributes:
        prompt_len: tokens of its prompt; those behind them are the answer's.
        has_penalties: whether one of the three changes anything.
        repetition, presence, frequency: the penalties.
        bias_ids, biases: int32 and float32 `[N]`, what is added to the logits of which tokens.
        allowed_ids: int32 `[N]`, the only tokens that may be drawn; None: all.
        held_back: its ends, which are banned at positions below `held_until`.
        held_until: position of the first token that may be one of them.
        bad_words: for histories whose last token is known, and for those whose last token is not.
        end: position from which on nothing is changed.
    """

    prompt_len: int
    has_penalties: bool
    repetition: float
    presence: float
    frequency: float
    bias_ids: Int32Array
    biases: NDArray[np.float32]
    allowed_ids: Int32Array | None
    held_back: TokenBans
    held_until: int
    bad_words: tuple[BadWords, BadWords]
    end: int

    @classmethod
    def of(cls, request: Request) -> LogitChanges | None:
        """Those of a request; None if its tokens are drawn from the model's own logits throughout."""
        params = request.params
        held_until = request.prompt_len + params.min_new_tokens if request.stop_ids else 0
        lasts = (
            params.has_penalties
            or bool(params.logit_bias)
            or params.allowed_token_ids is not None
            or bool(request.bad_words)
        )
        end = NEVER if lasts else held_until
        if end <= request.prompt_len:
            return None
        return cls(
            prompt_len=request.prompt_len,
            has_penalties=params.has_penalties,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            bias_ids=_ids([token for token, _ in params.logit_bias]),
            biases=np.array([bias for _, bias in params.logit_bias], dtype=np.float32),
            allowed_ids=None if params.allowed_token_ids is None else _ids(params.allowed_token_ids),
            held_back=_bans([(token, NO_TOKEN) for token in request.stop_ids]),
            held_until=held_until,
            bad_words=(BadWords.of(request.bad_words, False), BadWords.of(request.bad_words, True)),
            end=end,
        )

    def bans(self, position: int, known: Int32Array, last_is_unknown: bool) -> TokenBans:
        """What must not be drawn at a position, behind the known tokens and perhaps one that is not known yet."""
        bans = self.bad_words[last_is_unknown].bans(known)
        return bans + self.held_back if position < self.held_until else bans


def _bans(pairs: Sequence[tuple[int, int]]) -> TokenBans:
    return TokenBans(_ids([token for token, _ in pairs]), _ids([after for _, after in pairs]))


def _ids(tokens: Sequence[int]) -> Int32Array:
    return np.array(tokens, dtype=np.int32)
