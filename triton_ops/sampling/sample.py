"""The choice of the next token from logits: greedy, or one draw after temperature, top-k, top-p and min-p.

The vocabulary is cut into blocks of 4096 tokens. A draw chooses a block by the blocks' weights, then a token by
the masses within the block, both in vocabulary order and at one uniform number: it inverts the cumulative
distribution of the row. A block's masses are relative to its own greatest logit, so that a kernel reads it only
once.

The data flow of the kernels:

    without filters                 with filters
                                    chunk_maxima: logits -> maxima of 256 tokens each
                                    draw_from_candidates: maxima, some logits -> tokens of most rows
                                    logit_thresholds: logits of the other rows -> smallest logits kept
    draw_tokens: logits -> tokens   draw_tokens: logits of the other rows -> tokens

So logits are read once; with filters, few of them are read again except in rare rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import Impl, runs_triton
from triton_ops.sampling.candidate_draw import draw_from_candidates
from triton_ops.sampling.filtered_logits import reference_kept
from triton_ops.sampling.logit_threshold import logit_thresholds
from triton_ops.sampling.philox import philox_uniform
from triton_ops.sampling.row_maxima import chunk_maxima, finite_of
from triton_ops.sampling.token_draw import draw_tokens
from triton_ops.sampling.token_mass import BLOCK, exponent_scale, relative_exp2, token_mass

MAX_VOCAB_SIZE = 2**20  # one program can hold its chunk maxima; the sum of masses would allow 2^25


def greedy(
    logits: Tensor, *, out: Tensor | None = None, finite: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    """The first of the greatest logits of each row of `logits [R, vocab_size]`: int32 `[R]`.

    `out`, int32 `[R]`, receives the tokens and is returned. `finite`, bool `[R]`, receives `finite_rows(logits)`,
    which costs nothing here.
    """
    chosen = _empty_tokens(logits) if out is None else out
    if runs_triton(impl, logits.device):
        rows = _checked_rows(logits)
        draw_tokens(rows, chosen, chunk_maxima(rows), finite)
        return chosen
    if finite is not None:
        finite.copy_(finite_rows(logits, impl="torch"))
    return chosen.copy_(logits.argmax(dim=-1))


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
    out: Tensor | None = None,
    finite: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """One token a row of `logits [R, vocab_size]`, float16, bfloat16 or float32: int32 `[R]`.

    Filters apply in this order, each to what the one before left:

    - `temperatures` float32 `[R]` divides the logits; 0 is greedy, the first of the greatest logits,
    - `top_ks` int32 `[R]` keeps the k likeliest tokens and ties at the k-th; off where <= 0 or >= vocab_size,
    - `top_ps` float32 `[R]` keeps the fewest likeliest tokens whose share of the rest reaches p, and ties at the
      last of them; off where 1,
    - `min_ps` float32 `[R]` keeps tokens at least min_p times as likely as the likeliest; off where 0.

    A filter that is None is off for all rows, and costs nothing.

    The draw inverts the cumulative distribution in vocabulary order at one uniform number, from Philox under
    `(seeds int64, sample_indices int32, positions int32)`, all `[R]`. It depends on its own row only. A token less
    likely than 2^-39 of the likeliest of its block, such as one with logit -inf, is never drawn. A row that
    `finite_rows` rejects gives some token id. `out`, int32 `[R]`, receives the tokens and is returned. `finite`,
    bool `[R]`, receives `finite_rows(logits)`, which costs nothing here. Raises ValueError where the vocabulary is
    too large.
    """
    rows = _checked_rows(logits)
    chosen = _empty_tokens(logits) if out is None else out
    min_log2 = None if min_ps is None else min_ps.log2()
    draws = (temperatures, seeds, sample_indices, positions)
    if runs_triton(impl, logits.device):
        filtered = not (top_ks is None and top_ps is None and min_ps is None)
        if not filtered:
            draw_tokens(rows, chosen, None, finite, draws)
            return chosen
        maxima = chunk_maxima(rows)
        done = None
        if top_ks is not None or top_ps is not None:
            done = draw_from_candidates(rows, chosen, maxima, finite, draws, top_ks, top_ps, min_log2)
        thresholds, maximum = logit_thresholds(rows, maxima, temperatures, top_ks, top_ps, done)
        draw_tokens(rows, chosen, maxima, finite, draws, (thresholds, maximum, min_log2, done))
        return chosen
    if finite is not None:
        finite.copy_(finite_rows(logits, impl="torch"))
    return chosen.copy_(_sample_in_torch(logits, *draws, top_ks, top_ps, min_log2))


def sample_distribution(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
) -> Tensor:
    """What `sample` means where temperatures are above 0: the probabilities from which it draws, float64
    `[R, vocab_size]`.
    """
    scores = logits.double() / temperatures.double().unsqueeze(1)
    if top_ks is not None:
        last = torch.where((top_ks > 0) & (top_ks < logits.shape[1]), top_ks, logits.shape[1]).long() - 1
        kth = scores.sort(-1, descending=True).values.gather(1, last.unsqueeze(1))
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_ps is not None:
        descending = scores.sort(-1, descending=True).values
        before = descending.softmax(-1).cumsum(-1) - descending.softmax(-1)
        kept = (before < top_ps.double().unsqueeze(1)) | (top_ps >= 1.0).unsqueeze(1)
        least = descending.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if min_ps is not None:
        probabilities = scores.softmax(-1)
        least = min_ps.double().unsqueeze(1) * probabilities.amax(-1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, -torch.inf)
    return scores.softmax(-1)


def _sample_in_torch(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
    top_ks: Tensor | None,
    top_ps: Tensor | None,
    min_log2: Tensor | None,
) -> Tensor:
    """The tokens that the kernels draw, bit for bit: with masses as integers, block by block."""
    wide, scale = logits.float(), exponent_scale(temperatures).unsqueeze(1)
    kept = reference_kept(wide, temperatures, top_ks, top_ps, min_log2)
    likeliest = wide.amax(dim=-1, keepdim=True)

    blocks, blocks_kept = _in_blocks(wide, -torch.inf), _in_blocks(kept, False)
    anchor = blocks.amax(dim=-1)
    masses = token_mass(blocks, anchor.unsqueeze(2), scale.unsqueeze(2)) * blocks_kept
    sums = masses.sum(dim=-1)  # [R, blocks], as are the weights
    weights = (sums.double() * relative_exp2(anchor, likeliest, scale).double()).nan_to_num_(nan=0.0).long()

    cumulative = weights.cumsum(dim=-1)
    before, total = cumulative - weights, cumulative[:, -1]
    uniform = philox_uniform(seeds, sample_indices, positions)
    # Below the total, although float64 rounds it: the greatest uniform number is 1 - 2^-53. The block that holds
    # the target has a weight above 0.
    target = (uniform * total).long().unsqueeze(1)
    block = ((before <= target).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    target, weight, mass = (target - before.gather(1, block)), weights.gather(1, block), sums.gather(1, block)
    target = torch.minimum((target.double() / weight.double() * mass.double()).long(), mass - 1)
    inner = masses.gather(1, block.unsqueeze(2).expand(-1, -1, masses.shape[2])).squeeze(1).cumsum(dim=-1)
    token = block.squeeze(1) * BLOCK + (inner <= target).sum(dim=-1)
    token = token.clamp(max=logits.shape[1] - 1)  # a row of NaN has no mass at all
    return torch.where(temperatures > 0.0, token, logits.argmax(dim=-1))


def finite_rows(x: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Bool `[R]`: whether a row of `x [R, N]` holds no NaN, no +inf, and a number other than -inf."""
    if runs_triton(impl, x.device):
        return finite_of(chunk_maxima(as_rows(x)))
    return x.amax(dim=-1).isfinite()


def _empty_tokens(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)


def _checked_rows(logits: Tensor) -> Tensor:
    vocab_size = logits.shape[1]
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size} exceeds the limit of {MAX_VOCAB_SIZE}")
    return as_rows(logits)


def _in_blocks(x: Tensor, filler: float) -> Tensor:
    """`x [R, vocab_size]` as `[R, blocks, BLOCK]`; a smaller vocabulary is one block, without padding."""
    size = min(BLOCK, x.shape[1])
    num_blocks = -(-x.shape[1] // size)
    return pad(x, (0, -x.shape[1] % size), value=filler).view(-1, num_blocks, size)
