"""A radix tree from token prefixes to KV slots.

The tree knows tokens, slots, locks and recency. It allocates and frees nothing: what `evict` removes, and what
`insert` finds to be there already, it returns, and its caller moves the slots. Token ids and slots are numpy
int32 arrays, compared with offsets; nothing here recurses. Method: Zheng et al., "SGLang: Efficient Execution
of Structured Language Model Programs" (2024), section 3.
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
    """An edge of the tree: `tokens` `[n]` and, for each, the slot of its KV.

    A node stands for the whole path from its root to its last token. It keeps standing for that path when the
    edge is split: the split makes a new node for the upper part.
    """

    __slots__ = ("children", "last_access", "lock", "namespace", "parent", "queued", "slots", "tokens")

    def __init__(self, tokens: Tokens, slots: Slots, parent: Node | None, namespace: Namespace) -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.namespace = namespace
        self.children: dict[int, Node] = {}
        self.lock = 0  # live requests whose path crosses this node
        self.last_access = 0
        self.queued = False  # it has an entry in the eviction heap


@dataclass(frozen=True)
class Match:
    """The longest known prefix of some tokens, until the tree next changes.

    Attributes:
        node: the deepest node reached; None if the namespace holds nothing.
        inside: how many tokens of `node` agree; all of them, unless the match ends inside its edge.
        length: matched tokens in all.
    """

    node: Node | None
    inside: int
    length: int

    @property
    def at_boundary(self) -> bool:
        """Whether the match ends at the end of a node."""
        return self.node is not None and self.inside == len(self.node.tokens)


@dataclass(frozen=True)
class Insertion:
    """What `insert` did.

    Attributes:
        node: stands for the inserted path.
        canonical: `[n]` slots that the tree had already for the first n inserted tokens. The inserted slots of
            these tokens did not enter the tree; the rest did.
    """

    node: Node
    canonical: Slots


def _common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens of two arrays of one length agree."""
    differs = a != b
    first = int(differs.argmax())
    return first if differs[first] else len(a)


class RadixTree:
    """Prefixes of tokens, each token with its slot; unlocked leaves are evicted in order of last access."""

    def __init__(self) -> None:
        self.roots: dict[Namespace, Node] = {}
        self.total_tokens = 0
        self.locked_tokens = 0
        self.version = 0  # grows whenever a match may have changed
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._entries = 0  # breaks ties between heap entries, so that nodes are never compared

    @property
    def evictable_tokens(self) -> int:
        """Tokens that `evict` can remove. A locked node's ancestors are locked, so all others can go."""
        return self.total_tokens - self.locked_tokens

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
            done = _common_prefix(node.tokens[inside : inside + length], tokens[:length])
            inside += done
            if inside < len(node.tokens):
                return node, inside, done
        while done < n:
            child = node.children.get(int(tokens[done]))
            if child is None:
                break
            length = min(len(child.tokens), n - done)
            agree = _common_prefix(child.tokens[:length], tokens[done : done + length])
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
        """The slots of a node's whole path, `[depth in tokens]`."""
        parts = [n.slots for n in self.path(node)]
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
        """Count one more live request on a path; with `until`, only on its part below that ancestor."""
        for step in self.path(node, until):
            if step.lock == 0:
                self.locked_tokens += len(step.tokens)
            step.lock += 1

    def unlock(self, node: Node) -> None:
        """Count one live request less on a path.

        Raises:
            ValueError: the path is not locked.
        """
        for step in list(self.path(node)):
            if step.lock == 0:
                raise ValueError("unlocking a path that no request has locked")
            step.lock -= 1
            if step.lock == 0:
                self.locked_tokens -= len(step.tokens)
                self._offer(step)

    def insert(self, node: Node, tokens: Tokens, slots: Slots) -> Insertion:
        """Add `tokens` `[n]` with their `slots` `[n]` below `node`.

        Where the tree already holds a token of this path it keeps its own slot: see `Insertion.canonical`.
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
                self.total_tokens += len(leaf.tokens)
                self.version += 1
                node = leaf
                break
            n = min(len(child.tokens), len(tokens) - done)
            agree = _common_prefix(child.tokens[:n], tokens[done : done + n])
            node = child if agree == len(child.tokens) else self._split(child, agree)
            canonical.append(node.slots)
            done += agree
        self.touch(node)
        self._offer(node)
        return Insertion(node, np.concatenate(canonical) if canonical else _EMPTY)

    def graft(self, node: Node, tokens: Tokens, slots: Slots, last_access: int) -> Node:
        """Add `tokens` `[n]`, of which the tree has none below `node`, with their `slots`; nothing is touched.

        Returns the new leaf. Raises ValueError if something below `node` begins with the first of them.
        """
        first = int(tokens[0])
        if first in node.children:
            raise ValueError(f"token {first} is there already")
        leaf = node.children[first] = Node(tokens.copy(), slots.copy(), node, node.namespace)
        leaf.last_access = last_access
        self.total_tokens += len(tokens)
        self.version += 1
        self._offer(leaf)
        return leaf

    def evict(self, num_tokens: int) -> Slots:
        """Remove `num_tokens` tokens, or all that can be, from unlocked leaves, least recently used first.

        The last leaf loses only as much of its tail as is needed. Returns the slots of what was removed.
        """
        freed: list[Slots] = []
        left = num_tokens
        while left > 0 and self._heap:
            last_access, _, node = self._heap[0]
            if node.lock or node.children:
                heapq.heappop(self._heap)  # it comes back when it is an unlocked leaf again
                node.queued = False
            elif last_access != node.last_access:
                heapq.heapreplace(self._heap, self._entry(node))
            elif len(node.tokens) > left:
                keep = len(node.tokens) - left
                freed.append(node.slots[keep:])
                node.tokens, node.slots = node.tokens[:keep], node.slots[:keep]
                left = 0
            else:
                heapq.heappop(self._heap)
                node.queued = False
                freed.append(node.slots)
                left -= len(node.tokens)
                assert node.parent is not None  # roots are never queued
                del node.parent.children[int(node.tokens[0])]
                self._offer(node.parent)
        if not freed:
            return _EMPTY
        slots = np.concatenate(freed)
        self.total_tokens -= len(slots)
        self.version += 1
        return slots

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's edge after `at` tokens. The new upper node is returned; `node` keeps the rest."""
        upper = Node(node.tokens[:at], node.slots[:at], node.parent, node.namespace)
        upper.lock = node.lock
        upper.last_access = node.last_access
        assert node.parent is not None  # a root has no tokens to split
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.slots = node.tokens[at:], node.slots[at:]
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it can go; drop a root that holds nothing."""
        if node.lock or node.children:
            return
        if node.parent is None:
            self.roots.pop(node.namespace, None)
        elif not node.queued:
            node.queued = True
            heapq.heappush(self._heap, self._entry(node))

    def _entry(self, node: Node) -> tuple[int, int, Node]:
        self._entries += 1
        return (node.last_access, self._entries, node)
