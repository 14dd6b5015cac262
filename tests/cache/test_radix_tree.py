"""The radix tree against a model that knows every prefix by itself, and at sizes where walks would show."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixrt.cache.radix_tree import DEVICE, HOST, Namespace, Node, RadixTree

HERE, THERE = Namespace(), Namespace(tenant="there")

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=9)
namespaces = st.sampled_from([HERE, THERE])


def array(tokens: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def put(tree: RadixTree, namespace: Namespace, tokens: np.ndarray, slots: np.ndarray) -> tuple[Node, np.ndarray]:
    """Insert from the root, as a request without a lease would. Returns the node and the slots of the path."""
    node = tree.node_at(namespace, tree.match(namespace, tokens, limit=0))
    end, canonical = tree.insert(node, tokens, slots)
    return end, np.concatenate([canonical, slots[len(canonical) :]])


class TreeMachine(RuleBasedStateMachine):
    """Every prefix is an entry of `known`: its slot and when it was last used. Evicts a token at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.known: dict[tuple[Namespace, tuple[int, ...]], list[int]] = {}  # -> [slot, tick]
        self.locked: list[tuple[Namespace, tuple[int, ...], Node]] = []
        self.next_slot = 1
        self.tick = 0

    def longest(self, namespace: Namespace, tokens: list[int]) -> int:
        return max(n for n in range(len(tokens) + 1) if n == 0 or (namespace, tuple(tokens[:n])) in self.known)

    def use(self, namespace: Namespace, tokens: list[int]) -> None:
        self.tick += 1
        for n in range(1, len(tokens) + 1):
            self.known[namespace, tuple(tokens[:n])][1] = self.tick

    def is_locked(self, namespace: Namespace, prefix: tuple[int, ...]) -> bool:
        return any(ns == namespace and path[: len(prefix)] == prefix for ns, path, _ in self.locked)

    @rule(namespace=namespaces, tokens=sequences)
    def insert(self, namespace: Namespace, tokens: list[int]) -> None:
        slots = np.arange(self.next_slot, self.next_slot + len(tokens), dtype=np.int32)
        self.next_slot += len(tokens)
        there = self.longest(namespace, tokens)
        node = self.tree.node_at(namespace, self.tree.match(namespace, array(tokens), limit=0))
        _, canonical = self.tree.insert(node, array(tokens), slots)
        for n in range(there + 1, len(tokens) + 1):
            self.known[namespace, tuple(tokens[:n])] = [int(slots[n - 1]), 0]
        self.use(namespace, tokens)
        expected = [self.known[namespace, tuple(tokens[:n])][0] for n in range(1, there + 1)]
        assert canonical.tolist() == expected

    @rule(namespace=namespaces, tokens=sequences, limit=st.none() | st.integers(0, 9))
    def match(self, namespace: Namespace, tokens: list[int], limit: int | None) -> None:
        shown = tokens if limit is None else tokens[:limit]
        match = self.tree.match(namespace, array(tokens), limit)
        assert match.length == self.longest(namespace, shown)

    @rule(namespace=namespaces, tokens=sequences)
    def lock(self, namespace: Namespace, tokens: list[int]) -> None:
        match = self.tree.match(namespace, array(tokens))
        node = self.tree.node_at(namespace, match)
        self.tree.lock(node)
        self.tree.touch(node)
        path = tokens[: match.length]
        self.use(namespace, path)
        self.locked.append((namespace, tuple(path), node))
        expected = [self.known[namespace, tuple(path[:n])][0] for n in range(1, len(path) + 1)]
        assert self.tree.slots_of(node).tolist() == expected

    @precondition(lambda self: self.locked)
    @rule(data=st.data(), keep=st.none() | st.integers(0, 9))
    def unlock(self, data: st.DataObject, keep: int | None) -> None:
        which = data.draw(st.integers(0, len(self.locked) - 1))
        namespace, path, node = self.locked.pop(which)
        expected = []
        for n in range(len(path), len(path) if keep is None else keep, -1):
            key = (namespace, path[:n])
            if self.is_locked(*key) or any(ns == namespace and p[:-1] == path[:n] for ns, p in self.known):
                break
            expected.append(self.known.pop(key)[0])
        assert sorted(self.tree.unlock(node, keep).tolist()) == sorted(expected)

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        expected = []
        while len(expected) < count:
            leaves = [
                (tick, key)
                for key, (_, tick) in self.known.items()
                if not self.is_locked(*key) and not any(ns == key[0] and p[:-1] == key[1] for ns, p in self.known)
            ]
            if not leaves:
                break
            key = min(leaves, key=lambda leaf: leaf[0])[1]
            expected.append(self.known.pop(key)[0])
        assert sorted(self.tree.evict(count).tolist()) == sorted(expected)

    @invariant()
    def counters(self) -> None:
        assert self.tree.device_tokens == len(self.known)
        locked = sum(self.is_locked(*key) for key in self.known)
        assert self.tree.locked_tokens == locked
        assert self.tree.evictable_tokens == len(self.known) - locked
        roots = {ns for ns, _ in self.known} | {ns for ns, _, _ in self.locked}
        assert set(self.tree.roots) == roots


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)


def test_least_recently_used_goes_first() -> None:
    tree = RadixTree()
    for first in (1, 2, 3):
        put(tree, HERE, array([first, 9, 9]), array([10 * first, 10 * first + 1, 10 * first + 2]))
    tree.touch(tree.node_at(HERE, tree.match(HERE, array([1, 9, 9]))))
    assert sorted(tree.evict(3).tolist()) == [20, 21, 22]
    assert tree.evict(1).tolist() == [32]  # only as much of the tail as is needed
    assert tree.match(HERE, array([3, 9, 9])).length == 2
    assert sorted(tree.evict(100).tolist()) == [10, 11, 12, 30, 31]
    assert tree.evict(1).tolist() == []
    assert not tree.roots


def test_a_whole_path_is_used_with_its_end() -> None:
    tree = RadixTree()
    put(tree, HERE, array([1, 2]), array([10, 11]))
    put(tree, HERE, array([5, 7]), array([50, 51]))
    end, _ = put(tree, HERE, array([1, 2, 3, 4]), array([10, 11, 12, 13]))
    tree.lock(end)
    assert tree.unlock(end, 2).tolist() == [12, 13]  # nobody wants these
    assert tree.evict(2).tolist() == [50, 51]
    assert tree.evict(2).tolist() == [10, 11]


def test_a_locked_node_stays_and_keeps_its_ancestors() -> None:
    tree = RadixTree()
    put(tree, HERE, array([1, 2, 3]), array([1, 2, 3]))
    put(tree, HERE, array([1, 2, 4]), array([4, 5, 6]))
    node = tree.node_at(HERE, tree.match(HERE, array([1, 2, 3])))
    tree.lock(node)
    assert tree.evict(100).tolist() == [6]
    tree.unlock(node)
    assert sorted(tree.evict(100).tolist()) == [1, 2, 3]
    with pytest.raises(ValueError, match="no request has locked"):
        tree.unlock(node)


def test_a_node_stands_for_its_path_over_splits() -> None:
    tree = RadixTree()
    node, _ = put(tree, HERE, array([1, 2, 3, 4]), array([1, 2, 3, 4]))
    tree.lock(node)
    put(tree, HERE, array([1, 2, 9]), array([5, 6, 7]))
    assert tree.slots_of(node).tolist() == [1, 2, 3, 4]
    assert [n.lock for n in tree.path(node)] == [1, 1, 1]
    tree.unlock(node)
    assert tree.locked_tokens == 0


def test_a_path_that_has_left_the_device_has_other_slots_when_it_is_back() -> None:
    tree = RadixTree()
    node, _ = put(tree, HERE, array([1, 2]), array([1, 2]))
    assert tree.slots_of(node).tolist() == [1, 2]
    tree.attach(node, HOST, array([7, 8]))
    tree.detach(node, DEVICE)
    tree.attach(node, DEVICE, array([3, 4]))
    assert tree.slots_of(node).tolist() == [3, 4]


def test_tokens_and_slots_must_agree() -> None:
    tree = RadixTree()
    with pytest.raises(ValueError, match="2 tokens with 1 slots"):
        put(tree, HERE, array([1, 2]), array([1]))


def test_a_deep_tree_needs_no_recursion() -> None:
    tree = RadixTree()
    depth = 20_000
    tokens = np.arange(depth, dtype=np.int32) % 50
    for n in range(1, 200):  # a split every hundred tokens, then a leaf at the bottom
        put(tree, HERE, np.append(tokens[: n * 100], 77).astype(np.int32), np.arange(n * 100 + 1, dtype=np.int32))
    node, slots = put(tree, HERE, tokens, np.arange(depth, dtype=np.int32))
    tree.lock(node)
    assert tree.match(HERE, tokens).length == depth
    assert len(slots) == depth
    tree.unlock(node)
    assert len(tree.evict(10**9)) == depth + 199


def test_30k_leaves_are_evicted_in_order_without_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = RadixTree()
    head = np.arange(100, dtype=np.int32)
    count = 30_000
    slot = 0
    for i in range(count):
        tokens = np.append(head, [200 + i, 7]).astype(np.int32)
        put(tree, HERE, tokens, np.arange(slot, slot + 102, dtype=np.int32))
        slot += 102
    assert tree.device_tokens == 100 + 2 * count

    heap_operations = []
    for name in ("heappop", "heappush", "heapreplace"):
        original = getattr(heapq, name)
        monkeypatch.setattr(
            f"radixrt.cache.radix_tree.heapq.{name}",
            lambda *a, original=original: (heap_operations.append(1), original(*a))[1],
        )
    monkeypatch.setattr(RadixTree, "path", None)  # an eviction follows no path
    order = [int(tree.evict(2)[0]) // 102 for _ in range(1000)]
    assert order == list(range(1000))
    assert len(heap_operations) <= 1100
