"""Projections of weights in e4m3, with the quantisation of x: as layers compute them, and in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from scripts.kernel_benchmarks.case import Call, Case, Contender, Expected, Source, seeded
from scripts.kernel_benchmarks.roofline import Work
from triton_ops.activations.quantised_rows import BLOCK, quantise_rows
from triton_ops.e4m3 import E4M3, E4M3_MAX
from triton_ops.linear.e4m3_linear import (
    dequantised_weight,
    e4m3_linear,
    quantised_weight,
    scaled_product,
    torch_scaled_product,
)

ROWS = (8, 64, 512, 2048, 16_384)
# Of Llama 3.1 8B: q, k and v; o; gate and up; down.
PROJECTIONS = ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096))
CHECKED_ROWS = 64  # in float32


@dataclass(frozen=True)
class E4M3Inputs:
    """`x [M, K]`, `codes [N, K]` with `scale`, and `weight`, the same numbers in x's dtype."""

    x: Tensor
    codes: Tensor
    scale: Tensor
    weight: Tensor


def _ours(inputs: E4M3Inputs) -> Call:
    return Call(lambda: e4m3_linear(inputs.x, inputs.codes, inputs.scale, impl="triton"))


def _by(product: Callable[..., Tensor], inputs: E4M3Inputs) -> Call:
    def project() -> Tensor:
        codes, scale = quantise_rows(inputs.x, groups=inputs.scale.dim() == 2, impl="triton")
        return product(codes, scale, inputs.codes, inputs.scale, None, inputs.x.dtype)

    return Call(project)


def _unquantised(inputs: E4M3Inputs) -> Call:
    return Call(lambda: nn.functional.linear(inputs.x, inputs.weight))


def _expected(inputs: E4M3Inputs) -> Expected:
    """In float32: x is in e4m3 already, so that rounding it is no error."""
    rows = torch.arange(min(CHECKED_ROWS, len(inputs.x)), device=inputs.x.device)
    weight = dequantised_weight(inputs.codes, inputs.scale)
    return Expected((inputs.x[rows].float() @ weight.T,), rows)


def e4m3_case(
    num_rows: int, depth: int, num_columns: int, *, blocks: bool, dtype: torch.dtype = torch.bfloat16
) -> Case[E4M3Inputs]:
    """`num_rows` tokens, from `depth` to `num_columns` elements, with scales of blocks or of rows."""

    def inputs(source: Source) -> E4M3Inputs:
        random = partial(source.normal, dtype=torch.float32)
        x = random(num_rows, depth).mul_(64).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3).to(dtype)
        x[:, ::BLOCK] = E4M3_MAX  # all scales are 1
        codes, scale = quantised_weight(random(num_columns, depth).mul_(depth**-0.5), blocks=blocks)
        return E4M3Inputs(x, codes, scale, dequantised_weight(codes, scale).to(dtype))

    contenders = [Contender("radixrt", _ours), Contender("Triton", partial(_by, scaled_product))]
    if blocks:
        contenders.append(Contender("torch", partial(_by, torch_scaled_product)))
    else:
        exact = partial(torch_scaled_product, fast_sums=False)
        contenders.append(Contender("torch, exact sums", partial(_by, exact)))
    # x and the weight are read, the result is written.
    num_bytes = (num_rows * depth + num_rows * num_columns) * dtype.itemsize + num_columns * depth
    return Case(
        "linear-fp8",
        f"{num_rows}x{depth} to {num_columns}",
        "blocks" if blocks else "rows",
        Work(num_bytes, flops=2.0 * num_rows * depth * num_columns, in_e4m3=True),
        seeded(inputs),
        _expected,
        (*contenders, Contender("bf16", _unquantised)),
    )


def e4m3_cases() -> Iterator[Case[E4M3Inputs]]:
    """The projections of Llama 3.1 8B."""
    for depth, num_columns in PROJECTIONS:
        for num_rows in ROWS:
            for blocks in (False, True):
                yield e4m3_case(num_rows, depth, num_columns, blocks=blocks)
