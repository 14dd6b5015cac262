"""What the sampler is told about the requests of a pass, and what it does with their logits.

All rows are drawn from at once, from the model's own logits: what that launches depends on their number and on a
few `Features` alone. Then the few rows whose requests change their logits, the special ones, are drawn from again;
and log-probabilities are computed where they are asked for. So a request costs those beside it nothing but its own
work, and its draws do not depend on them. The host knows without asking the device what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixrt.execution.sampling.processors import NO_TOKEN, Int32Array, LogitChanges
from radixrt.execution.sampling.table import NO_LOGPROBS, Arrays, Features, SamplingTable
from radixrt.schedule.batch import ScheduleBatch
from triton_ops.implementation import Impl
from triton_ops.sampling.logit_masks import add_bias, ban_tokens, keep_only
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.penalties import apply_penalties
from triton_ops.sampling.sample import greedy, sample

LogprobTensors = tuple[Tensor, Tensor, Tensor, Tensor]  # as `token_logprobs` returns them

_SPECIAL = "special_"  # begins the names of the special draws' arrays


@dataclass(frozen=True)
class DrawPlan:
    """What is done with the S rows of logits of a pass.

    Attributes:
        features: of the draw of all S rows.
        special: of the draw of the X rows whose requests change their logits; None: there are none.
        num_top: alternatives to find for the L rows whose log-probabilities are wanted; None: there are none.
        arrays: numbers of the rows for the device, each `[S]`, `[X]` or `[L]`, or a list of pairs of a special row
            and a token.
    """

    features: Features
    special: Features | None
    num_top: int | None
    arrays: Arrays


@dataclass(frozen=True)
class _SpecialDraw:
    """A token to be drawn from changed logits.

    `last_is_unknown`: the token before it has been sampled, but only the device knows it, in `last_token[row]`.
    """

    changes: LogitChanges
    row: int
    position: int
    known: Int32Array
    last_is_unknown: bool


def plan_draws(table: SamplingTable, batch: ScheduleBatch, sampling: Int32Array) -> DrawPlan:
    """The draws of a pass whose S rows of logits are of the requests `sampling` `[S]`, in their order."""
    rows, positions = batch.req_pool_indices.take(sampling), batch.seq_lens.take(sampling)
    first = np.cumsum(batch.num_samples) - batch.num_samples
    samples = (np.arange(len(sampling)) - first.take(sampling)).astype(np.int32)

    num_top = table.num_top(rows)
    has_logprobs = num_top != NO_LOGPROBS
    asks = bool(has_logprobs.any())
    own: Arrays = {"logprob_rows": np.flatnonzero(has_logprobs).astype(np.int32)} if asks else {}

    is_special = table.is_special(rows, positions)
    special = None
    plain_rows = rows
    if is_special.any():
        at = np.flatnonzero(is_special)
        special, drawn = table.draws(rows[at], positions[at], samples[at])
        draws = [
            _SpecialDraw(
                changes=table.changes(row),
                row=row,
                position=position,
                known=request.tokens(),
                last_is_unknown=position > request.num_known,
            )
            for row, position, request in zip(
                rows[at].tolist(), positions[at].tolist(), (batch.requests[i] for i in sampling[at]), strict=True
            )
        ]
        own |= {"special_rows": at.astype(np.int32)} | {_SPECIAL + name: array for name, array in drawn.items()}
        own |= _penalties(draws) | _bias(draws) | _bans(draws) | _allowed(draws)
        # Nobody wants what the draw of all rows finds for these: it is to be as cheap as can be.
        plain_rows = np.where(is_special, np.int32(table.neutral_row), rows)
    features, plain = table.draws(plain_rows, positions, samples)
    return DrawPlan(features, special, int(num_top.max()) if asks else None, plain | own)


def draw_plain(
    logits: Tensor,
    arrays: Mapping[str, Tensor],
    features: Features,
    token_ids: Tensor,
    finite: Tensor,
    *,
    impl: Impl = "auto",
) -> None:
    """Draw a token from each row of `logits` `[S, vocab_size]` as they are. A CUDA graph can capture it.

    Args:
        arrays: those that the features name, each `[S]`, on the device; others are not looked at.
        token_ids: int32 `[S]`, gets the tokens.
        finite: bool `[S]`, gets whether there was one to draw.
    """
    if not features.is_random:
        greedy(logits, out=token_ids, finite=finite, impl=impl)
        return
    sample(
        logits,
        temperatures=arrays["temperatures"],
        seeds=arrays["seeds"],
        sample_indices=arrays["sample_indices"],
        positions=arrays["draw_positions"],
        top_ks=arrays["top_ks"] if features.has_top else None,
        top_ps=arrays["top_ps"] if features.has_top else None,
        min_ps=arrays["min_ps"] if features.has_min_p else None,
        out=token_ids,
        finite=finite,
        impl=impl,
    )


def draw_special(
    logits: Tensor,
    arrays: Mapping[str, Tensor],
    features: Features,
    last_token: Tensor,
    token_ids: Tensor,
    finite: Tensor,
    *,
    impl: Impl = "auto",
) -> None:
    """Draw the tokens of the special rows again, from what their requests make of their logits.

    Args:
        logits: `[S, vocab_size]`, the model's; they stay as they are.
        arrays: the plan's, on the device.
        features: of the special rows.
        last_token: int32 `[max_requests]`, the last token sampled for each row of `req_to_token`.
        token_ids, finite: int32 and bool `[S]`, what `draw_plain` left; those of the special rows are replaced.
    """
    rows = arrays["special_rows"]
    # float32 whatever the changes are, as some need it: a row's numbers do not depend on the rows beside it.
    own = logits.index_select(0, rows).float()
    if "penalty_ids" in arrays:
        ids = arrays["penalty_ids"]
        own = apply_penalties(
            own,
            arrays["penalty_rows"],
            # A negative id -(row + 1) is the last token sampled for that row, which the host does not know yet.
            ids.where(ids >= 0, last_token[(-ids - 1).clamp_min(0)]),
            arrays["penalty_is_output"],
            repetition=arrays["repetition"],
            presence=arrays["presence"],
            frequency=arrays["frequency"],
            impl=impl,
        )
    if "bias_ids" in arrays:
        own = add_bias(own, arrays["bias_rows"], arrays["bias_ids"], arrays["biases"], impl=impl)
    if "banned_ids" in arrays:
        after = arrays["banned_after"]
        applies = (after == NO_TOKEN) | (last_token[arrays["banned_last_row"]] == after)
        own = ban_tokens(own, arrays["banned_rows"], arrays["banned_ids"], applies, impl=impl)
    if "allowed_ids" in arrays:
        restricted = arrays["is_restricted"] != 0
        own = keep_only(own, arrays["allowed_rows"], arrays["allowed_ids"], restricted, impl=impl)
    chosen = torch.empty_like(rows)
    drawn = torch.empty_like(rows, dtype=torch.bool)
    parameters = {name: arrays[_SPECIAL + name] for name in features.array_names}
    draw_plain(own, parameters, features, chosen, drawn, impl=impl)
    token_ids[rows] = chosen
    # What the model computed stays rejected if it is not finite, though `keep_only` may hide it.
    finite[rows] &= drawn


def draw_logprobs(
    logits: Tensor, token_ids: Tensor, arrays: Mapping[str, Tensor], num_top: int, *, impl: Impl = "auto"
) -> LogprobTensors:
    """Log-probabilities of the L drawn tokens whose requests asked for them, as `token_logprobs` returns them.

    Args:
        logits: `[S, vocab_size]`, the model's.
        token_ids: int32 `[S]`, the tokens drawn.
        arrays: the plan's, on the device.
        num_top: the plan's; no more than the vocabulary holds are found.
    """
    rows = arrays["logprob_rows"]
    if len(rows) < len(token_ids):
        logits, token_ids = logits.index_select(0, rows), token_ids.index_select(0, rows)
    return token_logprobs(logits, token_ids, min(num_top, logits.shape[1]), impl=impl)


def _penalties(draws: Sequence[_SpecialDraw]) -> Arrays:
    """The history of each special draw that has penalties, `[H]` in all, and the penalties of all, `[X]`."""
    own = [(i, draw) for i, draw in enumerate(draws) if draw.changes.has_penalties]
    if not own:
        return {}
    # Histories as far as they are known, then the last tokens that are not.
    unknown = [(i, draw) for i, draw in own if draw.last_is_unknown]
    at = np.array([i for i, _ in own], dtype=np.int32)
    lengths = np.array([len(draw.known) for _, draw in own])
    outputs = lengths - [draw.changes.prompt_len for _, draw in own]
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


def _column(draws: Sequence[_SpecialDraw], number: Callable[[LogitChanges], float]) -> np.ndarray:
    return np.fromiter((number(draw.changes) for draw in draws), np.float32, len(draws))


def _bias(draws: Sequence[_SpecialDraw]) -> Arrays:
    own = [(i, draw.changes) for i, draw in enumerate(draws) if len(draw.changes.bias_ids)]
    if not own:
        return {}
    return {
        "bias_rows": _row_of_each([(i, changes.bias_ids) for i, changes in own]),
        "bias_ids": np.concatenate([changes.bias_ids for _, changes in own]),
        "biases": np.concatenate([changes.biases for _, changes in own]),
    }


def _bans(draws: Sequence[_SpecialDraw]) -> Arrays:
    """Tokens that must not come next `[H]`, always or only after a last token that the device knows."""
    bans = [draw.changes.bans(draw.position, draw.known, draw.last_is_unknown) for draw in draws]
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


def _allowed(draws: Sequence[_SpecialDraw]) -> Arrays:
    own = [(i, draw.changes.allowed_ids) for i, draw in enumerate(draws) if draw.changes.allowed_ids is not None]
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
    """The special row of each token of lists of tokens."""
    return np.repeat(np.array([i for i, _ in ids], dtype=np.int32), [len(tokens) for _, tokens in ids])
