"""Logits processors: penalties, bias, bans and allow-lists that change logits before a token is drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import NO_TOKEN, Arrays, Int32Array
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
    allowed_ids: Int32Array | None  # `[N]`, the only tokens that may be drawn; None: all
    stop_bans: Int32Array  # `[N, 2]` as in `BadWords`, bans of the stop tokens at positions below `stops_from`
    stops_from: int
    bad_words: tuple[BadWords, BadWords]  # for histories whose last token is known, and is not
    end: int  # position from which on nothing is changed

    @classmethod
    def of(cls, request: Request) -> LogitsProcessors | None:
        """None if all tokens are drawn from the model's own logits."""
        params, words = request.params, request.bad_words
        stops_from = request.prompt_len + params.min_new_tokens if request.stop_ids else 0
        is_endless = params.has_penalties or bool(params.logit_bias) or params.allowed_token_ids is not None
        end = NEVER if is_endless or words else stops_from
        if end <= request.prompt_len:
            return None
        return cls(
            params=params,
            prompt_len=request.prompt_len,
            bias_ids=_ids([token for token, _ in params.logit_bias]),
            biases=np.array([bias for _, bias in params.logit_bias], dtype=np.float32),
            allowed_ids=None if params.allowed_token_ids is None else _ids(params.allowed_token_ids),
            stop_bans=_bans([(token, NO_TOKEN) for token in request.stop_ids]),
            stops_from=stops_from,
            bad_words=(BadWords.of(words, False), BadWords.of(words, True)),
            end=end,
        )

    def bans(self, position: int, known: Int32Array, last_is_unknown: bool) -> Int32Array:
        """`[N, 2]` at a position, after the known tokens and perhaps one that is not known yet."""
        bans = self.bad_words[last_is_unknown].bans(known)
        return np.concatenate([bans, self.stop_bans]) if position < self.stops_from else bans


@dataclass(frozen=True)
class ProcessedDraw:
    """A token to be drawn from processed logits."""

    processors: LogitsProcessors
    row: int
    position: int
    known: Int32Array
    last_is_unknown: bool  # the token before it: only the device knows it, in `last_token[row]`


def processor_arrays(draws: Sequence[ProcessedDraw]) -> Arrays:
    """The arrays that the processors of X draws read on the device, by name."""
    return _penalties(draws) | _bias(draws) | _bans_of(draws) | _allowed(draws)


def _penalties(draws: Sequence[ProcessedDraw]) -> Arrays:
    """The history of each draw that has penalties, `[H]` in all, and the penalties of all, `[X]`."""
    at = _ids([i for i, draw in enumerate(draws) if draw.processors.params.has_penalties])
    if not len(at):
        return {}
    own = [draws[i] for i in at]
    # Histories as far as they are known, then the last tokens that are not.
    unknown = [i for i in at.tolist() if draws[i].last_is_unknown]
    lengths = np.array([len(draw.known) for draw in own])
    outputs = lengths - [draw.processors.prompt_len for draw in own]
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())  # tokens of a history from each on
    is_output = left <= np.repeat(outputs, lengths)
    params = [draw.processors.params for draw in draws]
    return {
        "penalty_rows": np.append(np.repeat(at, lengths), _ids(unknown)),
        "penalty_ids": np.concatenate(
            [draw.known for draw in own] + [_ids([-(draws[i].row + 1) for i in unknown])]
        ),
        "penalty_is_output": np.append(is_output, np.ones(len(unknown), dtype=np.bool_)).astype(np.int32),
        "repetition": np.array([one.repetition_penalty for one in params], dtype=np.float32),
        "presence": np.array([one.presence_penalty for one in params], dtype=np.float32),
        "frequency": np.array([one.frequency_penalty for one in params], dtype=np.float32),
    }


def _bias(draws: Sequence[ProcessedDraw]) -> Arrays:
    ids = [draw.processors.bias_ids for draw in draws]
    if not any(map(len, ids)):
        return {}
    biases = np.concatenate([draw.processors.biases for draw in draws])
    return {"bias_rows": _row_of_each(ids), "bias_ids": np.concatenate(ids), "biases": biases}


def _bans_of(draws: Sequence[ProcessedDraw]) -> Arrays:
    """Tokens that must not come next `[H]`, always or only after a last token that the device knows."""
    bans = [draw.processors.bans(draw.position, draw.known, draw.last_is_unknown) for draw in draws]
    rows, pairs = _row_of_each(bans), np.concatenate(bans)
    if not len(rows):
        return {}
    return {
        "banned_rows": rows,
        "banned_ids": pairs[:, 0].copy(),
        "banned_after": pairs[:, 1].copy(),
        "banned_last_row": _ids([draw.row for draw in draws])[rows],
    }


def _allowed(draws: Sequence[ProcessedDraw]) -> Arrays:
    is_restricted = _ids([draw.processors.allowed_ids is not None for draw in draws])
    if not is_restricted.any():
        return {}
    ids = [_ids([]) if draw.processors.allowed_ids is None else draw.processors.allowed_ids for draw in draws]
    return {"allowed_rows": _row_of_each(ids), "allowed_ids": np.concatenate(ids), "is_restricted": is_restricted}


def _row_of_each(items: Sequence[Int32Array]) -> Int32Array:
    """The processed row of each item of the rows' own."""
    return np.repeat(np.arange(len(items), dtype=np.int32), [len(own) for own in items])


def _bans(pairs: Sequence[tuple[int, int]]) -> Int32Array:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def _ids(tokens: Sequence[int]) -> Int32Array:
    return np.array(tokens, dtype=np.int32)
