"""What a list of prompts can gain from prefix reuse, from its tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Prompt = Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenStatistics:
    """Token counts of a list of prompts.

    Attributes:
        prompt_tokens: tokens of all prompts.
        distinct_tokens: nodes of the prompts' token trie: what one unlimited cache would hold.
        best_cached_tokens: prompt tokens that such a cache, empty at first, can serve. A prompt that is wholly
            cached still computes its last token, for the logits.
    """

    prompt_tokens: int
    distinct_tokens: int
    best_cached_tokens: int

    @property
    def best_hit_rate(self) -> float:
        """best_cached_tokens over prompt_tokens, 0 to 1; 0 if there are no tokens."""
        return self.best_cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def token_statistics(prompts: Sequence[Prompt]) -> TokenStatistics:
    """Count the tokens of `prompts` (each a list of ids that fit in int32, or int32 [num_tokens]).

    In lexicographic order the longest prefix that a prompt shares with any before it is the one that it shares
    with its neighbour. Any order of the tokens will do, so the prompts are sorted as bytes.
    """
    total = distinct = cached = 0
    ordered = sorted(np.asarray(prompt, dtype=np.int32).tobytes() for prompt in prompts)
    for previous, current in pairwise([b"", *ordered]):
        length = len(current) // 4
        shared = _common_prefix(np.frombuffer(previous, np.int32), np.frombuffer(current, np.int32))
        total += length
        distinct += length - shared
        cached += max(0, min(shared, length - 1))
    return TokenStatistics(total, distinct, cached)


def best_hit_rate(prompts: Sequence[Prompt]) -> float:
    """The hit rate, 0 to 1, that no order and no cache size can exceed, starting from an empty cache.

    Hits on generated tokens are not in it.
    """
    return token_statistics(prompts).best_hit_rate


def _common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
