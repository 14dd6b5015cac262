"""Copies of the KV of a list of slots between pools, host memory and buffers, all layers at once."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from triton_ops.implementation import Impl, cdiv, gpu_of, runs_triton, tl, triton
from triton_ops.tuning import COPY_WARPS, MAX_COPY_UNITS, copy_config

_ACCESS = 16  # bytes of a thread at once, at most
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kv_copy(
    source: Tensor,
    source_slots: Tensor | None,
    target: Tensor,
    target_slots: Tensor | None,
    *,
    impl: Impl = "auto",
) -> None:
    """Copy slot `source_slots[i]` of `source` to slot `target_slots[i]` of `target`, in every layer, bit by bit.

    Args:
        source, target: `[num_layers, 2, num_slots, num_kv_heads, head_dim]` like a pool, in one dtype; only
            num_slots may differ. A slot's heads and their elements lie one after the other; other strides are
            free: for memory with a token's KV together, `[num_slots, num_layers, 2, num_kv_heads, head_dim]`, pass
            `permute(1, 2, 0, 3, 4)`. Both may be the same tensor. Both are on the CPU, or at least one is on a GPU
            and the other there or in pinned host memory.
        source_slots, target_slots: int32 `[n]`, on the GPU if a tensor is. Target slots are distinct, and are no
            source slots if both tensors are the same. One of them may be None: 0 .. n - 1.

    The copy runs on the GPU's current stream; nothing waits for it. Raises ValueError where the kernel cannot read
    the tensors. Slots are not checked.
    """
    device = next((x.device for x in (source, target) if x.device.type == "cuda"), source.device)
    count = _check(source, source_slots, target, target_slots, device)
    if count == 0 or source.numel() == 0:
        return
    word_bytes = math.gcd(*_multiples(source), *_multiples(target), _ACCESS)
    source_words, target_words = _words(source, word_bytes), _words(target, word_bytes)
    if runs_triton(impl, device):
        for name, x in (("source", source), ("target", target)):
            if x.device != device and not x.is_pinned():
                raise ValueError(f"{name} is in host memory that is not pinned, the other tensor on {device}")
        _launch(source_words, source_slots, target_words, target_slots, count, word_bytes, device)
        return
    if source_slots is None:
        words = source_words[:, :, :count]
    else:
        words = source_words.index_select(2, source_slots.to(source.device))
    words = words.to(target.device)
    if target_slots is None:
        target_words[:, :, :count] = words
    else:
        target_words.index_copy_(2, target_slots.to(target.device, torch.int64), words)


def _check(
    source: Tensor, source_slots: Tensor | None, target: Tensor, target_slots: Tensor | None, device: torch.device
) -> int:
    """The number of slots to copy."""
    for name, x in (("source", source), ("target", target)):
        if x.dim() != 5 or x.shape[1] != 2:
            raise ValueError(
                f"{name} must be [num_layers, 2, num_slots, num_kv_heads, head_dim], but is {[*x.shape]}"
            )
        heads, head_dim = x.shape[3:]
        if (head_dim > 1 and x.stride(4) != 1) or (heads > 1 and x.stride(3) != head_dim):
            raise ValueError(
                f"{name} must have contiguous heads of {head_dim} elements, but has shape {[*x.shape]} and "
                f"strides {[*x.stride()]}"
            )
        if x.device != device and x.device.type != "cpu":
            raise ValueError(f"{name} is on {x.device}, the other tensor on {device}")
    if source.dtype != target.dtype or (source.shape[0], *source.shape[3:]) != (
        target.shape[0],
        *target.shape[3:],
    ):
        raise ValueError(
            f"source and target disagree: {[*source.shape]} {source.dtype}, {[*target.shape]} {target.dtype}"
        )
    counts = set()
    for name, slots in (("source_slots", source_slots), ("target_slots", target_slots)):
        if slots is None:
            continue
        if slots.dim() != 1 or slots.dtype != torch.int32 or not slots.is_contiguous() or slots.device != device:
            raise ValueError(
                f"{name} must be contiguous [n] in torch.int32 on {device}, but is {[*slots.shape]} in "
                f"{slots.dtype} on {slots.device}"
            )
        counts.add(len(slots))
    if len(counts) != 1:
        raise ValueError(f"source_slots and target_slots must name as many slots, but name {sorted(counts)}")
    (count,) = counts
    for name, x, slots in (("source", source, source_slots), ("target", target, target_slots)):
        if slots is None and count > x.shape[2]:
            raise ValueError(f"{name} has {x.shape[2]} slots, fewer than {count}")
    return count


def _row_strides(x: Tensor) -> tuple[int, int, int]:
    """The strides of layer, K or V, and slot, in elements; 0 for a dimension of size 1."""
    layer, kv, slot = (x.stride(i) if x.shape[i] > 1 else 0 for i in range(3))
    return layer, kv, slot


def _multiples(x: Tensor) -> list[int]:
    """Numbers of bytes that must be multiples of an access's size: where rows begin, and their length."""
    sizes = (x.storage_offset(), x.shape[3] * x.shape[4], *_row_strides(x))
    return [x.data_ptr(), *(x.dtype.itemsize * int(size) for size in sizes)]


def _words(x: Tensor, word_bytes: int) -> Tensor:
    """The same memory as integers `[num_layers, 2, num_slots, words of a row]`."""
    rows = x.as_strided((*x.shape[:3], x.shape[3] * x.shape[4]), (*_row_strides(x), 1))
    return rows.view(_WORDS[min(word_bytes, 8)])


def _launch(
    source: Tensor,
    source_slots: Tensor | None,
    target: Tensor,
    target_slots: Tensor | None,
    count: int,
    word_bytes: int,
    device: torch.device,
) -> None:
    vector = max(1, word_bytes // 8)  # words of an access
    # Rows fall into chunks of a power of two, so that no thread idles.
    words = source.shape[3]
    config = copy_config(gpu_of(device), from_host=source.device != device, to_host=target.device != device)
    tile = config.tile_bytes // source.dtype.itemsize
    chunk = min(words & -words, tile)
    tile_units = min(tile // chunk, MAX_COPY_UNITS)
    units = 2 * source.shape[0] * words // chunk
    num_tiles = cdiv(count * units, tile_units)
    if count * units + tile_units >= 2**31:
        raise ValueError(f"{count} slots of {units} pieces exceed the kernel's limit of 2**31")
    # The driver takes the device from its context; a pointer to host memory names none.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _kv_copy_kernel[(min(config.programs, num_tiles),)](
            source,
            source_slots,
            target,
            target_slots,
            count * units,
            num_tiles,
            *(stride // vector for stride in _row_strides(source)),
            *(stride // vector for stride in _row_strides(target)),
            UNITS=units,
            CHUNKS=words // chunk,
            CHUNK=chunk,
            TILE_UNITS=tile_units,
            VECTOR=vector,
            num_warps=COPY_WARPS,
        )


# One variant for two tensors, whatever the number of slots and wherever they are.
@triton.jit(
    do_not_specialize=[
        "num_units",
        "num_tiles",
        "source_layer",
        "source_kv",
        "source_slot",
        "target_layer",
        "target_kv",
        "target_slot",
    ],
    do_not_specialize_on_alignment=["source_slot_ptr", "target_slot_ptr"],
)
def _kv_copy_kernel(
    source_ptr,
    source_slot_ptr,
    target_ptr,
    target_slot_ptr,
    num_units,
    num_tiles,
    source_layer,
    source_kv,
    source_slot,
    target_layer,
    target_kv,
    target_slot,
    UNITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_UNITS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A unit is a chunk of a row; a slot has UNITS of them, layer after layer.

    Strides count accesses of VECTOR words, so that the compiler knows that each access is aligned.
    """
    word = tl.arange(0, CHUNK)[None, :]
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        unit = tile * TILE_UNITS + tl.arange(0, TILE_UNITS)
        is_live = unit < num_units
        i, row = unit // UNITS, unit % UNITS // CHUNKS
        layer, kv, first = (row // 2).to(tl.int64), (row % 2).to(tl.int64), unit % CHUNKS * CHUNK
        slot = i if source_slot_ptr is None else tl.load(source_slot_ptr + i, mask=is_live, other=0)
        at = slot.to(tl.int64) * source_slot + layer * source_layer + kv * source_kv
        mask = is_live[:, None]
        words = tl.load(source_ptr + (at * VECTOR + first)[:, None] + word, mask=mask)
        slot = i if target_slot_ptr is None else tl.load(target_slot_ptr + i, mask=is_live, other=0)
        at = slot.to(tl.int64) * target_slot + layer * target_layer + kv * target_kv
        tl.store(target_ptr + (at * VECTOR + first)[:, None] + word, words, mask=mask)
