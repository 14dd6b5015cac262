"""Log-likelihoods by one pass of transformers, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def dense(model: Any, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """The continuation's log-likelihood in one pass of transformers, and whether it is greedy."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation]])).logits[0].double().log_softmax(-1)
    rows = logits[len(context) - 1 : -1]
    picked = torch.tensor(continuation)
    return float(rows.gather(1, picked[:, None]).sum()), bool((rows.argmax(-1) == picked).all())
