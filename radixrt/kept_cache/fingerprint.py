"""A number that tells a model's weights from any others."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor, nn

_PIECE = 2**22  # elements at a time: what bounds the memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers without a pattern: the fractions of the golden ratio and of the square root of 3.
_STEP, _TURN = 0x1E3779B97F4A7C15, 0x3B67AE8584CAA73B


def weight_fingerprint(model: nn.Module) -> str:
    """SHA-256, as hex digits, of each parameter's name, shape, dtype and checksum: the same on every device."""
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
    """The sum, modulo 2^64, of all elements' bits as integers, times odd numbers that are hashes of their places.

    A change of one element always shows, others but by chance. An int64 scalar on x's device.
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
