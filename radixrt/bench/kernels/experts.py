"""Experts of gpt-oss 20b, in MXFP4 and dequantised to bf16 beforehand: both products, the activation, the sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixrt.bench.kernels.case import Call, Case, Contender, Expected, seeded
from radixrt.bench.kernels.roofline import Work
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.implementation import gpu_of
from triton_ops.moe.moe import Matrices, moe
from triton_ops.moe.mxfp4 import GROUP, Mxfp4, scale_of
from triton_ops.moe.mxfp4_hopper import takes_words

DTYPE = torch.bfloat16
TOKENS = (1, 16, 64, 256, 1024, 8192)
REFERENCE_ROWS = 8  # that are computed in float32, too


@dataclass(frozen=True)
class ExpertInputs:
    """`x [T, hidden]`, and the arguments of `moe` by the same names."""

    x: Tensor
    weights: Tensor
    experts: Tensor
    gate_up: Mxfp4
    down: Mxfp4


def _mix(inputs: ExpertInputs, x: Tensor, gate_up: Matrices, down: Matrices, **options: Any) -> Tensor:
    weights, experts = inputs.weights[: len(x)], inputs.experts[: len(x)]
    return moe(x, weights, experts, gate_up, down, activation=clamped_swiglu, **options)


def _call(inputs: ExpertInputs, gate_up: Matrices, down: Matrices) -> Call:
    return Call(lambda: _mix(inputs, inputs.x, gate_up, down, impl="triton"))


def _packed(inputs: ExpertInputs) -> Call:
    return _call(inputs, inputs.gate_up, inputs.down)


def _dense(inputs: ExpertInputs) -> Call:
    return _call(inputs, inputs.gate_up.dequantised(DTYPE), inputs.down.dequantised(DTYPE))


def _expected(inputs: ExpertInputs) -> Expected:
    rows = torch.arange(min(REFERENCE_ROWS, len(inputs.x)), device=inputs.x.device)
    exact = _mix(inputs, inputs.x[: len(rows)].float(), inputs.gate_up, inputs.down, impl="torch")
    return Expected((exact,), rows)


def experts_case(
    num_tokens: int, num_experts: int = 32, top_k: int = 4, hidden: int = 2880, inner: int = 2880
) -> Case[ExpertInputs]:
    """`num_tokens` tokens that are spread evenly over the experts."""

    def inputs(generator: torch.Generator) -> ExpertInputs:
        device = generator.device

        def matrices(size: int, depth: int) -> Mxfp4:
            groups = num_experts, size, depth // GROUP
            blocks = torch.randint(
                256, (*groups, GROUP // 2), dtype=torch.uint8, device=device, generator=generator
            )
            scales = torch.full(groups, scale_of(depth**-0.5), dtype=torch.uint8, device=device)
            stored = Mxfp4(blocks, scales)
            return stored.as_words() if takes_words(gpu_of(device), DTYPE) else stored

        chosen = torch.arange(num_tokens * top_k, device=device) % num_experts
        return ExpertInputs(
            torch.randn(num_tokens, hidden, dtype=DTYPE, device=device, generator=generator),
            torch.full((num_tokens, top_k), 1 / top_k, device=device),
            chosen.view(num_tokens, top_k),
            matrices(2 * inner, hidden),
            matrices(hidden, inner),
        )

    elements = min(num_experts, num_tokens * top_k) * 3 * hidden * inner
    num_bytes = elements // 2 + elements // GROUP + 2 * num_tokens * hidden * DTYPE.itemsize
    return Case(
        "experts",
        f"{num_tokens} tokens",
        "",
        Work(num_bytes, flops=2.0 * num_tokens * top_k * 3 * hidden * inner),
        seeded(inputs),
        _expected,
        (Contender("radixrt", _packed), Contender("radixrt bf16", _dense)),
    )


def experts_cases() -> Iterator[Case[ExpertInputs]]:
    """From one decode to a large pass."""
    return map(experts_case, TOKENS)
