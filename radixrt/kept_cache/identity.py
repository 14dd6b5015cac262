"""The identity of KV and states: Runtimes of equal identity compute the same for the same tokens."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from layers.checkpoint_slot import unpacked
from layers.placement import Placement
from layers.rotary import RopeParameters
from layers.weight import Stack
from radixrt.kept_cache.cache_file import Formats
from radixrt.models.config import AttentionKind, ModelConfig
from radixrt.models.decoder import Decoder
from radixrt.models.rank_part import rank_part
from triton_ops.implementation import triton

_PIECE = 2**22  # elements at a time, to bound the memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers without a pattern: the fractions of the golden ratio and of the square root of 3.
_STEP, _TURN = 0x1E3779B97F4A7C15, 0x3B67AE8584CAA73B
# Fields of a config on which no KV depends, or that are spelled out below.
_NOT_OF_KV = {
    *("dtype", "quantization", "initializer_range", "bos_token_id", "eos_token_ids"),
    *("context_length", "max_context_length", "attention", "is_tying_known"),
}


def cache_identity(
    config: ModelConfig, fingerprint: str, placement: Placement, formats: Formats, scales: Tensor | None
) -> dict[str, Any]:
    """Collect everything that KV depends on: JSON values by their names in messages.

    `config` is that of the whole model, `fingerprint` its `weight_fingerprint`, `placement` its own or a rank's,
    `formats` are of rows of KV and of states, `scales` those of all heads. KV of deterministic models has the same
    bits on the same kind of device alone, by the same torch, on as many ranks.
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
        "dtype of KV": next(iter(formats.values())).dtype,
        "weights": fingerprint,
        **_states_of(config, placement),
    }
    if scales is not None:  # another GPU may round them otherwise
        identity["scales of KV"] = _hash(scales.cpu())
    if placement.deterministic:  # stages add in the same order
        size = placement.ranks.size
        identity["same bits"] = _bits_of(placement.device) + ("" if size == 1 else f", {size} ranks")
    read: dict[str, Any] = json.loads(json.dumps(identity, default=sorted))  # as read from a file, sets as lists
    return read


def _states_of(config: ModelConfig, placement: Placement) -> dict[str, str]:
    """The parts of a state of the whole model."""
    return {
        f"{part.name} of states": f"{str(part.dtype).removeprefix('torch.')} {[*part.row_shape]}"
        for part in config.kv_layout(placement.dtype).sequences
    }


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
    heads, parts = zip(*_parameters(model), strict=True)
    return _digest(heads, _checksums(parts))


def weight_fingerprint_of_ranks(whole: Decoder, checksums: Sequence[Mapping[str, int]]) -> str:
    """The `weight_fingerprint` of the `whole` model (see `whole_of`), from the `rank_checksums` of all ranks. If
    weights are not held as a checkpoint stores them, as some quantised ones, it is one of so many ranks.
    """
    sums: dict[str, int] = {}
    for own in checksums:
        for name, checksum in own.items():
            sums[name] = _signed(sums.get(name, 0) + checksum)
    names = [name for name, _ in whole.named_parameters()]
    if sums.keys() != set(names):
        return f"of {len(checksums)} ranks: {_digest(sums, sums.values())}"
    heads, _ = zip(*_parameters(whole), strict=True)
    return _digest(heads, [sums[name] for name in names])


def rank_checksums(model: Decoder, whole: Decoder) -> dict[str, int]:
    """The checksum of each parameter of a rank, int64, by its name in the `whole` model (see `whole_of`), and with
    the places that its elements have there: those of all ranks add up, modulo 2^64, to the whole model's. Elements
    that several of them have count on the first one. Where they cannot add up, names tell the rank as well.
    """
    first_layer, ranks, stage = model.layers.start, model.placement.ranks, model.placement.stage
    parameters = {_name_in_whole(name, first_layer): name for name, _ in model.named_parameters()}
    if not _adds_up(model, whole):
        sums = _checksums([parts for _, parts in _parameters(model)])
        return {f"{stage.index} {ranks.rank} {name}": each for name, each in zip(parameters, sums, strict=True)}
    zero = torch.zeros((), dtype=torch.int64, device=model.placement.device)
    found = dict.fromkeys(parameters.values(), zero)
    for name, share in _shares(model, whole):
        found[name] = found[name] + share
    if not stage.is_first:  # the first one has it, too
        parameters = {told: name for told, name in parameters.items() if not name.startswith("embedding.")}
    sums = torch.stack([found[name] for name in parameters.values()]).tolist()
    return dict(zip(parameters, sums, strict=True))


def _name_in_whole(name: str, first_layer: int) -> str:
    """The name that a stage's parameter has in the whole model."""
    blocks, *rest = name.split(".", 2)
    return f"{blocks}.{int(rest[0]) + first_layer}.{rest[1]}" if blocks == "blocks" else name


def _digest(heads: Iterable[str], checksums: Iterable[int]) -> str:
    digest = hashlib.sha256()
    for head, checksum in zip(heads, checksums, strict=True):
        digest.update(head.encode() + struct.pack("<q", checksum))
    return digest.hexdigest()


def _checksums(parameters: Iterable[Iterable[Tensor]]) -> list[int]:
    sums: list[int] = torch.stack([_checksum(parts) for parts in parameters]).tolist()
    return sums  # the host waits once


def _parameters(model: nn.Module) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """What is told of each parameter, and it itself or its parts, as a checkpoint has it."""
    # Some devices hold some formats in another order.
    stored = {
        f"{prefix}.{part}": told
        for prefix, module in model.named_modules()
        if isinstance(module, Stack)
        for part, told in module.held.reordered(module.tensors).items()
    }
    for name, parameter in model.named_parameters():
        shape, parts = stored.get(name) or (tuple(parameter.shape), iter((parameter.detach(),)))
        yield f"{name} {[*shape]} {parameter.dtype}\0", parts


def _storages(model: nn.Module) -> dict[int, str]:
    """Names of parameters by where their memory begins."""
    return {parameter.untyped_storage().data_ptr(): name for name, parameter in model.named_parameters()}


def _adds_up(model: Decoder, whole: Decoder) -> bool:
    """Whether all that a rank has is a part of what a checkpoint stores, as it stores it."""
    wholes, found = dict(whole.checkpoint_tensors()), 0
    for name, place in model.checkpoint_tensors():
        own = unpacked(place)
        if not isinstance(own, Tensor) or not isinstance(unpacked(wholes[name]), Tensor):
            return False
        found += own.numel()
    return found == sum(parameter.numel() for parameter in model.parameters())


def _shares(model: Decoder, whole: Decoder) -> Iterator[tuple[str, Tensor]]:
    """A parameter's name, and the checksum of the part of it where a stored tensor goes; of all of these."""
    names, wholes, ranks = _storages(model), dict(whole.checkpoint_tensors()), model.placement.ranks
    for stored, place in model.checkpoint_tensors():
        own, whole_place = unpacked(place), unpacked(wholes[stored])
        assert isinstance(own, Tensor)
        assert isinstance(whole_place, Tensor)
        indices = [torch.arange(length, device=own.device) for length in own.shape]
        counts = [torch.ones_like(index) for index in indices]
        differing = [dim for dim, length in enumerate(own.shape) if length != whole_place.shape[dim]]
        for dim in differing:
            column = torch.arange(whole_place.shape[dim], device=own.device)
            column = column.view([-1 if each == dim else 1 for each in range(own.dim())])
            indices[dim], before = (
                rank_part(stored, column, wholes[stored], place, replace(ranks, rank=rank)).reshape(-1)
                for rank in (ranks.rank, max(ranks.rank - 1, 0))
            )
            if ranks.rank:
                counts[dim] = (indices[dim] != before).to(torch.int64)
        if not differing and ranks.rank:
            continue
        first = 1 + int(whole_place.storage_offset())
        offsets = [index * whole_place.stride(dim) for dim, index in enumerate(indices)]
        yield names[own.untyped_storage().data_ptr()], _checksum_at(own.detach(), first, offsets, counts)


def _checksum_at(part: Tensor, first: int, offsets: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """As `_checksum`, of elements whose place is `first` and the sum of the `offsets` along each dimension; each
    counts as often as the product of `counts` says.
    """
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    rows = max(1, _PIECE // max(1, part[0].numel()))
    for start in range(0, len(part), rows):
        place, count = _outer(torch.add, offsets, start, rows), _outer(torch.mul, counts, start, rows)
        total += (_weights_of(place + first) * _bits(part[start : start + rows]) * count).sum()
    return total


def _outer(
    combine: Callable[[Tensor, Tensor], Tensor], vectors: Sequence[Tensor], start: int, rows: int
) -> Tensor:
    """The vectors of all dimensions combined, of so many rows from `start` on."""
    combined = vectors[0][start : start + rows]
    for vector in vectors[1:]:
        combined = combine(combined.unsqueeze(-1), vector)
    return combined


def _signed(number: int) -> int:
    """A number modulo 2^64 as an int64."""
    return (number + 2**63) % 2**64 - 2**63


def _checksum(parts: Iterable[Tensor]) -> Tensor:
    """Sum all elements' bits as integers, each times an odd hash of its place, modulo 2^64: an int64 scalar. A
    tensor's parts follow one another.

    A change of one element always shows; other changes are missed by chance alone.
    """
    sums, first = [], 1
    for part in parts:
        flat = part.contiguous().view(-1)
        if not len(flat):
            sums.append(torch.zeros((), dtype=torch.int64, device=part.device))
        for start in range(0, len(flat), _PIECE):
            piece = _bits(flat[start : start + _PIECE])
            place = torch.arange(first, first + len(piece), dtype=torch.int64, device=piece.device)
            first += len(piece)
            sums.append(_weights_of(place).mul_(piece).sum())
    return torch.stack(sums).sum()


def _bits(part: Tensor) -> Tensor:
    """Each element's bits, as an int64."""
    return part.contiguous().view(_INTEGERS[part.dtype.itemsize]).to(torch.int64)


def _weights_of(place: Tensor) -> Tensor:
    """The odd hashes of places from 1 on; they take the memory of `place`."""
    place.mul_(_STEP)
    return place.bitwise_xor_(place >> 29).mul_(_TURN).bitwise_or_(1)
