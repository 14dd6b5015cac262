"""The bits of a row of every operation but attention do not depend on the rows beside it.

Where torch's own form depends on them, the operation is asked to be deterministic.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from layers.products import revealing_inputs
from tests.support.row_bits import COUNTS, ROWS, differing_counts, threads
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.sigmoid import sigmoid
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.implementation import triton
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store
from triton_ops.kv.view import KVView
from triton_ops.moe.moe import moe
from triton_ops.moe.topk_sigmoid import topk_sigmoid
from triton_ops.moe.topk_softmax import topk_softmax
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm, rms_norm_add
from triton_ops.sampling.filtered_logits import filtered_logits
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.penalties import apply_penalties
from triton_ops.sampling.sample import finite_rows, greedy, sample

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (17, 48, 256, 1001)
# A row of the largest is more than a thread's least share of a sum in torch.
VOCABULARIES = (101, 1632, 50_257)
FEW_ROWS, FEW_COUNTS = 9, (1, 2, 5, 8)

Case = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


class Random:
    """Random inputs of the operations, in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(self.dtype)

    def shares(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator, dtype=torch.int32)


def rows_cases(random: Random) -> Iterator[Case]:
    """Norms and activations."""
    for size in SIZES:
        x, residual, weight, gated = random(ROWS, size), random(ROWS, size), random(size), random(ROWS, 2 * size)
        for offset in (None, 1.0):
            norm = {"weight": weight, "eps": 1e-5, "offset": offset}
            yield f"rms_norm {size} {offset}", partial(rms_norm, **norm), (x,)
            yield f"add_rms_norm {size} {offset}", partial(add_rms_norm, **norm), (x, residual)
            yield f"rms_norm_add {size} {offset}", partial(rms_norm_add, **norm), (x, residual)
            with_before = partial(add_rms_norm, **norm, before=weight)
            yield f"add_rms_norm before {size} {offset}", with_before, (x, residual)
        yield f"silu {size}", partial(silu_and_mul, deterministic=True), (gated,)
        yield f"clamped swiglu {size}", partial(clamped_swiglu, deterministic=True), (gated,)
        for kind in ("none", "tanh"):
            gelu = partial(gelu_and_mul, approximate=kind, deterministic=True)
            yield f"gelu {kind} {size}", gelu, (gated,)
        yield f"sigmoid {size}", partial(sigmoid, deterministic=True), (x,)
        yield f"soft_cap {size}", partial(soft_cap, cap=5.0), (x,)
        table = random(300, size)
        yield f"embedding {size}", lambda ids, table=table: embedding(ids, table) * 16.0, (random.ints(300, ROWS),)


def heads_cases(random: Random) -> Iterator[Case]:
    """What comes before attention."""
    for num_heads, num_kv_heads, head_dim, rotary_dim in ((4, 2, 16, 16), (3, 1, 80, 20)):
        norm = HeadNorm(random(head_dim), random(head_dim), 1e-6)
        angles, heads = random.shares(500, rotary_dim), (num_heads, num_kv_heads, num_kv_heads)

        def prepare(
            packed: Tensor,
            positions: Tensor,
            norm: HeadNorm = norm,
            angles: Tensor = angles,
            heads: tuple[int, ...] = heads,
        ) -> tuple[Tensor, ...]:
            # A copy: the operation works in place.
            q, k, v = packed.clone().split(heads, dim=1)
            slots = torch.arange(1, len(packed) + 1, dtype=torch.int32)
            pool = torch.zeros(2, ROWS + 1, *k.shape[1:], dtype=packed.dtype)
            kv = KVView(pool[0], pool[1], slots[None])
            qk_norm_rope_store(q, k, v, kv, slots, norm=norm, rotation=Rotation(angles, positions))
            return q.contiguous(), pool[0, 1 : len(packed) + 1], pool[1, 1 : len(packed) + 1]

        packed = random(ROWS, sum(heads), head_dim)
        yield f"heads of {head_dim}", prepare, (packed, random.ints(500, ROWS))


def expert_cases(random: Random) -> Iterator[Case]:
    for num_experts, top_k, hidden, inner in ((4, 2, 32, 48), (60, 4, 64, 32), (6, 3, 33, 17)):
        device = torch.get_default_device()
        x, gate_up, _ = revealing_inputs(ROWS, num_experts * 2 * inner, hidden, random.dtype, device)
        gate_up, down = gate_up.view(num_experts, 2 * inner, hidden), random(num_experts, hidden, inner)

        def mix(
            x: Tensor, logits: Tensor, gate_up: Tensor = gate_up, down: Tensor = down, top_k: int = top_k
        ) -> tuple[Tensor, ...]:
            weights, experts = topk_softmax(logits, top_k, renormalize=True)
            correction = torch.linspace(-0.1, 0.1, logits.shape[1])
            others = topk_sigmoid(logits.float(), correction, top_k, renormalize=True, factor=2.5)
            return weights, experts, *others, moe(x, weights, experts, gate_up, down, deterministic=True)

        # Divided, so that float16 does not overflow.
        yield f"{top_k} of {num_experts} experts", mix, (x / 256, random(ROWS, num_experts))


def logits_cases(random: Random) -> Iterator[Case]:
    """Draws and log-probabilities."""
    for vocab_size in VOCABULARIES:
        num_rows = ROWS if vocab_size < 5000 else FEW_ROWS
        logits, shares = random(num_rows, vocab_size, scale=3.0), random.shares(3, num_rows)
        temperatures = shares[0] + 0.3
        temperatures[::5] = 0.0
        filters = random.ints(50, num_rows), shares[1] * 0.9 + 0.1, shares[2] * 0.1
        seeds, positions = random.ints(2**30, num_rows).long(), random.ints(1000, num_rows)

        def draw(
            logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *filters: Tensor
        ) -> Tensor:
            named = dict(zip(("top_ks", "top_ps", "min_ps"), filters, strict=False))
            given = {"temperatures": temperatures, "seeds": seeds, "positions": positions, **named}
            return sample(logits, sample_indices=torch.zeros_like(positions), **given)

        def filtered(logits: Tensor, temperatures: Tensor, *filters: Tensor) -> Tensor:
            named = dict(zip(("top_ks", "top_ps", "min_ps"), filters, strict=False))
            return filtered_logits(logits, temperatures=temperatures, **named)

        def penalised(logits: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
            """Each row has a history of eight tokens."""
            rows = torch.arange(len(logits), dtype=torch.int32).repeat_interleave(8)
            penalties = {"repetition": factors + 0.5, "presence": factors, "frequency": factors / 3}
            return apply_penalties(logits, rows, ids.flatten(), ids.flatten() % 2, **penalties)

        ids = random.ints(vocab_size, num_rows)
        yield f"draw {vocab_size}", draw, (logits, temperatures, seeds, positions)
        yield f"draw, filtered {vocab_size}", draw, (logits, temperatures, seeds, positions, *filters)
        yield f"filtered {vocab_size}", filtered, (logits, temperatures, *filters)
        yield f"temperature {vocab_size}", filtered, (logits, temperatures)
        yield f"greedy {vocab_size}", greedy, (logits,)
        yield f"finite {vocab_size}", finite_rows, (logits,)
        yield f"logprobs {vocab_size}", partial(token_logprobs, num_top=5), (logits, ids)
        yield f"penalties {vocab_size}", penalised, (logits, random.ints(vocab_size, num_rows, 8), shares[0])


@pytest.mark.each_once
@pytest.mark.long_unless(kept=lambda case: case["num_threads"] == (1 if case["dtype"] == torch.float16 else 2))
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", [rows_cases, heads_cases, expert_cases, logits_cases])
def test_bits_of_a_row(
    cases: Callable[[Random], Iterator[Case]], dtype: torch.dtype, num_threads: int, device: torch.device
) -> None:
    differing = {}
    with threads(num_threads):
        for name, op, inputs in cases(Random(dtype)):
            few = FEW_COUNTS if len(inputs[0]) < ROWS else COUNTS[::5]
            if found := differing_counts(op, *inputs, counts=few if cases is logits_cases else COUNTS):
                differing[name] = found
    assert not differing


def test_an_expert_does_not_depend_on_others_of_its_token() -> None:
    """The sum is in the order of a token's choices, not of the experts."""
    random = Random(torch.float32)
    x, gate_up, down = random(1, 32), random(3, 2 * 48, 32), random(3, 32, 48)
    weights = torch.tensor([[0.5, 0.3, 0.2]])
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        experts = torch.tensor([order])
        whole = moe(x, weights, experts, gate_up, down, deterministic=True)
        total = torch.zeros(1, 32)
        for place in range(3):
            one = moe(x, torch.ones(1, 1), experts[:, place : place + 1], gate_up, down, deterministic=True)
            total += one * weights[:, place : place + 1]
        assert torch.equal(whole, total)


def test_differences_are_found() -> None:
    """Those of torch's silu on processors with wide registers, and of anything that looks at its neighbours."""
    random = Random(torch.float32)
    x = random(ROWS, 5000)
    assert differing_counts(lambda rows: rows * len(rows), x, counts=(1, 5)) == [1, 5]
    assert differing_counts(lambda rows: rows.cumsum(0), x, counts=(1, 5)) == [1, 5]
    with threads(2):
        if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            assert differing_counts(silu, x)


@pytest.mark.skipif(not triton.__version__, reason="there is no Triton")
def test_kernels_are_the_same_at_all_numbers_of_rows() -> None:
    """But for attempts at a draw and experts' tiles: both count integers, and a tile's sums are one chain each.
    What others want changes no order in which log-probabilities are added; their dtype would.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    script = root / "tests" / "support" / "row_variants.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    several = {name: kernels for name, kernels in found["variants"].items() if kernels}
    filtered = [name for name in found["variants"] if re.match("sample: .*, top_", name)]
    assert len(filtered) == 8
    assert several == {
        **{name: ["_candidates_kernel"] for name in filtered},
        "experts": ["_expert_product_kernel", "_expert_tiles_kernel"],
    }
    assert found["launches change no code"]
    (narrow, *other_narrow), (wide, *other_wide) = found["sums"].values()
    assert len(narrow) == len(wide) == 1
    assert other_narrow == [narrow, narrow]
    assert other_wide == [wide, wide]
    assert narrow != wide
