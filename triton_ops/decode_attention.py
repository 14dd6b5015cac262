"""Attention of one new token a request over KV in the pool, following an AttentionPlan."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.attention_plan import AttentionPlan

# Items up to this many tokens are padded to one another: a separate block for them would cost more.
SHORT_ITEM = 64
# Elements of K that are gathered at a time: with as much of V they stay in a CPU's cache.
BLOCK_SIZE = 2**17


def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
) -> Tensor:
    """Softmax(scale * q k^T) v of every query row, over the items of `plan` that cover the row.

    Args:
        q: `[num_decodes, num_heads, head_dim]`, any float dtype, any strides.
        k_buffer, v_buffer: `[num_slots, num_kv_heads, head_dim]`. `num_heads` is a multiple of
            `num_kv_heads`: query head h reads KV head `h // (num_heads // num_kv_heads)`. Slots that no
            item names may hold anything, NaN included.
        req_to_token: int32 `[max_requests, max_context_len]`, position to slot.
        plan: the work items; several may cover a row, and several rows may share one.
        scale: factor on the scores.

    Returns:
        `[num_decodes, num_heads, head_dim]` in q's dtype, computed in float32. A row without an item, or
        whose items are all empty, is zero.

    Items of about the same length are padded to one another and computed together, a block at a time. On a GPU
    this waits for the device, to read the lengths. The merge is that of FlashDecoding (Dao et al., 2023).
    """
    num_decodes, num_heads, head_dim = q.shape
    # One row more: where the rows that pad a block read from and write to.
    queries = torch.zeros(num_decodes + 1, num_heads, head_dim, device=q.device)
    queries[:-1].copy_(q).mul_(scale)
    rows, outs, lses = [], [], []
    for items in _blocks(plan, tokens_per_block=BLOCK_SIZE // k_buffer[0].numel()):
        item_rows, starts, lens, query_starts, query_lens = items.unsqueeze(-1)
        offsets = torch.arange(int(lens.max()), device=q.device)
        is_token = offsets < lens
        # An item's first slot stands in beyond its end: what the pool holds elsewhere is never read.
        slots = req_to_token[item_rows, starts + offsets * is_token]
        offsets = torch.arange(int(query_lens.max()), device=q.device)
        query_rows = torch.where(offsets < query_lens, query_starts + offsets, num_decodes)
        out, lse = _attend(queries[query_rows], k_buffer, v_buffer, slots, is_token)
        rows.append(query_rows.flatten())
        outs.append(out.flatten(0, 1))
        lses.append(lse.flatten(0, 1))
    if not rows:
        return torch.zeros_like(q)
    row, out, lse = torch.cat(rows), torch.cat(outs), torch.cat(lses)

    # Items are not empty, so every lse is finite; a row that none covers is never read at the -inf it keeps.
    max_lse = torch.full_like(queries[..., 0], -torch.inf)
    max_lse.scatter_reduce_(0, row.unsqueeze(1).expand_as(lse), lse, "amax")
    weight = torch.exp(lse - max_lse[row])
    total = torch.zeros_like(max_lse).index_add_(0, row, weight)
    merged = torch.zeros_like(queries).index_add_(0, row, out * weight.unsqueeze(-1))
    return (merged / total.masked_fill_(total == 0.0, 1.0).unsqueeze(-1))[:-1].to(q.dtype)


def _blocks(plan: AttentionPlan, tokens_per_block: int) -> list[Tensor]:
    """The fields of the items that are not empty, int64 `[5, n]` each, in the plan's order of fields.

    Items of a block have about the same length and number of query rows; their lengths, when all are padded to the
    longest, sum to at most `tokens_per_block`, unless there is one item only.
    """
    fields = torch.stack(
        [plan.item_rows, plan.item_starts, plan.item_lens, plan.item_query_starts, plan.item_query_lens]
    ).long()
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
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, slots: Tensor, is_token: Tensor
) -> tuple[Tensor, Tensor]:
    """Partial results of `q [n, rows, num_heads, head_dim]` (scaled, float32) over `slots [n, length]`.

    Returns the output `[n, rows, num_heads, head_dim]` and the natural log of the sum of exponentials
    `[n, rows, num_heads]`.
    """
    num_items, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    group = num_heads // num_kv_heads

    def gather(buffer: Tensor) -> Tensor:
        kv = buffer.index_select(0, slots.flatten()).view(num_items, -1, num_kv_heads, head_dim)
        return kv.float().transpose(1, 2)

    # Side by side, for each KV head: every query row's heads that read it.
    q = q.view(num_items, num_rows, num_kv_heads, group, head_dim).transpose(1, 2)
    q = q.reshape(num_items, num_kv_heads, num_rows * group, head_dim)
    scores = q @ gather(k_buffer).transpose(2, 3)
    scores.masked_fill_(~is_token[:, None, None, :], -torch.inf)
    greatest = scores.amax(-1, keepdim=True)
    weight = scores.sub_(greatest).exp_()
    total = weight.sum(-1, keepdim=True)
    out = (weight @ gather(v_buffer)).div_(total)

    def heads_last(x: Tensor) -> Tensor:
        x = x.view(num_items, num_kv_heads, num_rows, group, -1).transpose(1, 2)
        return x.reshape(num_items, num_rows, num_heads, -1)

    return heads_last(out), heads_last(greatest + total.log()).squeeze(-1)
