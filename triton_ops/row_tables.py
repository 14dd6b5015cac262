"""Tables with one row a request: writing cells, and reading the token that was sampled last."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import Impl, cdiv, runs_triton, tl, triton
from triton_ops.tuning import ROW_TABLES


def write_cells(
    table: Tensor, rows: Tensor, columns: Tensor | None, values: Tensor, *, impl: Impl = "auto"
) -> None:
    """`table[rows[i], columns[i]] = values[i]`, in place.

    Args:
        table: int32 `[R, C]`, contiguous.
        rows, columns, values: int32 `[n]`; columns None: column 0. A cell that occurs twice gets one of its
            values.
    """
    if runs_triton(impl, table.device):
        if not table.is_contiguous():
            raise ValueError(f"table must be contiguous, but has strides {[*table.stride()]}")
        if len(rows):
            _write_cells_kernel[(cdiv(len(rows), ROW_TABLES.size),)](
                table,
                rows,
                columns,
                values,
                len(rows),
                table.stride(0),
                **ROW_TABLES.launch_arguments(),
            )
        return
    at = torch.zeros_like(rows) if columns is None else columns
    table.index_put_((rows.long(), at.long()), values)


def known_tokens(ids: Tensor, last_token: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Token ids int32 `[n]`: `ids[i]` or, where that is `-(row + 1)`, `last_token[row]`."""
    if runs_triton(impl, ids.device):
        out = torch.empty_like(ids)
        if len(ids):
            _known_tokens_kernel[(cdiv(len(ids), ROW_TABLES.size),)](
                ids, last_token, out, len(ids), **ROW_TABLES.launch_arguments()
            )
        return out
    return torch.where(ids >= 0, ids, last_token[(-ids - 1).clamp_min(0)])


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["rows_ptr", "columns_ptr", "values_ptr"],
)
def _write_cells_kernel(table_ptr, rows_ptr, columns_ptr, values_ptr, count, row_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    to = table_ptr + tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64) * row_stride
    if columns_ptr is not None:
        to += tl.load(columns_ptr + index, mask=mask, other=0)
    tl.store(to, tl.load(values_ptr + index, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids_ptr", "out_ptr"])
def _known_tokens_kernel(ids_ptr, last_token_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    ids = tl.load(ids_ptr + index, mask=mask, other=0)
    last = tl.load(last_token_ptr + tl.maximum(-ids - 1, 0), mask=mask & (ids < 0), other=0)
    tl.store(out_ptr + index, tl.where(ids < 0, last, ids), mask=mask)
