"""Decode attention, in torch and by the kernels, against dense attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.attention_cases import packed_qkv, shared_plan
from tests.support.attention_checks import (
    BOTH,
    EACH,
    FEW_SHAPES,
    FEW_TREES,
    OPTIONS,
    RUNS,
    SHAPES,
    TREES,
    check_decode,
    decode,
    fan,
    interpreted_only,
    make_case,
    options_of,
    plain_or,
    random_q,
    random_tree,
    require_plain,
    share,
    tree_case,
)
from triton_ops.attention.decode import SHORT_ITEM
from triton_ops.attention.plan import AttentionPlan, SharedItems

pytestmark = pytest.mark.usefixtures("impl", "pool")


@interpreted_only(
    lambda given: (
        (given["head_dim"], given["group"]) in (FEW_SHAPES if given["pool"] == "plain" else ((80, 7), (256, 1)))
    )
)
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_decode_matches_dense_attention(head_dim: int, group: int) -> None:
    lengths = [1, 2, SHORT_ITEM - 1, SHORT_ITEM, SHORT_ITEM + 1, 2 * SHORT_ITEM, 0, 200]
    case = make_case(lengths, head_dim=head_dim)
    q = random_q(len(lengths), 2 * group, head_dim)
    check_decode(case, q)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode_in_half_precision(dtype: torch.dtype) -> None:
    case = make_case([5, 90], dtype=dtype)
    q = random_q(2, 4, 16, dtype)
    check_decode(case, q)


@pytest.mark.parametrize(("scattered", "interleaved"), [(False, False), (True, True)])
def test_decode_reads_strided_queries_and_pools(scattered: bool, interleaved: bool) -> None:
    case = make_case([7, 70, 3], scattered=scattered, interleaved=interleaved)
    q, _, _ = packed_qkv(3, 4, 2, 16)
    check_decode(case, q)


def test_decode_of_an_empty_batch() -> None:
    case = make_case([])
    assert decode(case, random_q(0, 4, 16)).shape == (0, 4, 16)


def test_decode_rows_without_kv_are_zero() -> None:
    case = make_case([0, 3, 0])
    q = random_q(3, 4, 16)
    out = decode(case, q)
    assert (out[[0, 2]] == 0).all()
    # All padded; then a plan that covers row 1 only, and twice with nothing.
    assert (decode(make_case([0, 0]), q[:2]) == 0).all()
    row, other = case.rows[[1, 0]].tolist()
    plan = case.plan([row, row, other], [0, 3, 0], [3, 0, 0], [1, 1, 0], [1, 1, 3])
    torch.testing.assert_close(decode(case, q, plan), out, atol=1e-5, rtol=1e-5)


def test_decode_rows_do_not_disturb_one_another() -> None:
    case = make_case([30, 50, 64, 9])
    q = random_q(4, 4, 16)
    clean = decode(case, q)
    q[1] = torch.nan
    case.v_buffer[case.req_to_token[case.rows[3], 4].long()] = torch.nan
    out = decode(case, q)
    assert out[[1, 3]].isnan().any(-1).any(-1).all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@interpreted_only(lambda given: given["name"] in (FEW_TREES if given["pool"] == "plain" else FEW_TREES[1:2]))
@pytest.mark.parametrize("name", TREES)
def test_decode_computes_shared_items(name: str) -> None:
    case, plan = tree_case(*TREES[name])
    q = random_q(len(case.keys), 4, 16)
    check_decode(case, q, plan)


@interpreted_only(
    lambda given: (
        given["name"] == "two roots, two levels" or (given["name"], given["pool"]) == ("fan-out 20", "plain")
    )
)
@pytest.mark.parametrize("name", TREES)
def test_decode_of_trees(name: str) -> None:
    """The leaves in no order, segments cut and whole, padded items."""
    edges, leaves = TREES[name]
    leaves = leaves[::2] + leaves[1::2]
    case = share(edges, leaves)
    q = random_q(len(leaves), 4, 16)
    check_decode(case, q, shared_plan(case, edges, leaves, group=2, piece=1000))
    check_decode(case, q, shared_plan(case, edges, leaves, group=2, piece=37, max_item_len=30, padding=3, seed=1))


@interpreted_only(lambda given: given["seed"] in (range(5) if given["pool"] == "plain" else (9, 10)))
@pytest.mark.parametrize("seed", range(12))
def test_decode_of_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges, leaves = random_tree(rng)
    dtype = (torch.float32, torch.float16)[rng.integers(2)]
    num_kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 3, 4, 8]))
    case = share(edges, leaves, dtype=dtype, num_kv_heads=num_kv_heads, head_dim=int(rng.choice([16, 24, 32])))
    q = random_q(len(leaves), group * num_kv_heads, case.k_buffer.shape[2], dtype)
    plan = shared_plan(
        case,
        edges,
        leaves,
        group=group,
        piece=int(rng.choice([1000, 64, 17])),
        max_item_len=int(rng.choice([1000, 20])),
        padding=int(rng.integers(3)),
        seed=seed,
    )
    names = ("softcap 0.5", "sinks", "ALiBi")
    heads = q.shape[1]
    options = options_of(names[seed % 4], heads) if seed % 4 < 3 and heads <= 8 else {}
    check_decode(case, q, plan, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("position", [3, 150, 299])
def test_scores_of_shared_keys_far_above_those_before(position: int, dtype: torch.dtype) -> None:
    """Their exponentials, less the greatest score of the tiles before, are beyond what float32 holds."""
    require_plain("keys are changed in the pool itself")
    edges, leaves = [(-1, 300), (0, 3), (0, 70)], [1, 2, 2]
    case, q = share(edges, leaves, dtype=dtype), random_q(3, 4, 16, dtype)
    q[:2, :2, 0], q[:2, 2:, 0], q[2, :, 0] = 20.0, -20.0, 0.0  # some of them see great scores, others small ones
    for row, keys in zip(case.rows.tolist(), case.keys, strict=True):
        keys[position:, :, 0] = 40.0
        case.k_buffer[case.req_to_token[row, position : len(keys)], :, 0] = 40.0
    check_decode(case, q, shared_plan(case, edges, leaves, group=2, piece=1000))


# The last two: a query row has more heads than a tile of the kernel has rows.
@interpreted_only(
    lambda given: (
        (given["head_dim"], given["group"]) in ((80, 7), (256, 1))
        if given["pool"] == "e4m3"
        else (given["head_dim"], given["group"]) in ((16, 1), (80, 7), (128, 4), (16, 40))
        and (given["dtype"] == torch.float16 or (given["head_dim"], given["group"]) in ((16, 1), (80, 7)))
    )
)
@pytest.mark.parametrize(("head_dim", "group"), [*SHAPES, (16, 40), (80, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_of_trees_of_any_shape(head_dim: int, group: int, dtype: torch.dtype) -> None:
    edges, leaves = [(-1, 70), (0, 33), (0, 3), (1, 2), (1, 40)], [2, 3, 4, 3]
    case = share(edges, leaves, head_dim=head_dim, dtype=dtype)
    plan = shared_plan(case, edges, leaves, group=group, piece=64)
    check_decode(case, random_q(len(leaves), 2 * group, head_dim, dtype), plan)


def test_decode_of_trees_with_padded_rows_and_empty_items() -> None:
    """Rows without tokens, a row whose tail is empty, and a shared item of no token."""
    case = make_case([0, 40, 0, 9])
    row, other = case.rows[[1, 3]].tolist()
    whole, none = np.array([40, 0], np.int32), np.zeros(2, np.int32)
    shared = SharedItems(
        req_pool_indices=np.array([row, other], np.int32),
        starts=none,
        lens=whole,
        query_starts=np.array([0, 1], np.int32),
        query_lens=np.array([1, 2], np.int32),
        queries=np.array([1, 3, 1], np.int32),
    )
    plan = AttentionPlan.tree(case.rows.numpy(force=True), case.seq_lens.numpy(force=True), [0, 40, 0, 0], shared)
    out = check_decode(case, random_q(4, 4, 16), plan.to(case.rows.device))
    assert (out[[0, 2]] == 0).all()


@pytest.mark.long_unless(kept=lambda given: given["impl"] == "triton" or given["pool"] == "plain")
def test_decode_of_a_thousand_rows_that_share_an_item(device: torch.device) -> None:
    if RUNS["impl"] == "triton" and device.type == "cpu":
        pytest.skip("takes the interpreter minutes")
    case, plan = tree_case(*fan(1024))
    check_decode(case, random_q(1024, 4, 16), plan)


def test_decode_merges_items_in_any_order_and_of_any_cut() -> None:
    case = make_case([100, 20])
    q = random_q(2, 4, 16)
    row, other = case.rows.tolist()
    plan = case.plan(
        [other, row, row, row, other], [19, 64, 0, 1, 0], [1, 36, 1, 63, 19], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1]
    )
    check_decode(case, q, plan)


def test_decode_merges_scores_far_apart() -> None:
    """Partial results whose sums of exponentials differ by more than float32 spans."""
    require_plain("its keys are beyond the scale")
    case = make_case([80])
    slots = case.req_to_token[case.rows[0], :40].long()
    case.k_buffer[slots] *= 200
    case.keys[0][:40] *= 200
    row = int(case.rows[0])
    plan = case.plan([row, row], [0, 40], [40, 40], [0, 0], [1, 1])
    q = random_q(1, 4, 16) * 3
    check_decode(case, q, plan)


def test_decode_of_scores_all_far_below_zero() -> None:
    require_plain("its keys are beyond the scale")
    case, q = make_case([70]), random_q(1, 4, 16).abs()
    slots = case.req_to_token[case.rows[0], :70].long()
    case.keys[0] = -100 * case.keys[0].abs() - 30
    case.k_buffer[slots] = case.keys[0]
    check_decode(case, q)


@plain_or(name=BOTH)
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_with_options(name: str) -> None:
    lengths = [1, 2, SHORT_ITEM - 1, SHORT_ITEM, SHORT_ITEM + 1, 2 * SHORT_ITEM, 0, 200, 7, 8]
    case, options = make_case(lengths, head_dim=32), options_of(name, 8)
    q = random_q(len(lengths), 8, 32)
    check_decode(case, q, **options)


@interpreted_only(lambda given: given["name"] in ((*EACH, "sinks", "ALiBi") if given["pool"] == "plain" else BOTH))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_with_options_in_half_precision(name: str, dtype: torch.dtype) -> None:
    lengths = [1, SHORT_ITEM - 1, SHORT_ITEM, SHORT_ITEM + 1, 0, 200]
    case = make_case(lengths, dtype=dtype)
    check_decode(case, random_q(len(lengths), 4, 16, dtype), **options_of(name, 4))
    check_decode(case, random_q(len(lengths), 4, 16, dtype), case.flat_plan(), **options_of(name, 4))


@interpreted_only(
    lambda given: (
        [*OPTIONS].index(given["name"]) % len(TREES) == [*TREES].index(given["tree"])
        and (given["pool"] == "plain" or given["name"] in BOTH)
    )
)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("tree", TREES)
def test_decode_of_shared_items_with_options(tree: str, name: str) -> None:
    """The rows of an item end at different positions: each has a window of its own."""
    case, plan = tree_case(*TREES[tree])
    q = random_q(len(case.keys), 4, 16)
    check_decode(case, q, plan, **options_of(name, 4))


@plain_or(name=("softcap 0.5",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "window" not in options])
def test_decode_of_trees_with_options(name: str, dtype: torch.dtype) -> None:
    edges, leaves = TREES["two roots, two levels"]
    case = share(edges, leaves, dtype=dtype)
    plan = shared_plan(case, edges, leaves, group=2, piece=64)
    check_decode(case, random_q(len(leaves), 4, 16, dtype), plan, **options_of(name, 4))
