"""Lists of prompts as texts of English words, with the lengths and the sharing of the lists of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import islice, pairwise

import numpy as np

from radixrt.cache.radix_tree import Tokens
from radixrt.errors import RadixrtError
from radixrt.text.tokenizer import Tokenizer
from radixrt.workloads.lists import WorkloadPrompt
from radixrt.workloads.statistics import common_prefix

TOLERANCE = 0.02  # of a list's tokens
_DRAWS = 20  # for a first word that no other node has


@cache
def words() -> tuple[str, ...]:
    """Some English words, of small letters."""
    return tuple(files("radixrt.workloads").joinpath("words.txt").read_text(encoding="ascii").split())


def as_texts(prompts: Sequence[WorkloadPrompt], tokenizer: Tokenizer, seed: int = 0) -> list[WorkloadPrompt]:
    """The prompts with texts, and with the ids that each text has by itself.

    Every node of the prompts' prefix tree becomes a text of its own: prompts share as texts what they share as
    tokens. Each is cut where it is as deep as in the list. Siblings begin with words that differ, while there are
    enough words. Answers keep their lengths.

    Raises RadixrtError if the texts have 2 % more tokens than the list, or 2 % fewer.
    """
    texts = _Writer(tokenizer, seed).texts([prompt.prompt_ids for prompt in prompts])
    # Not as a list: what such texts share may be encoded once, and is compared with this.
    encoded = [np.array([*tokenizer.lead, *ids], np.int32) for ids in tokenizer.codec.encode(texts)]
    wanted, found = sum(len(prompt.prompt_ids) for prompt in prompts), sum(map(len, encoded))
    if abs(found - wanted) > TOLERANCE * wanted:
        raise RadixrtError(
            f"as texts the list has {found:,} tokens, and {wanted:,} as ids, which is not within {TOLERANCE:.0%}: "
            "longer prompts, or a tokenizer that has more words as one token"
        )
    return [
        replace(prompt, prompt_ids=ids, text=text)
        for prompt, text, ids in zip(prompts, texts, encoded, strict=True)
    ]


class _Node:
    """A node of the tree, with all that is before it.

    Attributes:
        end: its depth in the list's tokens.
        text, num_tokens: from the root to its end.
        first_words: of the nodes below it.
    """

    def __init__(self, end: int, text: str, num_tokens: int) -> None:
        self.end, self.text, self.num_tokens = end, text, num_tokens
        self.first_words: set[str] = set()


class _Writer:
    """Writes words, whose numbers of tokens, each with the blank before it, add up to lengths."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer, self._random = tokenizer, random.Random(seed)
        start = words()[0]
        one, *pairs = tokenizer.encode_batch([start, *(f"{start} {word}" for word in words())])
        costs = {word: len(pair) - len(one) for word, pair in zip(words(), pairs, strict=True)}
        self._cost = {word: cost for word, cost in costs.items() if cost > 0}  # not what is unknown like the start
        if not self._cost:
            raise RadixrtError("the tokenizer knows no English words: name another one")
        self._least, self._most = min(self._cost.values()), max(self._cost.values())
        # The words that take at most so many tokens.
        self._within = [
            [word for word, cost in self._cost.items() if cost <= num_tokens]
            for num_tokens in range(self._most + 1)
        ]

    def texts(self, prompts: Sequence[Tokens]) -> list[str]:
        """For each prompt `[n]` int32, its text."""
        keys = [prompt.tobytes() for prompt in prompts]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared = [0, *(common_prefix(keys[before], keys[i]) for before, i in pairwise(order))]
        texts = [""] * len(prompts)
        path = [_Node(0, "", len(self._tokenizer.lead))]
        for place, i in enumerate(order):
            while path[-1].end > shared[place]:
                path.pop()
            for end in sorted({*_partings(shared, place), len(prompts[i])}):
                if end > path[-1].end:
                    path.append(self._below(path[-1], end))
            texts[i] = path[-1].text
        return texts

    def _below(self, node: _Node, end: int) -> _Node:
        """A node below another one, up to a depth of the list."""
        word = self._first_word(node, end - node.num_tokens)
        written = [node.text, word] if node.text else [word]
        num_tokens = node.num_tokens + (self._cost[word] if node.text else self._cost_without_blank(word))
        while within := self._words_within(end - num_tokens):
            drawn = self._random.choices(within, k=max(1, (end - num_tokens) // self._most))
            written += drawn
            num_tokens += sum(map(self._cost.__getitem__, drawn))
        return _Node(end, " ".join(written), num_tokens)

    def _first_word(self, node: _Node, num_tokens: int) -> str:
        """A word of so few tokens that no other node below this one begins with, if there is one."""
        within = self._words_within(max(num_tokens, self._least))
        for _ in range(_DRAWS):
            word = self._random.choice(within)
            if word not in node.first_words:
                break
        node.first_words.add(word)
        return word

    def _cost_without_blank(self, word: str) -> int:
        return len(self._tokenizer.encode(word, add_special_tokens=False))

    def _words_within(self, num_tokens: int) -> Sequence[str]:
        return self._within[min(max(0, num_tokens), self._most)]


def _partings(shared: Sequence[int], place: int) -> Iterator[int]:
    """Depths at which others, in their order, part from the prompt at a place, which is the first to have them."""
    lowest = None
    for depth in islice(shared, place + 1, None):
        if depth <= shared[place]:
            return
        if lowest is None or depth < lowest:
            yield (lowest := depth)
