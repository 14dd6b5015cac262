"""Philox4x32-10, the counter-based random generator of Salmon et al., "Parallel random numbers" (SC 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import tl, triton

ROUNDS = 10
MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)  # of counter words 2 and 0
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox_uniform(seeds: Tensor, sample_indices: Tensor, positions: Tensor) -> Tensor:
    """One uniform number in the open interval (0, 1) for each (seed, sample index, position).

    All three are integer tensors `[R]` on one device; the seed's 64 bits are the key, (position, sample index, 0,
    0) is the counter. Returns float64 `[R]`: odd multiples of 2^-53 from 52 random bits of the first two words.
    The numbers are the same on every device and in every batch.
    """
    zero = torch.zeros_like(seeds)
    counter = torch.stack([positions.to(torch.int64), sample_indices.to(torch.int64), zero, zero], dim=1)
    words = philox4x32(counter & WORD, torch.stack([seeds, seeds >> 32], dim=1) & WORD)
    bits = (words[:, 0] << 20) | (words[:, 1] >> 12)
    return (2 * bits + 1).to(torch.float64) * 2.0**-53


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """The four random words of `counter [R, 4]` under `key [R, 2]`, all int64 that hold 32-bit words."""
    # Constants are Python numbers: a tensor of them would be copied to the device synchronously.
    words, keys = list(counter.unbind(1)), list(key.unbind(1))
    for _ in range(ROUNDS):
        # A product of two words needs 64 unsigned bits; int64 wraps around to the same bits, and the mask removes
        # the copies of the sign that the shift brings in.
        products = [words[2] * MULTIPLIERS[0], words[0] * MULTIPLIERS[1]]
        high = [((products[i] >> 32) ^ words[2 * i + 1] ^ keys[i]) & WORD for i in range(2)]
        words = [high[0], products[0] & WORD, high[1], products[1] & WORD]
        keys = [(keys[i] + KEY_INCREMENTS[i]) & WORD for i in range(2)]
    return torch.stack(words, dim=1)


@triton.jit
def load_uniform(seeds_ptr, sample_indices_ptr, positions_ptr, row):
    """`philox_uniform` of one row, in a kernel."""
    position = tl.load(positions_ptr + row).to(tl.uint32)
    sample_index = tl.load(sample_indices_ptr + row).to(tl.uint32)
    zero = tl.zeros((), tl.uint32)
    first, second, _, _ = tl.philox(tl.load(seeds_ptr + row), position, sample_index, zero, zero)
    bits = (first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)
    return (2 * bits + 1).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
