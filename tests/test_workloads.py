"""The best possible hit rate, from the token lists alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.workloads import TokenStatistics, best_hit_rate, token_statistics

# few tokens, some of them beyond a byte: prefixes are often shared, and whole tokens must differ
TOKENS = st.sampled_from([0, 1, 255, 256, 257, 2**31 - 1])
PROMPTS = st.lists(st.lists(TOKENS, max_size=6), max_size=12)


def in_order(prompts: list[list[int]]) -> TokenStatistics:
    """An unlimited cache that sees the prompts in this order: the set of all prefixes."""
    cache: set[tuple[int, ...]] = set()
    cached = 0
    for prompt in prompts:
        prefixes = [tuple(prompt[:n]) for n in range(1, len(prompt) + 1)]
        cached += sum(prefix in cache for prefix in prefixes[:-1])
        cache.update(prefixes)
    return TokenStatistics(sum(map(len, prompts)), len(cache), cached)


@given(prompts=PROMPTS, seed=st.integers(0, 100))
def test_is_what_an_unlimited_cache_reaches_at_best(prompts: list[list[int]], seed: int) -> None:
    # Prefixes first: a prompt that is wholly cached computes its last token again.
    expected = in_order(sorted(prompts, key=len))
    random.Random(seed).shuffle(prompts)
    assert in_order(prompts).best_cached_tokens <= expected.best_cached_tokens
    assert token_statistics(prompts) == expected
    assert token_statistics([np.array(prompt, dtype=np.int32) for prompt in prompts]) == expected


def test_a_whole_hit_computes_its_last_token() -> None:
    assert token_statistics([[1, 2, 3]] * 4) == TokenStatistics(12, 3, 6)
    assert best_hit_rate([[1, 2, 3]] * 4) == 0.5
    assert token_statistics([[1, 2, 3], [1, 2], [1]]) == TokenStatistics(6, 3, 3)


def test_no_tokens() -> None:
    assert best_hit_rate([]) == 0.0
    assert best_hit_rate([[], []]) == 0.0


def test_ids_beyond_int32_are_refused() -> None:
    with pytest.raises(OverflowError):
        token_statistics([[2**31]])
