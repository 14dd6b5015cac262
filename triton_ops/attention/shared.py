"""Attention of many query rows to segments of KV that they share: the shared items of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.attention.arguments import Scoring, kernel_arguments
from triton_ops.attention.merge import Partials
from triton_ops.attention.plan import SharingPlan
from triton_ops.attention.softmax import (
    attend_first_tile,
    attend_tile,
    attend_tile_fixed_max,
    load_heads,
    overflows,
    write_rows,
)
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import GPU, gdc_launch_dependents, gpu_of, tl, triton
from triton_ops.kv.view import KVView
from triton_ops.tuning import shared_config


def shared_rows(gpu: GPU, head_dim: int, group: int, dtype: torch.dtype) -> int:
    """The largest number of query rows of a shared item: a tile holds `group` heads of each, in `dtype`."""
    return shared_config(gpu, head_dim, dtype).block_rows(group) // group


def shared_attention(q: Tensor, kv: KVView, plan: SharingPlan, scoring: Scoring, partials: Partials) -> None:
    """Write the partial results of the plan's shared items, of which there is at least one. Runs on a GPU.

    The caller, `decode_attention` or `extend_attention`, has checked the arguments. A program's tile is an item's
    query rows times the heads of a group, gathered: they read the segment once.

    Raises ValueError where an item has more rows than `shared_rows`; on a GPU nothing is checked, and the results
    of further rows are not written.
    """
    gpu, num_kv_heads = gpu_of(q.device), kv.k.shape[1]
    group = q.shape[1] // num_kv_heads
    config = shared_config(gpu, q.shape[2], q.dtype, e4m3=kv.k.dtype == E4M3)
    block_m = config.block_rows(group)
    # On a GPU this would wait for the device.
    longest = int(plan.shared_query_lens.max()) if q.device.type == "cpu" else 0
    if longest > block_m // group:
        raise ValueError(
            f"a shared item has {longest} query rows, but a tile of the kernel {block_m // group}: cut it to "
            "shared_rows"
        )
    _shared_kernel[(plan.shared_req_pool_indices.shape[0] * num_kv_heads,)](
        seq_lens=plan.seq_lens,
        item_req_pool_indices=plan.shared_req_pool_indices,
        item_starts=plan.shared_starts,
        item_lens=plan.shared_lens,
        item_query_starts=plan.shared_query_starts,
        item_query_lens=plan.shared_query_lens,
        item_queries=plan.shared_queries,
        item_partials=plan.shared_partials,
        **kernel_arguments(q, kv, scoring, partials, config),
        BLOCK_M=block_m,
        EARLY=gpu.overlaps_launches,
    )


@triton.jit
def _shared_kernel(
    q, k_buffer, v_buffer, req_to_token, seq_lens,
    item_req_pool_indices, item_starts, item_lens, item_query_starts, item_query_lens, item_queries, item_partials,
    k_scale, v_scale, alibi_slopes, partial_out, partial_lse, scale, softcap,
    q_row_stride, q_head_stride, slot_stride, slot_head_stride, table_stride,
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
    slots = req_to_token + tl.load(item_req_pool_indices + item).to(tl.int64) * table_stride
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    WHOLE: tl.constexpr = HEAD_DIM == BLOCK_D
    in_head = (d < HEAD_DIM)[None, :]
    k_head = k_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
    v_head = v_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    m = tl.arange(0, BLOCK_M)
    # Beyond the end the last row is read again: a mask unknown to the compiler takes many registers.
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

    # The greatest scores of the first tile serve for all others. If far greater ones turn up, all tiles are
    # computed again by the careful loop, which looks for them in each tile. That loop is the only one for float32,
    # whose products leave no registers for a second one, and for ALiBi, whose scores grow from tile to tile.
    CAREFUL: tl.constexpr = q.dtype.element_ty == tl.float32 or HAS_ALIBI
    last = tl.maximum(end - 1, 0)
    careful_end = end
    if not CAREFUL:
        # All other tiles are whole: the keys that they have in common with the first one are not counted in it.
        whole = start + (end - start + BLOCK_N - 1) % BLOCK_N + 1
        # Beyond the end the last position is read again: other slots may hold NaN, and 0 * NaN is NaN.
        offset = tl.load(slots + tl.minimum(start + n, last)).to(tl.int64)[:, None] * slot_stride
        # The next tile's slots are carried along, so that loads do not wait for other loads.
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

    # Where the results go is computed again, from volatile loads: kept through the loops, it would spill.
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
