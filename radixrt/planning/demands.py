"""What the prompts of a store ask for. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixrt.arrays import Int64Array

Numbers = npt.NDArray[np.integer] | int


@dataclass(frozen=True)
class Demands:
    """What N prompts ask for, by the number of the prompt: `[N]` int64 each.

    Attributes:
        lengths: tokens of the prompt.
        new_tokens: expected tokens of each answer to it; 0 where it is only computed.
        num_answers: answers to it.
        match_limits: leading tokens of it that may come from the cache. The others are computed in any case, for
            their logits: the last one, and those before which log-probabilities of the prompt are wanted.
    """

    lengths: Int64Array
    new_tokens: Int64Array
    num_answers: Int64Array
    match_limits: Int64Array

    @classmethod
    def of(
        cls,
        lengths: Int64Array,
        new_tokens: Numbers,
        num_answers: Numbers = 1,
        match_limits: npt.NDArray[np.integer] | None = None,
    ) -> Demands:
        """Numbers for each prompt or for all of them; without limits only the last token is computed anyway."""

        def each(numbers: Numbers) -> Int64Array:
            return np.broadcast_to(np.asarray(numbers, dtype=np.int64), len(lengths))

        limits = lengths - 1 if match_limits is None else np.minimum(each(match_limits), lengths - 1)
        return cls(lengths, each(new_tokens), each(num_answers), np.maximum(0, limits))

    def __getitem__(self, prompts: Int64Array) -> Demands:
        """Those of some prompts, in their order."""
        return Demands(*(numbers[prompts] for numbers in vars(self).values()))

    @property
    def grown(self) -> Int64Array:
        """Tokens of each answer whose KV needs memory: the last one's does not."""
        return np.maximum(0, self.new_tokens - 1)
