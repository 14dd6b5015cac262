"""Computes the possible gain of prefix reuse from the tokens of a list of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Prompt = Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenStatistics:
    """Token counts of a list of prompts.

    Attributes:
        prompt_tokens: tokens of all prompts.
        distinct_tokens: nodes of the prompts' token trie, the content of an unlimited cache, without nodes that
            were computed before.
        best_cached_tokens: prompt tokens that such a cache can serve. A wholly cached prompt still computes its
            last token, for the logits.
    """

    prompt_tokens: int = 0
    distinct_tokens: int = 0
    best_cached_tokens: int = 0

    @property
    def best_hit_rate(self) -> float:
        """best_cached_tokens over prompt_tokens, 0 to 1; 0 if there are no tokens."""
        return self.best_cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: TokenStatistics) -> TokenStatistics:
        """The counts of two lists, with the first one's tokens computed before the second."""
        return TokenStatistics(
            self.prompt_tokens + other.prompt_tokens,
            self.distinct_tokens + other.distinct_tokens,
            self.best_cached_tokens + other.best_cached_tokens,
        )


@dataclass(frozen=True)
class SharedPrefix:
    """The length of a prompt, and the number of leading tokens it shares with sequences computed before it."""

    length: int
    shared: int

    @property
    def distinct(self) -> int:
        return self.length - self.shared


def shared_prefixes(prompts: Sequence[Prompt], computed_before: Sequence[Prompt] = ()) -> list[SharedPrefix]:
    """For each of `prompts`, in lexicographic order: the prefix it shares with earlier ones or with any of
    `computed_before`. No other order shares more tokens.

    Each is a list of ids that fit in int32, or int32 [num_tokens]. In lexicographic order a sequence shares its
    longest prefix with a neighbour, on either side. Any order of the tokens will do, so the sequences are sorted
    as bytes.
    """
    ordered = sorted([(_bytes(one), False) for one in computed_before] + [(_bytes(one), True) for one in prompts])
    found = []
    following = b""  # the next sequence of `computed_before`
    for i in reversed(range(len(ordered))):
        current, is_new = ordered[i]
        if not is_new:
            following = current
            continue
        preceding = ordered[i - 1][0] if i else b""
        shared = max(common_prefix(current, preceding), common_prefix(current, following))
        found.append(SharedPrefix(len(current) // 4, shared))
    return found[::-1]


def token_statistics(
    prompts: Sequence[Prompt], computed_before: Sequence[Prompt] = (), computed: Sequence[int] | None = None
) -> TokenStatistics:
    """Count the tokens of `prompts` (each a list of ids that fit in int32, or int32 [num_tokens]).

    The cache holds the tokens of `computed_before` at first. `computed` says how many of each prompt's last tokens
    are computed in any case; None: one.
    """
    prefixes = shared_prefixes(prompts, computed_before)
    return TokenStatistics(
        prompt_tokens=sum(prefix.length for prefix in prefixes),
        distinct_tokens=sum(prefix.distinct for prefix in prefixes),
        best_cached_tokens=_best_cached(prompts, computed_before, computed),
    )


def best_hit_rate(prompts: Sequence[Prompt]) -> float:
    """The hit rate, 0 to 1, that no order and no cache size can exceed, starting from an empty cache.

    Hits on generated tokens do not count.
    """
    return token_statistics(prompts).best_hit_rate


def _best_cached(
    prompts: Sequence[Prompt], computed_before: Sequence[Prompt], computed: Sequence[int] | None
) -> int:
    """The most prompt tokens that the cache can serve, in any order of the prompts.

    Where a prompt computes a token of the trie in any case, and runs first, all others that want it find it. Every
    other token of the trie is computed once, unless it was before.
    """
    each = [1] * len(prompts) if computed is None else computed
    limits = [max(0, len(one) - own) for one, own in zip(prompts, each, strict=True)]
    ordered = sorted(
        [(_bytes(one), 0) for one in computed_before] + list(zip(map(_bytes, prompts), limits, strict=True))
    )
    once, last = 0, b""
    path = [(0, 0)]  # of the trie, down to `last`: depth of a node, the lowest limit of the prompts below it
    for tokens, limit in [*ordered, (b"", 0)]:
        length, shared = len(tokens) // 4, common_prefix(last, tokens)
        while path[-1][0] > shared:
            depth, lowest = path.pop()
            above = max(shared, path[-1][0])
            once += max(0, min(depth, lowest) - above)
            _add(path, above, lowest)
        _add(path, length, limit)
        last = tokens
    return sum(limits) - once


def _add(path: list[tuple[int, int]], depth: int, limit: int) -> None:
    """A node at the end of a path, which may be there."""
    if path[-1][0] == depth:
        limit = min(limit, path.pop()[1])
    path.append((depth, limit))


def _bytes(tokens: Prompt) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


def common_prefix(a: bytes, b: bytes) -> int:
    """The number of leading int32 tokens that two sequences share."""
    length = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, np.int32, length) != np.frombuffer(b, np.int32, length)
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
