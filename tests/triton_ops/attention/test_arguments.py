"""What decode and extend attention have in common: precision, windows, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import packed_qkv, shared_extends, shared_plan
from tests.support.attention_checks import (
    RUNS,
    SCALE,
    assert_matches,
    check_decode,
    decode,
    dense_decode,
    extend,
    fan,
    int32,
    make_case,
    random_q,
    require_known,
    require_plain,
    share,
)
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.extend import Extends, extend_attention
from triton_ops.attention.plan import AttentionPlan, ExtendPlan
from triton_ops.kv.kv_store import kv_store
from triton_ops.kv.view import KVView

pytestmark = pytest.mark.usefixtures("impl", "pool")


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
    with pytest.raises(ValueError, match=r"the window is 7, but the plan has \d+ shared items"):
        decode(case, q, plan, window=7)
    extends = shared_extends(case, edges, leaves, (case.seq_lens - 1).tolist(), group=2, piece=64)
    with pytest.raises(ValueError, match=r"the window is 7, but the plan has \d+ shared items"):
        extend(case, (case.seq_lens - 1).tolist(), *packed_qkv(70, 4, 2, 16), plan=extends, window=7)
    if RUNS["impl"] == "triton" and q.device.type == "cpu":
        plan = shared_plan(case, edges, leaves, group=1, piece=64)
        with pytest.raises(ValueError, match="a shared item has 32 query rows, but a tile of the kernel 16"):
            decode(case, q, plan)


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
    "decode": lambda case, q, k, v, window: decode(case, q[:3], window=window),
    "extend": lambda case, q, k, v, window: extend(case, [88, 38, 3], q, k, v, window=window),
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
    kv, scoring = KVView(pool, pool, slots.view(1, 3)), Scoring(SCALE)
    expected, _ = dense_attention(q, stored, stored, scoring)
    assert_matches(decode_attention(q, kv, plan, scoring, **RUNS), expected)
    new, extends = stored[2:].float(), Extends(int32([0]), int32([2]), int32([0]), int32([1]))
    assert_matches(extend_attention(q, new, new, kv, extends, None, scoring, **RUNS), expected)
