"""Answers that wait, in the order of their tokens: those that begin alike stand side by side."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import itemgetter

from radixrt.cache.prefix_cache import sort_key
from radixrt.cache.radix_tree import Namespace, Node, common_prefix
from radixrt.cache.states import FEWEST
from radixrt.schedule.answer import Answer, place_of

MAX_ASKED = 256  # neighbours on either side, of one answer
FORGET_EACH = 1024  # answers that have come: users of states are looked up anew, as many of them have ended


class Neighbours:
    """Tells where an answer parts from others that wait, however far from it they stand in the queue."""

    def __init__(self) -> None:
        # Of each namespace, the tokens that answers had when they came, in bytes that sort as they do.
        self._sorted: dict[Namespace, list[tuple[bytes, Answer]]] = {}
        self._keys: dict[Answer, bytes] = {}
        self._num_added = 0
        # Of each state: its node, and answers that may begin with it, the first one last, when so many were added.
        self._users: dict[int, tuple[Node, list[Answer], int]] = {}

    def add(self, answers: Iterable[Answer]) -> None:
        """Let these be neighbours of others, if they are not yet."""
        for answer in answers:
            if answer not in self._keys:
                self._keys[answer] = key = sort_key(answer.tokens())
                insort(self._sorted.setdefault(answer.request.namespace, []), (key, answer), key=itemgetter(0))
                self._num_added += 1
                if self._num_added % FORGET_EACH == 0:
                    self._users.clear()

    def remove(self, answer: Answer) -> None:
        """Forget an answer, if it is here."""
        if answer in self._keys:
            namespace = answer.request.namespace
            del self._sorted[namespace][self._place(answer)], self._keys[answer]
            if not self._sorted[namespace]:
                del self._sorted[namespace]
            if not self._keys:
                self._users.clear()

    def first_user(self, node: Node) -> Answer | None:
        """The first answer here, as they stand in the queue, that may begin with a node's state; None: none may.

        Those that came after it was first asked for count once the others have gone, or many have come.
        """
        known, users, added = self._users.get(node.state, (None, [], -1))
        while users and users[-1] not in self._keys:
            users.pop()
        if known is not node or (not users and added != self._num_added):
            users = self._users_of(node)
            self._users[node.state] = (node, users, self._num_added)
        return users[-1] if users else None

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

    def _users_of(self, node: Node) -> list[Answer]:
        tokens = node.path_tokens
        begins, ordered = sort_key(tokens), self._sorted.get(node.namespace, [])
        first = bisect_left(ordered, begins, key=itemgetter(0))
        end = bisect_left(ordered, begins + b"\xff", lo=first, key=itemgetter(0))
        users = [answer for _, answer in ordered[first:end] if answer.match_limit >= len(tokens)]
        return sorted(users, key=place_of, reverse=True)

    def _place(self, answer: Answer) -> int:
        ordered = self._sorted[answer.request.namespace]
        place = bisect_left(ordered, self._keys[answer], key=itemgetter(0))
        while ordered[place][1] is not answer:  # others may have the same tokens
            place += 1
        return place
