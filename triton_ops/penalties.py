"""Repetition, presence and frequency penalties on logits."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    is_output: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits `[R, vocab_size]` as float32, less likely where a token has occurred before.

    Args:
        logits: `[R, vocab_size]`, any float dtype.
        rows, token_ids: int32 `[H]`: token `token_ids[h]` occurs in the history of row `rows[h]`, once for each h.
        is_output: bool or int32 `[H]`: whether it was generated; else it is of the prompt.
        repetition: float32 `[R]`; logits of all tokens that occur are divided by it where positive, multiplied
            where negative (Keskar et al., "CTRL", 2019).
        presence, frequency: float32 `[R]`; subtracted from the logits of tokens that were generated, once, and
            once for each time.
    """
    out = logits.float()
    rows, token_ids = rows.long(), token_ids.long()
    occurs = torch.zeros(out.shape, dtype=torch.bool, device=out.device)
    # A Python value would be copied to the device, which waits for it.
    occurs.index_put_((rows, token_ids), torch.ones_like(rows, dtype=torch.bool))
    generated = torch.zeros_like(out)
    generated.index_put_((rows, token_ids), is_output.to(out.dtype), accumulate=True)
    factor = repetition.unsqueeze(1)
    out = torch.where(occurs, torch.where(out > 0, out / factor, out * factor), out)
    return out - frequency.unsqueeze(1) * generated - presence.unsqueeze(1) * (generated > 0)
