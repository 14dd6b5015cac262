"""Formats of weights of 4 bits, against packing number by number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layers.formats.int4 import awq_values, gptq_values, gptq_zeros, packed_values

N, K = 24, 48


@pytest.fixture
def values() -> Tensor:
    return torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def word(numbers: list[int]) -> int:
    """Eight numbers of 4 bits, the first one in the lowest bits, as a signed word of 32."""
    unsigned = sum(number << 4 * place for place, number in enumerate(numbers))
    return unsigned - 2**32 if unsigned >= 2**31 else unsigned


def test_awq(values: Tensor) -> None:
    """Along the outputs, of which a word holds the even ones of eight first."""
    by_input = values.T.tolist()
    words = [
        [word([*row[first : first + 8 : 2], *row[first + 1 : first + 8 : 2]]) for first in range(0, N, 8)]
        for row in by_input
    ]
    assert torch.equal(awq_values(torch.tensor(words, dtype=torch.int32)), values)


def test_gptq(values: Tensor) -> None:
    """Along the inputs."""
    rows = values.tolist()
    words = [[word(row[first : first + 8]) for row in rows] for first in range(0, K, 8)]
    assert torch.equal(gptq_values(torch.tensor(words, dtype=torch.int32)), values)


@pytest.mark.parametrize("less_one", [False, True])
def test_zeros_of_gptq(values: Tensor, less_one: bool) -> None:
    by_group = values.T.tolist()
    words = [[word(row[first : first + 8]) for first in range(0, N, 8)] for row in by_group]
    found = gptq_zeros(torch.tensor(words, dtype=torch.int32), less_one=less_one)
    assert torch.equal(found, values + less_one)
    assert found.max() == 15 + less_one


def test_compressed_tensors(values: Tensor) -> None:
    rows = values.tolist()
    words = [[word(row[first : first + 8]) for first in range(0, K, 8)] for row in rows]
    assert torch.equal(packed_values(torch.tensor(words, dtype=torch.int32)), values)
