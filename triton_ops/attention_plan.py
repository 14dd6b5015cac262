"""AttentionPlan: which segments of KV the query rows of a pass's decode part read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """The work items of a pass's decode attention.

    An item is a segment of KV read by a contiguous range of query rows. A query row is a decode request of
    the pass, in batch order (row 0 is the first decode). The result of a row is the merge, by log-sum-exp,
    of the partial results of all items whose range covers it; the order of the items means nothing.

    All fields are int32 tensors `[num_items]` on the device of the pass:

    - `item_rows`: the line of `req_to_token` that names the segment's slots (any request that has it),
    - `item_starts`: the first KV position of the segment,
    - `item_lens`: its number of tokens (0: the item adds nothing),
    - `item_query_starts`, `item_query_lens`: the query rows that read it.
    """

    item_rows: Tensor
    item_starts: Tensor
    item_lens: Tensor
    item_query_starts: Tensor
    item_query_lens: Tensor

    @classmethod
    def flat(cls, req_pool_indices: Tensor, seq_lens: Tensor) -> AttentionPlan:
        """The plan without sharing: one item a decode request, its whole context.

        `req_pool_indices` and `seq_lens` are int32 `[num_decodes]`; a `seq_len` of 0 marks a padded
        row. Nothing here waits for the device.
        """
        return cls(
            item_rows=req_pool_indices,
            item_starts=torch.zeros_like(seq_lens),
            item_lens=seq_lens,
            item_query_starts=torch.arange(seq_lens.shape[0], dtype=torch.int32, device=seq_lens.device),
            item_query_lens=torch.ones_like(seq_lens),
        )
