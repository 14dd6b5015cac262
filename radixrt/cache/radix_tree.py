"""A radix tree from token prefixes to KV slots, in one tier or two.

The tree knows tokens, slots, locks and recency. It returns the slots to be freed, and its caller frees them. Token
ids and slots are numpy int32 arrays, compared with offsets; nothing recurses. Method: Zheng et al., "SGLang:
Efficient Execution of Structured Language Model Programs" (2024), section 3.

A node lives on the device, on the host or on both, with all of its tokens. The parent of a node on the device is
on the device too. Only leaves of a tier, nodes without children there, leave it. So every node's whole path is in
one tier or the other.

A node may have the state of the sequence that ends there, in either tier: on the device if its tokens are there,
on the host wherever these are.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Slots = NDArray[np.int32]

EMPTY = np.zeros(0, dtype=np.int32)

DEVICE, HOST = 0, 1  # the tiers: indices of what a node and a tree have of each


class Namespace(NamedTuple):
    """The root under which a prefix lives. No match ever crosses from one namespace to another."""

    weights_version: int = 0
    adapter: str | None = None
    tenant: str | None = None


DEFAULT_NAMESPACE = Namespace()


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """An edge of the tree: `tokens` `[n]` and, for each, the slot of its KV in one tier or both.

    A node stands for the whole path from its root to its last token, also after its edge is cut. An edge only ever
    gets shorter, and is empty once the node has left the tree. A root has no tokens and is on the device.
    """

    tokens: Tokens
    parent: Node | None
    namespace: Namespace
    slots: list[Slots | None]  # by tier, `[n]`; None: it is not there
    children: dict[int, Node] = field(default_factory=dict)
    num_children: list[int] = field(default_factory=lambda: [0, 0])  # by tier: those that are there
    lock: int = 0  # live requests whose path crosses this node; it is on the device then
    last_access: int = 0
    touched_at: float = 0.0  # `time.monotonic` then; 0: before it came here, from a kept cache
    hits: int = 0  # requests that found it when they were admitted, or borrowed it
    state: int = 0  # that was kept on the device where it ends; 0: none
    host_state: int = 0  # on the host, likewise
    worth: int = 2  # of the state: see HostStates

    @property
    def has_state(self) -> bool:
        """Whether there is one in either tier."""
        return self.state > 0 or self.host_state > 0

    @property
    def beyond_state(self) -> int:
        """Tokens from the last state above to where it ends."""
        count, above = len(self.tokens), self.parent
        while above is not None and not above.has_state:
            count += len(above.tokens)
            above = above.parent
        return count

    @property
    def path_tokens(self) -> Tokens:
        """All tokens from its root to where it ends: `[n]`."""
        parts, node = [self.tokens], self.parent
        while node is not None:
            parts.append(node.tokens)
            node = node.parent
        return np.concatenate(parts[::-1])


def is_leaf(node: Node, tier: int) -> bool:
    """Whether a node can leave a tier."""
    if node.num_children[tier] or node.slots[tier] is None or node.parent is None:
        return False
    return not node.lock or tier == HOST


class Match(NamedTuple):
    """A place in the tree, until the tree next changes: where the longest known prefix of some tokens ends."""

    node: Node  # the deepest node reached
    inside: int  # how many tokens of it agree; all of them, unless the match ends inside its edge
    length: int  # matched tokens in all, in either tier

    @property
    def at_boundary(self) -> bool:
        """Whether the match ends at the end of a node."""
        return self.inside == len(self.node.tokens)

    @property
    def at_state(self) -> Match:
        """The part of it up to the last node with a state in either tier, or to the root."""
        node, length = self.node, self.length
        if not self.at_boundary and node.parent is not None:
            length -= self.inside
            node = node.parent
        while node.parent is not None and not node.has_state:
            length -= len(node.tokens)
            node = node.parent
        return Match(node, len(node.tokens), length)

    @property
    def on_device(self) -> Match:
        """The part of it that is on the device: the whole match, or its beginning up to a node's end."""
        node, inside, length = self
        if node.slots[DEVICE] is not None:
            return self
        while node.slots[DEVICE] is None:
            length -= inside
            assert node.parent is not None  # roots are on the device
            node = node.parent
            inside = len(node.tokens)
        return Match(node, inside, length)


NO_MATCH = Match(Node(EMPTY, None, DEFAULT_NAMESPACE, [EMPTY, None]), 0, 0)
"""The match where a namespace holds nothing; its node is in no tree."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens of two arrays of one length agree."""
    if a.tobytes() == b.tobytes():  # much faster than what follows
        return len(a)
    differs = a != b
    first = int(differs.argmax())
    return first if differs[first] else len(a)


class LeafQueue:
    """The leaves of one tier, by last access: a heap whose entries are checked only when they reach its top."""

    def __init__(self, tier: int) -> None:
        self.heap: list[tuple[int, int, Node]] = []
        self._tier = tier
        self._queued: set[Node] = set()
        self._numbers = itertools.count()  # break ties, so that nodes are never compared

    def offer(self, node: Node) -> None:
        """Queue a node if it is a leaf now."""
        if is_leaf(node, self._tier) and node not in self._queued:
            self._queued.add(node)
            heapq.heappush(self.heap, (node.last_access, next(self._numbers), node))

    def pop(self) -> Node | None:
        """Take the leaf that was used longest ago out of the queue; None if there is no leaf."""
        while self.heap:
            last_access, _, node = self.heap[0]
            if last_access != node.last_access:
                heapq.heapreplace(self.heap, (node.last_access, next(self._numbers), node))
                continue
            heapq.heappop(self.heap)
            self._queued.remove(node)
            if is_leaf(node, self._tier):
                return node  # others are offered again when they are leaves again
        return None


class RadixTree:
    """Prefixes of tokens, each token with its slot; unlocked leaves are evicted in order of last access."""

    def __init__(self) -> None:
        self.roots: dict[Namespace, Node] = {}
        self.total_tokens = self.device_tokens = self.locked_tokens = 0  # the first: in one tier or both
        self.version = 0  # grows whenever a match may have changed
        self.moves = 0  # times that a node has left the device
        self._last_path: tuple[Node | None, int, Slots] = None, 0, EMPTY  # what `slots_of` has made last, and when
        self.leaves = [LeafQueue(DEVICE), LeafQueue(HOST)]
        self.left: list[Node] = []  # nodes with states that have left a tier, for the cache to take
        self._clock = 0

    @property
    def host_only_tokens(self) -> int:
        return self.total_tokens - self.device_tokens

    @property
    def evictable_tokens(self) -> int:
        """Tokens that can leave the device. A locked node's ancestors are locked, so all others can."""
        return self.device_tokens - self.locked_tokens

    def match(self, namespace: Namespace, tokens: Tokens, limit: int | None = None) -> Match:
        """The longest prefix of `tokens` `[n]`, at most `limit` long, that the tree holds. Changes nothing."""
        root = self.roots.get(namespace)
        return NO_MATCH if root is None else self.follow(Match(root, 0, 0), tokens[:limit])

    def follow(self, start: Match, tokens: Tokens) -> Match:
        """Go on from `start` along `tokens` `[n]`, as far as the tree has them."""
        node, inside, edge = start.node, start.inside, start.node.tokens
        done, n, known = 0, len(tokens), tokens.tobytes()
        while done < n:
            if inside == len(edge):
                child = node.children.get(tokens.item(done))
                if child is None:
                    break
                node, inside, edge = child, 0, child.tokens
                if known.startswith(edge.tobytes(), tokens.itemsize * done):  # much faster than what follows
                    inside = len(edge)
                    done += inside
                    continue
            length = min(len(edge) - inside, n - done)
            agree = common_prefix(edge[inside : inside + length], tokens[done : done + length])
            inside += agree
            done += agree
            if agree < length:
                break
        return Match(node, inside, start.length + done)

    def slots_of(self, end: Node) -> Slots:
        """The slots of the whole path of a node on the device, `[depth in tokens]`. They must not change: whoever
        asks next for the same path, as those do that share it, gets this array.
        """
        if self._last_path[0] is not end or self._last_path[1] != self.moves:
            parts = [node.slots[DEVICE] for node in self.path(end)]
            self._last_path = end, self.moves, np.concatenate(cast("list[Slots]", parts[::-1]))
        return self._last_path[2]

    def path(self, end: Node, until: Node | None = None) -> Iterator[Node]:
        """The nodes from `end` up to its root, or up to its ancestor `until`, which is left out."""
        node: Node | None = end
        while node is not None and node is not until:
            yield node
            node = node.parent

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made if there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(EMPTY, None, namespace, [EMPTY, None])
        return root

    def node_at(self, namespace: Namespace, match: Match) -> Node:
        """The node that ends where `match` ends: an edge is split if need be, a root made if there is none."""
        return self.root(namespace) if match.node.parent is None else self.cut(match.node, match.inside)

    def insert(
        self, node: Node, tokens: Tokens, slots: Slots, last_access: int | None = None
    ) -> tuple[Node, Slots]:
        """Add `tokens` `[n]` with their `slots` `[n]` below `node`, which is on the device.

        Returns the node where they end, and the tree's own slots of the first of them, which were on the device
        already: the slots given for these do not enter the tree; the rest do. The path is touched, unless
        `last_access` says when a new leaf was used.
        """
        if len(tokens) != len(slots):
            raise ValueError(f"{len(tokens)} tokens with {len(slots)} slots")
        canonical: list[Slots] = []
        done = 0
        while done < len(tokens):
            first = tokens.item(done)
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = Node(tokens[done:].copy(), node, node.namespace, [None, None])
                child.last_access = last_access or 0
                self.total_tokens += len(tokens) - done
                self.version += 1
                self.attach(child, DEVICE, slots[done:].copy())
                node = child
                break
            length = min(len(child.tokens), len(tokens) - done)
            length = common_prefix(child.tokens[:length], tokens[done : done + length])
            node = self.cut(child, length)
            if (own := node.slots[DEVICE]) is not None:
                canonical.append(own)
            else:  # as are all below it, so canonical slots come first
                self.attach(node, DEVICE, slots[done : done + length].copy())
            done += length
        if last_access is None:
            self.touch(node)
        self.offer(node, DEVICE)
        return node, _joined(canonical)

    def touch(self, end: Node, hits: int = 0) -> None:
        """Mark a path as used now, by so many requests that found it."""
        self._clock += 1
        now = time.monotonic()
        node: Node | None = end
        while node is not None:  # `path` takes twice as long, and this is done for each request, more than once
            node.last_access, node.touched_at = self._clock, now
            node.hits += hits
            node = node.parent

    def held_alone(self, end: Node) -> int:
        """Tokens at the end of a locked path that one request alone locks."""
        count, node = 0, end
        while node.lock == 1 and node.parent is not None:
            count += len(node.tokens)
            node = node.parent
        return count

    def lock(self, end: Node, until: Node | None = None) -> None:
        """Count one more live request on a path on the device; with `until`, on its part below that ancestor."""
        node: Node | None = end
        while node is not None and node is not until:  # as in `touch`
            if node.lock == 0:
                self.locked_tokens += len(node.tokens)
            node.lock += 1
            node = node.parent

    def unlock(self, end: Node, reusable_len: int | None = None) -> Slots:
        """Count one live request less on a path. Returns the slots of the tokens that it removes.

        `reusable_len`: leading tokens of the path that are still wanted. Tokens beyond them are removed, as far as
        nothing but this path needs them and the host has no copy. Raises ValueError where the path is not locked.
        """
        freed: list[Slots] = []
        unwanted = 0 if reusable_len is None else sum(len(node.tokens) for node in self.path(end)) - reusable_len
        above: Node | None = end
        while above is not None:
            node, above = above, above.parent
            if node.lock == 0:
                raise ValueError("unlocking a path that no request has locked")
            node.lock -= 1
            if node.lock == 0:
                self.locked_tokens -= len(node.tokens)
                if unwanted > 0 and not node.children and node.slots[HOST] is None:
                    if len(node.tokens) > unwanted:
                        self.cut(node, len(node.tokens) - unwanted)
                    unwanted -= len(node.tokens)
                    freed.append(self.detach(node, DEVICE))
                self.offer(node, DEVICE)
        return _joined(freed)

    def evict(self, num_tokens: int, tier: int = DEVICE) -> Slots:
        """Take `num_tokens` tokens, or all that can be, out of a tier, least recently used leaves first (see
        `next_victim`). Tokens that are in no tier then are forgotten. Returns the slots that they had there.
        """
        freed: list[Slots] = []
        left = num_tokens
        while left > 0 and (victim := self.next_victim(left, tier)) is not None:
            freed.append(self.detach(victim, tier))
            left -= len(freed[-1])
        return _joined(freed)

    def next_victim(self, max_tokens: int, tier: int = DEVICE) -> Node | None:
        """The leaf of a tier used longest ago, or its tail of `max_tokens`; None if nothing can leave that tier.

        A node on the device is not cut to drop a part of its copy on the host.
        """
        node = self.leaves[tier].pop()
        if node is not None and len(node.tokens) > max_tokens and (tier == DEVICE or node.slots[DEVICE] is None):
            self.cut(node, len(node.tokens) - max_tokens)
        return node

    def attach(self, node: Node, tier: int, slots: Slots) -> None:
        """Put a node whose parent is on the device in a tier where it is not: in `slots` `[n]`."""
        assert node.parent is not None  # roots are on the device
        node.slots[tier] = slots
        node.parent.num_children[tier] += 1
        if tier == DEVICE:
            self.device_tokens += len(slots)

    def detach(self, node: Node, tier: int) -> Slots:
        """Take a leaf out of a tier; it is forgotten if it is in neither then. Returns its slots there."""
        slots, parent = node.slots[tier], node.parent
        assert slots is not None  # it is a leaf there
        assert parent is not None  # and no root
        node.slots[tier] = None
        parent.num_children[tier] -= 1
        if tier == DEVICE:
            self.device_tokens -= len(slots)
            self.moves += 1
        if node.has_state:
            self.left.append(node)
        if node.slots[1 - tier] is None:  # the other one
            del parent.children[node.tokens.item(0)]
            self.total_tokens -= len(node.tokens)
            self.version += 1
            node.tokens = EMPTY
        self.offer(parent, tier)
        return slots

    def offer(self, node: Node, tier: int) -> None:
        """Queue a node for eviction if it can leave a tier; drop a root that holds nothing."""
        if node.num_children[tier]:
            return
        if node.parent is not None:
            self.leaves[tier].offer(node)
        elif not (node.children or node.lock):
            self.roots.pop(node.namespace, None)

    def cut(self, node: Node, at: int) -> Node:
        """The node that ends after the first `at` tokens of a node: itself, or a new upper part of its edge, which
        has no state.
        """
        if at == len(node.tokens):
            return node
        upper = Node(node.tokens[:at], node.parent, node.namespace, [None, None])
        upper.lock, upper.last_access = node.lock, node.last_access
        upper.touched_at, upper.hits = node.touched_at, node.hits
        for tier, slots in enumerate(node.slots):
            if slots is not None:
                upper.slots[tier], node.slots[tier] = slots[:at], slots[at:]
                upper.num_children[tier] = 1
        assert node.parent is not None  # a root has no tokens to split
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        upper.children[int(node.tokens[0])] = node
        return upper


def _joined(parts: Sequence[Slots]) -> Slots:
    if len(parts) < 2:
        return parts[0] if parts else EMPTY
    return np.concatenate(parts)
