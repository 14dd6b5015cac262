"""Output projections of small batches with the norm that follows: as layers compute them, and by cuBLAS alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from layers.placement import Placement
from layers.weight import Weight
from scripts.kernel_benchmarks.case import Call, Case, Contender, Expected, Source, seeded
from scripts.kernel_benchmarks.roofline import Work
from triton_ops.norms.rms_norm import add_rms_norm

EPS = 1e-5
BATCHES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class LinearInputs:
    """`x [M, K]`, `weight [N, K]`; `residual [M, N]` and `norm_weight [N]` are the norm's."""

    x: Tensor
    weight: Tensor
    residual: Tensor
    norm_weight: Tensor


def _ours(inputs: LinearInputs) -> Call:
    """Parts where they are faster."""
    num_columns, depth = inputs.weight.shape
    placement = Placement(inputs.x.dtype, torch.device("meta"), "triton")
    weight = Weight(num_columns, depth, placement=placement)
    weight.values = nn.Parameter(inputs.weight, requires_grad=False)
    return _call(lambda: weight.product(inputs.x, None, split_k_ok=True), inputs)


def _cublas(inputs: LinearInputs) -> Call:
    return _call(lambda: nn.functional.linear(inputs.x, inputs.weight), inputs)


def _call(project: Callable[[], Tensor], inputs: LinearInputs) -> Call:
    return Call(lambda: add_rms_norm(project(), inputs.residual, inputs.norm_weight, EPS, impl="triton"))


def _expected(inputs: LinearInputs) -> Expected:
    """In float32, so that rounding shows as error."""
    x = inputs.x.float() @ inputs.weight.float().T
    return Expected(
        add_rms_norm(x, inputs.residual.float(), inputs.norm_weight.float(), EPS, impl="torch"),
    )


def linear_case(
    num_rows: int, depth: int, num_columns: int, dtype: torch.dtype = torch.bfloat16
) -> Case[LinearInputs]:
    """`num_rows` tokens, from `depth` to `num_columns` elements."""

    def inputs(source: Source) -> LinearInputs:
        random = partial(source.normal, dtype=dtype)
        return LinearInputs(
            random(num_rows, depth),
            random(num_columns, depth).mul_(depth**-0.5),
            random(num_rows, num_columns),
            random(num_columns),
        )

    # x, weight and norm_weight are read, the residual is read and written, its norm is written.
    elements = num_rows * depth + num_columns * depth + num_columns + 3 * num_rows * num_columns
    return Case(
        "linear",
        f"{num_rows}x{depth} to {num_columns}",
        "",
        Work(elements * dtype.itemsize, flops=2.0 * num_rows * depth * num_columns),
        seeded(inputs),
        _expected,
        (Contender("radixrt", _ours), Contender("cuBLAS", _cublas)),
    )


def linear_cases() -> Iterator[Case[LinearInputs]]:
    """o_proj and down_proj of Qwen3 0.6B and of Llama 3.1 8B."""
    for depth, num_columns in ((2048, 1024), (3072, 1024), (4096, 4096), (14_336, 4096)):
        for num_rows in BATCHES:
            yield linear_case(num_rows, depth, num_columns)


def linear_sweep() -> Iterator[Case[LinearInputs]]:
    """The projections of Qwen3 1.7B and 4B, Llama 3.2 3B, and Qwen2.5 7B."""
    for depth, num_columns in (
        *((2048, 2048), (6144, 2048)),
        *((4096, 2560), (9728, 2560)),
        *((3072, 3072), (8192, 3072)),
        *((3584, 3584), (18_944, 3584)),
    ):
        for num_rows in BATCHES:
            yield linear_case(num_rows, depth, num_columns)
