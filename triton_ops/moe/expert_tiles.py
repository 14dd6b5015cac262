"""The rows of experts in tiles: which tokens an expert has, and which program computes them."""

# Tests: tests/triton_ops/moe/test_kernels.py

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import (
    Impl,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    overlapped,
    runs_triton,
    tl,
    triton,
)
from triton_ops.tuning import expert_tiles_config


def expert_tiles(
    experts: Tensor, num_experts: int, tile_rows: int, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Sort choices by expert, and cut those of each expert into tiles of `tile_rows`.

    `experts` is int64 `[num_tokens, top_k]`, each below `num_experts`.

    Returns:
        order: int32 `[num_tokens * top_k]`, the choices by expert, those of an expert ascending. Choice
            `token * top_k + n` is a token's nth.
        tiles: int32 `[max_tiles, 3]`, of each tile, by expert: the expert, the tile's first row in `order`, and
            the end of its expert's rows. After the last tile the expert is -1; `max_tiles` depends on the
            arguments' shapes alone.
    """
    num_choices = experts.numel()
    max_tiles = min(num_choices, num_experts) + num_choices // tile_rows
    if runs_triton(impl, experts.device):
        return _launch(experts, num_experts, tile_rows, max_tiles)
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    records, first = [], 0
    for expert, count in enumerate(counts):
        records += [(expert, row, first + count) for row in range(first, first + count, tile_rows)]
        first += count
    records += [(-1, 0, 0)] * (max_tiles - len(records))
    return order.int(), torch.tensor(records, dtype=torch.int32, device=experts.device).view(max_tiles, 3)


def _launch(experts: Tensor, num_experts: int, tile_rows: int, max_tiles: int) -> tuple[Tensor, Tensor]:
    experts, num_choices = experts.contiguous(), experts.numel()
    order = torch.empty(num_choices, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=experts.device)
    if num_choices:
        config = expert_tiles_config(num_choices)
        _expert_tiles_kernel[(num_experts,)](
            experts,
            order,
            tiles,
            num_choices,
            max_tiles,
            tile_rows,
            NUM_EXPERTS=num_experts,
            EXPERT_BLOCK=max(16, next_power_of_2(num_experts)),
            BLOCK=config.size,
            num_warps=config.num_warps,
            **overlapped(experts.device, 0),
        )
    return order, tiles


@triton.jit(do_not_specialize=["num_choices", "max_tiles", "tile_rows"])
def _expert_tiles_kernel(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_choices,
    max_tiles,
    tile_rows,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program counts all choices, then writes those of one expert: no atomics, and one order."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERT_BLOCK)
    nth = tl.arange(0, BLOCK)
    counts = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for start in range(0, num_choices, BLOCK):
        chosen = tl.load(experts_ptr + start + nth, mask=start + nth < num_choices, other=EXPERT_BLOCK - 1)
        counts += tl.histogram(chosen.to(tl.int32), EXPERT_BLOCK)
    # What was loaded beyond the end counts for no expert.
    num_loaded = (num_choices + BLOCK - 1) // BLOCK * BLOCK
    counts -= tl.where(each == EXPERT_BLOCK - 1, num_loaded - num_choices, 0)

    count = tl.sum(tl.where(each == expert, counts, 0), axis=0)
    first_row = tl.sum(tl.where(each < expert, counts, 0), axis=0)
    tiles_before = tl.where(each < expert, (counts + tile_rows - 1) // tile_rows, 0)
    first_tile = tl.sum(tiles_before, axis=0)
    end_tile = first_tile + (count + tile_rows - 1) // tile_rows

    row = first_row
    if count > 0:
        for start in range(0, num_choices, BLOCK):
            chosen = tl.load(experts_ptr + start + nth, mask=start + nth < num_choices, other=-1)
            is_own = (chosen == expert).to(tl.int32)
            tl.store(order_ptr + row + tl.cumsum(is_own, axis=0) - 1, start + nth, mask=is_own > 0)
            row += tl.sum(is_own, axis=0)

    # The last program writes what is left of the tiles, too.
    end = tl.where(expert == NUM_EXPERTS - 1, max_tiles, end_tile)
    for start in range(first_tile, end, EXPERT_BLOCK):
        tile = start + each
        record = tiles_ptr + tile * 3
        tl.store(record, tl.where(tile < end_tile, expert, -1), mask=tile < end)
        tl.store(record + 1, first_row + (tile - first_tile) * tile_rows, mask=tile < end_tile)
        tl.store(record + 2, first_row + count, mask=tile < end_tile)
