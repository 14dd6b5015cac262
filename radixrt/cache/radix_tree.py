"""A radix tree from token prefixes to KV slots, in one tier or two.

The tree knows tokens, slots, locks and recency. It allocates and frees nothing: what `evict` removes, and what
`insert` finds to be there already, it returns, and its caller moves the slots. Token ids and slots are numpy
int32 arrays, compared with offsets; nothing here recurses. Method: Zheng et al., "SGLang: Efficient Execution
of Structured Language Model Programs" (2024), section 3.

A node lives on the device, on the host or on both, all of its tokens alike. The parent of a node on the device is
on the device too, so what leaves it is a device leaf: a node without children there. Of the host's copies too only
leaves are dropped, of nodes that are still on the device included, so every node's path is in one tier or another.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Slots = NDArray[np.int32]

_EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Namespace:
    """The root under which a prefix lives. No match ever crosses from one namespace to another."""

    weights_version: int = 0
    adapter: str | None = None
    tenant: str | None = None


DEFAULT_NAMESPACE = Namespace()


class Node:
    """An edge of the tree: `tokens` `[n]` and, for each, the slot of its KV on the device, on the host, or both.

    A node stands for the whole path from its root to its last token. It keeps standing for that path when the
    edge is split: the split makes a new node for the upper part. A root has no tokens and counts as on the device.
    Whoever keeps a node sees by its edge whether it changed: it only ever gets shorter, and is empty once the node
    has left the tree.
    """

    __slots__ = (
        "children",
        "device_children",
        "host_children",
        "host_queued",
        "host_slots",
        "last_access",
        "lock",
        "namespace",
        "parent",
        "queued",
        "slots",
        "tokens",
    )

    def __init__(self, tokens: Tokens, slots: Slots | None, parent: Node | None, namespace: Namespace) -> None:
        self.tokens = tokens
        self.slots = slots  # `[n]`; None: it is not on the device
        self.host_slots: Slots | None = None  # `[n]`; None: the host has no copy
        self.parent = parent
        self.namespace = namespace
        self.children: dict[int, Node] = {}
        self.device_children = 0  # those of them that are on the device
        self.host_children = 0  # those that the host has a copy of
        self.lock = 0  # live requests whose path crosses this node; it is on the device then
        self.last_access = 0
        self.queued = False  # it has an entry in the eviction heap
        self.host_queued = False  # and in the host's


@dataclass(frozen=True)
class Match:
    """The longest known prefix of some tokens, until the tree next changes.

    Attributes:
        node: the deepest node reached; None if the namespace holds nothing.
        inside: how many tokens of `node` agree; all of them, unless the match ends inside its edge.
        length: matched tokens in all, in either tier.
    """

    node: Node | None
    inside: int
    length: int

    @property
    def at_boundary(self) -> bool:
        """Whether the match ends at the end of a node."""
        return self.node is not None and self.inside == len(self.node.tokens)

    @property
    def on_device(self) -> int:
        """How many of the matched tokens are on the device: all of them, or the first ones, up to a node's end."""
        return 0 if self.node is None else on_device(self.node, self.inside, self.length)[2]


@dataclass(frozen=True)
class Insertion:
    """What `insert` did.

    Attributes:
        node: stands for the inserted path.
        canonical: `[n]` slots that the tree had on the device already for the first n inserted tokens. The
            inserted slots of these tokens did not enter the tree; the rest did.
    """

    node: Node
    canonical: Slots


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens of two arrays of one length agree."""
    differs = a != b
    first = int(differs.argmax())
    return first if differs[first] else len(a)


def on_device(node: Node, inside: int, length: int) -> tuple[Node, int, int]:
    """The last place on the device on the way to the one behind the first `inside` tokens of a node.

    Returns its node, how many tokens of that lie before it, and what is left of the way's `length` in tokens.
    """
    while node.slots is None:
        length -= inside
        assert node.parent is not None  # roots are on the device
        node = node.parent
        inside = len(node.tokens)
    return node, inside, length


class RadixTree:
    """Prefixes of tokens, each token with its slot; unlocked leaves are evicted in order of last access."""

    def __init__(self) -> None:
        self.roots: dict[Namespace, Node] = {}
        self.device_tokens = 0
        self.host_only_tokens = 0
        self.locked_tokens = 0
        self.version = 0  # grows whenever a match may have changed
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._host_heap: list[tuple[int, int, Node]] = []
        self._entries = 0  # breaks ties between heap entries, so that nodes are never compared

    @property
    def total_tokens(self) -> int:
        """Tokens that the tree holds, in one tier or both."""
        return self.device_tokens + self.host_only_tokens

    @property
    def evictable_tokens(self) -> int:
        """Tokens that can leave the device. A locked node's ancestors are locked, so all others can go."""
        return self.device_tokens - self.locked_tokens

    def match(self, namespace: Namespace, tokens: Tokens, limit: int | None = None) -> Match:
        """The longest prefix of `tokens` `[n]`, at most `limit` long, that the tree holds. Changes nothing."""
        end = len(tokens) if limit is None else min(limit, len(tokens))
        node = self.roots.get(namespace)
        if node is None:
            return Match(None, 0, 0)
        return Match(*self.follow(node, 0, tokens[:end]))

    def follow(self, node: Node, inside: int, tokens: Tokens) -> tuple[Node, int, int]:
        """Go from behind the first `inside` tokens of a node along `tokens` `[n]`, as far as the tree has them.

        Returns the node reached, how many of its tokens lie before that place, and how many of `tokens` there are.
        """
        done, n = 0, len(tokens)
        if inside < len(node.tokens) and done < n:
            length = min(len(node.tokens) - inside, n)
            done = common_prefix(node.tokens[inside : inside + length], tokens[:length])
            inside += done
            if inside < len(node.tokens):
                return node, inside, done
        while done < n:
            child = node.children.get(int(tokens[done]))
            if child is None:
                break
            length = min(len(child.tokens), n - done)
            agree = common_prefix(child.tokens[:length], tokens[done : done + length])
            done += agree
            node, inside = child, agree
            if agree < len(child.tokens):
                break
        return node, inside, done

    def node_at(self, namespace: Namespace, match: Match) -> Node:
        """The node that ends where `match` ends: an edge is split if need be, a root made if there is none."""
        return self.root(namespace) if match.node is None else self.cut(match.node, match.inside)

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made if there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(_EMPTY, _EMPTY, None, namespace)
        return root

    def cut(self, node: Node, inside: int) -> Node:
        """The node that ends behind the first `inside` tokens of a node, whose edge is split if need be."""
        return node if inside == len(node.tokens) else self._split(node, inside)

    def slots_of(self, node: Node) -> Slots:
        """The slots of the whole path of a node on the device, `[depth in tokens]`."""
        parts = []
        for step in self.path(node):
            assert step.slots is not None  # its parents are on the device too
            parts.append(step.slots)
        return np.concatenate(parts[::-1])

    def path(self, node: Node, until: Node | None = None) -> Iterator[Node]:
        """The nodes from `node` up to its root, or up to its ancestor `until`, which is left out."""
        step: Node | None = node
        while step is not None and step is not until:
            yield step
            step = step.parent

    def touch(self, node: Node) -> None:
        """Mark a path as used now."""
        self._clock += 1
        for step in self.path(node):
            step.last_access = self._clock

    def lock(self, node: Node, until: Node | None = None) -> None:
        """Count one more live request on a path on the device; with `until`, on its part below that ancestor."""
        for step in self.path(node, until):
            if step.lock == 0:
                self.locked_tokens += len(step.tokens)
            step.lock += 1

    def unlock(self, node: Node, reusable_len: int | None = None) -> Slots:
        """Count one live request less on a path.

        `reusable_len`: leading tokens of the path that are still wanted. Tokens beyond them are removed, as far as
        nothing but this path needs them and the host has no copy. Returns the slots of the removed tokens.

        Raises:
            ValueError: the path is not locked.
        """
        steps = list(self.path(node))
        freed: list[Slots] = []
        end = 0 if reusable_len is None else sum(len(step.tokens) for step in steps)
        for step in steps:
            if step.lock == 0:
                raise ValueError("unlocking a path that no request has locked")
            step.lock -= 1
            start = end - len(step.tokens)
            if step.lock == 0:
                self.locked_tokens -= len(step.tokens)
                if (
                    reusable_len is not None
                    and end > reusable_len
                    and not step.children
                    and step.host_slots is None
                ):
                    freed.append(self._cut_off(step, max(0, reusable_len - start)))
                if len(step.tokens) or step.parent is None:
                    self._offer(step)
            end = start
        return np.concatenate(freed) if freed else _EMPTY

    def insert(self, node: Node, tokens: Tokens, slots: Slots) -> Insertion:
        """Add `tokens` `[n]` with their `slots` `[n]` below `node`, which is on the device.

        Where the tree already holds a token of this path on the device it keeps its own slot: see
        `Insertion.canonical`. What only the host has is on the device again with the slots given.
        """
        if len(tokens) != len(slots):
            raise ValueError(f"{len(tokens)} tokens with {len(slots)} slots")
        canonical: list[Slots] = []
        done = 0
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                leaf = Node(tokens[done:].copy(), slots[done:].copy(), node, node.namespace)
                node.children[int(tokens[done])] = leaf
                node.device_children += 1
                self.device_tokens += len(leaf.tokens)
                self.version += 1
                node = leaf
                break
            n = min(len(child.tokens), len(tokens) - done)
            agree = common_prefix(child.tokens[:n], tokens[done : done + n])
            node = child if agree == len(child.tokens) else self._split(child, agree)
            if node.slots is None:  # and so are all below it: what is canonical comes before
                self.attach_device(node, slots[done : done + agree].copy())
            else:
                canonical.append(node.slots)
            done += agree
        self.touch(node)
        self._offer(node)
        return Insertion(node, np.concatenate(canonical) if canonical else _EMPTY)

    def insert_cold(self, node: Node, tokens: Tokens, slots: Slots, last_access: int) -> Node:
        """Add `tokens` `[n]`, of which the device has none below `node`, with their `slots`; nothing is touched.

        Returns the node where they end. What only the host has of them is on the device as well then.
        Raises ValueError if something on the device below `node` begins with the first of them.
        """
        done = 0
        while done < len(tokens):
            first = int(tokens[done])
            child = node.children.get(first)
            if child is None:
                leaf = node.children[first] = Node(tokens[done:].copy(), slots[done:].copy(), node, node.namespace)
                leaf.last_access = last_access
                node.device_children += 1
                self.device_tokens += len(leaf.tokens)
                self.version += 1
                node = leaf
                break
            if child.slots is not None:
                raise ValueError(f"token {first} is there already")
            length = min(len(child.tokens), len(tokens) - done)
            agree = common_prefix(child.tokens[:length], tokens[done : done + length])
            node = self.cut(child, agree)
            self.attach_device(node, slots[done : done + agree].copy())
            done += agree
        self._offer(node)
        return node

    def evict(self, num_tokens: int) -> Slots:
        """Remove `num_tokens` tokens, or all that can be, from unlocked leaves, least recently used first.

        The last leaf loses only as much of its tail as is needed. Returns the slots of what was removed. This is
        for a tree that has nothing on the host: see `next_victim`.
        """
        freed: list[Slots] = []
        left = num_tokens
        while left > 0:
            node = self._least_recent()
            if node is None:
                break
            slots, parent = node.slots, node.parent
            assert slots is not None  # it is on the device
            assert parent is not None  # roots are never queued
            if len(slots) > left:
                keep = len(slots) - left
                freed.append(slots[keep:])
                node.tokens, node.slots = node.tokens[:keep], slots[:keep]
                left = 0
            else:
                heapq.heappop(self._heap)
                node.queued = False
                freed.append(slots)
                left -= len(slots)
                del parent.children[node.tokens.item(0)]
                node.tokens = _EMPTY
                parent.device_children -= 1
                self._offer(parent)
        if not freed:
            return _EMPTY
        slots = np.concatenate(freed)
        self.device_tokens -= len(slots)
        self.version += 1
        return slots

    # -- two tiers -----------------------------------------------------------------------------------------

    def next_victim(self, max_tokens: int) -> Node | None:
        """What is to leave the device next: of its unlocked leaves the least recently used one.

        Of a longer one than `max_tokens` only that much of its tail goes. None if all that is on the device is
        locked. The caller stores it on the host, unless the host has a copy, and detaches it.
        """
        node = self._least_recent()
        if node is not None and len(node.tokens) > max_tokens:
            self._split(node, len(node.tokens) - max_tokens)
        return node

    def attach_device(self, node: Node, slots: Slots) -> None:
        """A node that only the host has, below one on the device, is on the device as well, in `slots` `[n]`."""
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
        """The host has a copy of a node on the device, in `host_slots` `[n]`."""
        assert node.parent is not None  # roots have nothing to copy
        node.host_slots = host_slots
        node.parent.host_children += 1
        self._offer_to_host(node)

    def evict_from_host(self, num_tokens: int) -> Slots:
        """Drop the host's copies of at least `num_tokens` tokens, or all, least recently used leaves first.

        What is on the device stays there; what is not is forgotten, of the last leaf only as much of the tail as
        is needed. Returns the host slots of what was dropped.
        """
        freed: list[Slots] = []
        left = num_tokens
        while left > 0 and self._host_heap:
            last_access, _, node = self._host_heap[0]
            host_slots, parent = node.host_slots, node.parent
            assert host_slots is not None  # what is queued has a copy until it is dropped here
            assert parent is not None  # roots are never queued
            if node.host_children:
                heapq.heappop(self._host_heap)  # it comes back when it is a leaf again
                node.host_queued = False
            elif last_access != node.last_access:
                heapq.heapreplace(self._host_heap, self._entry(node))
            elif node.slots is None and len(host_slots) > left:
                keep = len(host_slots) - left
                freed.append(host_slots[keep:])
                node.tokens, node.host_slots = node.tokens[:keep], host_slots[:keep]
                self.host_only_tokens -= left
                self.version += 1
                left = 0
            else:
                heapq.heappop(self._host_heap)
                node.host_queued = False
                freed.append(host_slots)
                left -= len(host_slots)
                node.host_slots = None
                parent.host_children -= 1
                if node.slots is None:
                    self.host_only_tokens -= len(host_slots)
                    self._forget(node)
                    self._offer(parent)  # a root may hold nothing now
                self._offer_to_host(parent)
        return np.concatenate(freed) if freed else _EMPTY

    # -- inside --------------------------------------------------------------------------------------------

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's edge after `at` tokens. The new upper node is returned; `node` keeps the rest."""
        upper = Node(node.tokens[:at], None, node.parent, node.namespace)
        upper.lock = node.lock
        upper.last_access = node.last_access
        if node.slots is not None:
            upper.slots, node.slots = node.slots[:at], node.slots[at:]
            upper.device_children = 1
        if node.host_slots is not None:
            upper.host_slots, node.host_slots = node.host_slots[:at], node.host_slots[at:]
            upper.host_children = 1
        assert node.parent is not None  # a root has no tokens to split
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens = node.tokens[at:]
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _cut_off(self, leaf: Node, keep: int) -> Slots:
        """Remove all but the first `keep` tokens of an unlocked leaf, which only the device has; with none left it
        leaves the tree. Returns the slots of what was removed.
        """
        slots = leaf.slots
        assert slots is not None  # it was locked
        self.device_tokens -= len(slots) - keep
        self.version += 1
        if keep:
            leaf.tokens, leaf.slots = leaf.tokens[:keep], slots[:keep]
        else:
            assert leaf.parent is not None  # a root has no tokens
            leaf.slots = None
            leaf.parent.device_children -= 1
            self._forget(leaf)
        return slots[keep:]

    def _forget(self, node: Node) -> None:
        """Take a node that is in no tier out of the tree."""
        assert node.parent is not None  # roots are in no tier
        del node.parent.children[node.tokens.item(0)]
        node.tokens = _EMPTY
        self.version += 1

    def _least_recent(self) -> Node | None:
        """The unlocked device leaf that was used longest ago: the node at the top of the heap."""
        while self._heap:
            last_access, _, node = self._heap[0]
            if node.lock or node.device_children or node.slots is None:
                heapq.heappop(self._heap)  # it comes back when it is an unlocked leaf again
                node.queued = False
            elif last_access != node.last_access:
                heapq.heapreplace(self._heap, self._entry(node))
            else:
                return node
        return None

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it can leave the device; drop a root that holds nothing."""
        if node.lock or node.device_children:
            return
        if node.parent is None:
            if not node.children:
                self.roots.pop(node.namespace, None)
        elif not node.queued and node.slots is not None:
            node.queued = True
            heapq.heappush(self._heap, self._entry(node))

    def _offer_to_host(self, node: Node) -> None:
        """Queue a node for eviction from the host if its copy can be dropped."""
        if node.host_slots is not None and not node.host_children and not node.host_queued:
            node.host_queued = True
            heapq.heappush(self._host_heap, self._entry(node))

    def _entry(self, node: Node) -> tuple[int, int, Node]:
        self._entries += 1
        return (node.last_access, self._entries, node)
