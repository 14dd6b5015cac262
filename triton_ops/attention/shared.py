"""Attention of many query rows to segments of KV that they share: the shared items of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.attention.plan import SharingPlan
from triton_ops.attention.softmax import (
    attend_first_tile,
    attend_tile,
    attend_tile_fixed_max,
    load_heads,
    overflows,
    write_rows,
)
from triton_ops.implementation import (
    GPU,
    gdc_launch_dependents,
    gpu_of,
    next_power_of_2,
    overlaps_launches,
    tl,
    triton,
)
from triton_ops.kv.e4m3 import E4M3


@dataclass(frozen=True)
class SharedConfig:
    """A tile has `block_m` rows (query rows times the heads of a group) and reads `block_n` keys a step;
    `num_warps` and `num_stages` are Triton's. With a limit `max_registers`, ptxas makes use of them; left to
    itself it may spill a little to save some.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def shared_config(gpu: GPU, head_dim: int, dtype: torch.dtype, *, e4m3: bool = False) -> SharedConfig:
    """The kernel's configuration for queries of `dtype`; `e4m3`: the pool is. The tiles' rows depend on none but
    the other arguments.

    Hopper's for heads of 65 to 128 was measured on an H200 (docs/benchmarks.md). The others are what compiles
    without spills.
    """
    if dtype == torch.float32:
        tile = 32 if head_dim <= 64 else 16
        return SharedConfig(tile, tile, 8, 1, max_registers=128)
    if head_dim > 128:
        if gpu.capability != 90:
            return SharedConfig(32, 16, 8, 2, max_registers=255)
        return SharedConfig(128, 16 if head_dim < 256 else 32, 8, 2)
    if gpu.capability != 90:
        return SharedConfig(128, 64 if head_dim <= 64 else 32, 8, 2, max_registers=255)
    if head_dim <= 64:
        return SharedConfig(128, 64, 4, 3)
    return SharedConfig(128, 32, 8, 3, max_registers=None if e4m3 else 128)


def shared_rows(gpu: GPU, head_dim: int, group: int, dtype: torch.dtype) -> int:
    """The most query rows that a shared item may have: with `group`, the heads of a row that read a KV head, they
    fill a tile. `dtype` is that of the queries.
    """
    return _block_m(shared_config(gpu, head_dim, dtype), group) // group


def _block_m(config: SharedConfig, group: int) -> int:
    """Rows of a tile: at least one query row's."""
    return max(config.block_m, next_power_of_2(group))


def shared_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    plan: SharingPlan,
    scale: float,
    softcap: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    alibi_slopes: Tensor | None,
    partial_out: Tensor,
    partial_lse: Tensor,
) -> None:
    """Write the partial results of the plan's shared items, of which there is one at least. Runs on a GPU.

    Args:
        q, k_buffer, v_buffer, req_to_token, plan, scale, softcap, k_scale, v_scale, alibi_slopes: as in
            `decode_attention` or `extend_attention`, which have checked them.
        partial_out: float32 `[P, num_heads, head_dim]`, each normalised by itself.
        partial_lse: float32 `[P, num_heads]`, log-sum-exps in base 2; -inf of an item without tokens.

    Raises ValueError where an item has more rows than `shared_rows`; on a GPU nobody looks, and the results of the
    rows beyond are not written.

    A program's tile is an item's query rows times the heads of a group, gathered: they read the segment once.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_buffer.shape[1]
    group = num_heads // num_kv_heads
    config = shared_config(gpu_of(q.device), head_dim, q.dtype, e4m3=k_buffer.dtype == E4M3)
    block_m = _block_m(config, group)
    # On a GPU that would be waiting for it.
    longest = int(plan.shared_query_lens.max()) if q.device.type == "cpu" else 0
    if longest > block_m // group:
        raise ValueError(
            f"a shared item has {longest} query rows, but a tile of the kernel {block_m // group}: cut it to "
            "shared_rows"
        )
    _shared_kernel[(plan.shared_lines.shape[0] * num_kv_heads,)](
        q,
        k_buffer,
        v_buffer,
        req_to_token,
        plan.seq_lens,
        plan.shared_lines,
        plan.shared_starts,
        plan.shared_lens,
        plan.shared_query_starts,
        plan.shared_query_lens,
        plan.shared_queries,
        plan.shared_partials,
        k_scale,
        v_scale,
        alibi_slopes,
        partial_out,
        partial_lse,
        scale if softcap is not None else scale * math.log2(math.e),
        1.0 if softcap is None else softcap,
        q.stride(0),
        q.stride(1),
        k_buffer.stride(0),
        k_buffer.stride(1),
        req_to_token.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        HAS_SOFTCAP=softcap is not None,
        HAS_ALIBI=alibi_slopes is not None,
        EARLY=overlaps_launches(q.device),
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )


@triton.jit
def _shared_kernel(
    q, k_buffer, v_buffer, req_to_token, seq_lens,
    item_lines, item_starts, item_lens, item_query_starts, item_query_lens, item_queries, item_partials,
    k_scale, v_scale, alibi_slopes, partial_out, partial_lse, scale, softcap,
    q_row_stride, q_head_stride, slot_stride, slot_head_stride, line_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program is one item and KV head; its tile's rows are the query rows times the heads of the group."""
    if EARLY:
        gdc_launch_dependents()
    item, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    query_len = tl.load(item_query_lens + item)
    if query_len == 0:
        return
    rows = item_queries + tl.load(item_query_starts + item)
    start = tl.load(item_starts + item)
    end = start + tl.load(item_lens + item)
    slots = req_to_token + tl.load(item_lines + item).to(tl.int64) * line_stride
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    WHOLE: tl.constexpr = HEAD_DIM == BLOCK_D
    in_head = (d < HEAD_DIM)[None, :]
    k_head = k_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
    v_head = v_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    m = tl.arange(0, BLOCK_M)
    # The last row stands in beyond the end: a mask that the compiler does not know takes many registers.
    row = tl.load(rows + tl.minimum(m // GROUP, query_len - 1)).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    queries = tl.load(
        q + row[:, None] * q_row_stride + head[:, None] * q_head_stride + d[None, :], mask=in_head, other=0.0
    )
    position = tl.zeros([BLOCK_M], tl.int32)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        position = tl.load(seq_lens + row) - 1
        slopes = tl.load(alibi_slopes + head)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # The greatest scores of the first tile serve for all others. Should these turn out to have far greater ones,
    # it all begins anew, careful with each tile. So are, always, float32, whose products leave no registers for
    # other loops of them, and ALiBi, whose scores grow from tile to tile.
    CAREFUL: tl.constexpr = q.dtype.element_ty == tl.float32 or HAS_ALIBI
    last = tl.maximum(end - 1, 0)
    careful_end = end
    if not CAREFUL:
        # All other tiles are whole: what they hold of the first one is not counted there.
        whole = start + (end - start + BLOCK_N - 1) % BLOCK_N + 1
        # The last position stands in beyond the end: what no item names may be NaN, and 0 * NaN is NaN.
        offset = tl.load(slots + tl.minimum(start + n, last)).to(tl.int64)[:, None] * slot_stride
        # The next tile's slots are carried along: loads that depend on loads would wait for them.
        slot = tl.load(slots + tl.minimum(whole + n, last))
        keys = load_heads(k_head + offset, in_head, WHOLE)
        values = load_heads(v_head + offset, in_head, WHOLE)
        acc, row_max, row_sum = attend_first_tile(
            queries, keys, values, start + n < end, start + n < whole, scale, softcap, HAS_SOFTCAP,
        )  # fmt: skip
        for first in tl.range(whole, end, BLOCK_N, num_stages=NUM_STAGES):
            offset = slot.to(tl.int64)[:, None] * slot_stride
            slot = tl.load(slots + tl.minimum(first + BLOCK_N + n, last))
            keys = load_heads(k_head + offset, in_head, WHOLE)
            values = load_heads(v_head + offset, in_head, WHOLE)
            acc, row_sum = attend_tile_fixed_max(
                queries, keys, values, acc, row_max, row_sum, scale, softcap, HAS_SOFTCAP,
            )  # fmt: skip
        careful_end = start
        if (start == end) | overflows(row_sum, q.dtype.element_ty):
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            careful_end = end
    for first in tl.range(start, careful_end, BLOCK_N, num_stages=NUM_STAGES if CAREFUL else 1):
        offset = tl.load(slots + tl.minimum(first + n, last)).to(tl.int64)[:, None] * slot_stride
        keys = load_heads(k_head + offset, in_head, WHOLE)
        values = load_heads(v_head + offset, in_head, WHOLE)
        acc, row_max, row_sum = attend_tile(
            queries, keys, values, acc, row_max, row_sum, first + n, position, slopes,
            (first + n < end)[None, :], scale, softcap, True, HAS_SOFTCAP, HAS_ALIBI, True,
        )  # fmt: skip

    # Where the results go is computed anew, from what the compiler cannot know to be the same: kept through the
    # loops, it would spill.
    query_len = tl.load(item_query_lens + item, volatile=True)
    first_partial = tl.load(item_partials + item, volatile=True)
    m += tl.minimum(query_len, 0)
    head = kv_head * GROUP + m % GROUP
    if v_scale is not None:
        acc *= tl.load(v_scale + kv_head)
    write_rows(
        acc, row_max, row_sum, row, first_partial + m // GROUP, False, head, m < query_len * GROUP,
        None, None, None, partial_out, partial_lse,
        NUM_KV_HEADS * GROUP, HEAD_DIM, BLOCK_D, False, False,
    )  # fmt: skip
