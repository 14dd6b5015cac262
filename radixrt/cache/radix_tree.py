"""A radix tree from token prefixes to KV slots, in one tier or two.

The tree knows tokens, slots, locks and recency. It allocates and frees nothing: it returns the slots to be freed,
and its caller frees them. Token ids and slots are numpy int32 arrays, compared with offsets; nothing recurses.
Method: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (2024), section 3.

A node lives on the device, on the host or on both, with all of its tokens. The parent of a node on the device is
on the device too, so only device leaves are evicted: nodes without children there. In the same way only host
leaves lose their copy on the host. So every node's whole path is in one tier or the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Slots = NDArray[np.int32]

EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Namespace:
    """The root under which a prefix lives. No match ever crosses from one namespace to another."""

    weights_version: int = 0
    adapter: str | None = None
    tenant: str | None = None


DEFAULT_NAMESPACE = Namespace()


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """An edge of the tree: `tokens` `[n]` and, for each, the slot of its KV on the device, on the host, or both.

    A node stands for the whole path from its root to its last token, also after its edge is split: the split makes
    a new node for the upper part. An edge only ever gets shorter, and is empty once the node has left the tree. A
    root has no tokens and counts as on the device.
    """

    tokens: Tokens
    slots: Slots | None  # `[n]`; None: it is not on the device
    parent: Node | None
    namespace: Namespace
    host_slots: Slots | None = None  # `[n]`; None: the host has no copy
    children: dict[int, Node] = field(default_factory=dict)
    device_children: int = 0  # children on the device
    host_children: int = 0  # children with a copy on the host
    lock: int = 0  # live requests whose path crosses this node; it is on the device then
    last_access: int = 0


def is_device_leaf(node: Node) -> bool:
    """Whether a node can leave the device."""
    return node.slots is not None and not (node.lock or node.device_children or node.parent is None)


def is_host_leaf(node: Node) -> bool:
    """Whether a node's copy on the host can be dropped."""
    return node.host_slots is not None and not node.host_children


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
    def on_device(self) -> Match:
        """The part of it that is on the device: the whole match, or its beginning up to a node's end."""
        node, inside, length = self
        while node.slots is None:
            length -= inside
            assert node.parent is not None  # roots are on the device
            node = node.parent
            inside = len(node.tokens)
        return Match(node, inside, length)


NO_MATCH = Match(Node(EMPTY, EMPTY, None, DEFAULT_NAMESPACE), 0, 0)
"""The match where a namespace holds nothing; its node is in no tree."""


class Insertion(NamedTuple):
    """The node where an inserted path ends, and the tree's own slots `[n]` of its first n tokens, which the device
    had already: the slots given for them did not enter the tree; the rest did.
    """

    node: Node
    canonical: Slots


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens of two arrays of one length agree."""
    differs = a != b
    first = int(differs.argmax())
    return first if differs[first] else len(a)


class LeafQueue:
    """The leaves of one tier, by last access: a heap whose entries are checked only when they reach its top."""

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._entries = 0  # breaks ties, so that nodes are never compared

    def offer(self, node: Node) -> None:
        """Queue a node if it is a leaf now."""
        if node not in self._queued and self._is_leaf(node):
            self._queued.add(node)
            heapq.heappush(self._heap, self._entry(node))

    def pop(self) -> Node | None:
        """Take the leaf that was used longest ago out of the queue; None if there is no leaf."""
        while self._heap:
            last_access, _, node = self._heap[0]
            if last_access != node.last_access:
                heapq.heapreplace(self._heap, self._entry(node))
                continue
            heapq.heappop(self._heap)
            self._queued.remove(node)
            if self._is_leaf(node):
                return node  # others are offered again when they are leaves again
        return None

    def nodes(self) -> list[Node]:
        """The node of each entry, leaf or not, in no particular order (for checks)."""
        return [node for _, _, node in self._heap]

    def _entry(self, node: Node) -> tuple[int, int, Node]:
        self._entries += 1
        return (node.last_access, self._entries, node)


class RadixTree:
    """Prefixes of tokens, each token with its slot; unlocked leaves are evicted in order of last access."""

    def __init__(self) -> None:
        self.roots: dict[Namespace, Node] = {}
        self.device_tokens = self.host_only_tokens = self.locked_tokens = 0
        self.version = 0  # grows whenever a match may have changed
        self.device_leaves = LeafQueue(is_device_leaf)
        self.host_leaves = LeafQueue(is_host_leaf)
        self._clock = 0

    @property
    def total_tokens(self) -> int:
        """Tokens that the tree holds, in one tier or both."""
        return self.device_tokens + self.host_only_tokens

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
        done, n = 0, len(tokens)
        while done < n:
            if inside == len(edge):
                child = node.children.get(int(tokens[done]))
                if child is None:
                    break
                node, inside, edge = child, 0, child.tokens
            length = min(len(edge) - inside, n - done)
            agree = common_prefix(edge[inside : inside + length], tokens[done : done + length])
            inside += agree
            done += agree
            if agree < length:
                break
        return Match(node, inside, start.length + done)

    def slots_of(self, end: Node) -> Slots:
        """The slots of the whole path of a node on the device, `[depth in tokens]`."""
        parts = [node.slots for node in self.path(end) if node.slots is not None]  # as its parents' are
        return np.concatenate(parts[::-1])

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
            root = self.roots[namespace] = Node(EMPTY, EMPTY, None, namespace)
        return root

    def node_at(self, namespace: Namespace, match: Match) -> Node:
        """The node that ends where `match` ends: an edge is split if need be, a root made if there is none."""
        return self.root(namespace) if match.node.parent is None else self.cut(match.node, match.inside)

    def cut(self, node: Node, inside: int) -> Node:
        """The node that ends after the first `inside` tokens of a node, whose edge is split if need be."""
        return node if inside == len(node.tokens) else self._split(node, inside)

    def insert(self, node: Node, tokens: Tokens, slots: Slots, last_access: int | None = None) -> Insertion:
        """Add `tokens` `[n]` with their `slots` `[n]` below `node`, which is on the device.

        A token of this path that is on the device already keeps its own slot: see `Insertion.canonical`. A token
        that only the host has gets the given slot on the device. The path is touched, unless `last_access` says
        when a new leaf was used.
        """
        if len(tokens) != len(slots):
            raise ValueError(f"{len(tokens)} tokens with {len(slots)} slots")
        canonical: list[Slots] = []
        done = 0
        while done < len(tokens):
            first = int(tokens[done])
            child = node.children.get(first)
            if child is None:
                leaf = node.children[first] = Node(tokens[done:].copy(), slots[done:].copy(), node, node.namespace)
                leaf.last_access = last_access or 0
                node.device_children += 1
                self.device_tokens += len(leaf.tokens)
                self.version += 1
                node = leaf
                break
            length = min(len(child.tokens), len(tokens) - done)
            agree = common_prefix(child.tokens[:length], tokens[done : done + length])
            node = self.cut(child, agree)
            if node.slots is not None:
                canonical.append(node.slots)
            else:  # as are all below it, so canonical slots come first
                self.attach_device(node, slots[done : done + agree].copy())
            done += agree
        if last_access is None:
            self.touch(node)
        self.device_leaves.offer(node)
        return Insertion(node, _joined(canonical))

    def touch(self, end: Node) -> None:
        """Mark a path as used now."""
        self._clock += 1
        for node in self.path(end):
            node.last_access = self._clock

    def lock(self, end: Node, until: Node | None = None) -> None:
        """Count one more live request on a path on the device; with `until`, on its part below that ancestor."""
        for node in self.path(end, until):
            if node.lock == 0:
                self.locked_tokens += len(node.tokens)
            node.lock += 1

    def unlock(self, end: Node, reusable_len: int | None = None) -> Slots:
        """Count one live request less on a path. Returns the slots of the tokens that it removes.

        `reusable_len`: leading tokens of the path that are still wanted. Tokens beyond them are removed, as far as
        nothing but this path needs them and the host has no copy. None: nothing is removed.

        Raises:
            ValueError: the path is not locked.
        """
        path = list(self.path(end))
        freed: list[Slots] = []
        depth = 0 if reusable_len is None else sum(len(node.tokens) for node in path)
        for node in path:
            if node.lock == 0:
                raise ValueError("unlocking a path that no request has locked")
            node.lock -= 1
            above = depth - len(node.tokens)
            if node.lock == 0:
                self.locked_tokens -= len(node.tokens)
                is_removable = not node.children and node.host_slots is None
                if reusable_len is not None and depth > reusable_len and is_removable:
                    if above < reusable_len:
                        self._split(node, reusable_len - above)
                    freed.append(self.detach_device(node))
                self._offer(node)
            depth = above
        return _joined(freed)

    def evict(self, num_tokens: int) -> Slots:
        """Take `num_tokens` tokens, or all that can be, off the device, least recently used leaves first, of the
        last one only its tail. Tokens without a copy on the host are forgotten. Returns the slots of the tokens.
        """
        freed: list[Slots] = []
        left = num_tokens
        while left > 0 and (victim := self.next_victim(left)) is not None:
            freed.append(self.detach_device(victim))
            left -= len(freed[-1])
        return _joined(freed)

    def next_victim(self, max_tokens: int) -> Node | None:
        """The unlocked device leaf used longest ago, or its tail of `max_tokens`; None if all is locked."""
        node = self.device_leaves.pop()
        if node is not None and len(node.tokens) > max_tokens:
            self._split(node, len(node.tokens) - max_tokens)
        return node

    def attach_device(self, node: Node, slots: Slots) -> None:
        """Put a node that only the host has, below one on the device, on the device as well: in `slots` `[n]`."""
        assert node.parent is not None  # roots are on the device
        node.slots = slots
        node.parent.device_children += 1
        self.device_tokens += len(slots)
        self.host_only_tokens -= len(slots)

    def detach_device(self, node: Node) -> Slots:
        """Take an unlocked leaf off the device; without a copy on the host it is forgotten. Returns its slots."""
        slots, parent = node.slots, node.parent
        assert slots is not None  # it is a leaf there
        assert parent is not None  # and no root
        node.slots = None
        parent.device_children -= 1
        self.device_tokens -= len(slots)
        if node.host_slots is None:
            self._forget(node)
        else:
            self.host_only_tokens += len(slots)
        self._offer(parent)
        return slots

    def attach_host(self, node: Node, host_slots: Slots) -> None:
        """Say that the host has a copy of a node on the device: in `host_slots` `[n]`."""
        assert node.parent is not None  # roots have nothing to copy
        node.host_slots = host_slots
        node.parent.host_children += 1
        self.host_leaves.offer(node)

    def evict_from_host(self, num_tokens: int) -> Slots:
        """Drop the host's copies of at least `num_tokens` tokens, or all, least recently used leaves first. Tokens
        that are not on the device are forgotten, of the last leaf only its tail. Returns the copies' host slots.
        """
        freed: list[Slots] = []
        left = num_tokens
        while left > 0 and (node := self.host_leaves.pop()) is not None:
            if node.slots is None and len(node.tokens) > left:
                self._split(node, len(node.tokens) - left)
            host_slots, parent = node.host_slots, node.parent
            assert host_slots is not None  # it is a leaf there
            assert parent is not None  # and no root
            freed.append(host_slots)
            left -= len(host_slots)
            node.host_slots = None
            parent.host_children -= 1
            if node.slots is None:
                self.host_only_tokens -= len(host_slots)
                self._forget(node)
                self._offer(parent)  # a root may hold nothing now
            self.host_leaves.offer(parent)
        return _joined(freed)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's edge after `at` tokens. The new upper node is returned; `node` keeps the rest."""
        upper = Node(node.tokens[:at], None, node.parent, node.namespace)
        upper.lock, upper.last_access = node.lock, node.last_access
        if node.slots is not None:
            upper.slots, node.slots = node.slots[:at], node.slots[at:]
            upper.device_children = 1
        if node.host_slots is not None:
            upper.host_slots, node.host_slots = node.host_slots[:at], node.host_slots[at:]
            upper.host_children = 1
        assert node.parent is not None  # a root has no tokens to split
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _forget(self, node: Node) -> None:
        """Take a node that is in no tier out of the tree."""
        assert node.parent is not None  # roots are in no tier
        del node.parent.children[node.tokens.item(0)]
        node.tokens = EMPTY
        self.version += 1

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it can leave the device; drop a root that holds nothing."""
        if node.lock or node.device_children:
            return
        if node.parent is None:
            if not node.children:
                self.roots.pop(node.namespace, None)
        else:
            self.device_leaves.offer(node)


def _joined(parts: Sequence[Slots]) -> Slots:
    return np.concatenate(parts) if parts else EMPTY
