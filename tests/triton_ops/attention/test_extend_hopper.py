"""Extend attention's kernel for Hopper, and the one that takes its place elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.attention_cases import Case, Edges, packed_qkv
from tests.support.attention_checks import (
    RUNS,
    SCALE,
    assert_matches,
    check_extend,
    check_shared_extend,
    extend,
    int32,
    make_case,
    random_q,
    share,
)
from triton_ops.attention import extend as extend_module
from triton_ops.attention import extend_hopper
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.extend import Extends, extend_attention
from triton_ops.attention.extend_hopper import runs_hopper
from triton_ops.attention.plan import ExtendPlan
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import GPU, gpu_of, has_gluon
from triton_ops.kv.view import KVView

BF16 = {"head_dim": 128, "dtype": torch.bfloat16}
ROWS = 128  # of a tile
H100 = GPU(capability=90, num_sms=132)

# --- which kernel ---


def arguments(**changes: Any) -> dict[str, Any]:
    """Those of `runs_hopper` for 8 KV heads in a group of 4, as a model has them."""
    of = {"dtype": torch.bfloat16, "head_dim": 128, "group": 4, "pool": torch.bfloat16, "spare": 0} | changes
    packed = torch.empty(50, (of["group"] + 2) * 8 * of["head_dim"] + of["spare"], dtype=of["dtype"])
    packed = packed[:, of["spare"] :].view(50, -1, of["head_dim"])
    q, k, v = packed.split([of["group"] * 8, 8, 8], dim=1)
    pool = torch.empty(60, 8, of["head_dim"], dtype=of["pool"])
    kv = KVView(pool, pool, torch.empty(3, 60, dtype=torch.int32))
    out = torch.empty(q.shape, dtype=q.dtype)
    usual = {"gpu": H100, "q": q, "k": k, "v": v, "kv": kv, "scoring": Scoring(SCALE), "out": out}
    usual |= {"tile_tokens": ROWS // of["group"]}
    return usual | {name: value for name, value in changes.items() if name in usual}


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_the_kernel_is_for_plain_heads_of_128(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_hopper, "has_gluon", lambda: True)
    assert runs_hopper(**arguments(group=group))


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": GPU(80, 108)},
        {"gpu": GPU(100, 148)},
        {"dtype": torch.float16},
        {"pool": E4M3},
        {"pool": torch.float32},
        {"head_dim": 64},
        {"group": 3},
        {"group": 16},
        {"tile_tokens": 16},
        {"out": torch.empty(50, 32, 128)},
        {"scoring": Scoring(SCALE, softcap=30.0)},
        {"scoring": Scoring(SCALE, window=4096)},
        {"scoring": Scoring(SCALE, sinks=torch.zeros(32))},
        {"scoring": Scoring(SCALE, alibi_slopes=torch.zeros(32))},
        {"spare": 8},
    ],
    ids=" ".join,
)
def test_what_it_is_not_for(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_hopper, "has_gluon", lambda: True)
    assert not runs_hopper(**arguments(**changes))


def test_it_needs_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_hopper, "has_gluon", lambda: False)
    assert not runs_hopper(**arguments())


# --- both on a GPU ---

on_gpu = pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True, scope="module"
)


@pytest.fixture(params=["gluon", "triton"])
def kernel(request: pytest.FixtureRequest, device: torch.device) -> Iterator[str]:
    """The kernel that runs, which is seen to afterwards."""
    name, launches = request.param, []
    if name == "gluon" and not (has_gluon() and gpu_of(device).has_wgmma):
        pytest.skip("this kernel runs on Hopper alone, with some versions of Triton")
    launch = extend_module.launch_hopper

    def recorded(*given: Any, **keywords: Any) -> None:
        launches.append(given)
        launch(*given, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RUNS, "impl", "triton")
        patch.setattr(extend_module, "launch_hopper", recorded)
        if name == "triton":
            patch.setattr(extend_hopper, "has_gluon", lambda: False)
        yield name
    assert bool(launches) == (name == "gluon")


def long_tiles(prefix: list[int], counts: list[int], group: int, most: int | None = None) -> ExtendPlan:
    """The plan in tiles of long extends, though these may be short."""
    starts = np.cumsum(counts) - counts
    plan = ExtendPlan.of_extends(prefix, starts, counts, tile_tokens=ROWS // group, max_item_len=most)
    return plan.to(torch.get_default_device())


@on_gpu
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("packed", [False, True])
def test_groups(group: int, packed: bool, kernel: str, device: torch.device) -> None:
    """Several whole tiles of prefixes and of new tokens, in one item or cut."""
    case = make_case([900, 300, 129, 260, 1], num_kv_heads=2, interleaved=packed, **BF16)
    check_extend(case, [400, 0, 1, 256, 0], group, packed=packed)
    case = make_case([2000, 70], num_kv_heads=1, **BF16)
    check_extend(case, [1900, 0], group, packed=packed)


@on_gpu
@pytest.mark.parametrize("most", [None, 256, 192])
def test_borders_of_tiles(most: int | None, kernel: str, device: torch.device) -> None:
    """Prefixes, extends, tiles and items that end at or beside one another's borders; empty extends."""
    pairs = [(0, 1), (0, 31), (0, 32), (0, 33), (1, 1), (127, 1), (128, 1), (129, 1), (0, 127), (0, 128), (0, 129)]
    pairs += [(0, 0), (5, 0), (63, 65), (64, 64), (65, 63), (255, 257), (700, 3), (1, 513), (256, 128), (383, 100)]
    for some in ([*pairs], [(p + 128, n) for p, n in pairs], *([pair] for pair in pairs)):
        prefix, counts = [p for p, _ in some], [n for _, n in some]
        if any(counts):
            case = make_case([p + n for p, n in some], num_kv_heads=2, **BF16)
            check_extend(case, prefix, 4, long_tiles(prefix, counts, 4, most))


@on_gpu
@pytest.mark.parametrize("seed", range(6))
def test_trees(seed: int, kernel: str, device: torch.device) -> None:
    """Prefixes that others read, too: partial results of both kinds merge."""
    edges: Edges = [(-1, 300), (0, 170), (0, 30), (1, 120), (1, 290), (0, 200)]
    leaves = [3, 4, 2, 3, 5, 4]
    case = share(edges, leaves, num_kv_heads=2, **BF16)
    check_shared_extend(case, edges, leaves, (1, 2, 4, 8)[seed % 4], seed)


@on_gpu
def test_more_work_than_programs(kernel: str, device: torch.device) -> None:
    """Many requests of all lengths: each program computes several items, of which it keeps nothing."""
    rng = np.random.default_rng(0)
    prefix, counts = (rng.integers(low, high, size=60).tolist() for low, high in ((0, 700), (0, 150)))
    case = make_case([p + n for p, n in zip(prefix, counts, strict=True)], num_kv_heads=4, **BF16)
    check_extend(case, prefix, 4, long_tiles(prefix, counts, 4, 512))
    check_extend(case, prefix, 4)


@on_gpu
def test_requests_do_not_disturb_one_another(kernel: str, device: torch.device) -> None:
    case = make_case([200, 190, 180], **BF16)
    q, k, v = (x.bfloat16() for x in packed_qkv(120, 4, 2, 128))
    clean = extend(case, [160, 150, 140], q, k, v)
    case.k_buffer[case.req_to_token[case.rows[1], 3].long()] = torch.nan
    out = extend(case, [160, 150, 140], q, k, v)
    assert out[40:80].isnan().any()
    others = [*range(40), *range(80, 120)]
    assert torch.equal(out[others], clean[others])


@on_gpu
def test_nothing_to_do(kernel: str, device: torch.device) -> None:
    """Items of no tokens get zeros where they have rows, and leave everything else alone."""
    case = make_case([20, 90], **BF16)
    q, k, v = (x.bfloat16() for x in packed_qkv(70, 4, 2, 128))
    plan = long_tiles([20, 20], [0, 70], 2)
    empty = replace(plan, item_lens=torch.zeros_like(plan.item_lens))
    out = torch.full((80, 4, 128), torch.nan, dtype=torch.bfloat16)
    extend(case, [20, 20], q, k, v, empty, out=out[:70])
    assert not out[:70].any()
    assert out[70:].isnan().all()


@on_gpu
def test_slots_beyond_two_to_the_31_elements(kernel: str, device: torch.device) -> None:
    """The memory of the pool is never touched but at a few slots, so it costs address space only."""
    num_slots = 2**31 // (4 * 128) + 200
    pool = torch.empty(num_slots, 4, 128, dtype=torch.bfloat16)
    keys = random_q(180, 4, 128, torch.bfloat16)
    slots = int32([*range(num_slots - 130, num_slots), *range(5, 15)])
    pool[slots.long()] = keys[:140]
    q = random_q(40, 16, 128, torch.bfloat16)
    extends = Extends(int32([0]), int32([140]), int32([0]), int32([40]))
    kv, scoring = KVView(pool, pool, slots.view(1, 140)), Scoring(SCALE)
    out = extend_attention(q, keys[140:], keys[140:], kv, extends, None, scoring, **RUNS)
    assert_matches(out, dense_attention(q, keys, keys, scoring)[0], torch.bfloat16)


@on_gpu
def test_a_captured_graph_serves_other_extends(kernel: str, device: torch.device) -> None:
    """Of other lengths and plans, padded: items of nothing at the end."""
    rounds = [([300, 0, 17], [40, 130, 2]), ([0, 2000, 0], [10, 100, 0]), ([5, 5, 900], [1, 1, 170])]
    num_tokens, num_items, num_partials, num_kv_heads = 180, 60, 900, 2

    def padded(prefix: list[int], counts: list[int]) -> ExtendPlan:
        plan = long_tiles(prefix, counts, 4, 256)
        arrays: dict[str, Tensor] = {}
        for name, value, size in (
            ("item_requests", 0, num_items),
            ("item_query_starts", num_tokens, num_items),
            ("item_starts", 0, num_items),
            ("item_lens", 0, num_items),
            ("item_partials", -1, num_items),
            ("row_partials", 0, num_partials),
            ("row_partial_starts", 0, num_tokens + 1),
        ):
            array = getattr(plan, name)
            last = int(array[-1]) if name == "row_partial_starts" and len(array) else value
            arrays[name] = torch.cat([array, torch.full((size - len(array),), last, dtype=torch.int32)])
        return replace(plan, **arrays)

    def kept(case: Case, prefix: list[int]) -> tuple[Tensor, ...]:
        extends = case.extends(prefix)
        fields = extends.req_pool_indices, extends.prefix_lens, extends.extend_start_loc, extends.extend_seq_lens
        table = torch.zeros(6, 2200, dtype=torch.int32)
        table[:, : case.req_to_token.shape[1]] = case.req_to_token
        pool = torch.full((2, 2300, num_kv_heads, 128), torch.nan, dtype=torch.bfloat16)
        pool[0, : len(case.k_buffer)], pool[1, : len(case.v_buffer)] = case.k_buffer, case.v_buffer
        return (*fields, table, pool)

    cases = [
        make_case([p + n for p, n in zip(*of, strict=True)], num_kv_heads=num_kv_heads, **BF16) for of in rounds
    ]
    own, plan = [x.clone() for x in kept(cases[0], rounds[0][0])], padded(*rounds[0])
    q, k, v = (x.bfloat16() for x in packed_qkv(num_tokens, 8, num_kv_heads, 128))
    out = torch.empty(num_tokens, 8, 128, dtype=torch.bfloat16)

    def run() -> None:
        kv = KVView(own[5][0], own[5][1], own[4])
        extend_attention(q, k, v, kv, Extends(*own[:4]), plan, Scoring(SCALE), out=out, **RUNS)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number in (0, 1, 2, 0):
        case, (prefix, counts) = cases[number], rounds[number]
        for tensor, other in zip(own, kept(case, prefix), strict=True):
            tensor.copy_(other)
        for tensor, other in zip(plan.arrays(), padded(prefix, counts).arrays(), strict=True):
            tensor.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        start = 0
        for b, (cached, new) in enumerate(zip(prefix, counts, strict=True)):
            rows = slice(start, start + new)
            keys, values = (torch.cat([x[b][:cached], y[rows]]) for x, y in ((case.keys, k), (case.values, v)))
            assert_matches(out[rows], dense_attention(q[rows], keys, values, Scoring(SCALE))[0], torch.bfloat16)
            start += new
        assert out[start:].isnan().all()
