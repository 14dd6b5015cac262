"""Plans of a pass: their arrays in a buffer, plans that grow with their requests, and the pages' example."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layers.input_metadata import InputMetadata
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.pass_plans import CUT, WHOLE, PassPlans, PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.attention.tuning import PlanTuning, TreeCosts
from tests.execution.attention.test_planner import H200, TREE, PaddedExtends, families, int32, planner
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.plan import AttentionPlan, Int32Array
from triton_ops.implementation import GPU
from triton_ops.kv.view import KVView

PAGE = Path(__file__).resolve().parents[3] / "docs/architecture/tree-attention.md"


def assert_same(found: PassPlans[Int32Array], expected: PassPlans[Int32Array]) -> None:
    for here, there in zip(found.arrays(), expected.arrays(), strict=True):
        np.testing.assert_array_equal(here, there)


def in_buffer(plans: PassPlans[Int32Array]) -> tuple[Int32Array, PassPlans[Int32Array]]:
    """All arrays one after another in a buffer, and the plans of these places."""
    words = np.concatenate(plans.arrays())
    ends = np.cumsum([len(array) for array in plans.arrays()])
    return words, plans.with_arrays(np.split(words, ends[:-1]))


# --- growing ---


@pytest.mark.parametrize(
    ("lens", "head", "shape"),
    [
        (int32(range(60, 140)), 0, WHOLE),
        (int32([*range(60, 130), 0, 0, 0]), 0, WHOLE),  # padded
        (int32(range(3010, 3090)), 3000, TREE),
    ],
)
def test_plans_that_have_grown_are_those_made_anew(lens: Any, head: int, shape: PlanShape) -> None:
    """In a buffer, as in a captured pass; of requests that all are longer by as much."""
    rows, table = np.arange(len(lens), dtype=np.int32), families(len(lens), 3200, head)
    here = planner(H200, None, num_kv_heads=8, req_to_token=table, tree=True)
    words, plans = in_buffer(here.plan_padded_decodes(rows, lens))
    before = words.copy()
    assert plans.shape == shape
    for step in (1, 2, 40):
        longer = lens + step * (lens > 0).astype(np.int32)
        plans.grow(longer[lens > 0])
        assert_same(plans, here.plan_padded_decodes(rows, longer))
    assert (words != before).sum() == 2 * (lens > 0).sum(), "an item and a length of each request"


@pytest.mark.parametrize("window", [None, 300])
def test_cut_plans_that_have_grown_read_each_position_once(window: int | None) -> None:
    lens = int32([9000, 40, 700, 0])
    here = planner(H200, window, num_kv_heads=8)
    _, plans = in_buffer(here.plan_padded_decodes(np.arange(4, dtype=np.int32), lens))
    assert plans.shape == CUT
    plans.grow(lens[:3] + 50)
    plan = plans.decode[window]
    for row, length in enumerate((lens + 50 * (lens > 0)).tolist()):
        own = plan.item_query_starts == row
        positions = [
            position
            for start, count in zip(plan.item_starts[own], plan.item_lens[own], strict=True)
            for position in range(start, start + count)
        ]
        first = 0 if window is None else max(0, int(lens[row]) - window)
        assert sorted(positions) == list(range(first, length))


def test_arrays_lie_where_the_shape_says() -> None:
    """Plans that share, and those of padding alone, which come back from the device in the same order."""
    one = PaddedExtends((2900,) * 90, (3,) * 90, (2950,) * 9, 1500, num_extends=100, num_rows=20)
    here = planner(H200, None, 300, num_kv_heads=8, req_to_token=families(170, 3000, 2800), tree=True)
    plans = one.plans(here)
    assert plans is not None
    idle = PaddedExtends((), (), (), 1500, num_extends=100, num_rows=20).plans(here, plans.shape)
    assert idle is not None
    (words, places), (idle_words, _) = in_buffer(plans), in_buffer(idle)
    assert len(words) == len(idle_words)
    assert_same(places, plans)
    words[:] = idle_words
    assert_same(places, idle)
    device = plans.with_arrays(torch.from_numpy(array) for array in plans.arrays())
    assert list(device.decode) == list(device.extend) == list(plans.decode)
    for window, plan in plans.extend.items():
        assert device.extend[window].tile_tokens == plan.tile_tokens
        for name, array in vars(plan).items():
            assert isinstance(array, int) or (getattr(device.extend[window], name).numpy() == array).all()
    assert list(plans.numbered()) == [f"plan {number}" for number in range(len(plans.arrays()))]


# --- the example of the architecture pages ---


@pytest.fixture(scope="module")
def example() -> tuple[Int32Array, Int32Array, AttentionPlan[Int32Array]]:
    """The table, the lengths of A, B and C, and their plan, on a card where nothing but reading costs."""
    table, slots = np.zeros((3, 420), np.int32), np.arange(1, 413, dtype=np.int32)
    table[0, :405] = slots[:405]
    table[1, :403] = [*slots[:400], *slots[405:408]]
    table[2, :304] = [*slots[:300], *slots[408:]]
    lens = int32([405, 403, 304])
    free = TreeCosts(operations=np.inf, item=0.0, partial_crossings=0.0, launches=0.0)
    shape = KernelShape(GPU(90, 2), num_heads=16, num_kv_heads=8, head_dim=16, dtype=torch.float32)
    here = AttentionPlanner(shape, (None,), table, torch.float32, tree=True, tuning=PlanTuning(costs=free))
    host = InputMetadata.host_arrays(range(3), lens, lens - 1, np.zeros(3, np.int32))
    return table, lens, here.plan(host, 0).decode[None]


def tables() -> list[list[list[str]]]:
    """The tables of the page, row by row, without their heads."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.read_text().splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table[2:] for table in found if table]


def test_the_items_of_the_example_are_those_of_the_page(
    example: tuple[Int32Array, Int32Array, AttentionPlan[Int32Array]],
) -> None:
    _, lens, plan = example
    _, items, merging = tables()
    rows = []
    for group in ("shared", "item"):
        names = ("req_pool_indices", "starts", "lens", "query_starts", "query_lens", "partials")
        columns = zip(*(getattr(plan, f"{group}_{name}").tolist() for name in names), strict=True)
        for number, (row, start, length, first, count, partial) in enumerate(columns):
            queries = range(first, first + count)
            if group == "shared":
                queries = plan.shared_queries[first : first + count].tolist()
            partials = "none" if partial < 0 else ", ".join(map(str, range(partial, partial + count)))
            rows.append(
                [
                    f"{'own' if group == 'item' else group} {number}",
                    "ABC"[row],
                    f"{start} to {start + length}",
                    ", ".join("ABC"[query] for query in queries),
                    partials,
                ]
            )
    assert items == rows
    starts = plan.tail_partial_starts.tolist()
    taken = [plan.row_partials[start:end].tolist() for start, end in pairwise(starts)]
    assert merging == [["ABC"[i], ", ".join(map(str, own))] for i, own in enumerate(taken)]
    read = int(plan.item_lens.sum() + plan.shared_lens.sum())
    assert f"they read {read} positions; without sharing it were {int(lens.sum()):,}" in PAGE.read_text()


def test_the_example_attends_to_all_that_is_each_one_s_own(
    example: tuple[Int32Array, Int32Array, AttentionPlan[Int32Array]],
) -> None:
    table, lens, plan = example
    torch.manual_seed(0)
    q, k, v = (torch.randn(count, heads, 16) for count, heads in ((3, 16), (413, 8), (413, 8)))
    kv = KVView(k, v, torch.from_numpy(table))
    out = decode_attention(q, kv, plan.to(q.device), Scoring(0.3), impl="torch")
    for row, length in enumerate(lens.tolist()):
        slots = torch.from_numpy(table[row, :length]).long()
        expected, _ = dense_attention(q[row : row + 1], k[slots], v[slots], Scoring(0.3))
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=1e-5, rtol=1e-5)


def test_the_pieces_that_the_page_tells_of() -> None:
    table = np.arange(3 * 39_000, dtype=np.int32).reshape(3, 39_000)
    table[1, :38_000] = table[0, :38_000]
    table[2, :30_000] = table[0, :30_000]
    lens = int32([38_005, 38_003, 30_004])
    shape = KernelShape(H200, num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    here = AttentionPlanner(shape, (None,), table, torch.bfloat16, tree=True)
    host = InputMetadata.host_arrays(range(3), lens, lens - 1, np.zeros(3, np.int32))
    counts = here.plan(host, 0).decode[None].shared_query_lens
    words = " ".join(PAGE.read_text().split())
    assert f"{(counts == 3).sum()} pieces of the document and {(counts == 2).sum()} of the question" in words
