"""Adding to, forbidding and allowing single tokens' logits."""

from __future__ import annotations

import torch
from torch import Tensor


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> Tensor:
    """Logits `[R, vocab_size]` as float32, with `biases[h]` added at `(rows[h], token_ids[h])`.

    `rows` and `token_ids` are int32 `[H]`, `biases` is float32 `[H]`; a pair that stands twice counts twice.
    """
    return logits.float().index_put((rows.long(), token_ids.long()), biases, accumulate=True)


def ban_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor, applies: Tensor) -> Tensor:
    """Logits `[R, vocab_size]` with -inf at `(rows[h], token_ids[h])` where `applies[h]`; all three are `[H]`."""
    penalty = torch.where(applies, -torch.inf, 0.0).to(logits.dtype)
    banned = torch.zeros_like(logits).index_put((rows.long(), token_ids.long()), penalty, accumulate=True)
    return logits + banned


def keep_only(logits: Tensor, rows: Tensor, token_ids: Tensor, is_restricted: Tensor) -> Tensor:
    """Logits `[R, vocab_size]` with -inf at all tokens of restricted rows but `(rows[h], token_ids[h])`.

    `rows` and `token_ids` are int32 `[H]`, `is_restricted` is bool `[R]`.
    """
    allowed = (~is_restricted).unsqueeze(1).expand_as(logits).clone()
    # A Python value would be copied to the device, which waits for it.
    allowed.index_put_((rows.long(), token_ids.long()), torch.ones_like(rows, dtype=torch.bool))
    return logits.masked_fill(~allowed, -torch.inf)
