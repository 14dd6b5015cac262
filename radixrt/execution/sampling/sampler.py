"""Draws the tokens of a pass from its logits, on the device, which need not be asked what is to be done.

All rows are drawn from at once. Then the rows whose requests process their logits are drawn from again, and
log-probabilities are computed where they are asked for: a request costs its neighbours nothing but its own work.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from radixrt.schedule.passes import NO_TOKEN, PROCESSED, Features
from triton_ops.implementation import Impl
from triton_ops.sampling.filtered_logits import filtered_logits
from triton_ops.sampling.logit_masks import add_bias, ban_tokens, keep_only
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.penalties import apply_penalties
from triton_ops.sampling.sample import greedy, sample

Arrays = Mapping[str, Tensor]  # those of SamplingInputs, on the device
Tokens = tuple[Tensor, Tensor]  # token ids int32 `[S]`, and whether there was one to draw, bool `[S]`

_SHAPING = ("temperatures", "top_ks", "top_ps", "min_ps")  # parameters that make a distribution of logits


def sample_plain(logits: Tensor, arrays: Arrays, features: Features, out: Tokens, *, impl: Impl = "auto") -> None:
    """Draw a token from each row of `logits` `[S, vocab_size]` as they are. A CUDA graph can capture it.

    Only those of `arrays` are read that the features name, each `[S]`.
    """
    token_ids, finite = out
    if not features.is_random:
        greedy(logits, out=token_ids, finite=finite, impl=impl)
        return
    parameters = {name: arrays[name] for name in features.array_names}
    positions = parameters.pop("draw_positions")
    sample(logits, positions=positions, **parameters, out=token_ids, finite=finite, impl=impl)


def sample_processed(
    logits: Tensor, arrays: Arrays, features: Features, last_token: Tensor, out: Tokens, *, impl: Impl = "auto"
) -> Tensor | None:
    """Draw the tokens of the processed rows again, from what their requests make of the model's `logits`
    `[S, vocab_size]`, which stay as they are: these rows of `out`, which `sample_plain` left, are replaced.

    `features` are `SamplingInputs.processed`, `last_token` int32 `[max_requests]` those sampled last for each row.

    Returns float32 `[Y, vocab_size]`, whose softmax is what those rows were drawn from whose requests want its
    log-probabilities; None if there are none. A greedy row's is what its token is the likeliest of.
    """
    rows = arrays["processed_rows"]
    own = logits if len(rows) == len(logits) else logits.index_select(0, rows)  # changes that need float32 make it
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
    token_ids, finite = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.bool)
    parameters = {name: arrays[PROCESSED + name] for name in features.array_names}
    sample_plain(own, parameters, features, (token_ids, finite), impl=impl)
    out[0][rows] = token_ids
    # What the model computed stays rejected if it is not finite, though `keep_only` may hide it.
    out[1][rows] &= finite
    return _filtered(own, arrays["filtered_rows"], parameters, impl) if "filtered_rows" in arrays else None


def _filtered(own: Tensor, rows: Tensor, parameters: Arrays, impl: Impl) -> Tensor:
    """Of the rows `[Y]` of processed logits, as `sample_processed` returns them."""
    shaping = {name: parameters[name] for name in _SHAPING if name in parameters}
    if len(rows) < len(own):
        own = own.index_select(0, rows)
        shaping = {name: array.index_select(0, rows) for name, array in shaping.items()}
    own = own.float()
    return filtered_logits(own, **shaping, impl=impl) if shaping else own


def draw_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    arrays: Arrays,
    num_top: int,
    filtered: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> tuple[Tensor, ...]:
    """Log-probabilities of the L tokens, of the `token_ids` int32 `[S]` drawn, whose requests asked for them, as
    `token_logprobs` returns them, with as many of `num_top` alternatives as there are: of the model's `logits`
    `[S, vocab_size]`, or of what `sample_processed` returned, for the rows that `filtered` has.
    """
    rows = arrays["logprob_rows"]
    if len(rows) < len(token_ids):
        token_ids = token_ids.index_select(0, rows)
    num_top = min(num_top, logits.shape[1])
    if filtered is not None and len(filtered) == len(rows):
        return token_logprobs(filtered, token_ids, num_top, impl=impl)
    own = logits.index_select(0, rows) if len(rows) < len(logits) else logits
    found = token_logprobs(own, token_ids, num_top, impl=impl)
    if filtered is not None:
        # By themselves: a kernel's order depends on the dtype, and no row's dtype may depend on its neighbours.
        places = arrays["filtered_logprobs"].long()
        others = token_logprobs(filtered, token_ids.index_select(0, places), num_top, impl=impl)
        for whole, part in zip(found, others, strict=True):
            whole.index_copy_(0, places, part)
    return found
