"""A linear projection in one order: the bits of a row of the result depend on that row and the weights alone.

Libraries choose another kernel at other numbers of rows, which may cut the sum into parts or add it up in another
order. Here the sum over K is one chain, in ascending order, whatever the number of rows:

- The kernel adds one step of K after the other to one accumulator. Its tiles differ from one number of rows to the
  next, the chain does not: in float32 it adds element by element, and a tensor core adds groups of 16 elements.
- On a CPU every call of torch has `BLOCK_ROWS` rows, zeros among them, and each begins where memory is aligned, so
  that all of them take the same path.

Whether a device keeps to it is checked by comparison: see `layers.products`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.elementwise import as_rows
from triton_ops.implementation import Impl, cdiv, gpu_of, runs_triton, tl, triton
from triton_ops.tuning import ordered_linear_config

BLOCK_ROWS = 16  # of a call of torch: enough for its kernels to have no rest of rows
_ALIGNMENT = 64  # bytes


def ordered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`x W^T + b`, summed in float32 and rounded once: `[M, N]` in x's dtype.

    Args:
        x: `[M, K]`, float16, bfloat16 or float32. Rows that are not contiguous are copied first.
        weight: `[N, K]` in x's dtype, contiguous.
        bias: `[N]` in x's dtype, contiguous; None: 0.
        out: gets the result, contiguous; None: a new tensor does.

    Raises ValueError where shapes or dtypes disagree.
    """
    if out is None:
        out = x.new_empty(len(x), len(weight))
    _check(x, weight, bias, out)
    launches = runs_triton(impl, x.device)
    if len(x):
        (_launch if launches else _compute_blocks)(x, weight, bias, out)
    return out


def ordered_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `ordered_linear` means, in float64."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """torch's product of `x [M, K]`, whose order may depend on M, in `out` `[M, N]`."""
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    num_columns, depth = weight.shape
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        named = "" if bias is None else f" and {bias.dtype}"
        raise ValueError(f"x, weight and bias must have one dtype, but are {x.dtype}, {weight.dtype}{named}")
    if x.dim() != 2 or x.shape[1] != depth or not weight.is_contiguous():
        raise ValueError(
            f"x must be [M, K] and weight contiguous [N, K], but they are {[*x.shape]} and {[*weight.shape]} with "
            f"strides {[*weight.stride()]}"
        )
    if bias is not None and (bias.shape != (num_columns,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous [{num_columns}], but is {[*bias.shape]}")
    if out.shape != (len(x), num_columns) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {[len(x), num_columns]} in {x.dtype}, but is {[*out.shape]} in {out.dtype} "
            f"with strides {[*out.stride()]}"
        )


def _compute_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """A call for every `BLOCK_ROWS` rows of a padded copy."""
    (num_rows, depth), unit = x.shape, _ALIGNMENT // x.itemsize
    size, stride = cdiv(num_rows, BLOCK_ROWS) * BLOCK_ROWS, cdiv(depth, unit) * unit
    rows = x.new_zeros(size, stride)[:, :depth]
    rows[:num_rows] = x
    for block, to in zip(torch.split(rows, BLOCK_ROWS), torch.split(out, BLOCK_ROWS), strict=True):
        if len(to) == BLOCK_ROWS and not to.data_ptr() % _ALIGNMENT:
            plain_linear(block, weight, bias, to)
        else:
            to.copy_(plain_linear(block, weight, bias, to.new_empty(BLOCK_ROWS, len(weight)))[: len(to)])


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    rows, config = as_rows(x), ordered_linear_config(gpu_of(x.device), num_rows, num_columns, x.dtype)
    _ordered_kernel[(cdiv(num_rows, config.rows), cdiv(num_columns, config.columns))](
        rows,
        weight,
        bias,
        out,
        num_rows,
        rows.stride(0),
        num_columns,
        depth,
        WHOLE_STEPS=depth % config.depth == 0,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        STAGES=config.stages,
        num_warps=config.num_warps,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _ordered_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    num_columns,
    depth,
    WHOLE_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program computes a tile. Of the weight's, 64 columns or more are the first operand, as a wgmma takes them;
    fewer are the second one, which may have as few as 8.

    Programs that follow each other read the same weights.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[:, None].to(tl.int64)
    is_row, is_column = row < num_rows, column < num_columns
    inner = tl.arange(0, DEPTH)[None, :]
    xs = x_ptr + row * x_stride + inner
    weights = weight_ptr + column * depth + inner
    total = tl.zeros((COLUMNS, ROWS) if COLUMNS >= 64 else (ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
        # Elements beyond the end add zeros, which change no sum.
        is_inner = is_row if WHOLE_STEPS else is_row & (start + inner < depth)
        is_weight = is_column if WHOLE_STEPS else is_column & (start + inner < depth)
        weight = tl.load(weights + start, mask=is_weight, other=0.0)
        x = tl.load(xs + start, mask=is_inner, other=0.0)
        if COLUMNS >= 64:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if COLUMNS >= 64:
        total = tl.trans(total)
    column, is_column = tl.trans(column), tl.trans(is_column)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    out = out_ptr + row * num_columns + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row & is_column)
