"""How much texts have in common at their beginning."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.text.common_length import common_length


@settings(max_examples=200)
@given(
    st.text("ab😀", max_size=90), st.text("ab😀", max_size=20), st.text("ab😀", max_size=20), st.integers(-1, 120)
)
def test_as_characters_one_by_one(shared: str, one: str, other: str, guess: int) -> None:
    one, other = shared + one, shared + other
    differ = [place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    assert common_length(one, other) == min([*differ, len(one), len(other)])
    assert common_length(one, other, guess) == common_length(one, other), "a wrong guess, too"
