"""A tree as arrays, and what another tree takes of it. Files of snapshots: tests/kept_cache/test_kept_cache.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.cache.radix_tree import DEVICE, HOST, Namespace, RadixTree
from radixrt.cache.snapshot import Adoption, TreeSnapshot, adopt, plan_adoption, take_snapshot
from tests.support.cache_machine import ids

paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=6)


def grown(prompts: list[list[int]], tenant: str | None = None, first_slot: int = 1) -> RadixTree:
    tree = RadixTree()
    for prompt in prompts:
        slots = np.arange(first_slot, first_slot + len(prompt), dtype=np.int32)
        first_slot += len(prompt)
        tree.insert(tree.root(Namespace(tenant=tenant)), ids(*prompt), slots)
    return tree


def found(tree: RadixTree, prompt: list[int], namespace: Namespace) -> int:
    return tree.match(namespace, ids(*prompt)).length


def planned(
    tree: RadixTree,
    snapshot: TreeSnapshot,
    room: int,
    version: int = 0,
    *,
    first_slot: int,
    room_for_states: int = 0,
) -> Adoption:
    """What is to be adopted, in slots from `first_slot` on, and in states from 1 on."""
    plan = plan_adoption(tree, snapshot, version, room, room_for_states)
    slots, states = np.zeros(snapshot.num_tokens, dtype=np.int32), np.zeros(len(snapshot), dtype=np.int32)
    slots[plan.tokens] = np.arange(first_slot, first_slot + plan.tokens.sum())
    states[plan.states] = np.arange(1, 1 + plan.states.sum())
    return Adoption(snapshot, version, plan.kept, slots, states, plan.left_out_states)


def take(tree: RadixTree, snapshot: TreeSnapshot, room: int, version: int = 0) -> int:
    """Adopt what fits; how many tokens."""
    adoption = planned(tree, snapshot, room, version, first_slot=1000)
    assert (adoption.slots > 0).sum() == adoption.num_taken <= room
    before = tree.device_tokens
    adopt(tree, adoption)
    assert tree.device_tokens == before + adoption.num_taken
    return adoption.num_taken


@given(kept=paths, own=paths, room=st.integers(0, 30))
def test_a_tree_has_what_it_had_and_all_that_fits_of_a_snapshot(
    kept: list[list[int]], own: list[list[int]], room: int
) -> None:
    snapshot, slots, _ = take_snapshot(grown(kept), 0)
    assert snapshot.fault(3) is None
    assert len(slots) == snapshot.num_tokens
    tree = grown(own)
    lacking = {tuple(p[:n]) for p in kept for n in range(1, len(p) + 1)} - {
        tuple(p[:n]) for p in own for n in range(1, len(p) + 1)
    }
    assert take(tree, snapshot, room) == min(room, len(lacking))
    for prompt in own:
        assert found(tree, prompt, Namespace()) == len(prompt)
    if room >= len(lacking):
        for prompt in kept:
            assert found(tree, prompt, Namespace()) == len(prompt)
    assert take(tree, snapshot, 100) == max(0, len(lacking) - room)


def test_the_slots_of_a_snapshot_are_those_of_its_tokens() -> None:
    tree = grown([[1, 2, 3], [1, 2, 4]])
    snapshot, slots, _ = take_snapshot(tree, 0)
    by_token = dict(zip(snapshot.tokens.tolist(), slots.tolist(), strict=True))
    assert by_token == {1: 1, 2: 2, 3: 3, 4: 6}
    node = tree.match(Namespace(), ids(1, 2, 3)).node
    tree.attach(node, HOST, ids(9))
    tree.detach(node, DEVICE)
    _, slots, _ = take_snapshot(tree, 0)
    assert sorted(slots.tolist()) == [-9, 1, 2, 6]


def test_slots_go_to_the_taken_tokens_in_order() -> None:
    snapshot, *_ = take_snapshot(grown([[1, 2, 3], [1, 2, 4, 5], [6]]), 0)
    adoption = planned(grown([[1]], first_slot=50), snapshot, 10, first_slot=100)
    assert adoption.left_out == 0
    assert adoption.slots[snapshot.tokens == 1].tolist() == [0]
    taken = adoption.slots[adoption.slots > 0]
    assert taken.tolist() == [100, 101, 102, 103, 104]


def test_what_was_used_last_comes_first_and_is_older_than_all_else() -> None:
    snapshot, *_ = take_snapshot(grown([[1, 1, 1], [2, 2, 2]]), 0)
    tree = grown([[0]])
    assert take(tree, snapshot, 4) == 4
    here = Namespace()
    assert [found(tree, prompt, here) for prompt in ([1, 1, 1], [2, 2, 2])] == [1, 3]
    tree.evict(1)
    assert found(tree, [1, 1, 1], here) == 0
    tree.evict(3)
    assert (found(tree, [2, 2, 2], here), found(tree, [0], here)) == (0, 1)


def test_tenants_and_versions_stay_apart_and_adapters_are_left_out() -> None:
    tree = grown([[1, 2]], tenant="a")
    tree.insert(tree.root(Namespace(adapter="x")), ids(1, 2), ids(7, 8))
    tree.insert(tree.root(Namespace(weights_version=3)), ids(1, 2), ids(9, 10))
    snapshot, slots, _ = take_snapshot(tree, 0)
    assert (snapshot.tenant_names, slots.tolist()) == (("a",), [1, 2])
    other = RadixTree()
    take(other, snapshot, 9, version=5)
    assert found(other, [1, 2], Namespace(5, tenant="a")) == 2
    assert list(other.roots) == [Namespace(5, tenant="a")]


def test_an_empty_tree() -> None:
    snapshot, slots, _ = take_snapshot(RadixTree(), 0)
    assert (len(snapshot), snapshot.num_tokens, len(slots), snapshot.fault(3)) == (0, 0, 0, None)
    assert take(RadixTree(), snapshot, 5) == 0


def with_states(prompts: list[list[int]], at: list[list[int]], *, on_host: bool = False) -> RadixTree:
    """Prompts, with states 1, 2, ... where nodes end."""
    tree = grown(prompts)
    for state, prompt in enumerate(at, 1):
        match = tree.match(Namespace(), ids(*prompt))
        assert match.at_boundary
        setattr(match.node, "host_state" if on_host else "state", state)
    return tree


def test_states_of_a_snapshot() -> None:
    tree = with_states([[1, 2, 3], [1, 2, 4]], [[1, 2], [1, 2, 4]])
    tree.match(Namespace(), ids(1, 2, 3)).node.host_state = 7
    tree.match(Namespace(), ids(1, 2)).node.host_state = 8  # in both tiers
    snapshot, _, states = take_snapshot(tree, 0)
    last = [int(tokens[-1]) for tokens in snapshot.parts(snapshot.tokens)]
    assert dict(zip(last, states.tolist(), strict=True)) == {2: 1, 3: -7, 4: 2}
    assert snapshot.has_state.tolist() == [1, 1, 1]
    assert snapshot.num_states == 3


def ends_of(adoption: Adoption) -> list[int]:
    """The last tokens of nodes whose states are taken."""
    parts = adoption.snapshot.parts(adoption.snapshot.tokens)
    return sorted(int(parts[place][-1]) for place in np.flatnonzero(adoption.states))


@pytest.mark.parametrize(
    ("room", "room_for_states", "taken", "left_out"),
    [
        (99, 99, [2, 5, 6], 0),
        (99, 2, [2, 6], 1),  # those used last, and what is above them
        (99, 0, [], 3),
        (3, 99, [2, 6], 1),  # the last node finds no slots
        (1, 99, [], 3),  # a state belongs to the end of its node
    ],
)
def test_states_go_where_whole_nodes_go(room: int, room_for_states: int, taken: list[int], left_out: int) -> None:
    """Most recently used first: [1, 2, 6], then [5]."""
    prompts = [[1, 2, 3], [5], [1, 2, 6]]
    snapshot, *_ = take_snapshot(with_states(prompts, [[1, 2], [5], [1, 2, 6]]), 0)
    tree = RadixTree()
    adoption = planned(tree, snapshot, room, first_slot=10, room_for_states=room_for_states)
    assert ends_of(adoption) == taken
    assert (adoption.num_taken_states, adoption.left_out_states) == (len(taken), left_out)
    ends = adopt(tree, adoption)
    for place in np.flatnonzero(adoption.states).tolist():
        tokens = [int(t) for node in reversed([*tree.path(ends[place])]) for t in node.tokens]
        assert tokens in [[1, 2], [5], [1, 2, 6]]


@pytest.mark.parametrize("on_host", [False, True])
def test_states_that_are_there_stay(on_host: bool) -> None:
    prompts = [[1, 2, 3], [1, 2, 4]]
    snapshot, *_ = take_snapshot(with_states(prompts, [[1, 2], [1, 2, 4]]), 0)
    tree = with_states([*prompts, [1, 2, 5]], [[1, 2]], on_host=on_host)
    adoption = planned(tree, snapshot, 99, first_slot=10, room_for_states=99)
    assert (ends_of(adoption), adoption.left_out_states) == ([4], 0)
    tree = with_states([[1, 2, 4, 7]], [[1, 2, 4, 7]])  # nothing ends there yet
    adoption = planned(tree, snapshot, 99, first_slot=10, room_for_states=99)
    assert ends_of(adoption) == [2, 4]
    node = adopt(tree, adoption)[int(np.flatnonzero(adoption.states)[0])]
    assert tree.match(Namespace(), ids(1, 2)).node is node or tree.match(Namespace(), ids(1, 2, 4)).node is node


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("lengths", [3, 3], "do not add up to 5 tokens"),
        ("parents", [1, -1], "a node stands before its parent"),
        ("tenants", [0, 1], "a node's tenant is none of 1"),
        ("tokens", [1, 2, 3, 4, 9], "a token is not in 0 .. 8"),
        ("tokens", [1, 2, 3, -4, 5], "a token is not in 0 .. 8"),
        ("has_state", [0, 2], "a node has neither a state nor none"),
    ],
)
def test_faults(field: str, values: list[int], message: str) -> None:
    numbers = ids(1, 2, 3, 4, 5), ids(3, 2), ids(-1, 0), ids(0, 0), np.array([2, 1]), ids(0, 1)
    sound = TreeSnapshot(*numbers, (None,))
    assert sound.fault(9) is None
    fault = replace(sound, **{field: ids(*values)}).fault(9)
    assert fault is not None
    assert message in fault
