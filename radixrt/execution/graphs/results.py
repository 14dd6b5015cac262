"""Where captured decodes leave their results: tokens and flags in one place on the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.arrays import Int32Array


class ResultBuffer:
    """The sampled tokens of captured decodes, and whether they are finite: one copy a pass takes both to the host.

    Attributes:
        words: int32, token ids and after them flags, a byte each; on the device, like the two parts below.
        token_ids: int32 `[max_batch]`.
        finite: bool `[max_batch]`.
    """

    def __init__(self, max_batch: int, device: torch.device) -> None:
        self.words = torch.zeros(max_batch + -(-max_batch // 4), dtype=torch.int32, device=device)
        self.token_ids = self.words[:max_batch]
        self.finite = self.words[max_batch:].view(torch.bool)[:max_batch]

    def parts(self, words: Int32Array, count: int) -> tuple[Int32Array, NDArray[np.bool_]]:
        """The first `count` tokens and flags of `words` that were copied to the host."""
        flags: NDArray[np.bool_] = words[len(self.token_ids) :].view(np.bool_)
        return words[:count], flags[:count]
