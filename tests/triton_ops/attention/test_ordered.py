"""Deterministic attention: the bits of a token's result depend on the tokens up to it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layers.products import same_bits
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.attention.tuning import PlanTuning, TreeCosts
from tests.support.attention_cases import Case, make_case, share
from tests.support.attention_checks import interpreted_only
from tests.support.ordered_reads import check_ordered_reads
from tests.support.ordered_ways import RISES, RISING_LEN, rising
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.extend import Extends
from triton_ops.attention.ordered import MAX_CHAIN, ordered_decode, ordered_extend
from triton_ops.attention.plan import AttentionPlan, ExtendPlan
from triton_ops.implementation import GPU, Impl, gpu_of

SUPERBLOCK = 64  # of the kernel: short, so that short contexts have several
HEADS, GROUP = 4, 2
SCALE = 0.3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "window": {"window": 40},
    "sinks": {"sinks": torch.linspace(-1.0, 2.0, HEADS)},
    "alibi": {"alibi_slopes": torch.linspace(0.01, 0.5, HEADS)},
}
# In the interpreter, which takes seconds for each, all others are long tests.
FEW = ((torch.float32, "window"), (torch.bfloat16, "softcap"))
few_options = interpreted_only(lambda given: (given["dtype"], named(OPTIONS, given["options"])) in FEW)
windows = interpreted_only(lambda given: (given["dtype"], named(OPTIONS, given["options"])) == FEW[0])
soft_caps = interpreted_only(lambda given: (given["dtype"], named(OPTIONS, given["options"])) == FEW[1])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def named(values: dict[str, Any], value: Any) -> str:
    return next(name for name, other in values.items() if other is value)


@pytest.fixture(autouse=True)
def products(impl: Impl, device: torch.device) -> Iterator[None]:
    """In the interpreter, products as tensor cores add them."""
    if impl == "triton" and device.type == "cpu":
        from tests.support.tensor_cores import tensor_cores  # imports Triton's interpreter

        with tensor_cores():
            yield
    else:
        with nullcontext():
            yield


class Requests:
    """Requests whose every token has a query: what each of them gets, in one pass without a cache, is `out`."""

    def __init__(self, case: Case, impl: Impl, options: dict[str, Any]) -> None:
        here = {name: x.to(case.rows.device) if isinstance(x, Tensor) else x for name, x in options.items()}
        self.case, self.scoring = case, Scoring(SCALE, **here)
        self._impl: Impl = impl
        generator = torch.Generator().manual_seed(1)
        head_dim = case.k_buffer.shape[2]
        self.q = [
            (torch.randn(int(n), HEADS, head_dim, generator=generator) * 3).to(case.dtype) for n in case.seq_lens
        ]
        self.out, self.lse = zip(*self.extended([0] * len(self.q)), strict=True)

    def extended(
        self,
        prefix_lens: list[int],
        requests: list[int] | None = None,
        *,
        tile_tokens: int | None = None,
        plan: ExtendPlan | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Results and log-sum-exps of what comes after the prefix of each of the `requests`."""
        chosen = list(range(len(self.q))) if requests is None else requests
        prefix = torch.tensor(prefix_lens, dtype=torch.int32)
        lens = self.case.seq_lens[chosen] - prefix
        extends = Extends(self.case.rows[chosen], prefix, (lens.cumsum(0) - lens).int(), lens)
        q = torch.cat([self.q[i][start:] for i, start in zip(chosen, prefix_lens, strict=True)])
        lse = torch.empty(q.shape[:2])
        if tile_tokens is not None:
            numbers = (x.numpy(force=True) for x in (prefix, extends.extend_start_loc, lens))
            plan = ExtendPlan.of_extends(
                *numbers, tile_tokens=tile_tokens, sliding_window=self.scoring.window, superblock=SUPERBLOCK
            ).to(q.device)
        out = ordered_extend(
            q, self.case.kv, extends, plan, self.scoring, lse=lse, superblock=SUPERBLOCK, impl=self._impl
        )
        sizes = lens.tolist()
        return list(zip(out.split(sizes), lse.split(sizes), strict=True))

    def decoded(self, plan: AttentionPlan, lens: list[int], requests: list[int]) -> tuple[Tensor, Tensor]:
        """Those of the last of `lens` tokens of each of the `requests`."""
        q = torch.stack([self.q[i][n - 1] for i, n in zip(requests, lens, strict=True)])
        lse = torch.empty(q.shape[:2])
        rows = self.case.rows[requests]
        return ordered_decode(q, self.case.kv, rows, plan, self.scoring, lse=lse, impl=self._impl), lse

    def check_decodes(self, plan: AttentionPlan, lens: list[int], requests: list[int] | None = None) -> None:
        chosen = list(range(len(self.q))) if requests is None else requests
        out, lse = self.decoded(plan, lens, chosen)
        for i, n, one, its_lse in zip(chosen, lens, out, lse, strict=True):
            assert same_bits(one, self.out[i][n - 1]), (i, n)
            assert same_bits(its_lse, self.lse[i][n - 1]), (i, n)

    def flat(
        self, lens: list[int], requests: list[int] | None = None, max_item_len: int | None = None
    ) -> AttentionPlan:
        rows = self.case.rows if requests is None else self.case.rows[requests]
        return AttentionPlan.flat(
            rows.numpy(force=True),
            lens,
            max_item_len=max_item_len,
            sliding_window=self.scoring.window,
            superblock=SUPERBLOCK,
        ).to(rows.device)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@few_options
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_attention(dtype: torch.dtype, impl: Impl, options: dict[str, Any]) -> None:
    case = make_case([1, 150, 33], dtype=dtype, head_dim=20)
    requests = Requests(case, impl, options)
    for b, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        out, lse = dense_attention(requests.q[b], keys, values, requests.scoring)
        torch.testing.assert_close(requests.out[b].double(), out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(requests.lse[b].double(), lse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@windows
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_and_neighbours_change_nothing(dtype: torch.dtype, impl: Impl, options: dict[str, Any]) -> None:
    requests = Requests(make_case([100, 33, 1, 64, 170], dtype=dtype, head_dim=32), impl, options)
    for prefix_lens, chosen in (
        ([99, 17, 0, 63, 64], [0, 1, 2, 3, 4]),
        ([130, 5], [4, 0]),
        ([65], [4]),
        ([1, 32, 16], [3, 1, 0]),
    ):
        found = requests.extended(prefix_lens, chosen)
        for i, start, (out, lse) in zip(chosen, prefix_lens, found, strict=True):
            assert same_bits(out, requests.out[i][start:]), (i, start)
            assert same_bits(lse, requests.lse[i][start:]), (i, start)


@soft_caps
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decodes_have_the_bits_of_extends(dtype: torch.dtype, impl: Impl, options: dict[str, Any]) -> None:
    """Whole or cut, and beside empty rows."""
    lens = [100, 33, 1, 64, 170, 65]
    requests = Requests(make_case(lens, dtype=dtype, head_dim=32), impl, options)
    for max_item_len in (None, 1, 100):
        requests.check_decodes(requests.flat(lens, max_item_len=max_item_len), lens)
    some, shorter = [4, 1, 0], [140, 20, 97]
    for max_item_len in (None, 16):
        requests.check_decodes(requests.flat(shorter, some, max_item_len), shorter, some)


@interpreted_only(lambda given: given["dtype"] == torch.bfloat16)
def test_plans_for_windows_begin_at_them(dtype: torch.dtype, impl: Impl) -> None:
    """Not at the beginning, which the kernel would read for nothing."""
    requests = Requests(make_case([100, 170], dtype=dtype), impl, {"window": 40})
    q = requests.q[0]
    shape = KernelShape(gpu_of(q.device), HEADS, HEADS // GROUP, q.shape[2], dtype)
    found = requests.extended([10, 33], tile_tokens=shape.tile_tokens())
    for i, start, (out, lse) in zip((0, 1), (10, 33), found, strict=True):
        assert same_bits(out, requests.out[i][start:])
        assert same_bits(lse, requests.lse[i][start:])
    assert requests.flat([100, 170]).item_starts.tolist() == [48, 128], "multiples of 16"


def test_rows_without_tokens_are_zero(impl: Impl) -> None:
    case = make_case([0, 70, 0])
    q = torch.ones(3, HEADS, 16)
    plan = AttentionPlan.flat(case.rows.numpy(force=True), [0, 70, 0], superblock=SUPERBLOCK).to(q.device)
    lse = torch.empty(3, HEADS)
    out = ordered_decode(q, case.kv, case.rows, plan, Scoring(SCALE), lse=lse, impl=impl)
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -torch.inf).all()
    assert out[1].isfinite().all()


@interpreted_only(lambda given: given["name"] in ("far", "a jump"))
@pytest.mark.parametrize("name", RISES)
def test_scores_may_rise_along_a_superblock(name: str, impl: Impl) -> None:
    """The base of its first tile serves for all others, as far as float32 can hold the weights."""
    found, case, q, scoring = rising(name, impl)
    assert all(same_bits(other, found[0]) for other in found)
    if name not in ("tiny values", "a jump"):
        slots = case.req_to_token[case.rows[0], :RISING_LEN].long()
        out, lse = dense_attention(q[None], case.k_buffer[slots], case.v_buffer[slots], scoring)
        got, got_lse = found[0].double().split([HEADS * 16, HEADS])
        torch.testing.assert_close(got / out.abs().max(), out.flatten() / out.abs().max(), atol=1e-2, rtol=2e-2)
        torch.testing.assert_close(got_lse, lse[0], atol=1e-2, rtol=1e-3)


FREE = PlanTuning(costs=TreeCosts(item=0.0, launches=-1.0, partial_crossings=0.0), mean_partials=64)
TREES = {
    "fan": ([(-1, 300), (0, 9), (0, 70), (0, 1)], [1, 2, 3]),
    "forks": ([(-1, 100), (0, 50), (0, 30), (1, 200), (1, 7), (2, 64)], [3, 4, 4, 5, 5, 2]),
    "levels within a superblock": (  # which end at 64, 80, 96, 112 and 128
        [(-1, 70), (0, 20), (1, 10), (2, 14), (3, 20), (4, 3), (4, 5), (3, 2), (2, 1), (1, 4)],
        [5, 6, 7, 8, 9],
    ),
    "whole superblocks": ([(-1, 64), (0, 64), (1, 64), (2, 65), (2, 1), (1, 3)], [3, 4, 5, 3]),
    "a forest": ([(-1, 40), (-1, 130), (0, 3), (0, 4), (1, 100), (1, 16), (5, 1), (5, 2)], [2, 3, 4, 6, 7, 4]),
}


@interpreted_only(
    lambda given: given["dtype"] == torch.bfloat16 and given["tree"] is TREES["levels within a superblock"]
)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_have_the_bits_of_flat_plans(tree: Any, dtype: torch.dtype, impl: Impl) -> None:
    """Each prefix is read once, as far as superblocks and multiples of 16 allow."""
    edges, leaves = tree
    case = share(edges, leaves, dtype=dtype, head_dim=32)
    requests = Requests(case, impl, {})
    lens = case.seq_lens.tolist()
    shape = KernelShape(gpu_of(case.rows.device), HEADS, HEADS // GROUP, 32, dtype)
    rows, table = case.rows.numpy(force=True), case.req_to_token.numpy(force=True)
    planner = AttentionPlanner(shape, (None,), table, dtype, tree=True, tuning=FREE, superblock=SUPERBLOCK)
    plan = planner.plan_padded_decodes(rows, np.array(lens, np.int32)).decode[None]
    assert any(plan.shared_lens)
    check_ordered_reads(plan, lens, superblock=SUPERBLOCK)
    assert any(plan.item_sources >= 0) == (tree is not TREES["whole superblocks"]), "tails go on from a superblock"
    if tree is TREES["levels within a superblock"]:
        assert plan.shared_levels.max() == MAX_CHAIN - 1, "and so do shared items"
    requests.check_decodes(plan.to(case.rows.device), lens)

    # Extends of the last few tokens, in tiles.
    counts = np.minimum(np.array([1, 9, 20, 3, 40, 2], np.int32)[: len(lens)], lens)
    prefix = np.array(lens, np.int32) - counts
    host = {
        "req_pool_indices": rows,
        "seq_lens": np.array(lens, np.int32),
        "prefix_lens": prefix,
        "extend_start_loc": counts.cumsum(dtype=np.int32) - counts,
        "extend_seq_lens": counts,
    }
    extends = planner.plan(host, len(rows)).extend[None]
    positions = [int(p) + 1 + j for p, n in zip(prefix, counts, strict=True) for j in range(n)]
    check_ordered_reads(extends, positions, host, superblock=SUPERBLOCK)
    found = requests.extended(prefix.tolist(), plan=extends.to(case.rows.device))
    for i, (start, (out, lse)) in enumerate(zip(prefix, found, strict=True)):
        assert same_bits(out, requests.out[i][start:]), (i, start)
        assert same_bits(lse, requests.lse[i][start:]), (i, start)


def test_many_empty_rows_are_zero(impl: Impl) -> None:
    """More than a tile has, in one item: what is there already does not stay."""
    lens = [0] * 9 + [20] + [0] * 2
    case = make_case(lens)
    plan = AttentionPlan.flat(case.rows.numpy(force=True), lens, superblock=SUPERBLOCK).to(case.rows.device)
    q = torch.ones(12, 8, 16)
    out, lse = torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan)
    ordered_decode(q, case.kv, case.rows, plan, Scoring(SCALE), out=out, lse=lse, impl=impl)
    empty = [row for row, length in enumerate(lens) if not length]
    assert (out[empty] == 0).all()
    assert (lse[empty] == -torch.inf).all()
    assert out[9].isfinite().all()


@pytest.mark.parametrize("window", [512, 1024, 4096, None])
def test_plans_have_room(window: int | None) -> None:
    """For all that is cut and shared, in padded plans of any lengths."""
    chance = np.random.default_rng(0)
    shape = KernelShape(GPU(90, 132), 32, 8, 128, torch.bfloat16)
    for count in (1, 2, 60, 130, 512):
        table = np.arange(count * 20_000, dtype=np.int32).reshape(count, 20_000)
        table[:, :9000] = table[0, :9000]  # all share them
        planner = AttentionPlanner(shape, (window,), table, torch.bfloat16, tree=True, superblock=1024)
        rows = np.arange(count, dtype=np.int32)
        lens = chance.integers(9010, 19_000, count).astype(np.int32)
        plans = planner.plan_padded_decodes(rows, lens)
        again = planner.plan_padded_decodes(rows, lens - 1, [plans.shape])
        for plan, other in zip(plans.decode.values(), again.decode.values(), strict=True):
            assert [x.shape for x in plan.arrays()] == [x.shape for x in other.arrays()]
        if window is None and count >= 60:
            shared = plans.decode[None].shared_starts[plans.decode[None].shared_query_lens > 0]
            assert shared.max(initial=0) >= 1024, "the first superblocks are shared, if not all"
        elif window is None:
            assert len(plans.decode[None].item_lens[plans.decode[None].item_lens > 0]) > count, "long ones are cut"
