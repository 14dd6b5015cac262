"""Decode and extend attention against dense attention in float64, for tests of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import attention_cases
from tests.support.attention_cases import (
    Case,
    Edges,
    flat_extends,
    path_of,
    shared_extends,
)
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import SHORT_ITEM, decode_attention, decode_reference
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.extend import extend_attention, extend_reference
from triton_ops.attention.plan import AttentionPlan, ExtendPlan
from triton_ops.e4m3 import quantise

RUNS: dict[str, Any] = {"impl": "torch"}

POOL = {"e4m3": False}

SCALE = 0.3

# Every head_dim and every group size of the list once.
SHAPES = [(16, 1), (32, 2), (64, 4), (80, 7), (96, 8), (112, 16), (128, 4), (192, 2), (256, 1)]
# Of these, what the interpreter computes by default: heads that fill their blocks, and padded ones.
FEW_SHAPES = ((16, 1), (32, 2), (80, 7), (128, 4), (256, 1))

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
        pytest.skip("qk_norm_rope_store leaves float16 in place of bfloat16")
    if dtype == torch.bfloat16 and RUNS["impl"] == "triton" and torch.get_default_device().type == "cpu":
        pytest.skip("the interpreter does not know bfloat16")


def decode(
    case: Case,
    q: Tensor,
    plan: AttentionPlan | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """With `lse`, the log-sum-exps are written there; the options are those of `Scoring`."""
    plan = case.flat_plan(max_item_len=SHORT_ITEM) if plan is None else plan
    return decode_attention(q, case.kv, plan, Scoring(SCALE, **options), out=out, lse=lse, **RUNS)


def dense_decode(case: Case, q: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Of what each request's history is known to be, whatever the pool holds."""
    results = [
        dense_attention(q[b : b + 1], keys, values, Scoring(SCALE, **options))
        for b, (keys, values) in enumerate(zip(case.keys, case.values, strict=True))
    ]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def check_decode(case: Case, q: Tensor, plan: AttentionPlan | None = None, **options: Any) -> Tensor:
    dtype = case.dtype
    require_known(dtype)
    lse = torch.full(q.shape[:2], torch.nan)
    out = decode(case, q, plan, lse=lse, **options)
    expected, expected_lse = dense_decode(case, q, **options)
    reference = decode_reference(q, case.kv, case.rows, case.seq_lens, Scoring(SCALE, **options))
    torch.testing.assert_close(reference, (expected, expected_lse))
    assert_matches(out, expected, dtype)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)
    return out


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
# What the interpreter computes by default; random trees are deeper and wider.
FEW_TREES = ("one shared prefix", "two roots, two levels", "duplicate prompts", "one-token nodes")


def random_tree(rng: np.random.Generator, longest: int = 150) -> tuple[Edges, list[int]]:
    """Chains, wide trees and forests, with nodes of one token; the leaves in any order, some several times."""
    edges: Edges = []
    for n in range(rng.integers(1, 12)):
        parent = int(rng.choice([n - 1, rng.integers(-1, n), min(n, 1) - 1]))
        edges.append((parent, int(rng.choice([1, rng.integers(1, 9), rng.integers(1, longest)]))))
    parents = {parent for parent, _ in edges}
    leaves = [n for n in range(len(edges)) if n not in parents]
    return edges, [int(n) for n in rng.permutation(leaves * int(rng.choice([1, 1, 3])))]


def extend(
    case: Case,
    prefix_lens: list[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ExtendPlan | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """With `lse`, the log-sum-exps are written there; the options are those of `Scoring`."""
    extends, scoring = case.extends(prefix_lens), Scoring(SCALE, **options)
    return extend_attention(q, k, v, case.kv, extends, plan, scoring, out=out, lse=lse, **RUNS)


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
        dense_attention(part, keys, values, Scoring(SCALE, **options))
        for part, keys, values in zip(parts, case.keys, case.values, strict=True)
    ]
    expected, expected_lse = (torch.cat(results) for results in zip(*dense, strict=True))
    reference = extend_reference(q, k, v, case.kv, case.extends(prefix_lens), Scoring(SCALE, **options))
    torch.testing.assert_close(reference, (expected, expected_lse))
    if packed:
        q, k, v = torch.cat([q, k, v], dim=1).split([q.shape[1], num_kv_heads, num_kv_heads], dim=1)
        assert len(q) < 2 or not q.is_contiguous()
    lse = torch.full(q.shape[:2], torch.nan)
    cut = plan
    if plan is None and RUNS["impl"] == "triton":  # what passes follow; without a plan it reads whole tiles
        cut = flat_extends(case, prefix_lens, group, options.get("window"))
    assert_matches(extend(case, prefix_lens, q, k, v, plan=cut, lse=lse, **options), expected, dtype)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)
    # Without the log-sum-exps the reference takes another way, and without a plan the kernel. The interpreter has
    # seconds for that without options alone.
    if plan is None and (RUNS["impl"] == "torch" or q.is_cuda or not options):
        assert_matches(extend(case, prefix_lens, q, k, v, **options), expected, dtype)


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


# With lengths up to 200 and items of 64: windows of one token, with their edge inside a tile or an item and at its
# border, and longer than everything. A softcap of 0.5 bends all scores, one of 50 few.
OPTIONS: dict[str, dict[str, Any]] = {
    "window 1": {"window": 1},
    "window 7": {"window": 7},
    "window 64": {"window": 64},
    "window 70": {"window": 70},
    "window 500": {"window": 500},
    "softcap 0.5": {"softcap": 0.5},
    "softcap 50": {"softcap": 50.0},
    "window 7, softcap 0.5": {"window": 7, "softcap": 0.5},
    "sinks": {"sinks": [0.3, -2.0, 5.0, 40.0, 0.0, 1.0, -30.0, 2.0]},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0, 1.0, 2.0, 0.01, 0.3]},
    "everything": {
        "window": 70,
        "softcap": 5.0,
        "sinks": [0.3, -2.0, 5.0, 4.0, 0.0, 1.0, -30.0, 2.0],
        "alibi_slopes": [0.5, 0.25, 0.125, 0.0, 1.0, 2.0, 0.01, 0.3],
    },
}

# What kernels that take the interpreter long are tested with in it.
EACH = ("window 70", "softcap 0.5", "everything")
BOTH = ("window 70", "everything")  # what pools of e4m3 are tested with in the interpreter


def options_of(name: str, num_heads: int) -> dict[str, Any]:
    """The options of that name, the lists cut to a value a head."""
    return {
        key: torch.tensor(value[:num_heads]) if isinstance(value, list) else value
        for key, value in OPTIONS[name].items()
    }
