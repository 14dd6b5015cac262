"""A part of the radix tree as numbers, to look at: its size is bounded, and it tells no token."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from radixrt.cache.radix_tree import DEVICE, HOST, Namespace, Node, RadixTree

MAX_NODES = 1_000  # shown
MAX_SEEN = 2_000  # of which these are chosen: a node may have 100,000 children

_Ranked = tuple[bool, int, int, int, int, Node, int]  # what decides, the node, and its parent's place


@dataclass
class TreeExcerpt:
    """N nodes, parents before their children, and how many children of theirs are left out.

    Each list has a value of each node. `left_out` and `left_out_tokens` are by place in them; at -1 is what begins
    a prefix.
    """

    ids: list[int] = field(default_factory=list)  # a node keeps its own from one excerpt to the next
    parents: list[int] = field(default_factory=list)  # places; -1 where a node begins a prefix
    tokens: list[int] = field(default_factory=list)  # how many
    hits: list[int] = field(default_factory=list)
    locks: list[int] = field(default_factory=list)
    ages: list[float | None] = field(default_factory=list)  # seconds since the last use; None: before a restart
    tiers: list[str] = field(default_factory=list)  # "device", "host" or "both"
    left_out: dict[int, int] = field(default_factory=dict)  # children
    left_out_tokens: dict[int, int] = field(default_factory=dict)  # theirs, without those below and those unseen

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, node: Node, node_id: int, parent: int, now: float) -> int:
        """Add a node, and return its place."""
        self.ids.append(node_id)
        self.parents.append(parent)
        self.tokens.append(len(node.tokens))
        self.hits.append(node.hits)
        self.locks.append(node.lock)
        self.ages.append(round(now - node.touched_at, 1) if node.touched_at else None)
        on_host = node.slots[HOST] is not None
        self.tiers.append("host" if node.slots[DEVICE] is None else "both" if on_host else "device")
        return len(self) - 1

    def leave_out(self, parent: int, count: int, tokens: int) -> None:
        self.left_out[parent] = self.left_out.get(parent, 0) + count
        self.left_out_tokens[parent] = self.left_out_tokens.get(parent, 0) + tokens


class Excerpts:
    """Takes the part of a tree that matters most, again and again: what is in use, then by hits, then by size."""

    def __init__(self, is_shown: Callable[[Namespace], bool]) -> None:
        """Of namespaces that are not shown, nothing is told."""
        self._is_shown = is_shown
        self._numbers = itertools.count()
        self._ids: dict[Node, int] = {}  # of the last excerpt's nodes

    def take(self, tree: RadixTree, max_nodes: int = MAX_NODES, max_seen: int = MAX_SEEN) -> TreeExcerpt:
        """The excerpt of the tree as it is now. The time that it takes has a bound, however large the tree is."""
        taken, now, ids = TreeExcerpt(), time.monotonic(), dict[Node, int]()
        best: list[_Ranked] = []
        left = max_seen
        for space, root in tree.roots.items():
            if self._is_shown(space):
                left -= _see(root, -1, left // 2, best, taken)
        while best and len(taken) < max_nodes:
            *_, node, parent = heapq.heappop(best)
            ids[node] = known if (known := self._ids.get(node)) is not None else next(self._numbers)
            place = taken.add(node, ids[node], parent, now)
            left -= _see(node, place, left // 2, best, taken)  # half: the next ones are to be seen into as well
        for *_, node, parent in best:
            taken.leave_out(parent, 1, len(node.tokens))
        self._ids = ids
        return taken


def _see(node: Node, place: int, most: int, best: list[_Ranked], taken: TreeExcerpt) -> int:
    """Queue the children of a node, `most` of them at most, and return how many. The others are left out."""
    children = node.children.values()
    seen = [*islice(children, most)]
    if len(children) > most:  # the oldest, which have outlived others, and the newest
        seen = [*islice(children, most // 2), *islice(reversed(children), most - most // 2)]
        taken.leave_out(place, len(children) - len(seen), 0)
    for child in seen:
        rank = not child.lock, -child.hits, -len(child.tokens), -child.last_access, id(child)
        heapq.heappush(best, (*rank, child, place))
    return len(seen)
