"""Filtered logits against the exact distribution of a draw, and beside the draws themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.triton_ops.sampling.test_sample import (
    FILTERS,
    KERNEL_DTYPES,
    KERNEL_FILTERS,
    NEVER,
    draw,
    random_logits,
)
from triton_ops.implementation import Impl
from triton_ops.sampling.filtered_logits import filtered_logits
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.sample import sample, sample_distribution
from triton_ops.sampling.token_mass import BLOCK

pytestmark = pytest.mark.usefixtures("device")

NAMES = {"temperature": "temperatures", "top_k": "top_ks", "top_p": "top_ps", "min_p": "min_ps"}


def of_rows(num_rows: int, device: torch.device | None = None, **given: Any) -> dict[str, Tensor]:
    """Parameters of `filtered_logits`, from one number for all rows or one a row."""
    columns = {
        name: torch.as_tensor(value, dtype=torch.int32 if name == "top_ks" else torch.float32, device=device)
        for name, value in {"temperatures": 1.0, **given}.items()
    }
    return {name: column.expand(num_rows).contiguous() for name, column in columns.items()}


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_their_softmax_is_what_is_drawn_from(parameters: dict[str, float], dtype: torch.dtype) -> None:
    logits = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i)) / 8 for i in range(5)])
    logits = (logits - 40.0).to(dtype)
    given = of_rows(5, **{NAMES[name]: value for name, value in parameters.items()})
    got = filtered_logits(logits, **given)
    assert got.dtype == torch.float32
    exact = sample_distribution(logits, **given)
    torch.testing.assert_close(got.double().softmax(-1), exact, atol=1e-6, rtol=1e-5)
    assert torch.equal(got == NEVER, exact == 0)
    chosen, _, _, top = token_logprobs(got, got.argmax(-1).int(), 40)
    torch.testing.assert_close(top.exp().sum(-1), torch.ones(5))
    torch.testing.assert_close(chosen.double(), exact.amax(-1).log(), atol=1e-5, rtol=1e-5)


def test_greedy_rows_stay_as_they_are() -> None:
    logits = random_logits(4, 30)
    logits[2, 5:] = NEVER
    given = of_rows(4, temperatures=[0.0, 2.0, 0.0, 1.0], top_ks=3, top_ps=0.5, min_ps=0.9)
    got = filtered_logits(logits, **given)
    assert torch.equal(got[[0, 2]], logits[[0, 2]])
    assert ((got[[1, 3]] > NEVER).sum(-1) <= 3).all()


def test_ties_and_temperatures_near_zero() -> None:
    tied = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    kept = [1, 2, 3, 4]
    for filters in ({"top_ks": 2}, {"top_ps": 0.5}, {"top_ks": 4, "top_ps": 0.99}):
        got = filtered_logits(tied, **of_rows(1, **filters))[0]
        assert (got > NEVER).nonzero().flatten().tolist() == kept
    got = filtered_logits(tied.expand(2, -1), **of_rows(2, temperatures=[1e-38, 1e-45]))
    assert got.argmax(-1).tolist() == [1, 1]
    assert not got.isnan().any()
    assert (got.softmax(-1)[:, 1] == 1.0).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    """Alone it has no filters but its own; among others those that are off for it are there, too."""
    logits = random_logits(6, 700, spread=3.0)
    alone: list[dict[str, float]] = [
        {},
        {"temperatures": 0.0},
        {"temperatures": 0.7},
        {"top_ks": 9},
        {"top_ps": 0.8, "temperatures": 1.7},
        {"min_ps": 0.02},
    ]
    off = {"temperatures": 1.0, "top_ks": 0, "top_ps": 1.0, "min_ps": 0.0}
    columns = {name: [own.get(name, neutral) for own in alone] for name, neutral in off.items()}
    together = filtered_logits(logits, **of_rows(6, **columns))
    for i, own in enumerate(alone):
        assert torch.equal(filtered_logits(logits[i : i + 1], **of_rows(1, **own))[0], together[i])


# --- the kernels ---


def both(logits: Tensor, device: torch.device, **parameters: Any) -> list[Tensor]:
    given = of_rows(len(logits), device, **parameters)
    impls: tuple[Impl, ...] = ("triton", "torch")
    return [filtered_logits(logits.to(device), **given, impl=impl) for impl in impls]


@pytest.mark.each_once
@pytest.mark.long_unless(
    kept=lambda given: (
        given["vocab_size"] == 100
        or (
            given["dtype"] != torch.float16 and (given["kernel_device"] == "cuda" or len(given["parameters"]) != 1)
        )
    )
)
@pytest.mark.parametrize("parameters", KERNEL_FILTERS, ids=lambda p: " ".join(p) or "none")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("vocab_size", [100, BLOCK + 905])
def test_the_kernel_is_the_reference(
    kernel_device: torch.device, vocab_size: int, dtype: torch.dtype, parameters: dict[str, Any]
) -> None:
    logits = random_logits(5, vocab_size, seed=vocab_size).to(dtype)
    logits[0, 3], logits[1, 7:30] = NEVER, 5.0
    wide = torch.cat([logits, logits], dim=1)[:, 3 : vocab_size + 3]
    for rows in (logits, wide) if kernel_device.type == "cuda" or vocab_size == 100 else (wide,):
        got, expected = both(rows, kernel_device, **parameters)
        assert got.dtype == expected.dtype == torch.float32
        assert torch.equal(got, expected)
    assert both(logits[:0], kernel_device)[0].shape == (0, vocab_size)


def test_rows_gone_bad_spoil_no_other(kernel_device: torch.device) -> None:
    logits = random_logits(6, 300)
    filters = {"top_ks": 20, "top_ps": 0.9, "min_ps": 0.01}
    clean = both(logits, kernel_device, **filters)
    logits[0, 3], logits[2, 5], logits[4] = torch.nan, torch.inf, NEVER
    for before, after in zip(clean, both(logits, kernel_device, **filters), strict=True):
        assert torch.equal(before[1::2], after[1::2])


DRAWN: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.5},
    {"min_p": 1.0, "temperature": 0.7},
    {"temperature": 0.3, "min_p": 0.25},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.85, "min_p": 0.125},
    {"temperature": 0.0, "top_k": 1},
]


def left_out(logits: Tensor, impl: Impl, parameters: dict[str, Any]) -> int:
    """Of how many rows the drawn token is not among the filtered logits."""
    given = of_rows(len(logits), logits.device, **{NAMES[name]: value for name, value in parameters.items()})
    each = torch.arange(len(logits), device=logits.device)
    counts = {"seeds": each * 7919, "sample_indices": each.int() % 5, "positions": each.int()}
    tokens = sample(logits, **given, **counts, impl=impl)
    filtered = filtered_logits(logits, **given, impl=impl)
    return int((filtered.gather(1, tokens.long().unsqueeze(1)) == NEVER).sum())


@pytest.mark.parametrize("parameters", DRAWN, ids=str)
def test_what_is_drawn_is_never_left_out(parameters: dict[str, Any]) -> None:
    """With logits that lie on the thresholds: ties, and halves and quarters of the greatest probability."""
    count, temperature = 4000, parameters.get("temperature", 1.0) or 1.0
    steps = torch.randint(-4, 1, (count, 50), generator=torch.Generator().manual_seed(1))
    logits = steps * (temperature * torch.tensor(2.0).log())
    assert left_out(logits, "torch", parameters) == 0
    assert draw(logits, **parameters).unique().numel() > 5


@pytest.mark.each_once
@pytest.mark.long_unless(kept=lambda given: given["dtype"] != torch.float32 or "top_k" in given["parameters"])
@pytest.mark.parametrize("parameters", DRAWN, ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_what_kernels_draw_is_never_left_out(
    kernel_device: torch.device, parameters: dict[str, Any], dtype: torch.dtype
) -> None:
    """By candidates, and where all logits are alike without them."""
    count, vocab_size = (400, 20_000) if kernel_device.type == "cuda" else (5, BLOCK + 300)
    temperature = parameters.get("temperature", 1.0) or 1.0
    steps = torch.randint(-9, 1, (count, vocab_size), generator=torch.Generator().manual_seed(2))
    logits = (steps * (temperature * torch.tensor(2.0).log())).to(dtype)
    logits[0] = 1.5
    logits[1::3] = random_logits(len(logits[1::3]), vocab_size).to(dtype)
    assert left_out(logits.to(kernel_device), "triton", parameters) == 0
