"""Choosing the next token from logits: greedy, or one draw after temperature, top-k, top-p and min-p."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.philox import philox_uniform

# Probabilities are integers in units of 2^-44 of the likeliest token's: their sums are exact in any order, so a
# row's draw is the same in every batch and under every parallel scan.
UNIT_BITS = 44
MAX_VOCAB_SIZE = 2 ** (63 - UNIT_BITS) - 1


def greedy(logits: Tensor) -> Tensor:
    """The first of the greatest logits of each row of `logits [R, vocab_size]`: int32 `[R]`."""
    return logits.argmax(dim=-1).int()


def sample(
    logits: Tensor,
    *,
    temperatures: Tensor,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token a row of `logits [R, vocab_size]`, any float dtype: int32 `[R]`.

    Filters apply in this order, each to what the one before left:

    - `temperatures` float32 `[R]` divides the logits; 0 is greedy, the first of the greatest logits,
    - `top_ks` int32 `[R]` keeps the k likeliest tokens and ties at the k-th; off where <= 0 or >=
      vocab_size,
    - `top_ps` float32 `[R]` keeps the fewest likeliest tokens whose share of the rest reaches p, and
      ties at the last of them; off where 1,
    - `min_ps` float32 `[R]` keeps tokens at least min_p times as likely as the likeliest; off where 0.

    A filter that is None is off for all rows, and costs nothing.

    The draw inverts the cumulative distribution in vocabulary order at one uniform number, of Philox under
    `(seeds int64, sample_indices int32, positions int32)`, all `[R]`. It depends on its own row only. A
    token less likely than 2^-45 of the likeliest, and so one whose logit is -inf, is never drawn. A row that
    `finite_rows` rejects gives some token id. Raises ValueError where the vocabulary is too large for exact
    sums.
    """
    vocab_size = logits.shape[1]
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size} exceeds the limit of {MAX_VOCAB_SIZE}")
    drawn = temperatures > 0.0
    mass = _mass(logits, torch.where(drawn, temperatures, 1.0))
    if top_ks is not None or top_ps is not None:
        mass = _keep(mass, _top_threshold(mass, top_ks, top_ps))
    if min_ps is not None:  # the likeliest token's mass is 2^44, and no filter removes it
        mass = _keep(mass, (min_ps.double() * 2.0**UNIT_BITS).ceil().long())

    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1]
    uniform = philox_uniform(seeds, sample_indices, positions)
    # Below the total, though float64 rounds it: the greatest uniform number is 1 - 2^-53. The first token whose
    # cumulative mass exceeds the target has mass of its own.
    target = (uniform * total).long()
    token = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    token = token.clamp(max=vocab_size - 1)  # a row of NaN has no mass at all
    return torch.where(drawn, token.int(), greedy(logits))


def finite_rows(x: Tensor) -> Tensor:
    """Bool `[R]`: whether a row of `x [R, N]` holds no NaN, no +inf, and something besides -inf."""
    return x.amax(dim=-1).isfinite()


def _mass(logits: Tensor, temperatures: Tensor) -> Tensor:
    """`exp((logit - greatest) / temperature)` in units of 2^-44, int64 `[R, vocab_size]`."""
    wide = logits.double()
    wide.sub_(wide.amax(dim=-1, keepdim=True)).div_(temperatures.double().unsqueeze(1))
    return wide.exp_().mul_(2.0**UNIT_BITS).round_().nan_to_num_(nan=0.0).long()


def _top_threshold(mass: Tensor, top_ks: Tensor | None, top_ps: Tensor | None) -> Tensor:
    """The least mass that top-k, then top-p, keep: int64 `[R]`."""
    vocab_size = mass.shape[1]
    descending = mass.sort(dim=-1, descending=True).values
    kept = descending
    if top_ks is not None:
        top_ks = torch.where((top_ks > 0) & (top_ks < vocab_size), top_ks, vocab_size)
        last = (top_ks.long() - 1).unsqueeze(1)
        kept = descending * (descending >= descending.gather(1, last))
    if top_ps is None:
        top_ps = torch.ones(mass.shape[0], device=mass.device)
    cumulative = kept.cumsum(dim=-1)
    # A token is kept if those before it fall short of p; all are where p is 1, which float64 might round off.
    top_ps = top_ps.double().unsqueeze(1)
    short = (cumulative - kept < (top_ps * cumulative[:, -1:]).ceil().long()) | (top_ps >= 1.0)
    last = ((kept > 0) & short).sum(dim=-1, keepdim=True) - 1
    return descending.gather(1, last.clamp_(min=0)).squeeze(1)


def _keep(mass: Tensor, threshold: Tensor) -> Tensor:
    """`mass` where it reaches its row's threshold, else 0."""
    return mass * (mass >= threshold.unsqueeze(1))
