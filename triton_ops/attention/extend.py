"""Causal attention of new tokens over a cached prefix in the pool and over one another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triton_ops.attention.inputs import check_attention_inputs, check_window
from triton_ops.attention.merge import merge_partials, merge_rows
from triton_ops.attention.plan import ExtendPlan
from triton_ops.attention.shared import shared_attention
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.attention.softmax import attend_tile, write_rows
from triton_ops.implementation import GPU, Impl, gpu_of, next_power_of_2, runs_triton, tl, triton
from triton_ops.kv.e4m3 import E4M3, slots_of


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    plan: ExtendPlan | None = None,
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
    """Token i of a request attends to the request's cached prefix and to its new tokens 0..i.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, any float dtype (over e4m3 not bfloat16, see `qk_norm_rope_store`),
            any strides but for the last, which is 1.
        k, v: `[num_tokens, num_kv_heads, head_dim]`, the new tokens' own, contiguous by request.
            `num_heads` is a multiple of `num_kv_heads`.
        k_buffer, v_buffer: `[num_slots, num_kv_heads, head_dim]`, any float dtype, e4m3 included; read at the
            prefixes' slots only, the others may hold anything.
        req_to_token: int32 `[max_requests, max_context_len]`, position to slot.
        req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens: int32 `[num_extends]`. Request b
            has tokens `extend_start_loc[b] : extend_start_loc[b] + extend_seq_lens[b]`; 0 of them is
            allowed. Every token is one request's.
        plan: how the work is shared out, made of the same lengths and window; None: the kernel makes one of whole
            tiles here, which waits for the device to read the lengths, and the reference needs none.
        scale: factor on the scores, positive.
        softcap: the scaled scores become `softcap * tanh(score / softcap)`; None: they stay.
        sliding_window: a token at position p sees the positions from `p - sliding_window + 1` to p, so 1 is
            itself alone; None: all from 0, as it must be where the plan has shared items.
        k_scale, v_scale: float32 `[num_kv_heads]`, or None, as in `decode_attention`: they hold for k and v, too.
        sinks, alibi_slopes: float32 `[num_heads]`, as in `decode_attention`.
        out: `[num_tokens, num_heads, head_dim]`, any float dtype, contiguous: where the result goes; None: a new
            tensor in q's dtype.
        lse: float32 `[num_tokens, num_heads]`, contiguous, or None: as in `decode_attention`.

    Returns:
        `out`. The reference computes in float32; the kernel multiplies in q's dtype and adds in float32.

    Raises ValueError where the kernel cannot read its arguments, or the plan is not for them, or with a window and
    shared items.

    The reference waits for the device, to read the lengths, or the items of a plan. The kernel is FlashAttention-2
    (Dao, 2023) with the heads of a group side by side in a tile of queries; a long prefix that few tiles read is
    shared out and merged as in FlashDecoding (Dao et al., 2023). Shared items have a kernel of their own
    (`shared_attention`).
    """
    check_window(sliding_window, plan)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if runs_triton(impl, q.device):
        if plan is None:
            lens, group = extend_seq_lens.cpu().numpy(), q.shape[1] // k.shape[1]
            short = int(lens.max(initial=0)) * group <= SHORT_ROWS
            tile_tokens = extend_tile_tokens(gpu_of(q.device), q.shape[2], group, q.dtype, short=short)
            arrays = ExtendPlan.host_arrays(
                prefix_lens.cpu().numpy(),
                extend_start_loc.cpu().numpy(),
                lens,
                tile_tokens=tile_tokens,
                sliding_window=sliding_window,
            )
            plan = ExtendPlan.build(arrays, q.device, tile_tokens=tile_tokens)
        return _launch(
            q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, prefix_lens, extend_start_loc,
            extend_seq_lens, plan, scale, softcap, sliding_window, k_scale, v_scale, sinks, alibi_slopes, out, lse,
        )  # fmt: skip
    if plan is not None:
        return _attend_by_plan(
            q, k, v, k_buffer, v_buffer, req_to_token, req_pool_indices, prefix_lens, extend_start_loc,
            extend_seq_lens, plan, scale, softcap, sliding_window, k_scale, v_scale, sinks, alibi_slopes, out, lse,
        )  # fmt: skip
    requests = torch.stack([req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens], 1).tolist()
    for row, prefix_len, start, extend_len in requests:
        if extend_len == 0:
            continue
        new = slice(start, start + extend_len)
        keys, values = k[new], v[new]
        if k_scale is not None:
            keys = keys.float() * k_scale.unsqueeze(1)
        if v_scale is not None:
            values = values.float() * v_scale.unsqueeze(1)
        mask = bias = None
        # What the first new token no longer sees, none of them does.
        first = 0 if sliding_window is None else max(0, prefix_len - sliding_window + 1)
        num_cached = prefix_len - first
        if num_cached:
            slots = req_to_token[row, first:prefix_len]
            keys = torch.cat([slots_of(k_buffer, slots, k_scale), keys.float()])
            values = torch.cat([slots_of(v_buffer, slots, v_scale), values.float()])
        plain = softcap is None and sinks is None and alibi_slopes is None and lse is None
        if num_cached or not plain or (sliding_window is not None and sliding_window < extend_len):
            mask = torch.ones(extend_len, num_cached + extend_len, dtype=torch.bool, device=q.device)
            mask = mask.tril_(num_cached)
            if sliding_window is not None:
                mask = mask.triu_(num_cached - sliding_window + 1)
        if plain:
            out[new] = _attend(q[new], keys, values, mask, scale)
            continue
        assert mask is not None
        if alibi_slopes is not None:
            tokens = torch.arange(num_cached + extend_len, device=q.device)
            bias = alibi_slopes[:, None, None] * (tokens - tokens[num_cached:, None])
        out[new], new_lse = _attend_with_all(q[new], keys, values, mask, scale, softcap, sinks, bias)
        if lse is not None:
            lse[new] = new_lse
    return out


def _attend_by_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    plan: ExtendPlan,
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
    """The reference that reads item by item."""
    keys_of = partial(_keys_of, k, k_buffer, req_to_token, k_scale)
    values_of = partial(_keys_of, v, v_buffer, req_to_token, v_scale)
    rows, parts, lses = [], [], []

    def attend(row: Tensor, positions: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
        distances = torch.arange(start, start + len(keys), device=q.device) - positions[:, None]
        mask = distances <= 0
        if sliding_window is not None:
            mask &= distances > -sliding_window
        bias = None if alibi_slopes is None else alibi_slopes[:, None, None] * distances
        part, part_lse = _attend_with_all(q[row], keys, values, mask, scale, softcap, None, bias)
        rows.append(row)
        parts.append(part)
        lses.append(part_lse)

    requests = torch.stack([req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens], 1).tolist()
    items = torch.stack([plan.item_requests, plan.item_query_starts, plan.item_starts, plan.item_lens], 1)
    for request, query_start, start, length in items[plan.item_lens > 0].tolist():
        line, prefix_len, loc, extend_len = requests[request]
        tokens = torch.arange(query_start, min(query_start + plan.tile_tokens, extend_len), device=q.device)
        new = slice(loc + max(start - prefix_len, 0), loc + max(start + length - prefix_len, 0))
        cached = slice(start, min(start + length, prefix_len))
        attend(loc + tokens, prefix_len + tokens, start, keys_of(line, cached, new), values_of(line, cached, new))
    segments = torch.stack([plan.shared_lines, plan.shared_starts, plan.shared_lens], 1).tolist()
    lists = torch.stack([plan.shared_query_starts, plan.shared_query_lens], 1).tolist()
    for (line, start, length), (first, count) in zip(segments, lists, strict=True):
        row = plan.shared_queries[first : first + count].long()
        cached, new = slice(start, start + length), slice(0)
        positions = plan.seq_lens[row] - 1
        attend(row, positions, start, keys_of(line, cached, new), values_of(line, cached, new))
    return merge_rows(rows, parts, lses, sinks, out, lse)


def _keys_of(
    new_tokens: Tensor,
    buffer: Tensor,
    req_to_token: Tensor,
    factor: Tensor | None,
    line: int,
    cached: slice,
    new: slice,
) -> Tensor:
    """Keys, or values, of positions of a prefix, and behind them of new tokens: float32
    `[L, num_kv_heads, head_dim]`.
    """
    own = new_tokens[new].float()
    if factor is not None:
        own = own * factor.unsqueeze(1)
    return torch.cat([slots_of(buffer, req_to_token[line, cached], factor), own])


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`q [T, num_heads, head_dim]` over `keys` and `values` `[L, num_kv_heads, head_dim]` where
    `mask [T, L]` is true (None: causal, T = L), in float32.
    """
    q, keys, values = (x.transpose(0, 1).float() for x in (q, keys, values))
    attended = scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _attend_with_all(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`_attend` with everything that torch's attention does not know: also returns the log-sum-exps
    `[T, num_heads]`. `bias` is `[num_heads, T, L]`.
    """
    q, keys, values = (x.transpose(0, 1).float() for x in (q, keys, values))
    group = q.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = q @ keys.transpose(1, 2) * scale
    if softcap is not None:
        scores = soft_cap(scores, softcap, impl="torch")
    if bias is not None:
        scores += bias
    lse = scores.masked_fill_(~mask, -torch.inf).logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    # Of what sees nothing, 0 stands for it: -inf less -inf would be NaN.
    finite = lse.clamp(min=torch.finfo(torch.float32).min)
    return ((scores - finite.unsqueeze(-1)).exp_() @ values).transpose(0, 1), lse.T


# --- the kernel ---


@dataclass(frozen=True)
class ExtendConfig:
    """A tile has `block_m` rows (tokens times the heads of a group) and reads `block_n` keys a step; `num_warps`
    and `num_stages` are Triton's. With 128 registers a thread two programs of 8 warps run side by side, with 168
    three of 4. With a limit `max_registers`, ptxas makes use of them; left to itself it may spill a little to
    save some.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def extend_config(
    gpu: GPU, head_dim: int, dtype: torch.dtype, *, short: bool, alibi: bool = False, e4m3: bool = False
) -> ExtendConfig:
    """The kernel's configuration; `short` tiles have at most `SHORT_ROWS` rows, others that or more. With `alibi`
    they are of the same size as without.

    Hopper's were measured on an H200 (docs/benchmarks.md), but for those of float32 and `alibi`. The others are
    what compiles without spills.
    """
    if dtype == torch.float32:
        tile = 32 if head_dim <= 64 else 16
        return ExtendConfig(tile, tile, 8, 1, max_registers=128)
    if e4m3 and gpu.capability == 90:
        if head_dim > 128:
            return ExtendConfig(64 if short else 128, 32 if short else 16, 8, 1 if head_dim == 256 else 2)
        return ExtendConfig(64, 32, 4, 3, 168) if short else ExtendConfig(128, 32, 8, 2, 128)
    if gpu.capability != 90:
        if head_dim <= 64:
            return ExtendConfig(64 if short else 128, 64, 8, 2, max_registers=255)
        return ExtendConfig(64, 64 if head_dim <= 128 else 32, 8, 2)
    if head_dim > 128:
        return ExtendConfig(64, 32, 8, 2) if short else ExtendConfig(128, 16 if head_dim < 256 else 32, 8, 2)
    if short:
        return ExtendConfig(64, 32, 4, 3, max_registers=168)
    if head_dim <= 64:
        return ExtendConfig(128, 64, 4, 3)
    # Heads that are padded need registers for their masks, as distances do.
    return ExtendConfig(128, 32, 8, 3, max_registers=128 if head_dim == 128 and not alibi else None)


def _block_m(config: ExtendConfig, group: int) -> int:
    """Rows of a tile: at least one token's."""
    return max(config.block_m, next_power_of_2(group))


def extend_tile_tokens(gpu: GPU, head_dim: int, group: int, dtype: torch.dtype, *, short: bool) -> int:
    """The most tokens of a tile: `group` heads of each read a KV head."""
    return _block_m(extend_config(gpu, head_dim, dtype, short=short), group) // group


SHORT_ROWS = 64  # extends with no more rows than this take short tiles


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    plan: ExtendPlan,
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
    _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    check_attention_inputs(q, k_buffer, v_buffer, req_to_token, k_scale, v_scale, sinks, alibi_slopes, out, lse)
    gpu, short, e4m3 = gpu_of(q.device), plan.tile_tokens * group <= SHORT_ROWS, k_buffer.dtype == E4M3
    config = extend_config(gpu, head_dim, q.dtype, short=short, alibi=alibi_slopes is not None, e4m3=e4m3)
    if k.stride() != v.stride() or k.stride(2) != 1:
        # A norm over all heads leaves k beside the projection that v is part of. The kernel has registers for one
        # offset a token.
        k, v = k.contiguous(), v.contiguous()
    tile_tokens = _block_m(config, group) // group
    if plan.tile_tokens != tile_tokens:
        raise ValueError(
            f"the plan's tiles have {plan.tile_tokens} tokens, the kernel's {tile_tokens}: it was made for "
            "another GPU, dtype or shape"
        )
    num_items = plan.item_requests.shape[0]
    if num_items == 0:
        return out
    num_partials = plan.row_partials.shape[0]
    partial_out = torch.empty((num_partials, num_heads, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((num_partials, num_heads), dtype=torch.float32, device=q.device)
    if plan.shared_lines.shape[0]:
        shared_attention(
            q, k_buffer, v_buffer, req_to_token, plan,
            scale, softcap, k_scale, v_scale, alibi_slopes, partial_out, partial_lse,
        )  # fmt: skip
    _extend_kernel[(num_items * num_kv_heads,)](
        q,
        k,
        v,
        k_buffer,
        v_buffer,
        req_to_token,
        req_pool_indices,
        prefix_lens,
        extend_start_loc,
        extend_seq_lens,
        plan.item_requests,
        plan.item_query_starts,
        plan.item_starts,
        plan.item_lens,
        plan.item_partials,
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
        k.stride(0),
        k.stride(1),
        k_buffer.stride(0),
        k_buffer.stride(1),
        req_to_token.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_M=_block_m(config, group),
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=sliding_window is not None,
        HAS_SINKS=sinks is not None,
        HAS_ALIBI=alibi_slopes is not None,
        HAS_LSE=lse is not None,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )
    if num_partials:
        merge_partials(partial_out, partial_lse, plan.row_partial_starts, plan.row_partials, sinks, out, lse)
    return out


@triton.jit
def _extend_kernel(
    q, k, v, k_buffer, v_buffer, req_to_token,
    req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens,
    item_requests, item_query_starts, item_starts, item_lens, item_partials,
    k_scale, v_scale, sinks, alibi_slopes, out, lse, partial_out, partial_lse, scale, softcap, window,
    q_row_stride, q_head_stride, kv_row_stride, kv_head_stride, slot_stride, slot_head_stride, line_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """A program is one item and KV head; a tile's rows are the item's tokens times the heads of the group."""
    item, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    request = tl.load(item_requests + item)
    query_start = tl.load(item_query_starts + item)
    start = tl.load(item_starts + item)
    end = start + tl.load(item_lens + item)
    first_partial = tl.load(item_partials + item)
    prefix_len = tl.load(prefix_lens + request)
    extend_len = tl.load(extend_seq_lens + request)
    first_row = tl.load(extend_start_loc + request)
    slots = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * line_stride

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_head = (d < HEAD_DIM)[None, :]
    token = query_start + m // GROUP
    in_tile = (token < extend_len) & (m < BLOCK_M // GROUP * GROUP)
    head = kv_head * GROUP + m % GROUP
    position = prefix_len + token
    row = (first_row + token).to(tl.int64)
    queries = tl.load(
        q + row[:, None] * q_row_stride + head[:, None] * q_head_stride + d[None, :],
        mask=in_tile[:, None] & in_head,
        other=0.0,
    )
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + head, mask=in_tile, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # The cached prefix, through the pool: whole tiles, then what is left, masked. A window masks every tile. So
    # does float32, whose products leave no registers for other loops of them.
    MASK_ALL: tl.constexpr = HAS_WINDOW or q.dtype.element_ty == tl.float32
    k_head = k_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
    v_head = v_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    cached_end = tl.minimum(end, prefix_len)
    peeled = start + tl.maximum(cached_end - start, 0) // BLOCK_N * BLOCK_N
    if MASK_ALL:
        peeled = start
    # The next tile's slots are carried along: loads that depend on loads would wait for them.
    slot = tl.load(slots + start + n, mask=start + n < cached_end, other=0)
    for first in tl.range(start, peeled, BLOCK_N, num_stages=NUM_STAGES):
        offset = slot.to(tl.int64)[:, None] * slot_stride
        slot = tl.load(slots + first + BLOCK_N + n, mask=first + BLOCK_N + n < cached_end, other=0)
        keys = tl.load(k_head + offset, mask=in_head, other=0.0)
        values = tl.load(v_head + offset, mask=in_head, other=0.0)
        acc, row_max, row_sum = attend_tile(
            queries, keys, values, acc, row_max, row_sum, first + n, position, slopes,
            in_tile[:, None], scale, softcap, False, HAS_SOFTCAP, HAS_ALIBI,
        )  # fmt: skip
    for first in tl.range(peeled, cached_end, BLOCK_N, num_stages=NUM_STAGES if MASK_ALL else 1):
        live = first + n < cached_end
        offset = slot.to(tl.int64)[:, None] * slot_stride
        if MASK_ALL:
            slot = tl.load(slots + first + BLOCK_N + n, mask=first + BLOCK_N + n < cached_end, other=0)
        # What is not the request's may be NaN, and 0 * NaN is NaN: neither K nor V is read there.
        keys = tl.load(k_head + offset, mask=live[:, None] & in_head, other=0.0)
        values = tl.load(v_head + offset, mask=live[:, None] & in_head, other=0.0)
        visible = in_tile[:, None] & live[None, :]
        if HAS_WINDOW:
            visible = visible & ((first + n)[None, :] > position[:, None] - window)
        acc, row_max, row_sum = attend_tile(
            queries, keys, values, acc, row_max, row_sum, first + n, position, slopes, visible,
            scale, softcap, True, HAS_SOFTCAP, HAS_ALIBI,
        )  # fmt: skip

    # The new tokens, contiguous: those that all rows see, then the diagonal.
    k_new = k + first_row.to(tl.int64) * kv_row_stride + kv_head * kv_head_stride + d[None, :]
    v_new = v + first_row.to(tl.int64) * kv_row_stride + kv_head * kv_head_stride + d[None, :]
    new_start = tl.maximum(start - prefix_len, 0)
    new_end = tl.minimum(end - prefix_len, extend_len)
    # Rows see up to their own token, the first row the fewest: up to and with token query_start.
    seen_by_all = tl.minimum(query_start + 1, new_end)
    peeled = new_start + tl.maximum(seen_by_all - new_start, 0) // BLOCK_N * BLOCK_N
    if MASK_ALL:
        peeled = new_start
    for first in tl.range(new_start, peeled, BLOCK_N, num_stages=NUM_STAGES):
        offset = (first + n).to(tl.int64)[:, None] * kv_row_stride
        keys = tl.load(k_new + offset, mask=in_head, other=0.0)
        values = tl.load(v_new + offset, mask=in_head, other=0.0)
        acc, row_max, row_sum = attend_tile(
            queries, keys, values, acc, row_max, row_sum, prefix_len + first + n, position, slopes,
            in_tile[:, None], scale, softcap, False, HAS_SOFTCAP, HAS_ALIBI,
        )  # fmt: skip
    for first in tl.range(peeled, new_end, BLOCK_N, num_stages=NUM_STAGES if MASK_ALL else 1):
        key = first + n
        live = (key < new_end)[:, None] & in_head
        offset = key.to(tl.int64)[:, None] * kv_row_stride
        keys = tl.load(k_new + offset, mask=live, other=0.0)
        values = tl.load(v_new + offset, mask=live, other=0.0)
        visible = in_tile[:, None] & (key < new_end)[None, :] & (key[None, :] <= token[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > token[:, None] - window)
        acc, row_max, row_sum = attend_tile(
            queries, keys, values, acc, row_max, row_sum, prefix_len + key, position, slopes, visible,
            scale, softcap, True, HAS_SOFTCAP, HAS_ALIBI,
        )  # fmt: skip

    if GROUP % 4 != 0:
        # Where these rows go takes more to compute. It is done anew, from what the compiler cannot know to be the
        # same: kept through the loops, the results would spill.
        request = tl.load(item_requests + item, volatile=True)
        query_start = tl.load(item_query_starts + item, volatile=True)
        first_partial = tl.load(item_partials + item, volatile=True)
        extend_len = tl.load(extend_seq_lens + request, volatile=True)
        first_row = tl.load(extend_start_loc + request, volatile=True)
        m += tl.minimum(extend_len, 0)
        token = query_start + m // GROUP
        in_tile = (token < extend_len) & (m < BLOCK_M // GROUP * GROUP)
        head = kv_head * GROUP + m % GROUP
        row = (first_row + token).to(tl.int64)
    if v_scale is not None:
        acc *= tl.load(v_scale + kv_head)
    write_rows(
        acc, row_max, row_sum, row, first_partial + m // GROUP, first_partial < 0, head, in_tile,
        sinks, out, lse, partial_out, partial_lse,
        NUM_KV_HEADS * GROUP, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
    )  # fmt: skip
