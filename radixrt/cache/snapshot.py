"""The cached prefixes as arrays, and their adoption by another tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.cache.radix_tree import EMPTY, Match, Namespace, Node, RadixTree, Slots, Tokens


@dataclass(frozen=True)
class TreeSnapshot:
    """The prefixes of one version of the weights: N nodes, parents before their children, T tokens."""

    tokens: Tokens  # `[T]`, node after node
    lengths: NDArray[np.int32]  # `[N]`, tokens of each node
    parents: NDArray[np.int32]  # `[N]`, indices of nodes; -1 where a node begins a prefix
    tenants: NDArray[np.int32]  # `[N]`, indices into `tenant_names`
    last_used: NDArray[np.int64]  # `[N]`, greater is later
    tenant_names: tuple[str | None, ...]  # None: requests without a tenant

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def starts(self) -> NDArray[np.int64]:
        """Return where each node's tokens begin: int64 `[N]`."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        return np.asarray(ends - self.lengths)

    def fault(self, vocab_size: int) -> str | None:
        """Say why this is no tree of prefixes; None if it is one."""
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
        # Siblings begin with different tokens; nodes below a root are siblings if they are of one tenant.
        above = np.where(begins, -1 - self.tenants, self.parents)
        firsts = self.tokens[self.starts()]
        if len(np.unique(np.stack([above, firsts]), axis=1).T) != len(self):
            return "two nodes go on from one place with the same token"
        return None


def take_snapshot(tree: RadixTree, weights_version: int) -> tuple[TreeSnapshot, Slots]:
    """Return all prefixes of a weights version, except those of adapters, with the slots `[T]` of their tokens.

    A token that is not on the device has -s, for host slot s.
    """
    spaces = [s for s in tree.roots if s.weights_version == weights_version and s.adapter is None]
    nodes, parents, tenants = list[Node](), list[int](), list[int]()
    stack = [(child, -1, i) for i, s in enumerate(spaces) for child in tree.roots[s].children.values()]
    while stack:
        node, parent, tenant = stack.pop()
        stack.extend((child, len(nodes), tenant) for child in node.children.values())
        nodes.append(node)
        parents.append(parent)
        tenants.append(tenant)
    snapshot = TreeSnapshot(
        tokens=np.concatenate([EMPTY, *(node.tokens for node in nodes)]),
        lengths=np.array([len(node.tokens) for node in nodes], dtype=np.int32),
        parents=np.array(parents, dtype=np.int32),
        tenants=np.array(tenants, dtype=np.int32),
        last_used=np.array([node.last_access for node in nodes], dtype=np.int64),
        tenant_names=tuple(space.tenant for space in spaces),
    )
    return snapshot, np.concatenate([EMPTY, *map(_places, nodes)])


def _places(node: Node) -> Slots:
    if node.slots is not None:
        return node.slots
    assert node.host_slots is not None  # it is in one tier at least
    return -node.host_slots


@dataclass(frozen=True)
class Adoption:
    """The part of a snapshot that a tree takes: of each node the tokens `[known, known + taken)`."""

    snapshot: TreeSnapshot
    weights_version: int
    known: NDArray[np.int64]  # `[N]`, tokens that the tree has on the device already
    taken: NDArray[np.int64]  # `[N]`, tokens taken after these; none below a node that is not whole then
    recency: NDArray[np.int64]  # `[N]`, below 0 (older than all that this process has used), greater is later
    slots: Slots  # `[T]`, the slot for each taken token's KV, 0 for the others

    @property
    def num_taken(self) -> int:
        return int(self.taken.sum())

    @property
    def left_out(self) -> int:
        """Tokens that find no free slot."""
        return self.snapshot.num_tokens - int(self.known.sum()) - self.num_taken

    def namespace(self, i: int) -> Namespace:
        """The namespace of node `i` of the snapshot."""
        tenant = self.snapshot.tenant_names[self.snapshot.tenants[i]]
        return Namespace(self.weights_version, tenant=tenant)

    def assign(self, slots: Slots) -> None:
        """Give the taken tokens their slots `[num_taken]`, node after node."""
        begins = self.snapshot.starts() + self.known
        places = np.arange(self.num_taken) + np.repeat(begins - (np.cumsum(self.taken) - self.taken), self.taken)
        self.slots[places] = slots


def plan_adoption(tree: RadixTree, snapshot: TreeSnapshot, weights_version: int, room: int) -> Adoption:
    """Choose what a tree lacks of a snapshot, at most `room` tokens, most recently used first; no slots yet."""
    n = len(snapshot)
    known, taken = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    recency = _recency(snapshot)
    adoption = Adoption(snapshot, weights_version, known, taken, recency, np.zeros(snapshot.num_tokens, np.int32))
    ends: list[Match | None] = [None] * n  # where the tree has a node's last token, if it has the whole node
    for i, tokens in enumerate(_split(snapshot)):
        parent = int(snapshot.parents[i])
        start = ends[parent] if parent >= 0 else tree.match(adoption.namespace(i), tokens, limit=0)
        if start is not None:
            found = tree.follow(start, tokens).on_device
            known[i] = found.length - start.length
            if known[i] == len(tokens):
                ends[i] = found
    # A parent was used when its children were, so that sorted by use it comes before them.
    whole = np.zeros(n, dtype=bool)
    for i in np.lexsort((np.arange(n), -recency)):
        parent = int(snapshot.parents[i])
        if parent >= 0 and not whole[parent]:
            continue
        taken[i] = min(room, int(snapshot.lengths[i]) - int(known[i]))
        room -= int(taken[i])
        whole[i] = known[i] + taken[i] == snapshot.lengths[i]
    return adoption


def adopt(tree: RadixTree, adoption: Adoption) -> None:
    """Put the taken tokens, whose KV is in their slots, into the tree, which has not changed since."""
    snapshot = adoption.snapshot
    grows = adoption.taken > 0  # a node gets tokens, or one below it does
    for i in range(len(snapshot) - 1, -1, -1):
        if grows[i] and snapshot.parents[i] >= 0:
            grows[snapshot.parents[i]] = True
    starts = snapshot.starts()
    ends: dict[int, Node] = {}
    for i, tokens in enumerate(_split(snapshot)):
        if not grows[i]:
            continue
        parent = int(snapshot.parents[i])
        above = ends[parent] if parent >= 0 else tree.root(adoption.namespace(i))
        found = tree.follow(Match(above, len(above.tokens), 0), tokens).on_device
        node = tree.cut(found.node, found.inside)
        if adoption.taken[i]:
            known, end = found.length, found.length + int(adoption.taken[i])
            slots = adoption.slots[starts[i] + known : starts[i] + end]
            insertion = tree.insert(node, tokens[known:end], slots, int(adoption.recency[i]))
            assert not len(insertion.canonical)  # the device has none of these
            node = insertion.node
        ends[i] = node


def _split(snapshot: TreeSnapshot) -> list[Tokens]:
    """Return the tokens of each node."""
    return np.split(snapshot.tokens, snapshot.starts()[1:]) if len(snapshot) else []


def _recency(snapshot: TreeSnapshot) -> NDArray[np.int64]:
    """Rank `last_used` from -(number of ranks) to -1; a node ranks no lower than its children."""
    latest = snapshot.last_used.copy()
    for i in range(len(snapshot) - 1, -1, -1):
        parent = int(snapshot.parents[i])
        if parent >= 0:
            latest[parent] = max(latest[parent], latest[i])
    values, ranks = np.unique(latest, return_inverse=True)
    return np.asarray(ranks.reshape(-1).astype(np.int64) - len(values))
