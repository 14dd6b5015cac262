"""A linear projection whose weight is in e4m3, 8 bits a number, with scales in float32: x is quantised, too
(`quantised_rows`), and e4m3 is multiplied by e4m3.

The format is that of Micikevicius et al. (2022); blocks of 128 x 128 of a weight, with groups of 128 of x, are
those of DeepSeek-V3 (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from triton_ops.activations.quantised_rows import BLOCK, QuantisedRows, codes_of, scale_of, spread_groups
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import Impl, cdiv, gpu_of, runs_triton, tl, triton
from triton_ops.tuning import e4m3_linear_config

# Up to so many rows the kernel is faster than torch's product, of x's scales by row and of those by group.
FEW_ROWS, FEW_ROWS_OF_GROUPS = 64, 32
# Of torch's product: all in a tensor core's accumulator, which has fewer bits than float32. A result is 2 to 4
# thousandths off, where x and the weight, rounded to e4m3, are 37; 4 to 10 % faster on an H200.
FAST_SUMS = True


# --- weights ---


def quantised_weight(weight: Tensor, *, blocks: bool) -> tuple[Tensor, Tensor]:
    """`weight [N, K]`, any float, in e4m3, and float32 scales: `[N]`, or `[N / 128, K / 128]` rounded up."""
    num_rows, depth = weight.shape
    wide = weight.float()
    if not blocks:
        scale = scale_of(wide.abs().amax(1))
        return codes_of(wide, scale.unsqueeze(1)), scale
    padded = pad(wide.abs(), (0, -depth % BLOCK, 0, -num_rows % BLOCK))
    tiles = padded.view(cdiv(num_rows, BLOCK), BLOCK, cdiv(depth, BLOCK), BLOCK)
    scale = scale_of(tiles.amax((1, 3)))
    return codes_of(wide, _spread(scale, num_rows, depth)), scale


def dequantised_weight(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes `[N, K]` of e4m3 times their scale, float32 `[N]` or `[N / 128, K / 128]` rounded up: in float32."""
    return codes.float().mul_(scale.unsqueeze(1) if scale.dim() == 1 else _spread(scale, *codes.shape))


def _spread(scale: Tensor, num_rows: int, depth: int) -> Tensor:
    """Scales of blocks for each element."""
    return scale.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :depth]


# --- the product ---


def e4m3_linear(
    x: Tensor | QuantisedRows,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """`x W^T + b`, of x in e4m3, summed in float32 and rounded once: `[..., N]` in x's dtype.

    Args:
        x: `[..., K]`, any float. `quantise_rows` quantises it, in groups where the weight has scales of blocks,
            unless who made it has done so.
        weight: e4m3 `[N, K]`, contiguous.
        scale: of the weight, float32 `[N]`, or `[N / 128, K / 128]` rounded up, contiguous.
        bias: `[N]` in x's dtype, contiguous; None: 0.

    Where it can, torch's scaled product multiplies, else `scaled_product`.

    Raises ValueError where shapes or dtypes disagree.
    """
    groups = scale.dim() == 2
    shape = x.codes.shape if isinstance(x, QuantisedRows) else x.shape
    _check(shape[-1], x.dtype, weight, scale, bias)
    if not isinstance(x, QuantisedRows):
        x = QuantisedRows.of(x.reshape(-1, x.shape[-1]), groups=groups, impl=impl)
    elif x.in_groups != groups and shape[-1] > BLOCK:
        raise ValueError(f"x is quantised {x.words}, but the weight's scales are {[*scale.shape]}")
    codes, x_scale = x.codes, x.scale
    if not runs_triton(impl, codes.device):
        wide = codes.float().mul_(spread_groups(x_scale, shape[-1]) if groups else x_scale)
        result = wide @ dequantised_weight(weight, scale).T
        out = (result if bias is None else result + bias.float()).to(x.dtype)
    elif _torch_is_faster(codes, weight, bias, x.dtype, groups=groups):
        out = torch_scaled_product(codes, x_scale, weight, scale, bias, x.dtype)
    else:
        out = scaled_product(codes, x_scale, weight, scale, bias, x.dtype)
    return out.view(*shape[:-1], len(weight))


def _check(size: int, dtype: torch.dtype, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    num_columns, depth = weight.shape
    if weight.dtype != E4M3 or not weight.is_contiguous() or size != depth:
        raise ValueError(
            f"weight must be contiguous [N, {size}] in {E4M3}, but is {[*weight.shape]} in {weight.dtype} "
            f"with strides {[*weight.stride()]}"
        )
    blocks = [cdiv(num_columns, BLOCK), cdiv(depth, BLOCK)]
    if [*scale.shape] not in ([num_columns], blocks) or scale.dtype != torch.float32 or not scale.is_contiguous():
        raise ValueError(
            f"scale must be contiguous float32 {[num_columns]} or {blocks}, but is {[*scale.shape]} in "
            f"{scale.dtype}"
        )
    if bias is not None and (bias.shape != (num_columns,) or bias.dtype != dtype or not bias.is_contiguous()):
        raise ValueError(
            f"bias must be contiguous {[num_columns]} in {dtype}, but is {[*bias.shape]} in {bias.dtype}"
        )


def _torch_is_faster(
    codes: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, groups: bool
) -> bool:
    """Whether torch's scaled product serves, and the rows are enough for it. It is used on Hopper alone, as other
    GPUs were not tried.
    """
    if codes.device.type != "cuda" or not gpu_of(codes.device).has_wgmma or dtype != torch.bfloat16:
        return False
    (num_columns, depth), num_rows = weight.shape, len(codes)
    if groups:
        # cuBLAS wants blocks that are whole, and fours of a row's scales.
        fits = (
            num_columns % BLOCK == 0
            and depth % (4 * BLOCK) == 0
            and bias is None
            and hasattr(functional, "scaled_mm")
        )
        return fits and num_rows > FEW_ROWS_OF_GROUPS
    return num_columns % 16 == 0 and depth % 16 == 0 and num_rows > FEW_ROWS


def torch_scaled_product(
    codes: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast_sums: bool = FAST_SUMS,
) -> Tensor:
    """`scaled_product` by torch, on a GPU for scales of blocks; `fast_sums` are those of scales of rows alone."""
    if scale.dim() == 1:
        return torch._scaled_mm(
            codes, weight.T, x_scale, scale.unsqueeze(0), bias=bias, out_dtype=dtype, use_fast_accum=fast_sums
        )
    # A column of x's scales lies in one piece, and its length is a multiple of four.
    num_rows = len(codes)
    if missing := -num_rows % 4:
        codes = pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(E4M3)
        x_scale = pad(x_scale, (0, 0, 0, missing))
    return functional.scaled_mm(
        codes,
        weight.T,
        x_scale.T.contiguous().T,
        functional.ScalingType.BlockWise1x128,
        scale.T,
        functional.ScalingType.BlockWise128x128,
        bias=bias,
        output_dtype=dtype,
    )[:num_rows]


def scaled_product(
    codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`x W^T + b` in `dtype`, `[M, N]`, by the kernel. `codes` and `x_scale` are from `quantise_rows`, the others
    as in `e4m3_linear`. Sums over 128 elements are a tensor core's; these are added up in float32.
    """
    (num_rows, depth), num_columns = codes.shape, weight.shape[0]
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=codes.device)
    config = e4m3_linear_config(gpu_of(codes.device), num_rows, num_columns)
    if num_rows:
        _scaled_product_kernel[(cdiv(num_rows, config.rows), cdiv(num_columns, config.columns))](
            codes,
            x_scale,
            weight,
            scale,
            bias,
            out,
            num_rows,
            num_columns,
            depth,
            BY_BLOCKS=scale.dim() == 2,
            WHOLE_STEPS=depth % BLOCK == 0,
            ROWS=config.rows,
            COLUMNS=config.columns,
            STAGES=config.stages,
            num_warps=config.num_warps,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _scaled_product_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    BY_BLOCKS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program computes a tile, whose columns are of one block. Of the weight's tile, 64 columns or more are the
    first operand, as a wgmma takes them; fewer are the second one. Programs that follow each other read the same
    weights.
    """
    weight_first: tl.constexpr = COLUMNS >= 64
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    first_column = tl.program_id(1) * COLUMNS
    column = (first_column + tl.arange(0, COLUMNS))[:, None].to(tl.int64)
    is_row, is_column = row < num_rows, column < num_columns
    inner = tl.arange(0, 128)[None, :]
    xs = x_ptr + row * depth + inner
    weights = weight_ptr + column * depth + inner
    num_groups = (depth + 127) // 128
    x_scales = x_scale_ptr + row * (num_groups if BY_BLOCKS else 1)
    scales = scale_ptr + first_column // 128 * num_groups
    x_scale_mask = is_row
    if weight_first:
        x_scales, x_scale_mask = tl.trans(x_scales), tl.trans(is_row)
    total = tl.zeros((COLUMNS, ROWS) if weight_first else (ROWS, COLUMNS), tl.float32)
    for group in tl.range(0, num_groups, num_stages=STAGES):
        start = group * 128
        x_mask = is_row if WHOLE_STEPS else is_row & (start + inner < depth)
        weight_mask = is_column if WHOLE_STEPS else is_column & (start + inner < depth)
        weight = tl.load(weights + start, mask=weight_mask, other=0.0)
        x = tl.load(xs + start, mask=x_mask, other=0.0)
        part = tl.dot(weight, tl.trans(x)) if weight_first else tl.dot(x, tl.trans(weight))
        if BY_BLOCKS:
            part *= tl.load(x_scales + group, mask=x_scale_mask, other=0.0) * tl.load(scales + group)
        total += part
    if not BY_BLOCKS:
        total *= tl.load(x_scales, mask=x_scale_mask, other=0.0)
    if weight_first:
        total = tl.trans(total)
    column, is_column = tl.trans(column), tl.trans(is_column)
    if not BY_BLOCKS:
        total *= tl.load(scale_ptr + column, mask=is_column, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    out = out_ptr + row * num_columns + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row & is_column)
