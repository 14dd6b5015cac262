"""The cached prefixes as arrays, and their adoption by another tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    has_state: NDArray[np.int32]  # `[N]`, 1 where the state of a sequence is kept at a node's end, or 0
    tenant_names: tuple[str | None, ...]  # None: requests without a tenant

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_states(self) -> int:
        return int(np.count_nonzero(self.has_state))

    def parts(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Return views of `values` `[T]`, one for each node."""
        return np.split(values, np.cumsum(self.lengths, dtype=np.int64))[:-1]

    def namespace(self, node: int, weights_version: int) -> Namespace:
        """Return where a node belongs under a version of the weights."""
        return Namespace(weights_version, tenant=self.tenant_names[self.tenants[node]])

    def recency(self) -> NDArray[np.int64]:
        """Rank `last_used` from -(number of ranks) to -1: int64 `[N]`; a node ranks no lower than its children."""
        latest = self.last_used.copy()
        for i, parent in reversed([*enumerate(self.parents.tolist())]):
            if parent >= 0:
                latest[parent] = max(latest[parent], latest[i])
        values, ranks = np.unique(latest, return_inverse=True)
        return np.asarray(ranks.reshape(-1).astype(np.int64) - len(values))

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
        if ((self.has_state != 0) & (self.has_state != 1)).any():
            return "a node has neither a state nor none"
        # Siblings begin with different tokens; nodes below a root are siblings if they are of one tenant.
        above = np.where(begins, -1 - self.tenants, self.parents)
        firsts = self.tokens[np.cumsum(self.lengths, dtype=np.int64) - self.lengths]
        if len(np.unique(np.stack([above, firsts]), axis=1).T) != len(self):
            return "two nodes go on from one place with the same token"
        return None


def take_snapshot(tree: RadixTree, weights_version: int) -> tuple[TreeSnapshot, Slots, Slots]:
    """Return all prefixes of a weights version, except those of adapters, with the slots `[T]` of their tokens,
    and the states `[N]` that are kept where nodes end, 0 where none is.

    A token or state that is not on the device has -s, for slot or state s of the host.
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
        has_state=np.array([node.has_state for node in nodes], dtype=np.int32),
        tenant_names=tuple(space.tenant for space in spaces),
    )
    states = np.array([node.state or -node.host_state for node in nodes], dtype=np.int32)
    return snapshot, np.concatenate([EMPTY, *map(_places, nodes)]), states


def _places(node: Node) -> Slots:
    on_device, on_host = node.slots
    if on_device is not None:
        return on_device
    assert on_host is not None  # it is in one tier at least
    return -on_host


@dataclass(frozen=True)
class Adoption:
    """The part of a snapshot that a tree takes, and where its KV and its states go."""

    snapshot: TreeSnapshot
    weights_version: int
    kept: NDArray[np.int64]  # `[N]`, leading tokens of each node that the tree has, or takes
    slots: Slots  # `[T]`, the slot for each taken token's KV, 0 for the others
    states: Slots  # `[N]`, the state for that of each node whose state is taken, 0 for the others
    left_out_states: int  # that the tree neither has nor takes

    @property
    def num_taken(self) -> int:
        return int(np.count_nonzero(self.slots))

    @property
    def num_taken_states(self) -> int:
        return int(np.count_nonzero(self.states))

    @property
    def left_out(self) -> int:
        """Tokens that find no free slot."""
        return self.snapshot.num_tokens - int(self.kept.sum())


class AdoptionPlan(NamedTuple):
    """What a tree takes of a snapshot."""

    kept: NDArray[np.int64]  # as in Adoption
    tokens: NDArray[np.bool_]  # `[T]`, those that it lacks
    states: NDArray[np.bool_]  # `[N]`, nodes whose states it lacks
    left_out_states: int  # as in Adoption


def plan_adoption(
    tree: RadixTree, snapshot: TreeSnapshot, weights_version: int, room: int, room_for_states: int
) -> AdoptionPlan:
    """Choose what a tree lacks of a snapshot on the device, at most `room` tokens and `room_for_states` states,
    most recently used first; of nodes that do not find room to their end no state, which belongs there.
    """
    kept, taken = np.zeros(len(snapshot), dtype=np.int64), np.zeros(snapshot.num_tokens, dtype=np.bool_)
    states, known_states = np.zeros(len(snapshot), dtype=np.bool_), 0
    tokens, marks = snapshot.parts(snapshot.tokens), snapshot.parts(taken)
    # Of the nodes that are whole then: where the tree has their last token; None: it lacks that.
    ends: dict[int, Match | None] = {}
    # A parent was used when its children were, so that sorted by use it comes before them.
    for i in np.argsort(-snapshot.recency(), kind="stable").tolist():
        parent, length, known = int(snapshot.parents[i]), len(tokens[i]), 0
        if parent >= 0 and parent not in ends:
            continue
        root = snapshot.namespace(i, weights_version)
        end = ends[parent] if parent >= 0 else tree.match(root, tokens[i], limit=0)
        if end is not None:
            start, end = end.length, tree.follow(end, tokens[i]).on_device
            known = end.length - start
        count = min(room, length - known)
        room -= count
        kept[i] = known + count
        marks[i][known : known + count] = True
        if kept[i] == length:
            ends[i] = end = None if count else end
            if snapshot.has_state[i]:
                is_known = end is not None and end.at_boundary and end.node.has_state
                known_states += is_known
                states[i] = not is_known and room_for_states > 0
                room_for_states -= int(states[i])
    left_out_states = snapshot.num_states - known_states - int(np.count_nonzero(states))
    return AdoptionPlan(kept, taken, states, left_out_states)


def adopt(tree: RadixTree, adoption: Adoption) -> dict[int, Node]:
    """Put the taken tokens, whose KV is in their slots, into the tree, which has not changed since. Returns where
    the snapshot's nodes end there, by their indices.
    """
    snapshot, ends = adoption.snapshot, dict[int, Node]()
    tokens, slots, recency = snapshot.parts(snapshot.tokens), snapshot.parts(adoption.slots), snapshot.recency()
    for i, kept in enumerate(adoption.kept.tolist()):
        if kept:
            parent = int(snapshot.parents[i])
            above = ends[parent] if parent >= 0 else tree.root(snapshot.namespace(i, adoption.weights_version))
            own = slots[i][:kept]
            ends[i], canonical = tree.insert(above, tokens[i][:kept], own, int(recency[i]))
            assert len(canonical) == kept - np.count_nonzero(own)  # the tree keeps its own slots
    return ends


class Saved(NamedTuple):
    """What a file of a kept cache holds."""

    tokens: int
    states: int  # of sequences


class Loaded(NamedTuple):
    """What was loaded of one, and what found no room."""

    tokens: int
    left_out: int
    states: int  # of sequences
    left_out_states: int
