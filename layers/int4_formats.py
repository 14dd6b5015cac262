"""How checkpoints store weights of 4 bits: AWQ, GPTQ and compressed-tensors pack eight of them into an int32.

Each function turns a stored tensor into numbers 0 to 15, uint8, in rows of outputs as `int4_linear` has them.
Zeros of GPTQ may be 16.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

IN_A_WORD = 8  # numbers

# Of the eight columns that AWQ packs into a word, the one in its bits 0 to 3, 4 to 7, ...
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Words(Enum):
    """How a checkpoint packs numbers of 4 bits. Zeros of the first format of GPTQ are stored less one."""

    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    COMPRESSED = "pack-quantized"


def awq_values(qweight: Tensor) -> Tensor:
    """AWQ's `qweight` int32 `[K, N / 8]` as `[N, K]`; `qzeros` `[K / 128, N / 8]` as `[N, K / 128]`."""
    found = _nibbles(qweight)
    values = torch.empty_like(found)
    values[..., list(_AWQ_ORDER)] = found
    return values.flatten(1).T.contiguous()


def gptq_values(qweight: Tensor) -> Tensor:
    """GPTQ's `qweight` int32 `[K / 8, N]` as `[N, K]`."""
    return _nibbles(qweight.T).flatten(1)


def gptq_zeros(qzeros: Tensor, *, less_one: bool) -> Tensor:
    """GPTQ's `qzeros` int32 `[K / 128, N / 8]` as `[N, K / 128]`. The first format stores them `less_one`."""
    return (_nibbles(qzeros).flatten(1) + int(less_one)).T.contiguous()


def packed_values(weight_packed: Tensor) -> Tensor:
    """compressed-tensors' `weight_packed` int32 `[N, K / 8]` as `[N, K]`: its numbers plus 8."""
    return _nibbles(weight_packed).flatten(1)


def _nibbles(words: Tensor) -> Tensor:
    """int32 `[..., M]` as uint8 `[..., M, 8]`, from the lowest bits on."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)
