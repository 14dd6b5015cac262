"""Texts and chats to token ids: CPU seconds, those of the process that renders chats included, and seconds.

python scripts/bench_text.py --model SmolLM2-135M-Instruct --chats 10000

Chats of one system prompt and a question each. Their texts are encoded together, and each by itself. Figures are
the least of some runs; in a run the steps follow each other.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import psutil

from radixrt.arrays import Int32Array
from radixrt.bench.report import figure_table, wide_console
from radixrt.text.chat import Chat, SharedParts
from radixrt.text.tokenizer import Tokenizer, load_tokenizer

WORDS = 1500  # different ones
QUESTION = 20, 150  # words
BLOCK = 512  # texts whose ids are compared at once

_T = TypeVar("_T")


@dataclass(frozen=True)
class Taken:
    """Seconds."""

    cpu: float
    wall: float

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.cpu + other.cpu, self.wall + other.wall)


def taken(step: Callable[[], _T]) -> tuple[_T, Taken]:
    """What a step returns, and the time that it takes in this process and its children."""
    cpu, wall = _cpu_seconds(), time.perf_counter()
    found = step()
    return found, Taken(_cpu_seconds() - cpu, time.perf_counter() - wall)


def _cpu_seconds() -> float:
    seconds = time.process_time()
    for child in psutil.Process().children():
        seconds += sum(child.cpu_times()[:2])
    return seconds


def words_of(tokenizer: Tokenizer) -> list[str]:
    """Words that are a token with the blank before them: the first of a vocabulary are mostly common ones."""
    pieces = (tokenizer.piece(token_id) for token_id in range(tokenizer.vocab_size))
    words = [piece[1:] for piece in pieces if piece[:1] in "Ġ▁" and piece[1:].isascii() and piece[1:].islower()]
    return words[:WORDS]


def chats_of(tokenizer: Tokenizer, count: int, system_len: int) -> list[list[dict[str, str]]]:
    words, rng = words_of(tokenizer), random.Random(0)
    system = {"role": "system", "content": " ".join(rng.choices(words, k=system_len))}
    questions = (" ".join(rng.choices(words, k=rng.randint(*QUESTION))) for _ in range(count))
    return [[system, {"role": "user", "content": question}] for question in questions]


def rendered(tokenizer: Tokenizer, chats: Sequence[list[dict[str, str]]]) -> list[str]:
    """As lists of prompts are. Raises TokenizerError if one cannot be rendered."""
    shared, texts = SharedParts(), []
    for text in tokenizer.chat_texts([Chat.of(chat, shared) for chat in chats]):
        if not isinstance(text, str):
            raise text
        texts.append(text)
    return texts


def encode_each(tokenizer: Tokenizer, texts: Sequence[str], expected: Sequence[Int32Array]) -> None:
    """Encode each text by itself. Raises SystemExit if its ids are not those expected."""
    for first in range(0, len(texts), BLOCK):
        found = tokenizer.codec.encode(list(texts[first : first + BLOCK]))
        if found != [ids.tolist() for ids in expected[first : first + BLOCK]]:
            raise SystemExit("the ids of texts that are encoded together differ from those of each by itself")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a chat template, or a hub id")
    parser.add_argument("--chats", type=int, default=10_000, metavar="N", help="(10000)")
    parser.add_argument("--system-len", type=int, default=2000, metavar="WORDS", help="system prompt (2000)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs; texts by themselves: one (5)")
    given = parser.parse_args(argv)
    tokenizer = load_tokenizer(given.model)
    chats = chats_of(tokenizer, given.chats, given.system_len)
    tokenizer.chat_text(chats[0])  # starts the process
    steps: dict[str, list[Taken]] = {"chats rendered": [], "texts together": [], "chats to ids": []}
    for _ in range(given.repeat):
        texts, rendering = taken(partial(rendered, tokenizer, chats))
        ids, encoding = taken(partial(tokenizer.encode_batch, texts, add_special_tokens=False))
        for name, one in zip(steps, (rendering, encoding, rendering + encoding), strict=True):
            steps[name].append(one)
    steps["each text by itself"] = [taken(partial(encode_each, tokenizer, texts, ids))[1]]
    least = {name: Taken(min(t.cpu for t in each), min(t.wall for t in each)) for name, each in steps.items()}
    base = least["texts together"]
    table = figure_table(None, f"{given.chats:,} chats, {sum(map(len, ids)):,} tokens", "CPU s", "x", "s", "x")
    for name, one in least.items():
        figures = (one.cpu, one.cpu / base.cpu, one.wall, one.wall / base.wall)
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    wide_console(100).print(table)


if __name__ == "__main__":
    main()
