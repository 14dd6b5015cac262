"""Attention of one new token a request over KV in the pool, following an AttentionPlan."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.attention_plan import AttentionPlan
from triton_ops.soft_cap import soft_cap

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
    softcap: float | None = None,
    sliding_window: int | None = None,
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
        softcap: the scaled scores become `softcap * tanh(score / softcap)`; None: they stay.
        sliding_window: a row sees the last `sliding_window` positions that its items hold; what lies before
            them is not read, unless another row of the item sees it. None: a row sees all.

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
    fields = torch.stack(
        [plan.item_rows, plan.item_starts, plan.item_lens, plan.item_query_starts, plan.item_query_lens]
    ).long()
    windows = None if sliding_window is None else _window_starts(fields, num_decodes + 1, sliding_window)
    if windows is not None:
        _cut(fields, windows)
    rows, outs, lses = [], [], []
    for items in _blocks(fields, tokens_per_block=BLOCK_SIZE // k_buffer[0].numel()):
        item_rows, starts, lens, query_starts, query_lens = items.unsqueeze(-1)
        offsets = torch.arange(int(lens.max()), device=q.device)
        is_token = offsets < lens
        # An item's first slot stands in beyond its end: what the pool holds elsewhere is never read.
        positions = starts + offsets * is_token
        slots = req_to_token[item_rows, positions]
        offsets = torch.arange(int(query_lens.max()), device=q.device)
        query_rows = torch.where(offsets < query_lens, query_starts + offsets, num_decodes)
        visible = is_token.unsqueeze(1)
        if windows is not None:
            visible = visible & (positions.unsqueeze(1) >= windows[query_rows].unsqueeze(2))
        out, lse = _attend(queries[query_rows], k_buffer, v_buffer, slots, visible, softcap)
        rows.append(query_rows.flatten())
        outs.append(out.flatten(0, 1))
        lses.append(lse.flatten(0, 1))
    if not rows:
        return torch.zeros_like(q)
    row, out, lse = torch.cat(rows), torch.cat(outs), torch.cat(lses)

    # A row's last position is always seen, so its greatest lse is finite, though that of an item before its window
    # is -inf. A row that no item covers is never read at the -inf it keeps.
    max_lse = torch.full_like(queries[..., 0], -torch.inf)
    max_lse.scatter_reduce_(0, row.unsqueeze(1).expand_as(lse), lse, "amax")
    weight = torch.exp(lse - max_lse[row])
    total = torch.zeros_like(max_lse).index_add_(0, row, weight)
    merged = torch.zeros_like(queries).index_add_(0, row, out * weight.unsqueeze(-1))
    return (merged / total.masked_fill_(total == 0.0, 1.0).unsqueeze(-1))[:-1].to(q.dtype)


def _window_starts(fields: Tensor, num_rows: int, sliding_window: int) -> Tensor:
    """The first position that each query row sees: int64 `[num_rows]`, below 0 where it sees all."""
    item, row = _item_rows(fields)
    ends = torch.zeros(num_rows, dtype=torch.int64, device=fields.device)
    return ends.scatter_reduce_(0, row, (fields[1] + fields[2])[item], "amax") - sliding_window


def _cut(fields: Tensor, windows: Tensor) -> None:
    """Take from the items, in place, what lies before the windows of all their rows."""
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
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, slots: Tensor, visible: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Partial results of `q [n, rows, num_heads, head_dim]` (scaled, float32) over `slots [n, length]` where
    `visible [n, rows or 1, length]` is true.

    Returns the output `[n, rows, num_heads, head_dim]` and the natural log of the sum of exponentials
    `[n, rows, num_heads]`: 0 and -inf where nothing is visible.
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
    if softcap is not None:
        scores = soft_cap(scores, softcap)
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(group, dim=1)
    scores.masked_fill_(~visible.unsqueeze(1), -torch.inf)
    greatest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    weight = scores.sub_(greatest).exp_()
    total = weight.sum(-1, keepdim=True)
    out = (weight @ gather(v_buffer)).div_(total.masked_fill(total == 0.0, 1.0))

    def heads_last(x: Tensor) -> Tensor:
        x = x.view(num_items, num_kv_heads, num_rows, group, -1).transpose(1, 2)
        return x.reshape(num_items, num_rows, num_heads, -1)

    return heads_last(out), heads_last(greatest + total.log()).squeeze(-1)
