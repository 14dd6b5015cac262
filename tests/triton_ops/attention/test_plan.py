"""Plans of attention: what they hold, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixrt.execution.attention.flat import KernelShape
from tests.support.attention_cases import plan_extends, tree_plan
from tests.support.attention_checks import TREES, share
from triton_ops.attention.plan import AttentionPlan, SharedItems
from triton_ops.implementation import GPU


def test_a_flat_plan_has_no_shared_items() -> None:
    plan = AttentionPlan.flat([0, 1], [5, 900], max_item_len=64)
    assert {len(array) for name, array in vars(plan).items() if name.startswith("shared_")} == {0}
    none = np.zeros(0, np.int32)
    tree = AttentionPlan.tree(
        [0, 1], [5, 900], [0, 0], SharedItems(none, none, none, none, none, none), max_item_len=64
    )
    assert plan.superblock == tree.superblock == 0
    for array, other in zip(plan.arrays(), tree.arrays(), strict=True):
        assert array.dtype == other.dtype == np.int32
        np.testing.assert_array_equal(array, other)


def test_partial_results_of_trees_are_numbered_once() -> None:
    edges, leaves = TREES["two roots, two levels"]
    case = share(edges, leaves)
    plan = tree_plan(case, edges, leaves, group=2, piece=30)
    assert all(array.dtype == np.int32 for array in plan.arrays())
    arrays = vars(plan)
    assert sorted(arrays["row_partials"]) == list(range(len(arrays["row_partials"])))
    starts = (arrays[name] for name in ("row_partial_starts", "tail_partial_starts"))
    row_of = np.concatenate([np.repeat(np.arange(len(some) - 1), np.diff(some)) for some in starts if len(some)])
    rows = dict(zip(arrays["row_partials"].tolist(), row_of.tolist(), strict=True))
    shared = ("shared_query_starts", "shared_query_lens", "shared_partials")
    for start, length, first in zip(*(arrays[name].tolist() for name in shared), strict=True):
        queries = arrays["shared_queries"][start : start + length].tolist()
        assert [rows.pop(first + n) for n in range(length)] == queries
    narrow = ("item_query_starts", "item_query_lens", "item_partials")
    for start, length, first in zip(*(arrays[name].tolist() for name in narrow), strict=True):
        if first >= 0:
            assert [rows.pop(first + n) for n in range(length)] == list(range(start, start + length))
    assert not rows


@pytest.mark.parametrize("query", [-1, 2])
def test_shared_items_of_rows_that_are_not_there(query: int) -> None:
    one = np.ones(1, np.int32)
    shared = SharedItems(0 * one, 0 * one, one, 0 * one, one, query * one)
    with pytest.raises(ValueError, match="query rows must be among the 2"):
        AttentionPlan.tree([0, 1], [5, 5], [1, 1], shared)


@pytest.mark.parametrize("others", [0, 100_000])
def test_a_long_prefix_among_many_short_prompts_is_cut(others: int) -> None:
    """Which have prefixes of `others`, of which they read nothing by themselves."""
    lens = ([others] * 32 + [100_000], [32] * 32 + [16])
    prefix, extend_lens = (np.array(x, np.int32) for x in lens)
    shape = KernelShape(GPU(90, 132), num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    plan = plan_extends(shape, prefix, extend_lens, tail_starts=np.append(prefix[:32], np.int32(0)))
    lengths = plan.item_lens
    assert lengths.max() < 4000
    assert lengths.sum() == 100_016 + 32 * 32
    assert (np.diff(lengths) <= 0).all()


def test_windows_longer_than_any_context() -> None:
    assert sorted(AttentionPlan.flat([0, 1], [5, 9], sliding_window=2**40).item_lens) == [5, 9]
