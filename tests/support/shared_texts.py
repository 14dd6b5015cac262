"""Lists of texts of which many begin alike, and end anywhere: what tokenizers could trip over."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

from tests.support.real_vocabularies import PIECES

BLANKS = " \u00a0\u1680\u2002\u2009\u202f\u205f\u3000\t\n\r\x0b\x0c\x1c\x85\u2028\u200b▁"
MARKS = "\u0301\u0308\u0323\u0338\u3099\uff9e\u1161\u11a8\u093c\u0651\u20dd\ufe0f\u200d"
LETTERS = "eèaAoqkß1e=<>か가각क한ㄱｶﾞİıſ\u212aÅÅ①ⅧǅΣσςŉﷺㅏ"  # noqa: RUF001
LONGEST_PIECE = 12  # characters


def letter(rng: random.Random) -> str:
    """One of all planes; surrogates are none."""
    found = chr(rng.randrange(rng.choice((0x80, 0x400, 0x3000, 0x20000, 0x110000))))
    return found if unicodedata.category(found) != "Cs" else "A"


def part(rng: random.Random, markers: Sequence[str]) -> str:
    kind = rng.random()
    if kind < 0.08:
        return "".join(letter(rng) for _ in range(rng.randint(1, 3)))
    if kind < 0.24:
        return "".join(rng.choices(BLANKS if rng.random() < 0.4 else " \n", k=rng.randint(1, 3)))
    if kind < 0.34:
        return "".join(rng.choices(LETTERS + MARKS, k=rng.randint(1, 4)))
    if kind < 0.56 and markers:
        whole = rng.choice(markers)
    elif kind < 0.75:
        return rng.choice(
            (" the", " quick", " brown", " fox", ".", ",", " 12", "don't", " x", "Ab", "a", "1", "hello")
        )
    else:
        whole = rng.choice(PIECES)
        start = rng.randrange(max(1, len(whole) - LONGEST_PIECE))
        whole = whole[start : start + LONGEST_PIECE]
    if rng.random() < 0.3:
        start = rng.randrange(len(whole))
        return whole[start : rng.randint(start, len(whole))]
    return whole


def text(rng: random.Random, markers: Sequence[str], longest: int = 12) -> str:
    return "".join(part(rng, markers) for _ in range(rng.randint(1, longest)))


def shared_texts(rng: random.Random, markers: Sequence[str] = (), count: int = 50) -> list[str]:
    """`count` texts, half of them cut from one, with something after the cut or nothing; some are the same."""
    whole = text(rng, markers, 20) + text(rng, markers, 20)
    found = ["", whole]
    while len(found) < count // 2:
        end = rng.randint(0, len(whole))
        found.append(whole[:end] + (text(rng, markers, 2) if rng.random() < 0.7 else ""))
    while len(found) < count:
        found.append(rng.choice(found) if rng.random() < 0.1 else text(rng, markers, 5))
    rng.shuffle(found)
    return found
