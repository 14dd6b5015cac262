"""Experts: both products, the activation and the sum. Cases are of gpt-oss 20b, in MXFP4 and dequantised to bf16
beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scripts.kernel_benchmarks.case import Call, Case, Contender, Expected, Source, seeded
from scripts.kernel_benchmarks.roofline import Work
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.activations.quantised_rows import BLOCK
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import Impl, cdiv, gpu_of
from triton_ops.moe.e4m3 import ScaledE4M3
from triton_ops.moe.moe import Matrices, moe
from triton_ops.moe.mxfp4 import GROUP, Mxfp4, scale_of, scales_of
from triton_ops.moe.mxfp4_hopper import takes_words

TOKENS = (1, 16, 64, 256, 1024, 8192)
REFERENCE_ROWS = 8  # that are computed in float32, too


@dataclass(frozen=True)
class ExpertShape:
    """`num_tokens` tokens that choose `top_k` of the experts each, spread evenly.

    Attributes:
        has_bias: as gpt-oss has them, whose activation it has then; in MXFP4 it has that in any case.
        stored: "dense" in `dtype`, "mxfp4", "e4m3" with a scale a row, or "e4m3 in blocks".
    """

    num_tokens: int
    num_experts: int = 32
    top_k: int = 4
    hidden_size: int = 2880
    inner_size: int = 2880
    dtype: torch.dtype = torch.bfloat16
    has_bias: bool = False
    stored: str = "dense"

    def _matrices(self, size: int, depth: int, source: Source) -> Matrices:
        if self.stored.startswith("e4m3"):
            scale = (size,) if self.stored == "e4m3" else (cdiv(size, BLOCK), cdiv(depth, BLOCK))
            scales = source.normal(self.num_experts, *scale, dtype=torch.float32)
            return ScaledE4M3(source.normal(self.num_experts, size, depth, dtype=E4M3), scales)
        if self.stored == "mxfp4":
            groups, in_words = depth // GROUP, takes_words(gpu_of(source.device), self.dtype)
            scales = torch.empty(
                self.num_experts, size, scales_of(groups, in_words), dtype=torch.uint8, device=source.device
            )
            scales.fill_(scale_of(depth**-0.5))[..., groups:] = 0
            return Mxfp4(source.bytes(self.num_experts, size, groups, GROUP // 2), scales, in_words)
        return source.normal(self.num_experts, size, depth, dtype=self.dtype)

    def inputs(self, source: Source) -> ExpertInputs:
        """The arguments of `moe` but for the implementation."""
        chosen = torch.arange(self.num_tokens * self.top_k, device=source.device) % self.num_experts
        options: dict[str, Any] = {}
        if self.has_bias or self.stored == "mxfp4":
            options["activation"] = clamped_swiglu
        if self.has_bias:
            for name, size in (("gate_up_bias", 2 * self.inner_size), ("down_bias", self.hidden_size)):
                options[name] = source.normal(self.num_experts, size, dtype=self.dtype)
        return ExpertInputs(
            source.normal(self.num_tokens, self.hidden_size, dtype=self.dtype),
            torch.full((self.num_tokens, self.top_k), 1 / self.top_k, device=source.device),
            chosen.view(self.num_tokens, self.top_k),
            self._matrices(2 * self.inner_size, self.hidden_size, source),
            self._matrices(self.hidden_size, self.inner_size, source),
            options,
        )


@dataclass(frozen=True)
class ExpertInputs:
    """`x [T, hidden]`, and the arguments of `moe` by the same names."""

    x: Tensor
    weights: Tensor
    experts: Tensor
    gate_up: Matrices
    down: Matrices
    options: Mapping[str, Any]

    def dequantised(self) -> ExpertInputs:
        """The same with matrices in the dtype of x."""
        assert isinstance(self.gate_up, Mxfp4)
        assert isinstance(self.down, Mxfp4)
        gate_up, down = (matrices.dequantised(self.x.dtype) for matrices in (self.gate_up, self.down))
        return replace(self, gate_up=gate_up, down=down)


def mix(inputs: ExpertInputs, *, parts_ok: bool = False, impl: Impl) -> Tensor:
    """`moe` on these inputs."""
    given = inputs.x, inputs.weights, inputs.experts, inputs.gate_up, inputs.down
    return moe(*given, **inputs.options, parts_ok=parts_ok, impl=impl)


def _call(inputs: ExpertInputs) -> Call:
    return Call(lambda: mix(inputs, impl="triton"))


def _dense(inputs: ExpertInputs) -> Call:
    return _call(inputs.dequantised())


def _expected(inputs: ExpertInputs) -> Expected:
    rows = torch.arange(min(REFERENCE_ROWS, len(inputs.x)), device=inputs.x.device)
    few = replace(inputs, x=inputs.x[rows].float(), weights=inputs.weights[rows], experts=inputs.experts[rows])
    return Expected((mix(few, impl="torch"),), rows)


def experts_case(shape: ExpertShape) -> Case[ExpertInputs]:
    """`shape` is in MXFP4."""
    elements = min(shape.num_experts, shape.num_tokens * shape.top_k) * 3 * shape.hidden_size * shape.inner_size
    num_bytes = elements // 2 + elements // GROUP + 2 * shape.num_tokens * shape.hidden_size * shape.dtype.itemsize
    flops = 2.0 * shape.num_tokens * shape.top_k * 3 * shape.hidden_size * shape.inner_size
    return Case(
        "experts",
        f"{shape.num_tokens} tokens",
        "",
        Work(num_bytes, flops),
        seeded(shape.inputs),
        _expected,
        (Contender("radixrt", _call), Contender("radixrt bf16", _dense)),
    )


def experts_cases() -> Iterator[Case[ExpertInputs]]:
    """From one decode to a large pass."""
    for num_tokens in TOKENS:
        yield experts_case(ExpertShape(num_tokens, stored="mxfp4"))
