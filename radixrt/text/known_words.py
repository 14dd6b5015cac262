"""The ids of words, remembered: few processors put texts together from them in less time than they encode them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from radixrt.text.cuts import Cuts

FEW_PROCESSORS = 4  # with more, the tokenizer's threads are faster, and leave the interpreter to others
MOST, LONGEST = 1 << 16, 32  # words that are remembered, and characters of one
MOST_NEW = 1 / 3  # of all words: with more of them it takes less time to encode texts whole

Encode = Callable[[list[str]], list[list[int]]]


class KnownWords:
    """Encodes texts that begin with a blank, from blank to blank, where all of these blanks are cuts.

    Several threads may use it.

    Args:
        encode: makes ids of texts; the tokenizer's own.
        cuts: of the same tokenizer, which puts no blank before texts.
    """

    def __init__(self, encode: Encode, cuts: Cuts) -> None:
        if cuts.drops_blank:
            raise ValueError("the tokenizer puts a blank before each text")
        self._encode, self._cuts = encode, cuts
        self._ids: dict[str, list[int]] = {}  # by words that a cut follows if a blank does

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text. Raises what the tokenizer's `encode` does."""
        split = [text.split(" ") for text in texts]
        # The first part has no blank before it: it is empty if a text begins with one.
        words = set(chain.from_iterable(parts[1:] for parts in split if not parts[0]))
        ids = self._with(words, sum(map(len, split)))
        found: dict[int, list[int]] = {}
        for place, parts in enumerate(split):
            if len(parts) > 1 and not parts[0]:
                own = [ids.get(word) for word in parts[1:]]
                if None not in own:
                    found[place] = list(chain.from_iterable(own))  # type: ignore[arg-type]
        others = [place for place in range(len(texts)) if place not in found]
        found.update(zip(others, self._encode([texts[place] for place in others]), strict=True))
        return [found[place] for place in range(len(texts))]

    def _with(self, words: set[str], total: int) -> dict[str, list[int]]:
        """The ids of what is known of some words, with those that are worth it among the new ones."""
        ids = self._ids
        new = self._worth_knowing(words.difference(ids))
        if len(new) > MOST_NEW * total:
            return {}
        if len(ids) + len(new) > MOST:
            ids = self._ids = {}  # others may look at the old ones
            new = self._worth_knowing(words)[:MOST]
        ids.update(zip(new, self._encode([" " + word for word in new]), strict=True))
        return ids

    def _worth_knowing(self, words: set[str]) -> Sequence[str]:
        last = self._cuts.last
        return [word for word in words if 0 < len(word) <= LONGEST and last(word[-1] + " ", 0, 2) == 1]
