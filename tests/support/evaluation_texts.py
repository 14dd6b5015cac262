"""Texts of an evaluation: few heads, questions to each, and choices."""

from __future__ import annotations

import random
from collections.abc import Callable

_WORDS = [
    "the",
    "of",
    "river",
    "mountain",
    "likes",
    "counts",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "when",
    "morning",
    "comes",
    "we'll",
    "37",
    "1984",
    "naïve",
    "however",
    "question",
    "answer",
    "table",
    "window",
    "Oslo",
    "Mira",
    "Tarek",
]
_HAN = "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年"


def english(rng: random.Random, count: int) -> str:
    marks = (rng.choice((",", ".", ";", "?\n", ":\n\n")) if rng.random() < 0.15 else "" for _ in range(count))
    return " ".join(rng.choice(_WORDS) + mark for mark in marks)


def chinese(rng: random.Random, count: int) -> str:
    marks = (rng.choice("，。：；！") if rng.random() < 0.08 else "" for _ in range(count))  # noqa: RUF001
    return "".join(rng.choice(_HAN) + mark for mark in marks)


def evaluation(
    write: Callable[[random.Random, int], str], *, heads: int = 6, questions: int = 40, choices: int = 4
) -> list[str]:
    """`heads` of 600 words or letters, with `questions` of 30 each, and `choices` of up to 4 of each."""
    rng = random.Random(5)
    texts = []
    for _ in range(heads):
        head = write(rng, 600)
        for _ in range(questions):
            question = f"{head}\n\n{write(rng, 30)}\n"
            texts += [question + write(rng, rng.randint(1, 4)) for _ in range(choices)]
    rng.shuffle(texts)
    return texts
