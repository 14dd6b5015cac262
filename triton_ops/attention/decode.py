"""Attention of one new token a request over KV in the pool, following an AttentionPlan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.attention.inputs import check_attention_inputs, check_window
from triton_ops.attention.merge import merge_partials, merge_partials_into, merge_rows
from triton_ops.attention.plan import AttentionPlan
from triton_ops.attention.shared import shared_attention
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.attention.softmax import attend_pairs, attend_tile, load_heads, write_rows
from triton_ops.implementation import (
    GPU,
    Impl,
    gdc_wait,
    gpu_of,
    next_power_of_2,
    overlaps_launches,
    runs_triton,
    tl,
    triton,
)
from triton_ops.kv.e4m3 import E4M3, slots_of

# Items up to this many tokens are padded to one another: a separate block for them would cost more.
SHORT_ITEM = 64
# Elements of K that are gathered at a time: with as much of V they stay in a CPU's cache.
BLOCK_SIZE = 2**17
BLOCK_M = 16  # query rows of a tile, the fewest that tl.dot takes; an item with more has several tiles
# Of products that take partial results in: tf32 is more precise than results in bfloat16 are.
TAKING_PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}


def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax(scale * q k^T) v of every query row, over the items of `plan` that cover the row.

    Args:
        q: `[num_decodes, num_heads, head_dim]`, any float dtype (over e4m3 not bfloat16, see `qk_norm_rope_store`),
            any strides but for the last, which is 1.
        k_buffer, v_buffer: `[num_slots, num_kv_heads, head_dim]`, any float dtype, e4m3 included. `num_heads` is a
            multiple of `num_kv_heads`: query head h reads KV head `h // (num_heads // num_kv_heads)`. Slots that
            no item names may hold anything, NaN included.
        req_to_token: int32 `[max_requests, max_context_len]`, position to slot.
        plan: the work items; several may cover a row, and several rows may share one.
        scale: factor on the scores, positive.
        softcap: the scaled scores become `softcap * tanh(score / softcap)`; None: they stay.
        sliding_window: a row sees the last `sliding_window` positions of its request, of those that its items
            hold; None: all, as it must be where the plan has shared items.
        k_scale, v_scale: float32 `[num_kv_heads]`, positive: keys and values are what the buffers hold times the
            head's; None: they are what the buffers hold.
        sinks: float32 `[num_heads]`: a logit that joins the softmax of each row of the head, without a value
            (Xiao et al., 2023, as learned by gpt-oss, 2025).
        alibi_slopes: float32 `[num_heads]`: `slope * (key position - own position)` is added to the scores (Press
            et al., 2022), after the softcap.
        out: `[num_decodes, num_heads, head_dim]`, any float dtype, contiguous: where the result goes; None: a new
            tensor in q's dtype.
        lse: float32 `[num_decodes, num_heads]`, contiguous, or None: where the natural logs of the sums of
            exponentials, sinks included, are written; -inf where a row saw nothing.

    Returns:
        `out`. The reference computes in float32; the kernel multiplies in q's dtype and adds in float32. A row
        without an item, or whose items are all empty, is zero.

    Raises ValueError where the kernel cannot read its arguments, or with a window and shared items.

    The reference waits for the device, to read the lengths: items of about the same length are padded to one
    another and computed together, a block at a time. The kernel does not, and its grid depends on the plan's
    shapes alone, so that a captured graph serves any plan of the same shapes. Shared items have a kernel of their
    own (`shared_attention`). Partial results are merged as in FlashDecoding (Dao et al., 2023).
    """
    check_window(sliding_window, plan)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if runs_triton(impl, q.device):
        return _launch(
            q, k_buffer, v_buffer, req_to_token, plan,
            scale, softcap, sliding_window, k_scale, v_scale, sinks, alibi_slopes, out, lse,
        )  # fmt: skip
    num_decodes, num_heads, head_dim = q.shape
    # One row more: where the rows that pad a block read from and write to.
    queries = torch.zeros(num_decodes + 1, num_heads, head_dim, device=q.device)
    queries[:-1].copy_(q).mul_(scale)
    positions = torch.zeros(num_decodes + 1, dtype=torch.int64, device=q.device)
    positions[:-1] = plan.seq_lens - 1
    narrow = (plan.item_rows, plan.item_starts, plan.item_lens, plan.item_query_starts, plan.item_query_lens)
    shared = (
        plan.shared_lines,
        plan.shared_starts,
        plan.shared_lens,
        plan.shared_query_starts + num_decodes,
        plan.shared_query_lens,
    )
    fields = torch.cat([torch.stack(narrow), torch.stack(shared)], 1).long()
    # What the items' query rows are counted in: all rows for the narrow ones, the lists of the shared ones, and
    # the row for padding.
    every_row = torch.arange(num_decodes + 1, device=q.device)
    row_list = torch.cat([every_row[:-1], plan.shared_queries.long(), every_row[-1:]])
    if sliding_window is not None:
        _cut(fields, positions - sliding_window + 1)
    rows, parts, lses = [], [], []
    for items in _blocks(fields, tokens_per_block=BLOCK_SIZE // k_buffer[0].numel()):
        item_rows, starts, lens, query_starts, query_lens = items.unsqueeze(-1)
        offsets = torch.arange(int(lens.max()), device=q.device)
        is_token = offsets < lens
        # An item's first slot stands in beyond its end: what the pool holds elsewhere is never read.
        key_positions = starts + offsets * is_token
        slots = req_to_token[item_rows, key_positions]
        offsets = torch.arange(int(query_lens.max()), device=q.device)
        query_rows = row_list[torch.where(offsets < query_lens, query_starts + offsets, len(row_list) - 1)]
        distances = key_positions.unsqueeze(1) - positions[query_rows].unsqueeze(2)  # [n, rows, length]
        visible = is_token.unsqueeze(1)
        if sliding_window is not None:
            visible = visible & (distances > -sliding_window)
        bias = None if alibi_slopes is None else alibi_slopes[:, None] * distances.unsqueeze(2)
        keys, values = (
            slots_of(buffer, slots.flatten(), factor).view(*slots.shape, *buffer.shape[1:])
            for buffer, factor in ((k_buffer, k_scale), (v_buffer, v_scale))
        )
        part, part_lse = _attend(queries[query_rows], keys, values, visible, softcap, bias)
        rows.append(query_rows.flatten())
        parts.append(part.flatten(0, 1))
        lses.append(part_lse.flatten(0, 1))
    return merge_rows(rows, parts, lses, sinks, out, lse)


def _cut(fields: Tensor, windows: Tensor) -> None:
    """Take from the items, in place, what lies before `windows`, each row's first position, of all their rows."""
    item, row = _item_rows(fields)
    starts, lens = fields[1], fields[2]
    first = starts + lens  # of an item without rows: nothing is left
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
    """The columns of `fields` int64 `[5, num_items]`, a plan's in its order, whose items are not empty:
    `[5, n]` each.

    Items of a block have about the same length and number of query rows; their lengths, when all are padded to the
    longest, sum to at most `tokens_per_block`, unless there is one item only.
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
    """Partial results of `q [n, rows, num_heads, head_dim]` (scaled, float32) over `keys` and `values`, float32
    `[n, length, num_kv_heads, head_dim]`, where `visible [n, rows or 1, length]` is true, with
    `bias [n, rows, num_heads, length]` on the scores.

    Returns the output `[n, rows, num_heads, head_dim]` and the natural log of the sum of exponentials
    `[n, rows, num_heads]`: 0 and -inf where nothing is visible.
    """
    num_items, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    # Side by side, for each KV head: every query row's heads that read it.
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


@dataclass(frozen=True)
class DecodeConfig:
    """`block_n` keys a step; `num_warps` and `num_stages` are Triton's. With a limit `max_registers`, ptxas makes
    use of them; left to itself it may spill a little to save some.
    """

    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def decode_config(
    gpu: GPU,
    head_dim: int,
    dtype: torch.dtype,
    *,
    alibi: bool,
    window: bool = False,
    e4m3: bool = False,
    tails: bool = False,
) -> DecodeConfig:
    """The kernel's configuration for queries of `dtype`; `e4m3`: the pool is; `tails`: items are mostly short, and
    take partial results in.

    Hopper's were measured on an H200 (docs/benchmarks.md), but for those of float32, `alibi` and `e4m3`. The
    others are what compiles without spills.
    """
    if dtype == torch.float32:
        return DecodeConfig(16, num_warps=8, num_stages=1, max_registers=128)
    if e4m3:
        # With 128 registers four programs run side by side.
        registers = 255 if tails else 168 if alibi or window or head_dim > 128 else 128
        return DecodeConfig(64 if head_dim <= 128 else 32, num_warps=4, num_stages=3, max_registers=registers)
    if head_dim > 128:
        if gpu.capability == 90:
            return DecodeConfig(32, num_warps=4, num_stages=2)
        return DecodeConfig(32, num_warps=8, num_stages=2, max_registers=255)
    few_warps = gpu.capability == 90 and not (alibi and head_dim > 64)
    if few_warps and tails:
        return DecodeConfig(32, num_warps=1, num_stages=2)
    if few_warps:
        return DecodeConfig(64, num_warps=2, num_stages=3, max_registers=168)
    wants_more = alibi or head_dim != next_power_of_2(head_dim)
    return DecodeConfig(64, num_warps=4, num_stages=2, max_registers=168 if wants_more else None)


def _launch(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    group = num_heads // num_kv_heads
    check_attention_inputs(q, k_buffer, v_buffer, req_to_token, k_scale, v_scale, sinks, alibi_slopes, out, lse)
    if num_rows == 0:
        return out
    num_partials = plan.row_partials.shape[0]
    partial_out = torch.empty((num_partials, num_heads, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((num_partials, num_heads), dtype=torch.float32, device=q.device)
    early: dict[str, bool] = {}
    if plan.shared_lines.shape[0]:
        if overlaps_launches(q.device):
            early = {"launch_pdl": True}
        shared_attention(
            q, k_buffer, v_buffer, req_to_token, plan,
            scale, softcap, k_scale, v_scale, alibi_slopes, partial_out, partial_lse,
        )  # fmt: skip
    e4m3 = k_buffer.dtype == E4M3
    # float32 products, which are not for speed, take e4m3 as it is.
    pairs = e4m3 and q.dtype == torch.float16
    slot_strides = k_buffer.stride()[:2]
    if pairs:
        k_buffer, v_buffer = k_buffer.view(torch.int16), v_buffer.view(torch.int16)
    config = decode_config(
        gpu_of(q.device),
        head_dim,
        q.dtype,
        alibi=alibi_slopes is not None,
        window=sliding_window is not None,
        e4m3=e4m3,
        tails=plan.tail_partial_starts.shape[0] > 0,
    )
    _decode_kernel[(plan.item_rows.shape[0] * num_kv_heads,)](
        q,
        k_buffer,
        v_buffer,
        req_to_token,
        plan.seq_lens,
        plan.item_rows,
        plan.item_starts,
        plan.item_lens,
        plan.item_query_starts,
        plan.item_query_lens,
        plan.item_partials,
        plan.tail_partial_starts,
        plan.row_partials,
        k_scale,
        v_scale,
        sinks,
        alibi_slopes,
        out,
        lse,
        partial_out,
        partial_lse,
        scale if softcap is not None else scale * math.log2(math.e),
        1.0 if softcap is None else softcap,
        0 if sliding_window is None else sliding_window,
        q.stride(0),
        q.stride(1),
        *slot_strides,
        req_to_token.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(32 if pairs else 16, next_power_of_2(head_dim)),
        BLOCK_M=BLOCK_M,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=sliding_window is not None,
        HAS_SINKS=sinks is not None,
        HAS_ALIBI=alibi_slopes is not None,
        HAS_LSE=lse is not None,
        PAIRS=pairs,
        HAS_TAILS=plan.tail_partial_starts.shape[0] > 0,
        TAKING=TAKING_PRECISION[q.dtype],
        EARLY=bool(early),
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        **early,
    )
    if plan.row_partial_starts.shape[0]:
        merge_partials(partial_out, partial_lse, plan.row_partial_starts, plan.row_partials, sinks, out, lse)
    return out


@triton.jit
def _decode_kernel(
    q, k_buffer, v_buffer, req_to_token, seq_lens,
    item_rows, item_starts, item_lens, item_query_starts, item_query_lens, item_partials,
    tail_partial_starts, row_partials,
    k_scale, v_scale, sinks, alibi_slopes, out, lse, partial_out, partial_lse, scale, softcap, window,
    q_row_stride, q_head_stride, slot_stride, slot_head_stride, line_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_LSE: tl.constexpr,
    PAIRS: tl.constexpr, HAS_TAILS: tl.constexpr, TAKING: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program is one item and KV head; a tile's rows are the item's query rows times the heads of the group."""
    item, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    query_len = tl.load(item_query_lens + item)
    query_start = tl.load(item_query_starts + item)
    item_start = tl.load(item_starts + item)
    end = item_start + tl.load(item_lens + item)
    first_partial = tl.load(item_partials + item)
    slots = req_to_token + tl.load(item_rows + item).to(tl.int64) * line_stride
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
        # The last row stands in beyond the end: a mask that the compiler does not know takes many registers.
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
            # The last position stands in beyond the end: what no item names may be NaN, and 0 * NaN is NaN.
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
        if EARLY:
            gdc_wait()  # for what shared items compute: until here it ran beside
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
    if EARLY:
        gdc_wait()  # one without rows, too: what comes behind counts on both kernels
