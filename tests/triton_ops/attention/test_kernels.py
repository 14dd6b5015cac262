"""Attention kernels on a GPU: captured graphs, random batches, and bfloat16 no worse than torch's own."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.support.attention_cases import (
    Case,
    Edges,
    make_case,
    packed_qkv,
    share,
    shared_extends,
    shared_plan,
    tree_plan,
)
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.extend import extend_attention
from triton_ops.attention.plan import AttentionPlan, Int32Array
from triton_ops.e4m3 import FIRST_CAPABILITY, quantise
from triton_ops.implementation import gpu_of
from triton_ops.kv.view import KVView

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["cuda"], indirect=True, scope="module")]

SECONDS = 300  # of random batches
SCALE = 0.2
KNOWS_E4M3 = torch.cuda.is_available() and gpu_of(torch.device("cuda", 0)).capability >= FIRST_CAPABILITY


# --- captured graphs ---


def padded(
    plan: AttentionPlan[Int32Array],
    num_items: int,
    num_partials: int,
    num_shared: int = 0,
    num_queries: int = 0,
) -> AttentionPlan[Int32Array]:
    """A plan with empty items and unused partial results at the end."""
    arrays = vars(plan)
    sizes = {name: num_items for name in arrays if name.startswith("item_")} | {"row_partials": num_partials}
    sizes["row_partial_starts"] = len(arrays["seq_lens"]) + 1
    if num_shared:
        sizes["tail_partial_starts"] = sizes["row_partial_starts"]
    sizes |= {name: num_shared for name in arrays if name.startswith("shared_")} | {"shared_queries": num_queries}
    padding = {name: np.pad(arrays[name], (0, size - arrays[name].size)) for name, size in sizes.items()}
    return replace(plan, **padding)


def test_a_captured_graph_serves_other_lengths_and_other_plans(device: torch.device) -> None:
    cases = [make_case(lengths, head_dim=64, dtype=torch.bfloat16) for lengths in ([300, 5, 64], [1, 700, 333])]
    flat = [
        AttentionPlan.flat(case.rows.cpu().numpy(), case.seq_lens.cpu().numpy(), max_item_len=64) for case in cases
    ]
    # The second list once more, its middle request's context as two items that nobody else reads.
    row, seq_lens = cases[1].rows.tolist(), cases[1].seq_lens.tolist()
    other = AttentionPlan.of_items(
        [row[1], *row], [0, 0, 500, 0], [500, 1, 200, 333], [1, 0, 1, 2], [1] * 4, seq_lens
    )
    rounds = [(cases[0], flat[0]), (cases[1], flat[1]), (cases[1], other), (cases[0], flat[0])]
    check_replays([(case, padded(plan, 40, 60)) for case, plan in rounds])


def test_a_captured_graph_serves_other_trees(device: torch.device) -> None:
    """And a plan without shared items."""
    trees: list[tuple[Edges, list[int]]] = [
        ([(-1, 300), *[(0, 40 + n) for n in range(50)]], list(range(1, 51))),
        ([(-1, 100), (0, 65), (0, 1), (1, 200), (2, 7), (2, 64)], [3, 4, 5, 3, 3] * 10),
        ([(-1, 128), (-1, 30), (0, 3), (1, 9)], [2, 3] * 25),
    ]
    cases = [share(*tree, head_dim=64, dtype=torch.bfloat16) for tree in trees]
    rounds = [
        (case, tree_plan(case, *tree, group=4, piece=64, max_item_len=100, seed=seed))
        for seed, (case, tree) in enumerate(zip(cases, trees, strict=True))
    ]
    flat = AttentionPlan.flat(cases[2].rows.cpu().numpy(), cases[2].seq_lens.cpu().numpy())
    rounds += [(cases[2], flat), rounds[0]]
    check_replays([(case, padded(plan, 300, 2000, 60, 1200)) for case, plan in rounds])


def check_replays(rounds: list[tuple[Case, AttentionPlan[Int32Array]]]) -> None:
    """One graph, captured with the first case and plan, gives the attention of each: plans are of one shape."""
    num_slots = max(len(case.k_buffer) for case, _ in rounds)
    num_rows = len(rounds[0][0].rows)
    k_buffer = torch.empty(num_slots, 2, 64, dtype=torch.bfloat16)
    v_buffer, q = torch.empty_like(k_buffer), torch.empty(num_rows, 8, 64, dtype=torch.bfloat16)
    req_to_token = torch.zeros(num_rows + 5, 800, dtype=torch.int32)
    plan = rounds[0][1].to(q.device)

    def put(case: Case, other: AttentionPlan[Int32Array], seed: int) -> None:
        k_buffer.fill_(torch.nan)[: len(case.k_buffer)] = case.k_buffer
        v_buffer.fill_(torch.nan)[: len(case.v_buffer)] = case.v_buffer
        height, width = case.req_to_token.shape
        req_to_token[:height, :width] = case.req_to_token
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
        for tensor, array in zip(plan.arrays(), other.arrays(), strict=True):
            tensor.copy_(torch.from_numpy(array))

    def run() -> Tensor:
        return decode_attention(q, KVView(k_buffer, v_buffer, req_to_token), plan, Scoring(SCALE))

    put(*rounds[0], 0)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, (case, arrays) in enumerate(rounds):
        put(case, arrays, seed)
        out.fill_(torch.nan)
        graph.replay()
        for b, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
            expected, _ = dense_attention(q[b : b + 1], keys, values, Scoring(SCALE))
            torch.testing.assert_close(out[b : b + 1].double(), expected, atol=1e-2, rtol=1e-2)


# --- precision ---


def test_bfloat16_is_no_worse_than_torch(device: torch.device) -> None:
    """The error against float64 is at most twice that of torch's own attention in bfloat16."""
    length, new, num_heads, head_dim = 1500, 700, 8, 128
    case = make_case([length], head_dim=head_dim, dtype=torch.bfloat16)
    q, k, v = (x.bfloat16() for x in packed_qkv(new, num_heads, 2, head_dim))
    keys, values = (torch.cat([old[0][: length - new], x]) for old, x in ((case.keys, k), (case.values, v)))
    mask = torch.ones(new, length, dtype=torch.bool).tril_(length - new)

    def dense(dtype: torch.dtype) -> Tensor:
        heads = (x.to(dtype).transpose(0, 1)[None] for x in (q, keys, values))
        attended = scaled_dot_product_attention(*heads, attn_mask=mask, scale=SCALE, enable_gqa=True)
        return attended[0].transpose(0, 1).double()

    scoring = Scoring(SCALE)
    out = extend_attention(q, k, v, case.kv, case.extends([length - new]), None, scoring).double()
    exact = dense(torch.float64)
    assert (out - exact).norm() <= 2 * (dense(torch.bfloat16) - exact).norm()
    last = case.req_to_token[case.rows[0], length - new : length].long()
    case.k_buffer[last], case.v_buffer[last] = k, v
    decoded = decode_attention(q[-1:], case.kv, case.flat_plan(max_item_len=256), scoring)
    assert (decoded[0].double() - exact[-1]).norm() <= 2 * (dense(torch.bfloat16)[-1] - exact[-1]).norm()


# --- random batches ---


@pytest.mark.long
def test_random_batches(device: torch.device) -> None:
    """Kernels against references for some minutes; a failure names its seed."""
    seed, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            check_random_batch(np.random.default_rng(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seed += 1
    logging.getLogger(__name__).warning("random batches: seeds 0 to %d", seed - 1)
    assert seed > 50


TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def check_both(call: Any, q: Tensor) -> None:
    """The kernel against torch, for the queries q."""
    results = []
    for impl in ("triton", "torch"):
        lse = torch.full(q.shape[:2], torch.nan)
        results.append((call(impl=impl, lse=lse).float(), lse))
    (ours, our_lse), (expected, expected_lse) = results
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])
    torch.testing.assert_close(our_lse, expected_lse, atol=1e-3, rtol=1e-3)


def check_random_batch(rng: np.random.Generator) -> None:
    """A batch of random shape, lengths and options: extends over a prefix, then the last tokens as decodes."""

    def choose(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    dtype = choose(torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    e4m3 = dtype != torch.bfloat16 and choose(True, False) and KNOWS_E4M3
    head_dim, group = choose(16, 32, 64, 80, 96, 112, 128, 128, 192, 256), choose(1, 2, 3, 4, 4, 7, 8, 16)
    num_kv_heads = choose(1, 2, 4)
    num_heads = group * num_kv_heads
    longest = choose(2, 70, 300, 2000)
    extends = rng.integers(0, choose(2, 20, 200, 600), size=choose(1, 2, 7, 30))
    prefixes = rng.integers(0, longest, size=extends.size)
    lengths = [int(n) for n in prefixes + extends]
    case = make_case(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        scattered=choose(True, True, False),
        interleaved=choose(True, False),
        e4m3=e4m3,
        seed=int(rng.integers(2**31)),
    )
    scoring = Scoring(
        head_dim**-0.5,
        softcap=choose(None, None, 5.0),
        window=choose(None, None, 1, 40, 500),
        sinks=choose(None, None, torch.randn(num_heads)),
        alibi_slopes=choose(None, None, torch.rand(num_heads)),
    )
    q, k, v = (x.to(dtype) for x in packed_qkv(int(extends.sum()), num_heads, num_kv_heads, head_dim))
    if case.k_scale is not None and case.v_scale is not None:
        k, v = quantise(k, case.k_scale).to(dtype), quantise(v, case.v_scale).to(dtype)
    new = case.extends(prefixes.tolist())

    def extend(**keywords: Any) -> Tensor:
        return extend_attention(q, k, v, case.kv, new, None, scoring, **keywords)

    plan = case.flat_plan(choose(None, 64, 192, 1000), choose(None, scoring.window))
    queries = torch.randn(len(lengths), num_heads, head_dim).to(dtype)

    def decode(**keywords: Any) -> Tensor:
        return decode_attention(queries, case.kv, plan, scoring, **keywords)

    check_both(extend, q)
    check_both(decode, queries)


@pytest.mark.long
def test_random_trees(device: torch.device) -> None:
    """Kernels against references for some minutes; a failure names its seed."""
    seed, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            check_random_tree(np.random.default_rng(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seed += 1
    logging.getLogger(__name__).warning("random trees: seeds 0 to %d", seed - 1)
    assert seed > 50


def check_random_tree(rng: np.random.Generator) -> None:
    """Requests that share prefixes in a tree of random shape."""

    def choose(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    dtype = choose(torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    head_dim, group = choose(16, 32, 64, 80, 96, 112, 128, 128, 192, 256), choose(1, 2, 3, 4, 4, 7, 8, 16)
    num_kv_heads = choose(1, 2, 4)
    longest = choose(2, 70, 500)
    edges: Edges = []
    for n in range(rng.integers(1, choose(3, 12, 60))):
        # Chains, wide trees and forests.
        parent = choose(n - 1, int(rng.integers(-1, n)), min(n, 1) - 1)
        edges.append((parent, choose(1, int(rng.integers(1, longest)), int(rng.integers(1, 6 * longest)))))
    leaves = sorted(set(range(len(edges))) - {parent for parent, _ in edges}) * choose(1, 1, 3, 40)
    leaves = [int(n) for n in rng.permutation(leaves)[:400]]
    case = share(
        edges,
        leaves,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        e4m3=dtype != torch.bfloat16 and choose(True, False) and KNOWS_E4M3,
        seed=int(rng.integers(2**31)),
    )
    plan = shared_plan(
        case,
        edges,
        leaves,
        group=group,
        piece=choose(64, 200, 1000, 10_000),
        max_item_len=choose(None, 64, 192, 1000),
        padding=choose(0, 5),
        seed=int(rng.integers(2**31)),
    )
    num_heads = group * num_kv_heads
    scoring = Scoring(
        head_dim**-0.5,
        softcap=choose(None, None, 5.0),
        sinks=choose(None, None, torch.randn(num_heads)),
        alibi_slopes=choose(None, None, torch.rand(num_heads)),
    )
    queries = torch.randn(len(leaves), num_heads, head_dim).to(dtype)
    check_both(lambda **keywords: decode_attention(queries, case.kv, plan, scoring, **keywords), queries)

    # The same requests, each with a few tokens that are new; those of a leaf are the same ones.
    few = choose(1, 8, 100)
    new = {leaf: int(rng.integers(1, min(edges[leaf][1], few) + 1)) for leaf in leaves}
    counts = torch.tensor([new[leaf] for leaf in leaves], dtype=torch.int32)
    prefix_lens = case.seq_lens - counts
    extends = shared_extends(
        case,
        edges,
        leaves,
        prefix_lens.tolist(),
        group=group,
        piece=choose(64, 200, 1000, 10_000),
        padding=choose(0, 5),
        cut=choose(True, False),
        seed=int(rng.integers(2**31)),
    )
    q, k, v = (x.to(dtype) for x in packed_qkv(int(counts.sum()), num_heads, num_kv_heads, head_dim))
    if case.k_scale is not None and case.v_scale is not None:
        k, v = quantise(k, case.k_scale).to(dtype), quantise(v, case.v_scale).to(dtype)
    requests = case.extends(prefix_lens.tolist())

    def extend(**keywords: Any) -> Tensor:
        # The reference reads without a plan.
        plan = extends if keywords["impl"] == "triton" else None
        return extend_attention(q, k, v, case.kv, requests, plan, scoring, **keywords)

    check_both(extend, q)
