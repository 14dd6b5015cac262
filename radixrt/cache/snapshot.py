"""The cached prefixes as arrays, and which of them a tree lacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.cache.radix_tree import Namespace, Node, RadixTree, Slots, Tokens, on_device

_EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class TreeSnapshot:
    """The prefixes of one version of the weights: N nodes, parents before their children, with T tokens in all.

    Attributes:
        tokens: int32 `[T]`, node after node.
        lengths: int32 `[N]`, tokens of each node.
        parents: int32 `[N]`, places among the nodes; -1 where a node begins a prefix.
        tenants: int32 `[N]`, places in `tenant_names`.
        last_used: int64 `[N]`, greater is later.
        tenant_names: of the tenants; None is whoever named none.
    """

    tokens: Tokens
    lengths: NDArray[np.int32]
    parents: NDArray[np.int32]
    tenants: NDArray[np.int32]
    last_used: NDArray[np.int64]
    tenant_names: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def starts(self) -> NDArray[np.int64]:
        """Where each node's tokens begin: int64 `[N]`."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        return np.asarray(ends - self.lengths)

    def fault(self, vocab_size: int) -> str | None:
        """Why this is no tree of prefixes; None if it is one."""
        places = np.arange(len(self))
        begins = self.parents < 0
        if (self.lengths < 1).any() or int(self.lengths.sum(dtype=np.int64)) != self.num_tokens:
            return f"the nodes' lengths do not add up to {self.num_tokens} tokens"
        if ((self.parents < -1) | (self.parents >= places)).any():
            return "a node stands before its parent"
        if ((self.tenants < 0) | (self.tenants >= len(self.tenant_names))).any():
            return f"a node's tenant is none of {len(self.tenant_names)}"
        if len(set(self.tenant_names)) != len(self.tenant_names):
            return "a tenant is named twice"
        if (self.tenants[~begins] != self.tenants[self.parents[~begins]]).any():
            return "a node's tenant is not its parent's"
        if self.num_tokens and (int(self.tokens.min()) < 0 or int(self.tokens.max()) >= vocab_size):
            return f"a token is not in 0 .. {vocab_size - 1}"
        # What two siblings begin with differs; below a root siblings are those of one tenant.
        above = np.where(begins, -1 - self.tenants, self.parents)
        firsts = self.tokens[self.starts()]
        if len(np.unique(np.stack([above, firsts]), axis=1).T) != len(self):
            return "two nodes go on from one place with the same token"
        return None


def take_snapshot(tree: RadixTree, weights_version: int) -> tuple[TreeSnapshot, Slots]:
    """All prefixes of a version of the weights, with the slots `[T]` of their tokens.

    The slot s of the host stands as -s, for tokens that are not on the device. Those of adapters are left out.
    """
    spaces = [s for s in tree.roots if s.weights_version == weights_version and s.adapter is None]
    nodes: list[Node] = []
    parents: list[int] = []
    tenants: list[int] = []
    stack = [(child, -1, i) for i, s in enumerate(spaces) for child in tree.roots[s].children.values()]
    while stack:
        node, parent, tenant = stack.pop()
        stack.extend((child, len(nodes), tenant) for child in node.children.values())
        nodes.append(node)
        parents.append(parent)
        tenants.append(tenant)
    snapshot = TreeSnapshot(
        tokens=np.concatenate([_EMPTY, *(node.tokens for node in nodes)]),
        lengths=np.array([len(node.tokens) for node in nodes], dtype=np.int32),
        parents=np.array(parents, dtype=np.int32),
        tenants=np.array(tenants, dtype=np.int32),
        last_used=np.array([node.last_access for node in nodes], dtype=np.int64),
        tenant_names=tuple(space.tenant for space in spaces),
    )
    return snapshot, np.concatenate([_EMPTY, *map(_places, nodes)])


def _places(node: Node) -> Slots:
    if node.slots is not None:
        return node.slots
    assert node.host_slots is not None  # it is in one tier at least
    return -node.host_slots


@dataclass(frozen=True)
class Adoption:
    """Which part of a snapshot a tree is to get: of each node the tokens `[known, known + taken)`.

    Attributes:
        known: int64 `[N]`, tokens that the tree has already on the device.
        taken: int64 `[N]`, tokens behind these that it is to get. What lies below a node that is not whole then is
            left out.
        recency: int64 `[N]`, below 0, greater is later: all of it is older than what this process has used.
        slots: int32 `[T]`, the slot that each taken token's KV is to be in, 0 for the others.
    """

    snapshot: TreeSnapshot
    weights_version: int
    known: NDArray[np.int64]
    taken: NDArray[np.int64]
    recency: NDArray[np.int64]
    slots: Slots

    @property
    def left_out(self) -> int:
        """Tokens that there is no room for."""
        return self.snapshot.num_tokens - int(self.known.sum()) - int(self.taken.sum())

    def namespace(self, node: int) -> Namespace:
        """Of a node of the snapshot."""
        tenant = self.snapshot.tenant_names[self.snapshot.tenants[node]]
        return Namespace(self.weights_version, tenant=tenant)


def plan_adoption(tree: RadixTree, snapshot: TreeSnapshot, weights_version: int, room: int) -> Adoption:
    """What a tree lacks of a snapshot, at most `room` tokens, what was used last first; without slots yet."""
    n = len(snapshot)
    known, taken = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    recency = _recency(snapshot)
    plan = Adoption(snapshot, weights_version, known, taken, recency, np.zeros(snapshot.num_tokens, np.int32))
    # A place in the tree where a node ends, if the tree has all of the node.
    ends: list[tuple[Node, int] | None] = [None] * n
    for i, tokens in enumerate(_split(snapshot)):
        parent = int(snapshot.parents[i])
        root = tree.roots.get(plan.namespace(i)) if parent < 0 else None
        place = ends[parent] if parent >= 0 else None if root is None else (root, 0)
        if place is not None:
            node, inside, known[i] = on_device(*tree.follow(*place, tokens))
            if known[i] == len(tokens):
                ends[i] = (node, inside)
    # A parent was used when its children were, so that sorted by use it comes before them.
    whole = np.zeros(n, dtype=bool)
    for i in np.lexsort((np.arange(n), -recency)):
        parent = int(snapshot.parents[i])
        if parent >= 0 and not whole[parent]:
            continue
        taken[i] = min(room, int(snapshot.lengths[i]) - int(known[i]))
        room -= int(taken[i])
        whole[i] = known[i] + taken[i] == snapshot.lengths[i]
    return plan


def adopt(tree: RadixTree, plan: Adoption) -> None:
    """Put what was planned into the tree, which has not changed since. Its KV is in its slots."""
    snapshot = plan.snapshot
    grows = plan.taken > 0  # a node gets tokens, or one below it does
    for i in range(len(snapshot) - 1, -1, -1):
        if grows[i] and snapshot.parents[i] >= 0:
            grows[snapshot.parents[i]] = True
    starts = snapshot.starts()
    ends: dict[int, Node] = {}
    for i, tokens in enumerate(_split(snapshot)):
        if not grows[i]:
            continue
        parent = int(snapshot.parents[i])
        above = ends[parent] if parent >= 0 else tree.root(plan.namespace(i))
        node, inside, known = on_device(*tree.follow(above, len(above.tokens), tokens))
        node = tree.cut(node, inside)
        if plan.taken[i]:
            end = known + int(plan.taken[i])
            slots = plan.slots[starts[i] + known : starts[i] + end]
            node = tree.insert_cold(node, tokens[known:end], slots, int(plan.recency[i]))
        ends[i] = node


def _split(snapshot: TreeSnapshot) -> list[Tokens]:
    """The tokens of each node."""
    return np.split(snapshot.tokens, snapshot.starts()[1:]) if len(snapshot) else []


def _recency(snapshot: TreeSnapshot) -> NDArray[np.int64]:
    """Ranks of `last_used` from -(number of ranks) to -1; a node's is no lower than its children's."""
    latest = snapshot.last_used.copy()
    for i in range(len(snapshot) - 1, -1, -1):
        parent = int(snapshot.parents[i])
        if parent >= 0:
            latest[parent] = max(latest[parent], latest[i])
    values, ranks = np.unique(latest, return_inverse=True)
    return np.asarray(ranks.reshape(-1).astype(np.int64) - len(values))
