"""The results of captured decodes: tokens and flags in one place on the device, and copies on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SampledTokens:
    """Words of memory, and their parts: token ids int32 `[max_batch]` and flags bool `[max_batch]`."""

    words: Tensor
    token_ids: Tensor
    finite: Tensor

    @staticmethod
    def of(words: Tensor, size: int) -> SampledTokens:
        """Words int32 that hold `size` token ids, then as many flags, a byte each."""
        return SampledTokens(words, words[:size], words[size:].view(torch.bool)[:size])


class ResultBuffer:
    """The sampled tokens of captured decodes, and whether they are finite: one copy a pass to the host.

    The memory of a copy is pinned, for CUDA, and used again: it belongs to a pass from `to_host` to `give_back`.
    So there are as many copies as passes have ever been in flight together.

    Attributes:
        token_ids: int32 `[max_batch]`, on the device.
        finite: bool `[max_batch]`, on the device.
    """

    def __init__(self, max_batch: int, device: torch.device) -> None:
        self._max_batch = max_batch
        self._words = torch.zeros(max_batch + -(-max_batch // 4), dtype=torch.int32, device=device)
        on_device = SampledTokens.of(self._words, max_batch)
        self.token_ids, self.finite = on_device.token_ids, on_device.finite
        self._free: list[SampledTokens] = []

    @property
    def num_free(self) -> int:
        """Copies whose memory may be used again."""
        return len(self._free)

    def to_host(self) -> SampledTokens:
        """Start the copy of a pass's results."""
        copy = self._free.pop() if self._free else self._new()
        copy.words.copy_(self._words, non_blocking=True)
        return copy

    def give_back(self, copy: SampledTokens) -> None:
        """Use the memory of a copy again, which has been made and read."""
        self._free.append(copy)

    def _new(self) -> SampledTokens:
        pinned = self._words.device.type == "cuda"
        words = torch.empty(len(self._words), dtype=torch.int32, device="cpu", pin_memory=pinned)
        return SampledTokens.of(words, self._max_batch)
