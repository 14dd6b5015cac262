"""Answers that wait, in the order of their tokens: those that begin alike stand side by side."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import itemgetter

from radixrt.cache.prefix_cache import sort_key
from radixrt.cache.radix_tree import Namespace, common_prefix
from radixrt.cache.states import FEWEST
from radixrt.schedule.answer import Answer

MAX_ASKED = 256  # neighbours on either side, of one answer


class Neighbours:
    """Tells where an answer parts from others that wait, however far from it they stand in the queue."""

    def __init__(self) -> None:
        # Of each namespace, the tokens that answers had when they came, in bytes that sort as they do.
        self._sorted: dict[Namespace, list[tuple[bytes, Answer]]] = {}
        self._keys: dict[Answer, bytes] = {}

    def add(self, answers: Iterable[Answer]) -> None:
        """Let these be neighbours of others, if they are not yet."""
        for answer in answers:
            if answer not in self._keys:
                self._keys[answer] = key = sort_key(answer.tokens())
                insort(self._sorted.setdefault(answer.request.namespace, []), (key, answer), key=itemgetter(0))

    def remove(self, answer: Answer) -> None:
        """Forget an answer, if it is here."""
        if answer in self._keys:
            namespace = answer.request.namespace
            del self._sorted[namespace][self._place(answer)], self._keys[answer]
            if not self._sorted[namespace]:
                del self._sorted[namespace]

    def partings(self, answer: Answer, after: int, least_gain: int) -> list[int]:
        """Positions beyond `after`, ascending, up to which others may match the tokens of an answer that is here.

        Others find at least `least_gain` tokens more for each, all together.
        """
        lengths, tokens = list[int](), answer.tokens()
        if len(tokens) - after < min(2, least_gain):  # who begins alike finds no more
            return lengths
        ordered, place = self._sorted[answer.request.namespace], self._place(answer)
        for side in (ordered[place + 1 : place + 1 + MAX_ASKED], ordered[max(0, place - MAX_ASKED) : place][::-1]):
            shared = len(tokens)  # gets shorter from one to the next
            for _, other in side:
                others = other.tokens()[:shared]
                shared = common_prefix(tokens[: len(others)], others)
                if shared <= after:
                    break
                lengths.append(min(shared, other.match_limit))
        lengths.sort()
        found = list[int]()
        for number, length in enumerate(lengths):
            if (length - after) * (len(lengths) - number) >= least_gain and length >= min(FEWEST, least_gain):
                found.append(length)
                after = length
        return found

    def _place(self, answer: Answer) -> int:
        ordered = self._sorted[answer.request.namespace]
        place = bisect_left(ordered, self._keys[answer], key=itemgetter(0))
        while ordered[place][1] is not answer:  # others may have the same tokens
            place += 1
        return place
