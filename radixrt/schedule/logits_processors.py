"""What a request does to the model's logits before its tokens are drawn: penalties, bias, bans, allowed tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.schedule.passes import NO_TOKEN, Arrays, Int32Array
from radixrt.schedule.request import Request

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
class LogitsProcessors:
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
    def of(cls, request: Request) -> LogitsProcessors | None:
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


@dataclass(frozen=True)
class ProcessedDraw:
    """A token to be drawn from changed logits.

    `last_is_unknown`: the token before it has been sampled, but only the device knows it, in `last_token[row]`.
    """

    processors: LogitsProcessors
    row: int
    position: int
    known: Int32Array
    last_is_unknown: bool


def processor_arrays(draws: Sequence[ProcessedDraw]) -> Arrays:
    """What the processors of X draws read on the device, by name."""
    return _penalties(draws) | _bias(draws) | _bans_of(draws) | _allowed(draws)


def _penalties(draws: Sequence[ProcessedDraw]) -> Arrays:
    """The history of each processed draw that has penalties, `[H]` in all, and the penalties of all, `[X]`."""
    own = [(i, draw) for i, draw in enumerate(draws) if draw.processors.has_penalties]
    if not own:
        return {}
    # Histories as far as they are known, then the last tokens that are not.
    unknown = [(i, draw) for i, draw in own if draw.last_is_unknown]
    at = np.array([i for i, _ in own], dtype=np.int32)
    lengths = np.array([len(draw.known) for _, draw in own])
    outputs = lengths - [draw.processors.prompt_len for _, draw in own]
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())  # tokens of a history from each on
    return {
        "penalty_rows": np.append(np.repeat(at, lengths), np.array([i for i, _ in unknown], dtype=np.int32)),
        "penalty_ids": np.concatenate(
            [draw.known for _, draw in own] + [np.array([-(draw.row + 1) for _, draw in unknown], dtype=np.int32)]
        ),
        "penalty_is_output": np.append(
            left <= np.repeat(outputs, lengths), np.ones(len(unknown), dtype=np.bool_)
        ).astype(np.int32),
        "repetition": _column(draws, lambda changes: changes.repetition),
        "presence": _column(draws, lambda changes: changes.presence),
        "frequency": _column(draws, lambda changes: changes.frequency),
    }


def _column(draws: Sequence[ProcessedDraw], number: Callable[[LogitsProcessors], float]) -> np.ndarray:
    return np.fromiter((number(draw.processors) for draw in draws), np.float32, len(draws))


def _bias(draws: Sequence[ProcessedDraw]) -> Arrays:
    own = [(i, draw.processors) for i, draw in enumerate(draws) if len(draw.processors.bias_ids)]
    if not own:
        return {}
    return {
        "bias_rows": _row_of_each([(i, changes.bias_ids) for i, changes in own]),
        "bias_ids": np.concatenate([changes.bias_ids for _, changes in own]),
        "biases": np.concatenate([changes.biases for _, changes in own]),
    }


def _bans_of(draws: Sequence[ProcessedDraw]) -> Arrays:
    """Tokens that must not come next `[H]`, always or only after a last token that the device knows."""
    bans = [draw.processors.bans(draw.position, draw.known, draw.last_is_unknown) for draw in draws]
    own = [(i, one) for i, one in enumerate(bans) if len(one.ids)]
    if not own:
        return {}
    rows = _row_of_each([(i, one.ids) for i, one in own])
    return {
        "banned_rows": rows,
        "banned_ids": np.concatenate([one.ids for _, one in own]),
        "banned_after": np.concatenate([one.afters for _, one in own]),
        "banned_last_row": np.array([draw.row for draw in draws], dtype=np.int32)[rows],
    }


def _allowed(draws: Sequence[ProcessedDraw]) -> Arrays:
    all_ids = [draw.processors.allowed_ids for draw in draws]
    own = [(i, ids) for i, ids in enumerate(all_ids) if ids is not None]
    if not own:
        return {}
    restricted = np.zeros(len(draws), dtype=np.int32)
    restricted[[i for i, _ in own]] = 1
    return {
        "allowed_rows": _row_of_each(own),
        "allowed_ids": np.concatenate([ids for _, ids in own]),
        "is_restricted": restricted,
    }


def _row_of_each(ids: Sequence[tuple[int, Int32Array]]) -> Int32Array:
    """The processed row of each token of lists of tokens."""
    return np.repeat(np.array([i for i, _ in ids], dtype=np.int32), [len(tokens) for _, tokens in ids])


def _bans(pairs: Sequence[tuple[int, int]]) -> TokenBans:
    return TokenBans(_ids([token for token, _ in pairs]), _ids([after for _, after in pairs]))


def _ids(tokens: Sequence[int]) -> Int32Array:
    return np.array(tokens, dtype=np.int32)
