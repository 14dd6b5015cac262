"""Cells of tables with a line a request, and the tokens that only the device knows: kernels and references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triton_ops.row_tables import known_tokens, write_cells
from triton_ops.tuning import ROW_TABLES

SIZES = (0, 1, 3, ROW_TABLES.size, ROW_TABLES.size + 1, 3 * ROW_TABLES.size - 5)


def int32(values: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


def random_cells(count: int, height: int, width: int) -> tuple[list[int], list[int], list[int]]:
    """Rows, columns and values of different cells."""
    generator = torch.Generator("cpu").manual_seed(count)
    cells = torch.randperm(height * width, generator=generator)[:count]
    values = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    return (cells // width).tolist(), (cells % width).tolist(), values.tolist()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("count", SIZES)
def test_cells_get_their_values_and_no_others(kernel_device: torch.device, impl: Any, count: int) -> None:
    table = int32(torch.arange(40 * 50).view(40, 50), kernel_device)
    rows, columns, values = random_cells(count, 40, 50)
    expected = table.tolist()
    for row, column, value in zip(rows, columns, values, strict=True):
        expected[row][column] = value
    write_cells(table, *(int32(each, kernel_device) for each in (rows, columns, values)), impl=impl)
    assert table.tolist() == expected


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_without_columns_it_is_the_first(kernel_device: torch.device, impl: Any) -> None:
    for width in (1, 3):
        table = int32(torch.zeros(700, width), kernel_device)
        rows = torch.randperm(700, generator=torch.Generator("cpu").manual_seed(0))[:600]
        write_cells(table, int32(rows, kernel_device), None, int32(rows + 1, kernel_device), impl=impl)
        expected = torch.zeros(700, width, dtype=torch.int32)
        expected[rows, 0] = rows.int() + 1
        assert torch.equal(table.cpu(), expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_cell_that_is_named_twice_gets_one_of_its_values(kernel_device: torch.device, impl: Any) -> None:
    """So do the padded decodes of a captured pass, which share a line."""
    table = int32(torch.zeros(3, 4), kernel_device)
    rows, columns, values = [2] * 300, [1] * 300, list(range(7, 307))
    write_cells(table, *(int32(each, kernel_device) for each in (rows, columns, values)), impl=impl)
    assert table[2, 1].item() in values
    table[2, 1] = 0
    assert not table.any()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_arrays_may_lie_anywhere_in_a_buffer(kernel_device: torch.device, impl: Any) -> None:
    """Staged arrays start where the ones before them end."""
    buffer = int32(torch.arange(1, 101), kernel_device)
    table = int32(torch.zeros(10, 10), kernel_device)
    rows, columns, values = buffer[1:4], buffer[2:5], buffer[51:54]
    write_cells(table, rows, columns, values, impl=impl)
    assert [table[i, i + 1].item() for i in (2, 3, 4)] == [52, 53, 54]
    ids = -buffer[3:6]
    assert known_tokens(ids[1:], buffer[7:20], impl=impl).tolist() == [12, 13]


def test_a_table_that_is_not_contiguous_is_refused(kernel_device: torch.device) -> None:
    table, ids = int32(torch.zeros(4, 6), kernel_device), int32([1], kernel_device)
    with pytest.raises(ValueError, match=r"table must be contiguous, but has strides \[6, 1\]"):
        write_cells(table[:, :3], ids, ids, ids, impl="triton")
    assert not table.any()


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_table_of_more_than_2_31_cells() -> None:
    table = torch.zeros(40_000, 60_000, dtype=torch.int32, device="cuda")  # 9.6 GB
    rows, columns, values = (int32(each, table.device) for each in ([39_999, 36_000], [59_999, 5], [7, 8]))
    write_cells(table, rows, columns, values, impl="triton")
    assert [table[39_999, 59_999].item(), table[36_000, 5].item()] == [7, 8]
    assert torch.count_nonzero(table[::1000]).item() == 1  # row 36,000


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("count", SIZES)
def test_ids_that_only_the_device_knows(kernel_device: torch.device, impl: Any, count: int) -> None:
    generator = torch.Generator("cpu").manual_seed(count)
    last_token = torch.randint(0, 151_936, (600,), generator=generator)
    ids = torch.randint(-600, 600, (count,), generator=generator)
    ids[:2] = torch.tensor([-600, 0])[:count]  # the last row; a token that is known, the least
    expected = [int(i) if i >= 0 else int(last_token[-int(i) - 1]) for i in ids]
    given = int32(ids, kernel_device)
    known = known_tokens(given, int32(last_token, kernel_device), impl=impl)
    assert known.dtype == torch.int32
    assert known.tolist() == expected
    assert given.tolist() == ids.tolist()
