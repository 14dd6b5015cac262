"""Lists of prompts that share prefixes, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

TOKENS = st.sampled_from([0, 1, 255, 256, 2**31 - 1])


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[list[int]]:
    """Fresh ones, repetitions, prefixes of one another, and long stretches that are shared."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(0, 12))):
        fresh = draw(st.lists(TOKENS, max_size=4)) * draw(st.sampled_from([1, 1, 1, 15]))
        goes_on = bool(prompts) and draw(st.booleans())
        earlier = draw(st.sampled_from(prompts)) if goes_on else []
        cut = len(earlier) if draw(st.booleans()) else draw(st.integers(0, len(earlier)))
        prompts.append(earlier[:cut] + fresh)
    return prompts
