"""Attention of one new token a request to KV in the pool, following an AttentionPlan."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.attention.arguments import (
    Scoring,
    check_arguments,
    check_window,
    kernel_arguments,
    result_arguments,
)
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.merge import Partials, merge_partials, merge_partials_into, merge_rows
from triton_ops.attention.plan import AttentionPlan
from triton_ops.attention.shared import shared_attention
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.attention.softmax import attend_pairs, attend_tile, load_heads, write_rows
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import (
    Impl,
    gdc_launch_dependents,
    gdc_wait,
    gpu_of,
    next_power_of_2,
    overlapped,
    runs_triton,
    tl,
    triton,
)
from triton_ops.kv.view import KVView
from triton_ops.tuning import DECODE_ROWS, MERGE_PRECISION, decode_config


def decode_attention(
    q: Tensor,
    kv: KVView,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention of each query row to the items of `plan` that cover the row: see `decode_reference`.

    Args:
        q: `[num_decodes, num_heads, head_dim]`, any float dtype (over e4m3 not bfloat16: `qk_norm_rope_store`
            leaves float16), any strides except for the last, which is 1. `num_heads` is a multiple of
            `num_kv_heads`: query head h reads KV head `h // (num_heads // num_kv_heads)`.
        kv: the pool, which holds the new tokens too.
        plan: the work items; several may cover a row, and several rows may share one.
        out: `[num_decodes, num_heads, head_dim]`, any float dtype, contiguous; None: a new tensor in q's dtype.
        lse: float32 `[num_decodes, num_heads]`, contiguous, or None: receives the natural logarithms of the sums
            of exponentials, sinks included; -inf where a row saw nothing.

    Returns:
        `out`. A row without an item, or whose items are all empty, is zero.

    Raises ValueError where the kernel cannot read its arguments, and for a window and a plan with shared items.

    In torch everything is computed in float32. The kernel multiplies in q's dtype and adds in float32; its grid
    depends on the plan's shapes alone, so that a captured graph serves any plan of the same shapes. Shared items
    have a kernel of their own (`shared_attention`). Partial results merge as in FlashDecoding (Dao et al., 2023).
    """
    check_window(scoring, plan)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if runs_triton(impl, q.device):
        return _launch(q, kv, plan, scoring, out, lse)
    return _decode_fast_cpu(q, kv, plan, scoring, out, lse)


def decode_reference(
    q: Tensor, kv: KVView, req_pool_indices: Tensor, seq_lens: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """What decode attention means, in float64: query row b attends to the first `seq_lens[b]` tokens of its
    request, the last of which is its own. Returns the result and the log-sum-exps.
    """
    out, lse = q.double(), q.new_empty(q.shape[:2], dtype=torch.float64)
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        keys, values = kv.gather(kv.req_to_token[row, :length])
        out[b : b + 1], lse[b : b + 1] = dense_attention(q[b : b + 1], keys, values, scoring)
    return out, lse


# --- in torch, fast on a CPU ---

# Items up to this many tokens are padded to one another: a separate block for them would cost more.
SHORT_ITEM = 64
# Elements of K that are gathered at a time: with as many of V they stay in a CPU's cache.
BLOCK_SIZE = 2**17


def _decode_fast_cpu(
    q: Tensor, kv: KVView, plan: AttentionPlan, scoring: Scoring, out: Tensor, lse: Tensor | None
) -> Tensor:
    """Items of about the same length are padded to one another and computed together, a block at a time. On a GPU
    this waits for the device, to read the lengths.
    """
    num_decodes, num_heads, head_dim = q.shape
    # One row more: where the rows that pad a block read from and write to.
    queries = torch.zeros(num_decodes + 1, num_heads, head_dim, device=q.device)
    queries[:-1].copy_(q).mul_(scoring.scale)
    positions = torch.zeros(num_decodes + 1, dtype=torch.int64, device=q.device)
    positions[:-1] = plan.seq_lens - 1
    narrow = (
        plan.item_req_pool_indices,
        plan.item_starts,
        plan.item_lens,
        plan.item_query_starts,
        plan.item_query_lens,
    )
    shared = (
        plan.shared_req_pool_indices,
        plan.shared_starts,
        plan.shared_lens,
        plan.shared_query_starts + num_decodes,
        plan.shared_query_lens,
    )
    fields = torch.cat([torch.stack(narrow), torch.stack(shared)], 1).long()
    # The list that items' query rows index: all rows for narrow items, the lists of shared ones, the row for
    # padding.
    every_row = torch.arange(num_decodes + 1, device=q.device)
    row_list = torch.cat([every_row[:-1], plan.shared_queries.long(), every_row[-1:]])
    if scoring.window is not None:
        _cut(fields, positions - scoring.window + 1)
    rows, parts, lses = [], [], []
    for items in _blocks(fields, tokens_per_block=BLOCK_SIZE // kv.k[0].numel()):
        item_req_pool_indices, starts, lens, query_starts, query_lens = items.unsqueeze(-1)
        offsets = torch.arange(int(lens.max()), device=q.device)
        is_token = offsets < lens
        # Beyond an item's end its first slot is read: other slots of the pool may hold anything.
        key_positions = starts + offsets * is_token
        slots = kv.req_to_token[item_req_pool_indices, key_positions]
        offsets = torch.arange(int(query_lens.max()), device=q.device)
        query_rows = row_list[torch.where(offsets < query_lens, query_starts + offsets, len(row_list) - 1)]
        distances = key_positions.unsqueeze(1) - positions[query_rows].unsqueeze(2)  # [n, rows, length]
        visible = is_token.unsqueeze(1)
        if scoring.window is not None:
            visible = visible & (distances > -scoring.window)
        slopes = scoring.alibi_slopes
        bias = None if slopes is None else slopes[:, None] * distances.unsqueeze(2)
        keys, values = (x.view(*slots.shape, *x.shape[1:]) for x in kv.gather(slots.flatten()))
        part, part_lse = _attend(queries[query_rows], keys, values, visible, scoring.softcap, bias)
        rows.append(query_rows.flatten())
        parts.append(part.flatten(0, 1))
        lses.append(part_lse.flatten(0, 1))
    return merge_rows(rows, parts, lses, scoring.sinks, out, lse)


def _cut(fields: Tensor, windows: Tensor) -> None:
    """Cut off each item, in place, what lies before the `windows` of all its rows: each row's first position."""
    item, row = _item_rows(fields)
    starts, lens = fields[1], fields[2]
    first = starts + lens  # nothing is left of an item without rows
    first = first.scatter_reduce(0, item, windows[row], "amin").clamp(min=starts)
    lens -= first - starts
    starts.copy_(first)


def _item_rows(fields: Tensor) -> tuple[Tensor, Tensor]:
    """Every pair of an item that is not empty and a query row that reads it: item and row, int64 `[pairs]`."""
    _, _, lens, query_starts, query_lens = fields
    counts = query_lens * (lens > 0)
    item = torch.repeat_interleave(counts)
    nth = torch.arange(item.shape[0], device=fields.device) - (counts.cumsum(0) - counts)[item]
    return item, query_starts[item] + nth


def _blocks(fields: Tensor, tokens_per_block: int) -> list[Tensor]:
    """The columns of `fields` int64 `[5, num_items]` whose items are not empty, in blocks `[5, n]`.

    Items of a block have about the same length and number of query rows. Padded to the longest, their lengths sum
    to at most `tokens_per_block`, unless the block has one item only.
    """
    blocks: list[list[int]] = []
    items = []
    for item, (_, _, length, _, num_rows) in enumerate(fields.T.tolist()):
        if length and num_rows:
            items.append((num_rows.bit_length(), max(length - 1, SHORT_ITEM - 1).bit_length(), length, item))
    items.sort(reverse=True)
    kind, longest = (0, 0), 0
    for rows_kind, length_kind, length, item in items:
        if (rows_kind, length_kind) != kind or (len(blocks[-1]) + 1) * longest > tokens_per_block:
            blocks.append([])
            kind, longest = (rows_kind, length_kind), length
        blocks[-1].append(item)
    return [fields[:, block] for block in blocks]


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    softcap: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Partial results of n items, in float32.

    `q` is `[n, rows, num_heads, head_dim]`, scaled; `keys` and `values` are `[n, length, num_kv_heads, head_dim]`;
    `visible` is `[n, rows or 1, length]`; `bias [n, rows, num_heads, length]` is added to the scores.

    Returns the output `[n, rows, num_heads, head_dim]` and the natural logarithms of the sums of exponentials
    `[n, rows, num_heads]`: 0 and -inf where nothing is visible.
    """
    num_items, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    # For each KV head, side by side, the heads of all query rows that read it.
    q = q.view(num_items, num_rows, num_kv_heads, group, head_dim).transpose(1, 2)
    q = q.reshape(num_items, num_kv_heads, num_rows * group, head_dim)
    scores = q @ keys.permute(0, 2, 3, 1)
    if softcap is not None:
        scores = soft_cap(scores, softcap, impl="torch")
    if bias is not None:
        bias = bias.view(num_items, num_rows, num_kv_heads, group, -1).transpose(1, 2)
        scores += bias.reshape(scores.shape)
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(group, dim=1)
    scores.masked_fill_(~visible.unsqueeze(1), -torch.inf)
    greatest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    weight = scores.sub_(greatest).exp_()
    total = weight.sum(-1, keepdim=True)
    out = (weight @ values.transpose(1, 2)).div_(total.masked_fill(total == 0.0, 1.0))

    def heads_last(x: Tensor) -> Tensor:
        x = x.view(num_items, num_kv_heads, num_rows, group, -1).transpose(1, 2)
        return x.reshape(num_items, num_rows, num_heads, -1)

    return heads_last(out), heads_last(greatest + total.log()).squeeze(-1)


# --- the kernel ---


def _launch(
    q: Tensor, kv: KVView, plan: AttentionPlan, scoring: Scoring, out: Tensor, lse: Tensor | None
) -> Tensor:
    check_arguments(q, kv, scoring, out, lse)
    if q.shape[0] == 0:
        return out
    gpu, e4m3, has_tails = gpu_of(q.device), kv.k.dtype == E4M3, plan.tail_partial_starts.shape[0] > 0
    partials = Partials.of(plan, q)
    after_shared = plan.shared_req_pool_indices.shape[0] > 0
    if after_shared:
        shared_attention(q, kv, plan, scoring, partials)
    config = decode_config(
        gpu,
        q.shape[2],
        q.dtype,
        alibi=scoring.alibi_slopes is not None,
        window=scoring.window is not None,
        e4m3=e4m3,
        tails=has_tails,
    )
    arguments = kernel_arguments(q, kv, scoring, partials, config) | result_arguments(scoring, out, lse)
    # Products in float32, which are not for speed, take e4m3 as it is.
    pairs = e4m3 and q.dtype == torch.float16
    if pairs:
        arguments["k_buffer"], arguments["v_buffer"] = kv.k.view(torch.int16), kv.v.view(torch.int16)
        arguments["BLOCK_D"] = max(32, next_power_of_2(q.shape[2]))
    _decode_kernel[(plan.item_req_pool_indices.shape[0] * kv.k.shape[1],)](
        seq_lens=plan.seq_lens,
        item_req_pool_indices=plan.item_req_pool_indices,
        item_starts=plan.item_starts,
        item_lens=plan.item_lens,
        item_query_starts=plan.item_query_starts,
        item_query_lens=plan.item_query_lens,
        item_partials=plan.item_partials,
        tail_partial_starts=plan.tail_partial_starts,
        row_partials=plan.row_partials,
        **arguments,
        BLOCK_M=DECODE_ROWS,
        PAIRS=pairs,
        HAS_TAILS=has_tails,
        TAKING=MERGE_PRECISION[q.dtype],
        AFTER_SHARED=after_shared,
        **overlapped(q.device, 0 if after_shared else q.shape[0]),
    )
    if plan.row_partial_starts.shape[0]:
        merge_partials(partials, plan, scoring.sinks, out, lse)
    return out


@triton.jit
def _decode_kernel(
    q, k_buffer, v_buffer, req_to_token, seq_lens,
    item_req_pool_indices, item_starts, item_lens, item_query_starts, item_query_lens, item_partials,
    tail_partial_starts, row_partials,
    k_scale, v_scale, sinks, alibi_slopes, out, lse, partial_out, partial_lse, scale, softcap, window,
    q_row_stride, q_head_stride, slot_stride, slot_head_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_LSE: tl.constexpr,
    PAIRS: tl.constexpr, HAS_TAILS: tl.constexpr, TAKING: tl.constexpr, AFTER_SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program is one item and KV head; a tile's rows are the item's query rows times the heads of the group."""
    if EARLY and not AFTER_SHARED:
        gdc_launch_dependents()
        gdc_wait()
    item, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    query_len = tl.load(item_query_lens + item)
    query_start = tl.load(item_query_starts + item)
    item_start = tl.load(item_starts + item)
    end = item_start + tl.load(item_lens + item)
    first_partial = tl.load(item_partials + item)
    slots = req_to_token + tl.load(item_req_pool_indices + item).to(tl.int64) * table_stride
    d = tl.arange(0, BLOCK_D)
    # Columns of the pool: elements of a head, or pairs of them.
    if PAIRS:
        slot_stride //= 2
        slot_head_stride //= 2
    c = tl.arange(0, BLOCK_D // 2) if PAIRS else d
    WHOLE: tl.constexpr = HEAD_DIM == BLOCK_D
    in_head = (c < (HEAD_DIM // 2 if PAIRS else HEAD_DIM))[None, :]
    k_head = k_buffer + kv_head.to(tl.int64) * slot_head_stride + c[None, :]
    v_head = v_buffer + kv_head.to(tl.int64) * slot_head_stride + c[None, :]
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)

    for tile in range(tl.cdiv(query_len * GROUP, BLOCK_M)):
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        in_tile = m < query_len * GROUP
        # Beyond the end the last row is read again: a mask unknown to the compiler takes many registers.
        row = (query_start + tl.minimum(m // GROUP, query_len - 1)).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        queries = tl.load(
            q + row[:, None] * q_row_stride + head[:, None] * q_head_stride + d[None, :],
            mask=(d < HEAD_DIM)[None, :],
            other=0.0,
        )
        if PAIRS:
            queries, odd = tl.split(tl.reshape(queries, [BLOCK_M, BLOCK_D // 2, 2]))
            acc_odd = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D // 2 if PAIRS else BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        start = item_start
        position = tl.zeros([BLOCK_M], tl.int32)
        slopes = tl.zeros([BLOCK_M], tl.float32)
        if HAS_WINDOW or HAS_ALIBI:
            position = tl.load(seq_lens + row) - 1
        if HAS_WINDOW:
            start = tl.maximum(start, tl.min(position) - window + 1)
        if HAS_ALIBI:
            slopes = tl.load(alibi_slopes + head)

        for first in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
            key_position = first + tl.arange(0, BLOCK_N)
            # Beyond the end the last position is read again: other slots may hold NaN, and 0 * NaN is NaN.
            offset = tl.load(slots + tl.minimum(key_position, end - 1)).to(tl.int64)[:, None] * slot_stride
            k = load_heads(k_head + offset, in_head, WHOLE)
            v = load_heads(v_head + offset, in_head, WHOLE)
            visible = (key_position < end)[None, :]
            if HAS_WINDOW:
                visible = visible & (key_position[None, :] > position[:, None] - window)
            if PAIRS:
                acc, acc_odd, row_max, row_sum = attend_pairs(
                    queries, odd, k, v, acc, acc_odd, row_max, row_sum, key_position, position, slopes, visible,
                    scale, softcap, True, HAS_SOFTCAP, HAS_ALIBI, not HAS_WINDOW,
                )  # fmt: skip
            else:
                acc, row_max, row_sum = attend_tile(
                    queries, k, v, acc, row_max, row_sum, key_position, position, slopes, visible,
                    scale, softcap, True, HAS_SOFTCAP, HAS_ALIBI, not HAS_WINDOW,
                )  # fmt: skip

        if PAIRS:
            acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_D])
        if v_scale is not None:
            acc *= tl.load(v_scale + kv_head)
        if EARLY and AFTER_SHARED:
            gdc_wait()  # for the results of shared items: until here both kernels run side by side
        if HAS_TAILS and first_partial < 0:
            begin = tl.load(tail_partial_starts + query_start)
            count = tl.load(tail_partial_starts + query_start + 1) - begin
            acc, row_max, row_sum = merge_partials_into(
                acc, row_max, row_sum, m, kv_head, row_partials + begin, count, partial_out, partial_lse,
                NUM_KV_HEADS * GROUP, GROUP, HEAD_DIM, BLOCK_D, TAKING,
            )  # fmt: skip
        write_rows(
            acc, row_max, row_sum, row, first_partial + m // GROUP, first_partial < 0, head, in_tile,
            sinks, out, lse, partial_out, partial_lse,
            NUM_KV_HEADS * GROUP, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
    if EARLY and AFTER_SHARED:
        gdc_wait()  # without rows, too: later kernels rely on both
