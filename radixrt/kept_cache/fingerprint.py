"""A hash of a model's weights."""

# Tests: tests/kept_cache/test_kept_cache.py

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor, nn

_PIECE = 2**22  # elements at a time, to bound the memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers without a pattern: the fractions of the golden ratio and of the square root of 3.
_STEP, _TURN = 0x1E3779B97F4A7C15, 0x3B67AE8584CAA73B


def weight_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 in hex of each parameter's name, shape, dtype and checksum, equal on every device."""
    names, checksums = [], []
    for name, parameter in model.named_parameters():
        names.append(f"{name} {[*parameter.shape]} {parameter.dtype}")
        checksums.append(_checksum(parameter.detach()))
    numbers = torch.stack(checksums).tolist()  # the only time that the host waits
    digest = hashlib.sha256()
    for name, number in zip(names, numbers, strict=True):
        digest.update(name.encode() + b"\0" + struct.pack("<q", number))
    return digest.hexdigest()


def _checksum(x: Tensor) -> Tensor:
    """Sum all elements' bits as integers, each times an odd hash of its place, modulo 2^64: an int64 scalar.

    A change of one element always shows; other changes are missed by chance alone.
    """
    bits = x.contiguous().view(-1).view(_INTEGERS[x.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + len(piece), dtype=torch.int64, device=x.device)
        place.mul_(_STEP)
        place.bitwise_xor_(place >> 29).mul_(_TURN).bitwise_or_(1)
        total += place.mul_(piece).sum()
    return total
