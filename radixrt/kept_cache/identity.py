"""The identity of KV: Runtimes of equal identity compute the same KV for the same tokens."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn

from layers.moe import Mxfp4Matrices
from layers.placement import Placement
from layers.rotary import RopeParameters
from radixrt.kept_cache.cache_file import KVFormat
from radixrt.models.config import AttentionKind, ModelConfig
from triton_ops.implementation import triton

_PIECE = 2**22  # elements at a time, to bound the memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers without a pattern: the fractions of the golden ratio and of the square root of 3.
_STEP, _TURN = 0x1E3779B97F4A7C15, 0x3B67AE8584CAA73B
# Fields of a config on which no KV depends, or that are spelled out below.
_NOT_OF_KV = {
    *("dtype", "quantization", "initializer_range", "bos_token_id", "eos_token_ids"),
    *("context_length", "max_context_length", "attention"),
}


def cache_identity(
    config: ModelConfig, fingerprint: str, placement: Placement, kv: KVFormat, scales: Tensor | None
) -> dict[str, Any]:
    """Collect everything that KV depends on: JSON values by their names in messages.

    `fingerprint` is `weight_fingerprint` of the model, `placement` the model's, `scales` are the pool's. KV of
    deterministic models has the same bits on the same kind of device alone, by the same torch.
    """
    sizes = config.head_dim, config.context_length  # some kinds of scaling depend on the latter
    own = [field.name for field in fields(config) if field.name not in _NOT_OF_KV]

    def each(of: Callable[[AttentionKind], Any]) -> Any:
        """One value if all layers agree, else the list."""
        values = [of(kind) for kind in config.attention]
        return values[0] if all(value == values[0] for value in values) else values

    identity = {
        **{name.replace("_", " "): getattr(config, name) for name in own},
        "rope theta": each(lambda kind: kind.rope and kind.rope.theta),
        "rope scaling": each(lambda kind: kind.rope and _scaling(kind.rope)),
        "rotated share of a head": each(lambda kind: kind.rope and kind.rope.partial_rotary_factor),
        "rope frequencies": each(lambda kind: kind.rope and _hash(kind.rope.frequencies(*sizes))),
        "sliding window": each(lambda kind: kind.window),
        "dtype": str(placement.dtype).removeprefix("torch."),
        "dtype of KV": kv.dtype,
        "weights": fingerprint,
    }
    if scales is not None:  # another GPU may round them otherwise
        identity["scales of KV"] = _hash(scales.cpu())
    if placement.deterministic:
        identity["same bits"] = _bits_of(placement.device)
    read: dict[str, Any] = json.loads(json.dumps(identity, default=sorted))  # as read from a file, sets as lists
    return read


def _bits_of(device: torch.device) -> str:
    """On what the bits of deterministic models depend besides."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}"
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"{device.type} {capability}, {threads} threads, torch {torch.__version__}"


def _scaling(rope: RopeParameters) -> dict[str, Any] | None:
    return None if rope.scaling is None else {"kind": type(rope.scaling).__name__, **asdict(rope.scaling)}


def _hash(x: Tensor) -> str:
    """Return the beginning of the hash of float32 numbers on the CPU."""
    return hashlib.sha256(x.numpy().astype("<f4").tobytes()).hexdigest()[:16]


def weight_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 in hex of each parameter's name, shape, dtype and checksum, equal on every device."""
    # Some devices hold MXFP4 in another order.
    stored = {
        f"{prefix}.{part}": told
        for prefix, module in model.named_modules()
        if isinstance(module, Mxfp4Matrices)
        for part, told in module.stored().items()
    }
    heads, checksums = [], []
    for name, parameter in model.named_parameters():
        shape, parts = stored.get(name) or (tuple(parameter.shape), iter((parameter.detach(),)))
        heads.append(f"{name} {[*shape]} {parameter.dtype}\0")
        checksums.append(_checksum(parts, parameter.device))
    digest = hashlib.sha256()
    # The only time that the host waits.
    for head, checksum in zip(heads, torch.stack(checksums).tolist(), strict=True):
        digest.update(head.encode() + struct.pack("<q", checksum))
    return digest.hexdigest()


def _checksum(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum all elements' bits as integers, each times an odd hash of its place, modulo 2^64: an int64 scalar. A
    tensor's parts follow one another.

    A change of one element always shows; other changes are missed by chance alone.
    """
    total, first = torch.zeros((), dtype=torch.int64, device=device), 1
    for part in parts:
        bits = part.contiguous().view(-1).view(_INTEGERS[part.dtype.itemsize])
        for start in range(0, len(bits), _PIECE):
            piece = bits[start : start + _PIECE].to(torch.int64)
            place = torch.arange(first, first + len(piece), dtype=torch.int64, device=device)
            first += len(piece)
            place.mul_(_STEP)
            place.bitwise_xor_(place >> 29).mul_(_TURN).bitwise_or_(1)
            total += place.mul_(piece).sum()
    return total
