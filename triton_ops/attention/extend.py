"""Causal attention of new tokens to a cached prefix in the pool and to one another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triton_ops.attention.arguments import (
    Scoring,
    check_arguments,
    check_window,
    kernel_arguments,
    result_arguments,
)
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.extend_hopper import launch_hopper, runs_hopper
from triton_ops.attention.merge import Partials, merge_partials, merge_rows
from triton_ops.attention.plan import ExtendPlan
from triton_ops.attention.shared import shared_attention
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.attention.softmax import attend_tile, write_rows
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import GPU, Impl, gpu_of, runs_triton, tl, triton
from triton_ops.kv.view import KVView
from triton_ops.tuning import SHORT_ROWS, extend_config


@dataclass(frozen=True)
class Extends:
    """The extends of a pass: int32 `[num_extends]` each, on its device.

    Request b has `prefix_lens[b]` tokens in the pool, in row `req_pool_indices[b]` of `req_to_token`, and the new
    tokens `extend_start_loc[b] : extend_start_loc[b] + extend_seq_lens[b]`, possibly none. Each new token belongs
    to one request.
    """

    req_pool_indices: Tensor
    prefix_lens: Tensor
    extend_start_loc: Tensor
    extend_seq_lens: Tensor

    def tolist(self) -> list[list[int]]:
        """The four numbers of each request. On a GPU this waits for the device."""
        fields = [self.req_pool_indices, self.prefix_lens, self.extend_start_loc, self.extend_seq_lens]
        requests: list[list[int]] = torch.stack(fields, 1).tolist()
        return requests


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVView,
    extends: Extends,
    plan: ExtendPlan | None,
    scoring: Scoring,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Token i of a request attends to its cached prefix and to its new tokens 0..i: see `extend_reference`.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, as in `decode_attention`.
        k, v: `[num_tokens, num_kv_heads, head_dim]`, those of the new tokens, contiguous by request; the scales of
            `kv` apply to them, too.
        kv: the pool; only the prefixes are read.
        plan: the work items, for the same lengths and window. Without one the kernel makes a plan that cuts no
            prefix, waiting for the device to read the lengths; torch needs none.
        out: `[num_tokens, num_heads, head_dim]`, any float dtype, contiguous; None: a new tensor in q's dtype.
        lse: float32 `[num_tokens, num_heads]`, contiguous, or None: as in `decode_attention`.

    Returns:
        `out`.

    Raises ValueError where the kernel cannot read its arguments or the plan is not for them, and for a window and
    a plan with shared items.

    In torch everything is computed in float32, after waiting for the device to read the lengths. The kernel is
    FlashAttention-2 (Dao, 2023) with the heads of a group side by side in a tile of queries; a long prefix that
    few tiles read is cut, and merged as in FlashDecoding (Dao et al., 2023). Shared items have a kernel of their
    own (`shared_attention`). On Hopper one in Gluon takes the place of the first where it can (`runs_hopper`).
    """
    check_window(scoring, plan)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if runs_triton(impl, q.device):
        plan = _uncut_plan(q, k, extends, scoring) if plan is None else plan
        return _launch(q, k, v, kv, extends, plan, scoring, out, lse)
    if plan is None:
        return _extend_fast_cpu(q, k, v, kv, extends, scoring, out, lse)
    return _extend_by_item(q, k, v, kv, extends, plan, scoring, out, lse)


def extend_reference(
    q: Tensor, k: Tensor, v: Tensor, kv: KVView, extends: Extends, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """What extend attention means, in float64: the new tokens of each request attend to its prefix and, causally,
    to one another. Returns the result and the log-sum-exps.
    """
    out, lse = q.double(), q.new_empty(q.shape[:2], dtype=torch.float64)
    for row, prefix_len, start, extend_len in extends.tolist():
        new = slice(start, start + extend_len)
        keys, values = _keys_and_values(k, v, kv, row, slice(prefix_len), new)
        out[new], lse[new] = dense_attention(q[new], keys, values, scoring)
    return out, lse


def _keys_and_values(
    k: Tensor, v: Tensor, kv: KVView, row: int, cached: slice, new: slice
) -> tuple[Tensor, Tensor]:
    """Those of cached positions of a request, then of new tokens: float32 `[L, num_kv_heads, head_dim]` both."""
    keys, values = kv.gather(kv.req_to_token[row, cached])
    new_keys, new_values = k[new].float(), v[new].float()
    if kv.k_scale is not None:
        new_keys = new_keys * kv.k_scale.unsqueeze(1)
    if kv.v_scale is not None:
        new_values = new_values * kv.v_scale.unsqueeze(1)
    return torch.cat([keys, new_keys]), torch.cat([values, new_values])


# --- in torch, fast on a CPU ---


def _extend_fast_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVView,
    extends: Extends,
    scoring: Scoring,
    out: Tensor,
    lse: Tensor | None,
) -> Tensor:
    """Request by request, with torch's own attention where it can express the scoring."""
    window = scoring.window
    only_window = all(x is None for x in (scoring.softcap, scoring.sinks, scoring.alibi_slopes, lse))
    for row, prefix_len, start, extend_len in extends.tolist():
        if extend_len == 0:
            continue
        new = slice(start, start + extend_len)
        # No later token sees a position that the first new token does not see.
        first = 0 if window is None else max(0, prefix_len - window + 1)
        num_cached = prefix_len - first
        keys, values = _keys_and_values(k, v, kv, row, slice(first, prefix_len), new)
        mask = None
        if num_cached or not only_window or (window is not None and window < extend_len):
            mask = torch.ones(extend_len, num_cached + extend_len, dtype=torch.bool, device=q.device)
            mask = mask.tril_(num_cached)
            if window is not None:
                mask = mask.triu_(num_cached - window + 1)
        if only_window:
            out[new] = _attend(q[new], keys, values, mask, scoring.scale)
            continue
        assert mask is not None
        tokens = torch.arange(num_cached + extend_len, device=q.device)
        distances = tokens - tokens[num_cached:, None]
        out[new], new_lse = _attend_with_all(q[new], keys, values, mask, distances, scoring, scoring.sinks)
        if lse is not None:
            lse[new] = new_lse
    return out


def _extend_by_item(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVView,
    extends: Extends,
    plan: ExtendPlan,
    scoring: Scoring,
    out: Tensor,
    lse: Tensor | None,
) -> Tensor:
    """Item by item, as the kernel reads them."""
    rows, parts, lses = [], [], []

    def attend(row: Tensor, positions: Tensor, line: int, start: int, cached: slice, new: slice) -> None:
        keys, values = _keys_and_values(k, v, kv, line, cached, new)
        distances = torch.arange(start, start + len(keys), device=q.device) - positions[:, None]
        mask = distances <= 0
        if scoring.window is not None:
            mask &= distances > -scoring.window
        part, part_lse = _attend_with_all(q[row], keys, values, mask, distances, scoring, None)
        rows.append(row)
        parts.append(part)
        lses.append(part_lse)

    requests = extends.tolist()
    items = torch.stack([plan.item_requests, plan.item_query_starts, plan.item_starts, plan.item_lens], 1)
    for request, query_start, start, length in items[plan.item_lens > 0].tolist():
        line, prefix_len, loc, extend_len = requests[request]
        tokens = torch.arange(query_start, min(query_start + plan.tile_tokens, extend_len), device=q.device)
        new = slice(loc + max(start - prefix_len, 0), loc + max(start + length - prefix_len, 0))
        cached = slice(start, min(start + length, prefix_len))
        attend(loc + tokens, prefix_len + tokens, line, start, cached, new)
    segments = torch.stack([plan.shared_req_pool_indices, plan.shared_starts, plan.shared_lens], 1).tolist()
    lists = torch.stack([plan.shared_query_starts, plan.shared_query_lens], 1).tolist()
    for (line, start, length), (first, count) in zip(segments, lists, strict=True):
        row = plan.shared_queries[first : first + count].long()
        attend(row, plan.seq_lens[row] - 1, line, start, slice(start, start + length), slice(0))
    return merge_rows(rows, parts, lses, scoring.sinks, out, lse)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`q [T, num_heads, head_dim]` over `keys` and `values` `[L, num_kv_heads, head_dim]` where `mask [T, L]` is
    true (None: causal, T = L), in float32.
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
    distances: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`_attend` with everything that torch's attention does not have: also returns the log-sum-exps
    `[T, num_heads]`. `distances` `[T, L]` are those of the keys from the queries.
    """
    q, keys, values = (x.transpose(0, 1).float() for x in (q, keys, values))
    group = q.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = q @ keys.transpose(1, 2) * scoring.scale
    if scoring.softcap is not None:
        scores = soft_cap(scores, scoring.softcap, impl="torch")
    if scoring.alibi_slopes is not None:
        scores += scoring.alibi_slopes[:, None, None] * distances
    lse = scores.masked_fill_(~mask, -torch.inf).logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    # Finite even where a row sees nothing, as -inf less -inf would be NaN.
    finite = lse.clamp(min=torch.finfo(torch.float32).min)
    return ((scores - finite.unsqueeze(-1)).exp_() @ values).transpose(0, 1), lse.T


# --- the kernel ---


def extend_tile_tokens(gpu: GPU, head_dim: int, group: int, dtype: torch.dtype, *, short: bool) -> int:
    """The tokens of a tile, of which `group` heads each read a KV head. `short`: as in `extend_config`."""
    return extend_config(gpu, head_dim, dtype, short=short).block_rows(group) // group


def _uncut_plan(q: Tensor, k: Tensor, extends: Extends, scoring: Scoring) -> ExtendPlan:
    lens, group = extends.extend_seq_lens.cpu().numpy(), q.shape[1] // k.shape[1]
    short = int(lens.max(initial=0)) * group <= SHORT_ROWS
    tile_tokens = extend_tile_tokens(gpu_of(q.device), q.shape[2], group, q.dtype, short=short)
    return ExtendPlan.of_extends(
        extends.prefix_lens.cpu().numpy(),
        extends.extend_start_loc.cpu().numpy(),
        lens,
        tile_tokens=tile_tokens,
        sliding_window=scoring.window,
    ).to(q.device)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVView,
    extends: Extends,
    plan: ExtendPlan,
    scoring: Scoring,
    out: Tensor,
    lse: Tensor | None,
) -> Tensor:
    gpu, num_kv_heads = gpu_of(q.device), k.shape[1]
    group = q.shape[1] // num_kv_heads
    check_arguments(q, kv, scoring, out, lse)
    short = plan.tile_tokens * group <= SHORT_ROWS
    alibi, e4m3 = scoring.alibi_slopes is not None, kv.k.dtype == E4M3
    config = extend_config(gpu, q.shape[2], q.dtype, short=short, alibi=alibi, e4m3=e4m3)
    if k.stride() != v.stride() or k.stride(2) != 1:
        # A norm over all heads leaves k outside the projection that v is part of, and the kernel has registers for
        # only one offset a token.
        k, v = k.contiguous(), v.contiguous()
    block_m = config.block_rows(group)
    if plan.tile_tokens != block_m // group:
        raise ValueError(
            f"the plan's tiles have {plan.tile_tokens} tokens, the kernel's {block_m // group}: it was made for "
            "another GPU, dtype or shape"
        )
    num_items = plan.item_requests.shape[0]
    if num_items == 0:
        return out
    partials = Partials.of(plan, q)
    if plan.shared_req_pool_indices.shape[0]:
        shared_attention(q, kv, plan, scoring, partials)
    work = {
        "req_pool_indices": extends.req_pool_indices,
        "prefix_lens": extends.prefix_lens,
        "extend_start_loc": extends.extend_start_loc,
        "extend_seq_lens": extends.extend_seq_lens,
        "item_requests": plan.item_requests,
        "item_query_starts": plan.item_query_starts,
        "item_starts": plan.item_starts,
        "item_lens": plan.item_lens,
        "item_partials": plan.item_partials,
    }
    if runs_hopper(gpu, q, k, v, kv, scoring, plan.tile_tokens, out):
        launch_hopper(q, k, v, kv, scoring, partials, out, lse, gpu.num_sms, **work)
    else:
        _extend_kernel[(num_items * num_kv_heads,)](
            k=k,
            v=v,
            kv_row_stride=k.stride(0),
            kv_head_stride=k.stride(1),
            **work,
            **kernel_arguments(q, kv, scoring, partials, config),
            **result_arguments(scoring, out, lse),
            BLOCK_M=block_m,
        )
    if partials.out.shape[0]:
        merge_partials(partials, plan, scoring.sinks, out, lse)
    return out


@triton.jit
def _extend_kernel(
    q, k, v, k_buffer, v_buffer, req_to_token,
    req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens,
    item_requests, item_query_starts, item_starts, item_lens, item_partials,
    k_scale, v_scale, sinks, alibi_slopes, out, lse, partial_out, partial_lse, scale, softcap, window,
    q_row_stride, q_head_stride, kv_row_stride, kv_head_stride, slot_stride, slot_head_stride, table_stride,
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
    slots = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * table_stride

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

    # The cached prefix, through the pool: whole tiles, then the masked rest. With a window every tile is masked,
    # and with float32, whose products leave no registers for a second loop.
    MASK_ALL: tl.constexpr = HAS_WINDOW or q.dtype.element_ty == tl.float32
    k_head = k_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
    v_head = v_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    cached_end = tl.minimum(end, prefix_len)
    peeled = start + tl.maximum(cached_end - start, 0) // BLOCK_N * BLOCK_N
    if MASK_ALL:
        peeled = start
    # The next tile's slots are carried along, so that loads do not wait for other loads.
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
        # Other requests' slots may hold NaN, and 0 * NaN is NaN: neither K nor V is read there.
        keys = tl.load(k_head + offset, mask=live[:, None] & in_head, other=0.0)
        values = tl.load(v_head + offset, mask=live[:, None] & in_head, other=0.0)
        visible = in_tile[:, None] & live[None, :]
        if HAS_WINDOW:
            visible = visible & ((first + n)[None, :] > position[:, None] - window)
        acc, row_max, row_sum = attend_tile(
            queries, keys, values, acc, row_max, row_sum, first + n, position, slopes, visible,
            scale, softcap, True, HAS_SOFTCAP, HAS_ALIBI,
        )  # fmt: skip

    # The new tokens, contiguous: first those that all rows see, then the diagonal.
    k_new = k + first_row.to(tl.int64) * kv_row_stride + kv_head * kv_head_stride + d[None, :]
    v_new = v + first_row.to(tl.int64) * kv_row_stride + kv_head * kv_head_stride + d[None, :]
    new_start = tl.maximum(start - prefix_len, 0)
    new_end = tl.minimum(end - prefix_len, extend_len)
    # Each row sees the tokens up to its own; the first row sees the fewest, up to token query_start.
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
        # The destination of these rows is costly to compute. It is computed again, from volatile loads: kept
        # through the loops, it would spill.
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
