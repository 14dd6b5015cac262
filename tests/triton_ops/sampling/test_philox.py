"""Philox against its published vectors and a plain implementation, and the uniform numbers made of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triton_ops.sampling import philox
from triton_ops.sampling.philox import philox4x32, philox_uniform

pytestmark = pytest.mark.usefixtures("device")

# Random123's known-answer vectors (Salmon et al. 2011): counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's algorithm in Python's integers."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ k0, second % 2**32, (first >> 32) ^ d ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def test_published_vectors() -> None:
    counters, keys, results = (torch.tensor([words(v[i]) for v in VECTORS]) for i in range(3))
    assert torch.equal(philox4x32(counters, keys), results)
    assert [plain_philox(words(counter), words(key)) for counter, key, _ in VECTORS] == results.tolist()


def test_many_counters_and_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (200, 4), generator=generator)
    keys = torch.randint(0, 2**32, (200, 2), generator=generator)
    expected = [plain_philox(c, k) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert philox4x32(counters, keys).tolist() == expected


SEEDS = [0, 1, 2**31, 2**32, 2**63 - 1, -1, -(2**63), 123456789012345678]


def test_uniform_is_what_it_says() -> None:
    seeds = torch.tensor(SEEDS)
    samples = torch.tensor([0, 1, 2, 3, 2**31 - 1, 0, 7, 1], dtype=torch.int32)
    positions = torch.tensor([0, 0, 5, 2**31 - 1, 1, 131071, 3, 1], dtype=torch.int32)
    expected = []
    for seed, sample, position in zip(SEEDS, samples.tolist(), positions.tolist(), strict=True):
        bits = seed % 2**64
        first, second, _, _ = plain_philox([position, sample, 0, 0], [bits % 2**32, bits >> 32])
        expected.append((((first << 20) | (second >> 12)) + 0.5) / 2**52)
    uniform = philox_uniform(seeds, samples, positions)
    assert uniform.dtype == torch.float64
    assert uniform.tolist() == expected
    one_by_one = [philox_uniform(seeds[i : i + 1], samples[i : i + 1], positions[i : i + 1]) for i in range(8)]
    assert torch.equal(torch.cat(one_by_one), uniform)


@pytest.mark.parametrize(("word", "expected"), [(0, 2.0**-53), (2**32 - 1, 1 - 2.0**-53)])
def test_uniform_stays_inside_the_open_interval(
    monkeypatch: pytest.MonkeyPatch, word: int, expected: float
) -> None:
    def constant(counter: Tensor, key: Tensor) -> Tensor:
        return torch.full_like(counter, word)

    monkeypatch.setattr(philox, "philox4x32", constant)
    one = torch.ones(1, dtype=torch.int64)
    assert philox_uniform(one, one, one).item() == expected
    assert 0.0 < expected < 1.0


@pytest.mark.parametrize("varied", ["seed", "sample", "position"])
def test_uniform_is_uniform_and_its_neighbours_independent(varied: str) -> None:
    count, bins = 100_000, 64
    zero, every = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    uniform = philox_uniform(*(every if name == varied else zero for name in ("seed", "sample", "position")))
    assert uniform.unique().numel() == count
    cell = (uniform * bins).long()
    for index, cells in ((cell, bins), (cell[:-1] // 8 * 8 + cell[1:] // 8, bins)):
        expected = index.numel() / cells
        chi_square = ((torch.bincount(index, minlength=cells) - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - (cells - 1)) < 4 * (2 * (cells - 1)) ** 0.5
