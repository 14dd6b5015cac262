"""The order of texts, beside that of a sort."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from radixrt.text.text_order import text_order

PIECES = st.sampled_from(["", "a", "b", "ab", "\x00", "é", "😀", "a" * 15, "a" * 16, "a" * 17, "b" * 40])
TEXTS = st.lists(st.lists(PIECES, max_size=6).map("".join), max_size=120)


@given(TEXTS)
def test_the_order_is_that_of_a_sort(texts: list[str]) -> None:
    assert text_order(texts) == sorted(range(len(texts)), key=texts.__getitem__)


def test_texts_on_a_few_heads_are_in_order() -> None:
    draw = random.Random(0)
    heads = ["".join(draw.choices("ab ", k=500)) for _ in range(3)]
    texts = [draw.choice(heads)[: draw.choice([500, 500, 400])] + f"{draw.randrange(300)}" for _ in range(2000)]
    assert text_order(texts) == sorted(range(len(texts)), key=texts.__getitem__)
