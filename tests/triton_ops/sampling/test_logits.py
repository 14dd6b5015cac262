"""Penalties, bias, bans and log-probabilities against plain arithmetic and transformers' processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from triton_ops.implementation import Impl
from triton_ops.sampling.logit_masks import add_bias, apply_bitmask, ban_tokens, keep_only, mask_rows
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.penalties import apply_penalties
from triton_ops.sampling.sample import finite_rows

pytestmark = pytest.mark.usefixtures("device")

V = 23


def logits(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)).to(dtype) * 3


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_repetition_penalty_is_that_of_transformers() -> None:
    x = logits(2)
    history = torch.tensor([[3, 5, 3, 7], [1, 2, 2, 0]])
    expected = RepetitionPenaltyLogitsProcessor(penalty=1.7)(history, x.clone())
    off = torch.zeros(2)
    got = apply_penalties(
        x,
        int32([0] * 4 + [1] * 4),
        history.flatten().int(),
        int32([0, 0, 1, 1] * 2),
        repetition=torch.full((2,), 1.7),
        presence=off,
        frequency=off,
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_presence_and_frequency_count_the_answer_alone(dtype: torch.dtype) -> None:
    x = logits(3, dtype=dtype)
    got = apply_penalties(
        x,
        int32([0, 0, 0, 0, 2]),
        int32([4, 4, 4, 9, 4]),
        int32([1, 1, 0, 0, 1]),
        repetition=torch.tensor([1.0, 1.0, 1.0]),
        presence=torch.tensor([0.5, 9.0, -1.0]),
        frequency=torch.tensor([0.25, 9.0, 0.0]),
    )
    expected = x.float()
    expected[0, 4] -= 0.5 + 2 * 0.25
    expected[2, 4] += 1.0
    torch.testing.assert_close(got, expected)


def test_bias_is_that_of_transformers() -> None:
    x = logits(2)
    expected = SequenceBiasLogitsProcessor(sequence_bias={(3,): 2.5, (0,): -100.0})(
        torch.zeros(2, 1, dtype=torch.long), x.clone()
    )
    got = add_bias(x, int32([0, 0, 1, 1]), int32([3, 0, 3, 0]), torch.tensor([2.5, -100.0, 2.5, -100.0]))
    torch.testing.assert_close(got, expected)
    assert torch.equal(add_bias(x, int32([]), int32([]), torch.tensor([])), x)


def test_bans_are_those_of_transformers() -> None:
    x = logits(2)
    history = torch.tensor([[1, 2, 3], [4, 5, 6]])
    words = [[2, 3, 8], [6, 9], [11]]
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([22]))(history, x.clone())
    expected = MinLengthLogitsProcessor(9, eos_token_id=22, device=x.device)(history, expected)
    applies = torch.tensor([True, True, True, False, True, True, True])
    got = ban_tokens(x, int32([0, 0, 0, 1, 1, 1, 1]), int32([8, 11, 22, 8, 9, 11, 22]), applies)
    assert torch.equal(got, expected)
    twice = ban_tokens(x, int32([0, 0]), int32([8, 8]), torch.tensor([True, True]))
    assert twice[0, 8] == -torch.inf
    assert not twice.isnan().any()


def test_keep_only() -> None:
    x = logits(3)
    got = keep_only(x, int32([1, 1, 2]), int32([4, 6, 0]), torch.tensor([False, True, True]))
    assert torch.equal(got[0], x[0])
    assert (got[1] > -torch.inf).nonzero().flatten().tolist() == [4, 6]
    assert (got[2] > -torch.inf).nonzero().flatten().tolist() == [0]
    assert torch.equal(got[1, [4, 6]], x[1, [4, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_against_float64(dtype: torch.dtype) -> None:
    x = logits(5, dtype=dtype)
    tokens = int32([0, 5, 22, 7, 7])
    chosen, ranks, top_ids, top = token_logprobs(x, tokens, 4)
    exact = torch.log_softmax(x.double(), -1)
    rows = torch.arange(5)
    torch.testing.assert_close(chosen.double(), exact[rows, tokens.long()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(top.double(), exact.sort(descending=True).values[:, :4], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(top, exact.gather(1, top_ids.long()).float(), atol=1e-5, rtol=1e-5)
    assert ranks.tolist() == [int((exact[i] > exact[i, t]).sum()) + 1 for i, t in enumerate(tokens.tolist())]
    assert token_logprobs(x, tokens, 0)[3].shape == (5, 0)


# --- the kernels ---

KERNEL_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def both(op: Callable[..., Any], device: torch.device, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
    """What the kernel and what the reference returns."""
    moved = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    keywords = {name: x.to(device) for name, x in keywords.items()}
    return op(*moved, **keywords, impl="triton"), op(*moved, **keywords, impl="torch")


def some_pairs(count: int, num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Rows and tokens, many of them more than once."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, num_rows, (count,), generator=generator).int()
    tokens = torch.randint(0, vocab_size, (count,), generator=generator).int() // 3 * 2
    return rows, tokens


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_kernels_of_penalties_and_masks(dtype: torch.dtype, kernel_device: torch.device) -> None:
    x = torch.randn(4, 2311, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    x[1, 5] = -torch.inf
    rows, tokens = some_pairs(1500, 4, 2311)
    is_output = (torch.arange(1500) % 3 > 0).int()
    got, expected = both(
        apply_penalties,
        kernel_device,
        x,
        rows,
        tokens,
        is_output,
        repetition=torch.tensor([1.0, 1.3, 0.7, 2.0]),
        presence=torch.tensor([0.0, 0.3, -0.5, 1.0]),
        frequency=torch.tensor([0.1, 0.0, 0.7, -0.2]),
    )
    assert torch.equal(got, expected)
    got, expected = both(add_bias, kernel_device, x, rows, tokens, torch.linspace(-3, 3, 1500))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    before = x.clone()
    got, expected = both(ban_tokens, kernel_device, x, rows, tokens, torch.arange(1500) % 2 == 0)
    assert torch.equal(got, expected)
    got, expected = both(keep_only, kernel_device, x, rows, tokens, torch.tensor([True, False, True, False]))
    assert torch.equal(got, expected)
    bitmask = torch.randint(-(2**31), 2**31, (4, 73), generator=torch.Generator().manual_seed(2)).int()
    got, expected = both(apply_bitmask, kernel_device, x, bitmask)
    assert torch.equal(got, expected)
    assert torch.equal(x, before)
    nothing = torch.zeros(0, dtype=torch.int32)
    assert torch.equal(*both(add_bias, kernel_device, x, nothing, nothing, torch.zeros(0)))


@pytest.mark.filterwarnings("ignore:invalid value encountered in add")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_kernel_that_masks_rows(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """In place, some rows of many; what is not finite stays so, whether it is masked or not."""
    x = torch.randn(6, 2311, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2, 7], x[4, 9], x[5, 11], x[0, 3] = torch.nan, torch.inf, -torch.inf, torch.nan
    bitmasks = torch.randint(-(2**31), 2**31, (4, 73), generator=torch.Generator().manual_seed(2)).int()
    bitmasks[1:3, 0] = 0

    def masked(x: Tensor, rows: Tensor, bitmasks: Tensor, *, impl: Impl) -> Tensor:
        x = x.clone()
        mask_rows(x, rows, bitmasks, impl=impl)
        return x

    rows = int32([5, 2, 4, 1])
    got, expected = both(masked, kernel_device, x, rows, bitmasks)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    x, bitmasks, rows = (given.to(got.device) for given in (x, bitmasks, rows))
    for place, row in ((0, 5), (3, 1)):
        assert torch.equal(got[row], apply_bitmask(x[row : row + 1], bitmasks[place : place + 1], impl="torch")[0])
    torch.testing.assert_close(got[[0, 3]], x[[0, 3]], rtol=0, atol=0, equal_nan=True)
    assert finite_rows(got, impl="torch").tolist() == [False, True, False, True, False, True]
    got, _ = both(masked, kernel_device, x, rows[:0], bitmasks[:0])
    torch.testing.assert_close(got, x, rtol=0, atol=0, equal_nan=True)


def test_bitmask() -> None:
    x = torch.zeros(2, 40)
    bitmask = torch.tensor([[5, 1 << 7], [-(2**31), 0]], dtype=torch.int32)
    allowed = [row.nonzero().flatten().tolist() for row in apply_bitmask(x, bitmask) == 0]
    assert allowed == [[0, 2, 39], [31]]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("vocab_size", "num_top"), [(23, 0), (23, 23), (4100, 5), (9000, 40)])
def test_logprob_kernels(vocab_size: int, num_top: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    x = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(3)).to(dtype) * 3
    x[2] = x[2].round()  # ties
    x[3, : vocab_size - 2] = -torch.inf
    tokens = int32([0, vocab_size - 1, 7, vocab_size - 2])
    got, expected = both(token_logprobs, kernel_device, x, tokens, num_top)
    for name, ours, theirs in zip(("chosen", "ranks", "ids", "top"), got, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert ours.shape == theirs.shape, name
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[3], expected[3], atol=1e-5, rtol=1e-5)
    # Ties may stand in another order; ids belong to their log-probabilities.
    logprobs, finite = torch.log_softmax(x.float(), -1).to(kernel_device), got[3] > -torch.inf
    found = logprobs.gather(1, got[2].long())
    torch.testing.assert_close(found[finite], got[3][finite], atol=1e-5, rtol=1e-5)
    for ids, is_finite in zip(got[2], finite, strict=True):
        assert ids[is_finite].unique().numel() == int(is_finite.sum())
