"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Natural logarithms of softmax probabilities, computed in float32.

    Args:
        logits: `[R, vocab_size]`, any float dtype.
        token_ids: int32 `[R]`, the token of each row that is asked for.
        num_top: how many of the most likely tokens to return, 0 to vocab_size.

    Returns:
        The tokens' log-probabilities float32 `[R]`; their ranks int32 `[R]`, 1 for the most likely (a token's
        rank counts those more likely than it); ids int32 `[R, num_top]` and log-probabilities float32
        `[R, num_top]` of the most likely tokens, the most likely first.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    top, top_ids = logprobs.topk(num_top, dim=1)
    return chosen.squeeze(1), ranks.int(), top_ids.int(), top
