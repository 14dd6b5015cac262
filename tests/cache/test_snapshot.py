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


def planned(tree: RadixTree, snapshot: TreeSnapshot, room: int, version: int = 0, *, first_slot: int) -> Adoption:
    """What is to be adopted, in slots from `first_slot` on."""
    kept, taken = plan_adoption(tree, snapshot, version, room)
    slots = np.zeros(len(taken), dtype=np.int32)
    slots[taken] = np.arange(first_slot, first_slot + taken.sum())
    return Adoption(snapshot, version, kept, slots)


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
    snapshot, slots = take_snapshot(grown(kept), 0)
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
    snapshot, slots = take_snapshot(tree, 0)
    by_token = dict(zip(snapshot.tokens.tolist(), slots.tolist(), strict=True))
    assert by_token == {1: 1, 2: 2, 3: 3, 4: 6}
    node = tree.match(Namespace(), ids(1, 2, 3)).node
    tree.attach(node, HOST, ids(9))
    tree.detach(node, DEVICE)
    _, slots = take_snapshot(tree, 0)
    assert sorted(slots.tolist()) == [-9, 1, 2, 6]


def test_slots_go_to_the_taken_tokens_in_order() -> None:
    snapshot, _ = take_snapshot(grown([[1, 2, 3], [1, 2, 4, 5], [6]]), 0)
    adoption = planned(grown([[1]], first_slot=50), snapshot, 10, first_slot=100)
    assert adoption.left_out == 0
    assert adoption.slots[snapshot.tokens == 1].tolist() == [0]
    taken = adoption.slots[adoption.slots > 0]
    assert taken.tolist() == [100, 101, 102, 103, 104]


def test_what_was_used_last_comes_first_and_is_older_than_all_else() -> None:
    snapshot, _ = take_snapshot(grown([[1, 1, 1], [2, 2, 2]]), 0)
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
    snapshot, slots = take_snapshot(tree, 0)
    assert (snapshot.tenant_names, slots.tolist()) == (("a",), [1, 2])
    other = RadixTree()
    take(other, snapshot, 9, version=5)
    assert found(other, [1, 2], Namespace(5, tenant="a")) == 2
    assert list(other.roots) == [Namespace(5, tenant="a")]


def test_an_empty_tree() -> None:
    snapshot, slots = take_snapshot(RadixTree(), 0)
    assert (len(snapshot), snapshot.num_tokens, len(slots), snapshot.fault(3)) == (0, 0, 0, None)
    assert take(RadixTree(), snapshot, 5) == 0


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("lengths", [3, 3], "do not add up to 5 tokens"),
        ("parents", [1, -1], "a node stands before its parent"),
        ("tenants", [0, 1], "a node's tenant is none of 1"),
        ("tokens", [1, 2, 3, 4, 9], "a token is not in 0 .. 8"),
        ("tokens", [1, 2, 3, -4, 5], "a token is not in 0 .. 8"),
    ],
)
def test_faults(field: str, values: list[int], message: str) -> None:
    sound = TreeSnapshot(ids(1, 2, 3, 4, 5), ids(3, 2), ids(-1, 0), ids(0, 0), np.array([2, 1]), (None,))
    assert sound.fault(9) is None
    fault = replace(sound, **{field: ids(*values)}).fault(9)
    assert fault is not None
    assert message in fault
