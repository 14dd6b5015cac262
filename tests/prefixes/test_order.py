"""Order, tree and order of the run, against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.planning.demands import Demands
from radixrt.planning.run_order import RunOrder, run_order
from radixrt.planning.token_store import TokenStore, TokenWriter
from radixrt.prefixes import order as ordering
from radixrt.prefixes.order import PrefixOrder, prefix_order
from radixrt.prefixes.tree import PrefixTree, prefix_tree
from radixrt.workloads import token_statistics

TOKENS = st.sampled_from([0, 1, 255, 256, 2**31 - 1])


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[list[int]]:
    """Fresh ones, repetitions, prefixes of one another, and long stretches that are shared."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(0, 12))):
        fresh = draw(st.lists(TOKENS, max_size=4)) * draw(st.sampled_from([1, 1, 1, 15]))
        earlier = draw(st.sampled_from(prompts)) if prompts and draw(st.booleans()) else []
        cut = len(earlier) if draw(st.booleans()) else draw(st.integers(0, len(earlier)))
        prompts.append(earlier[:cut] + fresh)
    return prompts


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def order_of(prompts: list[list[int]]) -> PrefixOrder:
    store = TokenStore.of(prompts)
    return prefix_order(store.tokens, store.offsets[:-1], store.offsets[1:])


def plan_of(
    prompts: list[list[int]], new_tokens: Sequence[int], match_limits: Sequence[int] | None = None
) -> tuple[PrefixOrder, PrefixTree, RunOrder]:
    order = order_of(prompts)
    tree = prefix_tree(order)
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    limits = None if match_limits is None else np.array(match_limits, dtype=np.int64)
    demands = Demands.of(lengths, np.array(new_tokens, dtype=np.int64), match_limits=limits)
    return order, tree, run_order(order, tree, demands[order.order])


def check_order(prompts: list[list[int]], order: PrefixOrder) -> None:
    expected = sorted(range(len(prompts)), key=lambda i: (prompts[i], i))
    assert order.order.tolist() == expected
    pairs = itertools.pairwise([[], *(prompts[i] for i in expected)])
    assert order.shared.tolist() == [common(a, b) for a, b in pairs]


@given(prompts=prompt_lists())
def test_prompts_stand_in_lexicographic_order(prompts: list[list[int]]) -> None:
    check_order(prompts, order_of(prompts))


@given(
    prompts=prompt_lists(),
    window=st.sampled_from([1, 4, 16]),
    ordered_by=st.sampled_from([1, 3, 20]),
    block=st.sampled_from([1, 3, 512]),
    cells=st.sampled_from([1, 8, 64]),
    rows=st.sampled_from([1, 4]),
)
def test_however_they_are_compared(
    prompts: list[list[int]], window: int, ordered_by: int, block: int, cells: int, rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "WINDOW", window)
        patch.setattr(ordering, "SORTED", ordered_by)
        patch.setattr(ordering, "BLOCK", block)
        patch.setattr(ordering, "CELLS", cells)
        patch.setattr(ordering, "ROWS", rows)
        check_order(prompts, order_of(prompts))


@given(prompts=prompt_lists(), region=st.integers(1, 40))
def test_region_by_region(prompts: list[list[int]], region: int) -> None:
    store = TokenStore.of(prompts)
    forgotten = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "REGION", region)
        found = prefix_order(store.tokens, store.offsets[:-1], store.offsets[1:], lambda: forgotten.append(1))
    check_order(prompts, found)
    assert bool(forgotten) == (len(prompts) > 1 and len(store.tokens) > region)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=3, max_size=8),
    block=st.sampled_from([2, 512]),
)
def test_prompts_that_agree_for_long_part_where_the_first_of_them_does(
    prompts: list[tuple[int, int]], block: int
) -> None:
    listed = [[5] * 10 + [1] * length + [token] * bool(token) for length, token in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "WINDOW", 4)
        patch.setattr(ordering, "BLOCK", block)
        check_order(listed, order_of(listed))


def test_what_is_read_one_by_one_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than a region of it stays, and what many share is read about once."""
    head = list(range(1000))
    store = TokenStore.of([head + [n % 7] * (n % 3) for n in range(50)])
    reads: list[list[int]] = [[]]
    count = ordering._Sorting._count

    def counted(self: ordering._Sorting, num_read: int) -> None:
        count(self, num_read)
        reads[-1].append(num_read)

    monkeypatch.setattr(ordering._Sorting, "_count", counted)
    monkeypatch.setattr(ordering, "REGION", 5000)
    prefix_order(store.tokens, store.offsets[:-1], store.offsets[1:], lambda: reads.append([]))
    # The first one after each is read when it has been forgotten.
    assert max(map(sum, reads)) <= 5000 + 1000
    assert 40_000 < sum(map(sum, reads)) < 55_000


@given(prompts=prompt_lists(), data=st.data())
def test_ends_of_prompts_are_sorted_likewise(prompts: list[list[int]], data: st.DataObject) -> None:
    store = TokenStore.of(prompts)
    skipped = [data.draw(st.integers(0, len(prompt))) for prompt in prompts]
    starts = store.offsets[:-1] + np.array(skipped, dtype=np.int64)
    rests = [prompt[skip:] for prompt, skip in zip(prompts, skipped, strict=True)]
    check_order(rests, prefix_order(store.tokens, starts, store.offsets[1:]))


def test_a_large_store_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 30, 400).tolist() for _ in range(7)]
    prompts = [heads[i % 7] + rng.integers(0, 3, i % 11).tolist() for i in range(3000)]
    with TokenWriter(tmp_path) as writer:
        writer.append([np.array(prompt) for prompt in prompts])
        store = writer.finish()
    monkeypatch.setattr(ordering, "REGION", 1 << 16)
    check_order(prompts, prefix_order(store.tokens, store.offsets[:-1], store.offsets[1:], store.forget))


# -- the tree ----------------------------------------------------------------------------------------------


@given(prompts=prompt_lists())
def test_nodes_are_what_two_or_more_share(prompts: list[list[int]]) -> None:
    order = order_of(prompts)
    tree = prefix_tree(order)
    ordered = [prompts[i] for i in order.order]
    expected = {(0, len(prompts), 0)}
    for a, b in itertools.combinations(ordered, 2):
        prefix = a[: common(a, b)]
        having = [place for place, prompt in enumerate(ordered) if prompt[: len(prefix)] == prefix]
        expected.add((having[0], having[-1] + 1, len(prefix)))
    assert len(tree) == len(expected)
    assert set(zip(tree.begin.tolist(), tree.end.tolist(), tree.depth.tolist(), strict=True)) == expected

    def deepest(begin: int, end: int, depth: float) -> int:
        above = [
            n for n in range(len(tree)) if tree.begin[n] <= begin and end <= tree.end[n] and tree.depth[n] < depth
        ]
        return max(above, key=lambda n: tree.depth[n])

    assert tree.parent[0] == -1
    for node in range(1, len(tree)):
        assert tree.parent[node] == deepest(tree.begin[node], tree.end[node], tree.depth[node]) < node
    for place in range(len(prompts)):
        assert tree.leaf_parent[place] == deepest(place, place + 1, np.inf)
    children = [*tree.parent[1:].tolist(), *tree.leaf_parent.tolist()]
    assert tree.fan_out.tolist() == [children.count(node) for node in range(len(tree))]
    shared = sum(len(prompt) for prompt in prompts) - token_statistics(prompts).distinct_tokens
    assert tree.saved_tokens.sum() == shared


# -- the order of the run ----------------------------------------------------------------------------------


def depth_first(prompts: list[list[int]], new_tokens: Sequence[int], limits: Sequence[int]) -> list[int]:
    """By the definition: those that compute the most come first, then long answers; subtrees stay whole."""

    def visit(members: list[int], depth: int) -> list[int]:
        if len(members) == 1:
            return members
        ended = [[i] for i in members if len(prompts[i]) == depth]
        others = sorted((i for i in members if len(prompts[i]) > depth), key=lambda i: (prompts[i], i))
        groups = [list(group) for _, group in itertools.groupby(others, key=lambda i: prompts[i][depth])]
        if len(ended) + len(groups) == 1:
            return visit(members, depth + 1)
        least = [(min(depth, *(limits[i] for i in group)), group) for group in ended + groups]
        least.sort(key=lambda each: (each[0], -max(new_tokens[i] for i in each[1])))
        return [i for _, group in least for i in (group if group in ended else visit(group, depth + 1))]

    return visit(list(range(len(prompts))), 0) if prompts else []


@given(prompts=prompt_lists(), data=st.data())
def test_the_run_is_depth_first_and_begins_with_what_is_computed_anyway_and_long_answers(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    new_tokens = [data.draw(st.integers(1, 4)) for _ in prompts]
    limits = [data.draw(st.integers(0, max(0, len(prompt) - 1))) for prompt in prompts]
    for given_limits in (None, limits):
        run = plan_of(prompts, new_tokens, given_limits)[2]
        known = given_limits or [max(0, len(prompt) - 1) for prompt in prompts]
        assert run.order.tolist() == depth_first(prompts, new_tokens, known)


@given(prompts=prompt_lists(), data=st.data())
def test_the_run_computes_each_distinct_token_once(prompts: list[list[int]], data: st.DataObject) -> None:
    limits = [data.draw(st.integers(0, len(prompt))) for prompt in prompts] if data.draw(st.booleans()) else None
    run = plan_of(prompts, [data.draw(st.integers(1, 4)) for _ in prompts], limits)[2]
    in_run = [prompts[i] for i in run.order]
    for place, prompt in enumerate(in_run):
        before, after = in_run[:place], in_run[place + 1 :]
        assert run.shared[place] == max((common(prompt, other) for other in before), default=0)
        assert run.keep[place] == max((common(prompt, other) for other in after), default=0)
    lengths = np.array([len(prompt) for prompt in in_run], dtype=np.int64)
    statistics = token_statistics(prompts)
    assert (lengths - run.shared).sum() == statistics.distinct_tokens
    if limits is None:
        assert np.maximum(0, np.minimum(run.shared, lengths - 1)).sum() == statistics.best_cached_tokens


def test_equal_answers_leave_lexicographic_order() -> None:
    prompts = [[2, 1], [1, 5], [1], [2], [1, 4]]
    assert plan_of(prompts, [3] * 5)[2].order.tolist() == [2, 4, 1, 3, 0]


def test_the_longest_answer_comes_first_with_all_that_shares_its_prefix() -> None:
    prompts = [[1, 1], [1, 2], [2, 1], [2, 2], [3]]
    assert plan_of(prompts, [5, 1, 2, 9, 6])[2].order.tolist() == [3, 2, 4, 0, 1]


def test_whoever_computes_a_prefix_anyway_comes_before_those_that_find_it() -> None:
    prompts = [[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 3], [1, 2, 3, 7, 6], [1, 2, 3, 7, 5]]
    assert plan_of(prompts, [5, 1, 1, 1, 1], [3, 3, 2, 4, 4])[2].order.tolist() == [2, 0, 4, 3, 1]
    assert plan_of(prompts, [5, 1, 1, 1, 1], [3, 1, 2, 0, 4])[2].order.tolist() == [3, 4, 1, 2, 0]


def test_a_deep_tree() -> None:
    """Each prompt one token longer: as many nodes on a path as prompts."""
    tokens = list(range(3000))
    prompts = [tokens[:length] for length in range(1, 3001)][::-1]
    order, tree, run = plan_of(prompts, range(3000))
    assert order.order.tolist() == run.order.tolist() == list(range(2999, -1, -1))
    assert len(tree) == 3000
    assert run.shared.tolist() == list(range(3000))
