"""Attention, references and kernels, and kv_store, against dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixrt.execution.attention.flat import KernelShape
from tests.support import attention_cases
from tests.support.attention_cases import (
    Case,
    Edges,
    dense_attention,
    flat_extends,
    packed_qkv,
    path_of,
    shared_extends,
    shared_plan,
    tree_plan,
)
from tests.support.interpreter import require_interpreter
from triton_ops.attention.decode import SHORT_ITEM, decode_attention
from triton_ops.attention.extend import extend_attention
from triton_ops.attention.plan import AttentionPlan, ExtendPlan, SharedItems
from triton_ops.implementation import GPU, Impl, gpu_of
from triton_ops.kv.e4m3 import FIRST_CAPABILITY, quantise
from triton_ops.kv.kv_store import kv_store


@pytest.fixture(scope="module", params=["torch", "triton"])
def impl(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Impl]:
    """What the functions below run: the reference, or the kernel, on a CPU in Triton's interpreter."""
    if request.param == "triton" and device.type == "cpu":
        require_interpreter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RUNS, "impl", request.param)
        yield request.param


@pytest.fixture(scope="module", params=["plain", "e4m3"])
def pool(request: pytest.FixtureRequest, device: torch.device, impl: Impl) -> Iterator[None]:
    """What the pools of `make_case` hold: numbers of the queries' dtype, or e4m3."""
    if request.param == "e4m3" and impl == "triton" and gpu_of(device).capability < FIRST_CAPABILITY:
        pytest.skip("this GPU does not know e4m3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POOL, "e4m3", request.param == "e4m3")
        yield


pytestmark = pytest.mark.usefixtures("impl", "pool")

RUNS: dict[str, Any] = {"impl": "torch"}
POOL = {"e4m3": False}
SCALE = 0.3
# Every head_dim and every group size of the list once.
SHAPES = [(16, 1), (32, 2), (64, 4), (80, 7), (96, 8), (112, 16), (128, 4), (192, 2), (256, 1)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def interpreted_only(kept: Callable[[dict[str, Any]], bool]) -> pytest.MarkDecorator:
    """In Triton's interpreter, which takes seconds for them, other tests than those that are kept are long."""
    return pytest.mark.long_unless(
        kept=lambda given: (given["impl"], given["device"]) != ("triton", "cpu") or kept(given)
    )


def plain_or(**few: Any) -> pytest.MarkDecorator:
    """In the interpreter, pools of e4m3 with these parameters alone, each a tuple of values."""
    return interpreted_only(
        lambda given: given["pool"] == "plain" or all(given[name] in values for name, values in few.items())
    )


def random_q(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_matches(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def make_case(seq_lens: list[int], **options: Any) -> Case:
    return attention_cases.make_case(seq_lens, **(POOL | options))


def require_plain(reason: str) -> None:
    """Skip a test in a pool of e4m3."""
    if POOL["e4m3"]:
        pytest.skip(reason)


def require_known(dtype: torch.dtype) -> None:
    """Triton's interpreter computes bfloat16 wrong; over e4m3 the kernels want float16 instead."""
    if dtype == torch.bfloat16 and RUNS["impl"] == "triton" and POOL["e4m3"]:
        pytest.skip("norm_rotary_store leaves float16 in place of bfloat16")
    if dtype == torch.bfloat16 and RUNS["impl"] == "triton" and torch.get_default_device().type == "cpu":
        pytest.skip("the interpreter does not know bfloat16")


# --- decode ---


def decode(case: Case, q: Tensor, plan: AttentionPlan | None = None, **options: Any) -> Tensor:
    """With `lse=`, the log-sum-exps are written there."""
    plan = case.flat_plan(max_item_len=SHORT_ITEM) if plan is None else plan
    options |= RUNS | scales_of(case)
    return decode_attention(q, case.k_buffer, case.v_buffer, case.req_to_token, plan, scale=SCALE, **options)


def scales_of(case: Case) -> dict[str, Any]:
    return {"k_scale": case.k_scale, "v_scale": case.v_scale}


def dense_decode(case: Case, q: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for b, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        if len(keys):
            out[b : b + 1], lse[b : b + 1] = dense_attention(q[b : b + 1], keys, values, SCALE, **options)
        elif options.get("sinks") is not None:
            lse[b] = options["sinks"]
    return out, lse


def check_decode(case: Case, q: Tensor, plan: AttentionPlan | None = None, **options: Any) -> Tensor:
    dtype = case.dtype
    require_known(dtype)
    lse = torch.full(q.shape[:2], torch.nan)
    out = decode(case, q, plan, lse=lse, **options)
    expected, expected_lse = dense_decode(case, q, **options)
    assert_matches(out, expected, dtype)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)
    return out


@plain_or(head_dim=(80, 128, 256))
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


def test_half_precision_is_computed_in_float32() -> None:
    require_plain("it is about pools in half precision")
    require_known(torch.bfloat16)
    if RUNS["impl"] == "triton":
        pytest.skip("the kernel multiplies in half precision and adds in float32")
    case, wide = make_case([70, 9], dtype=torch.bfloat16), make_case([70, 9])
    for buffer in ("k_buffer", "v_buffer"):
        setattr(wide, buffer, getattr(case, buffer).float())
    q = random_q(2, 4, 16, torch.bfloat16)
    assert torch.equal(decode(case, q), decode(wide, q.float()).bfloat16())
    _, k, v = (x.bfloat16() for x in packed_qkv(2, 4, 2, 16))
    out = extend(case, [69, 8], q, k, v)
    assert torch.equal(out, extend(wide, [69, 8], q.float(), k.float(), v.float()).bfloat16())


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


def share(edges: Edges, leaves: list[int], **options: Any) -> Case:
    return attention_cases.share(edges, leaves, **(POOL | options))


def tree_case(edges: Edges, leaves: list[int]) -> tuple[Case, AttentionPlan]:
    """`share` of leaves that are depth first. Every node is one narrow item, named through the first of the rows
    that hold it.
    """
    case = share(edges, leaves)
    fields: dict[int, list[int]] = {}
    for b, leaf in enumerate(leaves):
        start = 0
        for node in path_of(edges, leaf):
            fields.setdefault(node, [int(case.rows[b]), start, edges[node][1], b, 0])[4] += 1
            start += edges[node][1]
    return case, case.plan(*map(list, zip(*fields.values(), strict=True)))


def fan(width: int) -> tuple[list[tuple[int, int]], list[int]]:
    """A root with `width` leaves."""
    return [(-1, 9)] + [(0, 1 + n % 3) for n in range(width)], list(range(1, width + 1))


TREES = {
    "one shared prefix": ([(-1, 100), (0, 5), (0, 70), (0, 1)], [1, 2, 3]),
    "two roots, two levels": (
        [(-1, 40), (0, 30), (1, 3), (1, 90), (0, 2), (-1, 7), (5, 6), (5, 66)],
        [2, 3, 4, 6, 7],
    ),
    "duplicate prompts": ([(-1, 33), (0, 8)], [1, 1, 1]),
    "one-token nodes": ([(-1, 1), (0, 1), (1, 1), (0, 1)], [2, 3]),
    "depth 10": ([(n - 1, 3 + n) for n in range(10)] + [(n, 2) for n in reversed(range(10))], list(range(10, 20))),
    "fan-out 20": fan(20),
}


@plain_or(name=("two roots, two levels",))
@pytest.mark.parametrize("name", TREES)
def test_decode_computes_shared_items(name: str) -> None:
    case, plan = tree_case(*TREES[name])
    q = random_q(len(case.keys), 4, 16)
    out = check_decode(case, q, plan)
    torch.testing.assert_close(out, decode(case, q), atol=1e-5, rtol=1e-5)


@plain_or(name=("two roots, two levels",))
@pytest.mark.parametrize("name", TREES)
def test_decode_of_trees(name: str) -> None:
    """The leaves in no order, segments cut and whole, padded items."""
    edges, leaves = TREES[name]
    leaves = leaves[::2] + leaves[1::2]
    case = share(edges, leaves)
    q = random_q(len(leaves), 4, 16)
    out = check_decode(case, q, shared_plan(case, edges, leaves, group=2, piece=1000))
    torch.testing.assert_close(out, decode(case, q), atol=1e-5, rtol=1e-5)
    check_decode(case, q, shared_plan(case, edges, leaves, group=2, piece=37, max_item_len=30, padding=3, seed=1))


def random_tree(rng: np.random.Generator, longest: int = 150) -> tuple[Edges, list[int]]:
    """Chains, wide trees and forests, with nodes of one token; the leaves in any order, some several times."""
    edges: Edges = []
    for n in range(rng.integers(1, 12)):
        parent = int(rng.choice([n - 1, rng.integers(-1, n), min(n, 1) - 1]))
        edges.append((parent, int(rng.choice([1, rng.integers(1, 9), rng.integers(1, longest)]))))
    parents = {parent for parent, _ in edges}
    leaves = [n for n in range(len(edges)) if n not in parents]
    return edges, [int(n) for n in rng.permutation(leaves * int(rng.choice([1, 1, 3])))]


@interpreted_only(lambda given: (given["pool"] == "plain") == (given["seed"] < 8))
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
        else given["dtype"] == torch.float16 or given["head_dim"] in (16, 80)
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


# --- extend ---


def extend(case: Case, prefix_lens: list[int], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    extend_lens = case.seq_lens - int32(prefix_lens)
    return extend_attention(
        q,
        k,
        v,
        case.k_buffer,
        case.v_buffer,
        case.req_to_token,
        case.rows,
        int32(prefix_lens),
        (extend_lens.cumsum(0) - extend_lens).int(),
        extend_lens,
        scale=SCALE,
        **RUNS,
        **scales_of(case),
        **options,
    )


def numbers(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a pool with that scale holds for values, as numbers."""
    return values if scale is None else quantise(values, scale).to(dtype)


def hide_new_tokens(case: Case, prefix_lens: list[int]) -> None:
    """Empty the pool's slots of the new tokens: they are to be read from k and v."""
    for row, prefix, length in zip(case.rows.tolist(), prefix_lens, case.seq_lens.tolist(), strict=True):
        slots = case.req_to_token[row, prefix:length].long()
        case.k_buffer[slots], case.v_buffer[slots] = torch.nan, torch.nan


def check_extend(
    case: Case,
    prefix_lens: list[int],
    group: int,
    plan: ExtendPlan | None = None,
    *,
    packed: bool = False,
    **options: Any,
) -> None:
    num_kv_heads, head_dim = case.k_buffer.shape[1:]
    dtype = case.dtype
    require_known(dtype)
    new_keys = [keys[prefix:] for keys, prefix in zip(case.keys, prefix_lens, strict=True)]
    new_values = [values[prefix:] for values, prefix in zip(case.values, prefix_lens, strict=True)]
    hide_new_tokens(case, prefix_lens)
    q = random_q(sum(map(len, new_keys)), group * num_kv_heads, head_dim, dtype)
    k = numbers(torch.cat(new_keys), case.k_scale, dtype)
    v = numbers(torch.cat(new_values), case.v_scale, dtype)
    parts = q.split([len(n) for n in new_keys])
    dense = [
        dense_attention(part, keys, values, SCALE, **options)
        for part, keys, values in zip(parts, case.keys, case.values, strict=True)
    ]
    expected, expected_lse = (torch.cat(results) for results in zip(*dense, strict=True))
    if packed:
        q, k, v = torch.cat([q, k, v], dim=1).split([q.shape[1], num_kv_heads, num_kv_heads], dim=1)
        assert len(q) < 2 or not q.is_contiguous()
    lse = torch.full(q.shape[:2], torch.nan)
    cut = plan
    if plan is None and RUNS["impl"] == "triton":  # what passes follow; without a plan it reads whole tiles
        cut = flat_extends(case, prefix_lens, group, options.get("sliding_window"))
    assert_matches(extend(case, prefix_lens, q, k, v, plan=cut, lse=lse, **options), expected, dtype)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)
    if plan is None:  # without the log-sum-exps the reference takes another way
        assert_matches(extend(case, prefix_lens, q, k, v, **options), expected, dtype)


@plain_or(head_dim=(80,))
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_extend_matches_dense_attention(head_dim: int, group: int) -> None:
    case = make_case([9, 12, 1, 30, 21], head_dim=head_dim)
    check_extend(case, [0, 11, 0, 17, 1], group)


@pytest.mark.parametrize(("length", "prefix"), [(130, 0), (130, 1), (130, 64), (130, 129), (1, 0), (2, 1)])
def test_extend_of_one_request(length: int, prefix: int) -> None:
    check_extend(make_case([length]), [prefix], 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extend_in_half_precision(dtype: torch.dtype) -> None:
    check_extend(make_case([9, 40], dtype=dtype), [4, 0], 2, packed=True)


@pytest.mark.parametrize(("scattered", "interleaved"), [(False, False), (True, True)])
def test_extend_reads_a_packed_projection(scattered: bool, interleaved: bool) -> None:
    check_extend(make_case([9, 40], scattered=scattered, interleaved=interleaved), [4, 0], 2, packed=True)


def test_extend_with_padded_requests() -> None:
    """Requests of no new token, with and without a prefix."""
    case = make_case([0, 6, 5, 0])
    prefix_lens = [0, 2, 5, 0]
    keys, values = case.keys[1].clone(), case.values[1].clone()
    hide_new_tokens(case, prefix_lens)
    q, k, v = packed_qkv(4, 4, 2, 16)
    k, v = numbers(k, case.k_scale, k.dtype), numbers(v, case.v_scale, v.dtype)
    keys[2:] = k if case.k_scale is None else k * case.k_scale[:, None]
    values[2:] = v if case.v_scale is None else v * case.v_scale[:, None]
    assert_matches(extend(case, prefix_lens, q, k, v), dense_attention(q, keys, values, SCALE)[0])


def test_extend_of_an_empty_batch() -> None:
    assert extend(make_case([]), [], *packed_qkv(0, 4, 2, 16)).shape == (0, 4, 16)


def test_extend_requests_do_not_disturb_one_another() -> None:
    case = make_case([9, 8, 7])
    q, k, v = packed_qkv(3, 4, 2, 16)
    clean = extend(case, [8, 7, 6], q, k, v)
    case.k_buffer[case.req_to_token[case.rows[1], 3].long()] = torch.nan
    out = extend(case, [8, 7, 6], q, k, v)
    assert out[1].isnan().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def check_shared_extend(
    case: Case, edges: Edges, leaves: list[int], group: int, seed: int, **options: Any
) -> None:
    """Each leaf's requests have as much of it in their prefixes: nothing, all but a token, or what is between."""
    rng = np.random.default_rng(seed)
    cached = {leaf: int(rng.choice([0, edges[leaf][1] - 1, rng.integers(edges[leaf][1])])) for leaf in leaves}
    prefix_lens = [sum(edges[n][1] for n in path_of(edges, leaf)[:-1]) + cached[leaf] for leaf in leaves]
    plan = shared_extends(
        case,
        edges,
        leaves,
        prefix_lens,
        group=group,
        piece=int(rng.choice([1000, 64, 17])),
        padding=int(rng.integers(3)),
        cut=bool(rng.integers(2)),
        seed=seed,
    )
    check_extend(case, prefix_lens, group, plan, packed=bool(rng.integers(2)), **options)


@plain_or(name=("two roots, two levels",))
@pytest.mark.parametrize("name", TREES)
def test_extend_of_trees(name: str) -> None:
    """Leaves in no order; prefixes that end at their borders, and extends of one token."""
    edges, leaves = TREES[name]
    leaves = leaves[::2] + leaves[1::2]
    check_shared_extend(share(edges, leaves), edges, leaves, 2, seed=0)


@interpreted_only(lambda given: (given["pool"] == "plain") == (given["seed"] < 8))
@pytest.mark.parametrize("seed", range(12))
def test_extend_of_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges, leaves = random_tree(rng, longest=40)
    dtype = (torch.float32, torch.float16)[rng.integers(2)]
    num_kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 3, 4, 8]))
    case = share(edges, leaves, dtype=dtype, num_kv_heads=num_kv_heads, head_dim=int(rng.choice([16, 24, 32])))
    names, heads = ("softcap 0.5", "sinks", "ALiBi"), group * num_kv_heads
    options = options_of(names[seed % 4], heads) if seed % 4 < 3 and heads <= 8 else {}
    check_shared_extend(case, edges, leaves, group, seed, **options)


# The last two: a token has more heads than a tile of the kernels has rows.
@plain_or(head_dim=(80,), group=(7,))
@pytest.mark.parametrize(("head_dim", "group"), [*SHAPES, (16, 40), (80, 24)])
def test_extend_of_trees_of_any_shape(head_dim: int, group: int) -> None:
    edges, leaves = [(-1, 20), (0, 17), (0, 3), (1, 2), (1, 9)], [2, 3, 4, 3]
    dtype = (torch.float32, torch.float16)[head_dim // 16 % 2]
    check_shared_extend(share(edges, leaves, head_dim=head_dim, dtype=dtype), edges, leaves, group, seed=2)


@plain_or(name=("softcap 0.5",))
@pytest.mark.parametrize("name", ["softcap 0.5", "sinks", "ALiBi"])
def test_extend_of_trees_with_options(name: str) -> None:
    edges, leaves = [(-1, 20), (0, 17), (0, 3), (1, 2), (1, 9)], [2, 3, 4, 3]
    check_shared_extend(share(edges, leaves), edges, leaves, 2, seed=3, **options_of(name, 4))


# --- what kernels refuse ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lse": lambda: torch.zeros(4, 3).T}, "lse must be contiguous"),
        ({"out": lambda: torch.zeros(3, 4, 32)[..., ::2]}, "out must be contiguous"),
        ({"sinks": lambda: torch.zeros(4, dtype=torch.float64)}, "sinks must be contiguous float32"),
        ({"alibi_slopes": lambda: torch.zeros(2)}, "alibi_slopes must be contiguous float32"),
    ],
)
def test_kernels_refuse_what_they_cannot_read(change: dict[str, Any], message: str) -> None:
    if RUNS["impl"] == "torch":
        pytest.skip("the references take any strides")
    case, q = make_case([3, 4, 5]), random_q(3, 4, 16)
    change = {name: make() for name, make in change.items()}
    with pytest.raises(ValueError, match=message):
        decode(case, q, **change)
    with pytest.raises(ValueError, match=message):
        extend(case, [2, 3, 4], *packed_qkv(3, 4, 2, 16), **change)


def test_kernels_refuse_large_heads_and_foreign_plans(device: torch.device) -> None:
    if RUNS["impl"] == "torch":
        pytest.skip("the references take heads of any size, and no plan")
    case = make_case([3], head_dim=272)
    with pytest.raises(ValueError, match="head_dim up to 256, but it is 272"):
        decode(case, random_q(1, 4, 272))
    case, q = make_case([60]), packed_qkv(60, 4, 2, 16)
    zero, sixty = np.array([0], np.int32), np.array([60], np.int32)
    plan = ExtendPlan.of_extends(zero, zero, sixty, tile_tokens=60).to(device)
    with pytest.raises(ValueError, match="the plan's tiles have 60 tokens"):
        extend(case, [0], *q, plan=plan)


def test_plans_with_shared_items_that_no_kernel_takes() -> None:
    edges, leaves = fan(70)
    case, q = share(edges, leaves), random_q(70, 4, 16)
    plan = shared_plan(case, edges, leaves, group=2, piece=64)
    with pytest.raises(ValueError, match=r"sliding_window is 7, but the plan has \d+ shared items"):
        decode(case, q, plan, sliding_window=7)
    extends = shared_extends(case, edges, leaves, (case.seq_lens - 1).tolist(), group=2, piece=64)
    with pytest.raises(ValueError, match=r"sliding_window is 7, but the plan has \d+ shared items"):
        extend(case, (case.seq_lens - 1).tolist(), *packed_qkv(70, 4, 2, 16), plan=extends, sliding_window=7)
    if RUNS["impl"] == "triton" and q.device.type == "cpu":
        plan = shared_plan(case, edges, leaves, group=1, piece=64)
        with pytest.raises(ValueError, match="a shared item has 32 query rows, but a tile of the kernel 16"):
            decode(case, q, plan)


# --- plans ---


def test_a_flat_plan_has_no_shared_items() -> None:
    plan = AttentionPlan.flat([0, 1], [5, 900], max_item_len=64)
    assert {len(array) for name, array in vars(plan).items() if name.startswith("shared_")} == {0}
    none = np.zeros(0, np.int32)
    tree = AttentionPlan.tree(
        [0, 1], [5, 900], [0, 0], SharedItems(none, none, none, none, none, none), max_item_len=64
    )
    for name, array in vars(plan).items():
        assert array.dtype == getattr(tree, name).dtype == np.int32, name
        np.testing.assert_array_equal(array, getattr(tree, name))


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
    plan = shape.plan_extends(
        prefix,
        np.cumsum(extend_lens, dtype=np.int32) - extend_lens,
        extend_lens,
        tail_starts=np.append(prefix[:32], np.int32(0)),
    )
    lengths = plan.item_lens
    assert lengths.max() < 4000
    assert lengths.sum() == 100_016 + 32 * 32
    assert (np.diff(lengths) <= 0).all()


def test_windows_longer_than_any_context() -> None:
    assert sorted(AttentionPlan.flat([0, 1], [5, 9], sliding_window=2**40).item_lens) == [5, 9]


# --- windows and softcaps ---

# With lengths up to 200 and items of 64: windows of one token, with their edge inside a tile or an item and at its
# border, and longer than everything. A softcap of 0.5 bends all scores, one of 50 few.
OPTIONS: dict[str, dict[str, Any]] = {
    "window 1": {"sliding_window": 1},
    "window 7": {"sliding_window": 7},
    "window 64": {"sliding_window": 64},
    "window 70": {"sliding_window": 70},
    "window 500": {"sliding_window": 500},
    "softcap 0.5": {"softcap": 0.5},
    "softcap 50": {"softcap": 50.0},
    "window 7, softcap 0.5": {"sliding_window": 7, "softcap": 0.5},
    "sinks": {"sinks": [0.3, -2.0, 5.0, 40.0, 0.0, 1.0, -30.0, 2.0]},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0, 1.0, 2.0, 0.01, 0.3]},
    "everything": {
        "sliding_window": 70,
        "softcap": 5.0,
        "sinks": [0.3, -2.0, 5.0, 4.0, 0.0, 1.0, -30.0, 2.0],
        "alibi_slopes": [0.5, 0.25, 0.125, 0.0, 1.0, 2.0, 0.01, 0.3],
    },
}

BOTH = ("window 70", "everything")  # what pools of e4m3 are tested with in the interpreter


def options_of(name: str, num_heads: int) -> dict[str, Any]:
    """The options of that name, the lists cut to a value a head."""
    return {
        key: torch.tensor(value[:num_heads]) if isinstance(value, list) else value
        for key, value in OPTIONS[name].items()
    }


@plain_or(name=BOTH)
@pytest.mark.parametrize("name", OPTIONS)
def test_decode_with_options(name: str) -> None:
    lengths = [1, 2, SHORT_ITEM - 1, SHORT_ITEM, SHORT_ITEM + 1, 2 * SHORT_ITEM, 0, 200, 7, 8]
    case, options = make_case(lengths, head_dim=32), options_of(name, 8)
    q = random_q(len(lengths), 8, 32)
    check_decode(case, q, **options)


# In half precision alone the kernels have a loop over tiles that need no mask.


@plain_or(name=BOTH)
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
@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "sliding_window" not in options])
def test_decode_of_trees_with_options(name: str, dtype: torch.dtype) -> None:
    edges, leaves = TREES["two roots, two levels"]
    case = share(edges, leaves, dtype=dtype)
    plan = shared_plan(case, edges, leaves, group=2, piece=64)
    check_decode(case, random_q(len(leaves), 4, 16, dtype), plan, **options_of(name, 4))


@plain_or(name=BOTH)
@pytest.mark.parametrize("name", OPTIONS)
def test_extend_with_options(name: str) -> None:
    check_extend(make_case([9, 12, 1, 30, 21, 90], head_dim=32), [0, 11, 0, 17, 1, 80], 4, **options_of(name, 8))
    check_extend(make_case([130]), [40], 2, packed=True, **options_of(name, 4))
    check_extend(make_case([130, 1, 7, 8, 64, 65]), [0] * 6, 1, **options_of(name, 2))


@plain_or(name=BOTH)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_extend_with_options_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Several whole tiles of prefix and of new tokens; a few tokens on a prefix, which take short tiles."""
    check_extend(make_case([9, 320], dtype=dtype), [4, 210], 2, **options_of(name, 4))
    check_extend(make_case([230], dtype=dtype), [220], 2, **options_of(name, 4))


@interpreted_only(
    lambda given: given["name"] in ((*BOTH, "softcap 0.5") if given["pool"] == "plain" else ("everything",))
)
@pytest.mark.parametrize("name", OPTIONS)
def test_extend_of_a_few_tokens_on_a_long_prefix(name: str) -> None:
    """The kernel cuts the prefix among its programs."""
    check_extend(make_case([2100, 900], num_kv_heads=1, head_dim=32), [2090, 897], 8, **options_of(name, 8))


def test_slots_before_the_windows_are_not_read() -> None:
    case, window = make_case([90, 40, 5]), 8
    q, k, v = packed_qkv(6, 4, 2, 16)
    seen_by = {name: call(case, q, k, v, window) for name, call in WINDOWED.items()}
    for row, length in zip(case.rows.tolist(), case.seq_lens.tolist(), strict=True):
        # The first new token is two before the end.
        hidden = case.req_to_token[row, : max(0, length - 1 - window)].long()
        case.k_buffer[hidden], case.v_buffer[hidden] = torch.nan, torch.nan
    for name, call in WINDOWED.items():
        assert torch.equal(call(case, q, k, v, window), seen_by[name]), name


WINDOWED = {
    "decode": lambda case, q, k, v, window: decode(case, q[:3], sliding_window=window),
    "extend": lambda case, q, k, v, window: extend(case, [88, 38, 3], q, k, v, sliding_window=window),
}


def test_softcaps_of_huge_scores_are_finite() -> None:
    """Every score is far beyond the cap: keys in the query's direction share the attention evenly."""
    require_plain("its keys are beyond the scale")
    case = make_case([70])
    slots = case.req_to_token[case.rows[0], :70].long()
    case.keys[0] = torch.full_like(case.keys[0], 1e6)
    case.keys[0][::2] *= -1
    case.k_buffer[slots] = case.keys[0]
    q, options = torch.full((1, 4, 16), 1e6), {"softcap": 30.0}
    check_decode(case, q, **options)
    out = extend(case, [69], q, case.keys[0][69:], case.values[0][69:], **options)
    assert_matches(out, dense_decode(case, q, **options)[0])


# --- store ---


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kv_store_writes_its_slots_only(pool_dtype: torch.dtype, interleaved: bool) -> None:
    require_plain("test_kernels_elementwise stores e4m3")
    case = make_case([5, 4], dtype=pool_dtype, interleaved=interleaved)
    _, k, v = packed_qkv(3, 4, 2, 16)
    slots = [7, 2, 11]
    expected_k, expected_v = case.k_buffer.clone(), case.v_buffer.clone()
    for token, slot in enumerate(slots):
        expected_k[slot], expected_v[slot] = k[token], v[token]
    kv_store(k, v, case.k_buffer, case.v_buffer, int32(slots))
    torch.testing.assert_close(case.k_buffer, expected_k, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(case.v_buffer, expected_v, equal_nan=True, atol=0, rtol=0)


def test_kv_store_of_padding_and_of_nothing() -> None:
    require_plain("test_kernels_elementwise stores e4m3")
    case = make_case([3])
    before = case.k_buffer[1:].clone()
    _, k, v = packed_qkv(2, 4, 2, 16)
    kv_store(k, v, case.k_buffer, case.v_buffer, int32([0, 0]))
    kv_store(k[:0], v[:0], case.k_buffer, case.v_buffer, int32([]))
    torch.testing.assert_close(case.k_buffer[1:], before, equal_nan=True, atol=0, rtol=0)


def test_slots_beyond_two_to_the_31_elements() -> None:
    """The memory of the pool is never touched but at a few slots, so it costs address space only."""
    require_plain("it has a pool of its own")
    num_kv_heads, head_dim = 4, 256
    num_slots = 2**31 // (num_kv_heads * head_dim) + 8
    pool = torch.empty(num_slots, num_kv_heads, head_dim, dtype=torch.bfloat16)
    _, k, _ = packed_qkv(3, 4, num_kv_heads, head_dim)
    slots = int32([num_slots - 1, 3, num_slots - 5])
    kv_store(k, k, pool, pool, slots)
    stored = k.bfloat16()
    assert torch.equal(pool[num_slots - 1], stored[0])
    q = random_q(1, 4, head_dim)
    plan = AttentionPlan.flat([0], [3]).to(q.device)
    expected, _ = dense_attention(q, stored, stored, SCALE)
    assert_matches(decode_attention(q, pool, pool, slots.view(1, 3), plan, scale=SCALE, **RUNS), expected)
    out = extend_attention(
        q,
        stored[2:].float(),
        stored[2:].float(),
        pool,
        pool,
        slots.view(1, 3),
        int32([0]),
        int32([2]),
        int32([0]),
        int32([1]),
        scale=SCALE,
        **RUNS,
    )
    assert_matches(out, expected)
