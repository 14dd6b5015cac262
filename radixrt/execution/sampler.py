"""What the sampler is told about the requests of a pass, and what it does with their logits.

Only what some request of the pass asks for is sent and computed, and the host knows without asking the device
which that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixrt.schedule.request import Request
from triton_ops.implementation import Impl
from triton_ops.logit_masks import add_bias, ban_tokens, keep_only
from triton_ops.penalties import apply_penalties
from triton_ops.sampling import finite_rows, greedy, sample

Arrays = dict[str, NDArray[Any]]
NO_TOKEN = -1


@dataclass(frozen=True)
class Draw:
    """One token to be drawn: for which request, from which row of logits, as which of its samples.

    Attributes:
        request: whose parameters apply.
        row: its row in `req_to_token`, where the device keeps the last token sampled for it.
        position: of the token to be drawn.
        sample_index: which of the n answers it belongs to.
    """

    request: Request
    row: int
    position: int
    sample_index: int


def sampling_arrays(draws: Sequence[Draw]) -> Arrays:
    """The sampler's arrays for S draws; row i of the logits is that of draw i."""
    return {
        **_distribution(draws),
        **_penalties(draws),
        **_bias(draws),
        **_bans(draws),
        **_allowed(draws),
    }


def draw_tokens(
    logits: Tensor, arrays: Mapping[str, Tensor], last_token: Tensor, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Token ids `[S]` int32 for `logits` `[S, vocab_size]`, and bool `[S]`: whether there was one to draw.

    Args:
        arrays: what `sampling_arrays` made, on the device.
        last_token: int32 `[max_requests]`, the last token sampled for each row.
    """
    # What is not finite stays so, but for what `keep_only` hides.
    before = finite_rows(logits, impl=impl) if "allowed_ids" in arrays else None
    if "penalty_ids" in arrays:
        ids = arrays["penalty_ids"]
        logits = apply_penalties(
            logits,
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
        logits = add_bias(logits, arrays["bias_rows"], arrays["bias_ids"], arrays["biases"], impl=impl)
    if "banned_ids" in arrays:
        after, row = arrays["banned_after"], arrays["banned_last_row"]
        applies = (after == NO_TOKEN) | (last_token[row] == after)
        logits = ban_tokens(logits, arrays["banned_rows"], arrays["banned_ids"], applies, impl=impl)
    if "allowed_ids" in arrays:
        restricted = arrays["is_restricted"] != 0
        logits = keep_only(logits, arrays["allowed_rows"], arrays["allowed_ids"], restricted, impl=impl)
    drawn = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    if "temperatures" not in arrays:
        token_ids = greedy(logits, finite=drawn, impl=impl)
    else:
        token_ids = sample(
            logits,
            temperatures=arrays["temperatures"],
            seeds=arrays["seeds"],
            sample_indices=arrays["sample_indices"],
            positions=arrays["draw_positions"],
            top_ks=arrays.get("top_ks"),
            top_ps=arrays.get("top_ps"),
            min_ps=arrays.get("min_ps"),
            finite=drawn,
            impl=impl,
        )
    return token_ids, drawn if before is None else drawn & before


def _distribution(draws: Sequence[Draw]) -> Arrays:
    """Temperature and filters, each `[S]`; nothing if all draws are greedy, no filter that none uses."""
    count = len(draws)
    params = [draw.request.params for draw in draws]
    temperatures = np.fromiter((p.temperature for p in params), np.float32, count)
    if not temperatures.any():
        return {}
    arrays: Arrays = {
        "temperatures": temperatures,
        "seeds": np.fromiter((draw.request.seed for draw in draws), np.int64, count),
        "sample_indices": np.fromiter((draw.sample_index for draw in draws), np.int32, count),
        "draw_positions": np.fromiter((draw.position for draw in draws), np.int32, count),
    }
    top_ks = np.fromiter((p.top_k for p in params), np.int32, count)
    top_ps = np.fromiter((p.top_p for p in params), np.float32, count)
    min_ps = np.fromiter((p.min_p for p in params), np.float32, count)
    if top_ks.any() or (top_ps < 1).any():
        arrays |= {"top_ks": top_ks, "top_ps": top_ps}
    if min_ps.any():
        arrays["min_ps"] = min_ps
    return arrays


def _penalties(draws: Sequence[Draw]) -> Arrays:
    """The history of each draw that has penalties, `[H]` in all, and the penalties of all, `[S]`."""
    rows: list[NDArray[np.int32]] = []
    ids: list[NDArray[np.int32]] = []
    is_output: list[NDArray[np.int32]] = []
    for i, draw in enumerate(draws):
        request = draw.request
        if not request.params.has_penalties:
            continue
        history = request.tokens()
        if request.samples_in_flight > 1:  # this draw's own sample, and the one before it
            history = np.append(history, np.int32(-(draw.row + 1)))
        output = np.ones(len(history), dtype=np.int32)
        output[: request.prompt_len] = 0
        rows.append(np.full(len(history), i, dtype=np.int32))
        ids.append(history)
        is_output.append(output)
    if not rows:
        return {}
    count = len(draws)
    params = [draw.request.params for draw in draws]
    return {
        "penalty_rows": np.concatenate(rows),
        "penalty_ids": np.concatenate(ids),
        "penalty_is_output": np.concatenate(is_output),
        "repetition": np.fromiter((p.repetition_penalty for p in params), np.float32, count),
        "presence": np.fromiter((p.presence_penalty for p in params), np.float32, count),
        "frequency": np.fromiter((p.frequency_penalty for p in params), np.float32, count),
    }


def _bias(draws: Sequence[Draw]) -> Arrays:
    entries = [(i, *pair) for i, draw in enumerate(draws) for pair in draw.request.params.logit_bias]
    if not entries:
        return {}
    rows, ids, biases = zip(*entries, strict=True)
    return {
        "bias_rows": np.array(rows, dtype=np.int32),
        "bias_ids": np.array(ids, dtype=np.int32),
        "biases": np.array(biases, dtype=np.float32),
    }


def _bans(draws: Sequence[Draw]) -> Arrays:
    """Tokens that must not come next `[H]`, always or only after a last token that the device knows."""
    entries: list[tuple[int, int, int, int]] = []
    for i, draw in enumerate(draws):
        request = draw.request
        in_flight = request.samples_in_flight > 1  # this draw's own sample, and the one before it
        if draw.position - request.prompt_len < request.params.min_new_tokens:
            entries += [(i, token, NO_TOKEN, draw.row) for token in request.stop_ids]
        if not request.bad_words:
            continue
        # As transformers does, prompt and answer are looked at alike.
        known = request.tokens()
        for *before, last in request.bad_words:
            after = NO_TOKEN
            if in_flight and before:
                *before, after = before
            if len(before) <= len(known) and known[len(known) - len(before) :].tolist() == list(before):
                entries.append((i, last, after, draw.row))
    if not entries:
        return {}
    rows, ids, after_ids, last_rows = zip(*entries, strict=True)
    return {
        "banned_rows": np.array(rows, dtype=np.int32),
        "banned_ids": np.array(ids, dtype=np.int32),
        "banned_after": np.array(after_ids, dtype=np.int32),
        "banned_last_row": np.array(last_rows, dtype=np.int32),
    }


def _allowed(draws: Sequence[Draw]) -> Arrays:
    restricted = np.zeros(len(draws), dtype=np.int32)
    rows: list[NDArray[np.int32]] = []
    ids: list[NDArray[np.int32]] = []
    for i, draw in enumerate(draws):
        allowed = draw.request.params.allowed_token_ids
        if allowed is not None:
            restricted[i] = 1
            rows.append(np.full(len(allowed), i, dtype=np.int32))
            ids.append(np.array(allowed, dtype=np.int32))
    if not rows:
        return {}
    return {
        "allowed_rows": np.concatenate(rows),
        "allowed_ids": np.concatenate(ids),
        "is_restricted": restricted,
    }
