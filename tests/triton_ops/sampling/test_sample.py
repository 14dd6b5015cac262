"""The sampler against exact distributions and transformers' filters; ties, extremes, and rows on their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triton_ops.implementation import Impl
from triton_ops.sampling import candidate_draw
from triton_ops.sampling import sample as sampling
from triton_ops.sampling.logit_threshold import min_kept
from triton_ops.sampling.row_maxima import chunk_maxima
from triton_ops.sampling.sample import MAX_VOCAB_SIZE, finite_rows, greedy, sample, sample_distribution
from triton_ops.sampling.token_mass import BLOCK, LOG2_E, UNIT_BITS, exponent_scale, token_mass
from triton_ops.tuning import CandidateConfig

pytestmark = pytest.mark.usefixtures("device")

NEVER = -torch.inf


def draw(
    logits: Tensor,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    seed: Any = 0,
    sample_index: Any = 0,
    position: Any = None,
    impl: Impl = "torch",
) -> Tensor:
    """`sample` with parameters that are one for all rows or one a row; positions count the rows by default."""
    num_rows = logits.shape[0]

    def rows(value: Any, dtype: torch.dtype) -> Any:
        return None if value is None else torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous()

    return sample(
        logits,
        temperatures=rows(temperature, torch.float32),
        top_ks=rows(top_k, torch.int32),
        top_ps=rows(top_p, torch.float32),
        min_ps=rows(min_p, torch.float32),
        seeds=rows(seed, torch.int64),
        sample_indices=rows(sample_index, torch.int32),
        positions=rows(torch.arange(num_rows) if position is None else position, torch.int32),
        impl=impl,
    )


def random_logits(num_rows: int, vocab_size: int, *, spread: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def fix_uniform(monkeypatch: pytest.MonkeyPatch, uniform: Tensor) -> None:
    monkeypatch.setattr(sampling, "philox_uniform", lambda seeds, samples, positions: uniform)


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shares of the tokens when the uniform number sweeps (0, 1): the exact distribution, to 2 / 20,000."""

    def shares(logits: Tensor, **parameters: Any) -> Tensor:
        count = 20_000
        fix_uniform(monkeypatch, (torch.arange(count, dtype=torch.float64) + 0.5) / count)
        tokens = draw(logits.expand(count, -1), **parameters)
        assert tokens.dtype == torch.int32
        assert (tokens.diff() >= 0).all(), "the inverse of a cumulative distribution does not fall"
        return torch.bincount(tokens, minlength=logits.shape[-1]) / count

    return shares


def assert_shares(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected).double(), atol=1.01e-4, rtol=0)


# --- distributions ---

FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 10},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.1},
    {"top_k": 5, "top_p": 0.6},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.15},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.85, "min_p": 0.08},
]


@pytest.mark.each_once
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_are_those_of_transformers(grid: Any, parameters: dict[str, float], dtype: torch.dtype) -> None:
    warpers = LogitsProcessorList()
    if "temperature" in parameters:
        warpers.append(TemperatureLogitsWarper(parameters["temperature"]))
    if "top_k" in parameters:
        warpers.append(TopKLogitsWarper(int(parameters["top_k"])))
    if "top_p" in parameters:
        warpers.append(TopPLogitsWarper(parameters["top_p"]))
    if "min_p" in parameters:
        warpers.append(MinPLogitsWarper(parameters["min_p"]))
    for seed in range(3):
        logits = random_logits(1, 40, seed=seed)
        if dtype == torch.bfloat16:  # no two alike, so that ties do not matter here
            logits = (torch.randperm(40, generator=torch.Generator().manual_seed(seed)) / 8).view(1, 40)
        logits = logits.to(dtype)
        expected = torch.softmax(warpers(torch.zeros(1, 0), logits.double()), -1)[0]
        meant = sample_distribution(
            logits,
            torch.tensor([parameters.get("temperature", 1.0)]),
            torch.tensor([int(parameters.get("top_k", 0))]),
            torch.tensor([parameters.get("top_p", 1.0)]),
            torch.tensor([parameters.get("min_p", 0.0)]),
        )
        torch.testing.assert_close(meant[0], expected)
        shares = grid(logits, **parameters)
        assert_shares(shares, expected)
        assert (shares[expected == 0] == 0).all()


@pytest.mark.parametrize("parameters", [FILTERS[0], FILTERS[-1]], ids=str)
@pytest.mark.parametrize("varied", ["seed", "sample_index", "position"])
def test_draws_follow_the_distribution(parameters: dict[str, float], varied: str, grid: Any) -> None:
    """Chi-square of 40,000 draws of Philox, each of another seed, sample or position."""
    logits, count = random_logits(1, 12, seed=5), 40_000
    # Before `grid` replaces the generator.
    tokens = draw(logits.expand(count, -1), **{"position": 3, varied: torch.arange(count), **parameters})
    expected = grid(logits, **parameters)
    counts, used = torch.bincount(tokens, minlength=12), expected > 0
    assert (counts[~used] == 0).all()
    expected = expected[used] * count
    freedom = int(used.sum()) - 1
    chi_square = ((counts[used] - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_known_distribution(grid: Any) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert_shares(grid(logits), [0.1, 0.2, 0.3, 0.4])
    assert_shares(grid(logits, temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30])
    assert_shares(grid(logits, top_k=2), [0, 0, 3 / 7, 4 / 7])
    assert_shares(grid(logits, top_p=0.6), [0, 0, 3 / 7, 4 / 7])
    assert_shares(grid(logits, min_p=0.6), [0, 0, 3 / 7, 4 / 7])
    # Top-p counts what top-k left: 0.4 is 4/7 of it.
    assert_shares(grid(logits, top_k=2, top_p=0.55), [0, 0, 0, 1])
    # Min-p sees the distribution that temperature flattened.
    flattened = torch.tensor([0.0, 2.0, 3.0, 4.0]).sqrt()
    assert_shares(grid(logits, temperature=2.0, min_p=0.6), flattened / flattened.sum())


@pytest.mark.parametrize("top_k", [-1, 0, 4, 5, 2**31 - 1])
def test_top_k_off(grid: Any, top_k: int) -> None:
    assert_shares(grid(torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), top_k=top_k), [0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}], ids=str)
def test_filters_that_are_off_for_all_rows_change_nothing(off: dict[str, float]) -> None:
    logits = random_logits(200, 50)
    others = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    others = {name: value for name, value in others.items() if name not in off}
    assert torch.equal(draw(logits, **others), draw(logits, **others, **off))


def test_ties_at_the_thresholds_are_all_kept(grid: Any) -> None:
    tied = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    three = torch.softmax(torch.tensor([NEVER, 3.0, 2.0, 2.0, 2.0, NEVER]), 0)
    assert_shares(grid(tied, top_k=2), three)
    assert_shares(grid(tied, top_k=4), three)
    assert_shares(grid(tied, top_p=0.5), three)
    assert_shares(grid(tied, top_k=2, top_p=0.99), three)
    assert_shares(grid(tied, min_p=float(torch.tensor(-1.0).exp()) - 1e-6), three)
    assert_shares(grid(torch.zeros(1, 4), top_k=1, top_p=0.1), [0.25] * 4)


@pytest.mark.parametrize(("top_p", "least"), [(0.49, 8), (0.5, 8), (0.51, 4), (0.75, 4), (0.76, 2), (0.99, 2)])
def test_top_p_reached_exactly(top_p: float, least: int) -> None:
    """Masses as no logits would give them."""
    mass = torch.tensor([[8, 4, 2, 2]])
    assert min_kept(mass, mass, None, torch.tensor([top_p])).item() == least


# --- greedy ---


def test_greedy_takes_the_first_of_the_greatest() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [NEVER, -3.0, NEVER, -4.0], [7.0, 7.0, 7.0, 7.0]])
    for tokens in (greedy(logits), draw(logits, temperature=0.0, top_k=2, top_p=0.5, min_p=0.5)):
        assert tokens.dtype == torch.int32
        assert tokens.tolist() == [1, 1, 0]


def test_greedy_rows_among_drawn_ones() -> None:
    logits = random_logits(50, 30)
    temperature = torch.arange(50) % 2
    tokens = draw(logits, temperature=temperature)
    assert torch.equal(tokens[::2], logits[::2].argmax(-1).int())
    assert torch.equal(tokens[1::2], draw(logits[1::2], position=torch.arange(50)[1::2]))
    assert not torch.equal(tokens[1::2], logits[1::2].argmax(-1).int())


def test_a_temperature_near_zero_is_nearly_greedy() -> None:
    logits = random_logits(100, 30).argsort(-1) / 8.0  # no two of a row within 1/8
    for temperature in (1e-3, 1e-38):
        assert torch.equal(draw(logits, temperature=temperature), logits.argmax(-1).int())


# --- extremes ---

EXTREMES = [2.0**-53, 0.5, 1 - 2.0**-53]


@pytest.mark.parametrize("uniform", EXTREMES)
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_masked_and_impossible_tokens_are_never_drawn(
    monkeypatch: pytest.MonkeyPatch, uniform: float, parameters: dict[str, float]
) -> None:
    fix_uniform(monkeypatch, torch.full((4,), uniform, dtype=torch.float64))
    logits = torch.full((4, 9), NEVER)
    logits[0, 4] = -3.0  # the only one
    logits[1, 2:4] = 60000.0  # two alike, and others that underflow
    logits[1, [0, 8]] = 0.0
    logits[2, [1, 7]] = torch.tensor([0.0, -200.0])
    logits[3, [1, 7]] = torch.tensor([-1e30, 1e30])
    tokens = draw(logits, **parameters).tolist()
    assert tokens[0] == 4
    assert tokens[1] in (2, 3)
    assert tokens[2:] == [1, 7]


@pytest.mark.parametrize("uniform", EXTREMES)
def test_the_largest_vocabulary(monkeypatch: pytest.MonkeyPatch, uniform: float) -> None:
    """Equal logits make the greatest total there is."""
    fix_uniform(monkeypatch, torch.tensor([uniform], dtype=torch.float64))
    token = draw(torch.zeros(1, MAX_VOCAB_SIZE), top_p=0.999).item()
    assert token == int(uniform * MAX_VOCAB_SIZE)
    with pytest.raises(ValueError, match=f"{MAX_VOCAB_SIZE + 1} exceeds the limit of {MAX_VOCAB_SIZE}"):
        draw(torch.zeros(1, MAX_VOCAB_SIZE + 1))


def test_rows_gone_bad_give_some_token_and_spoil_no_other() -> None:
    logits = random_logits(6, 20)
    clean = draw(logits, top_p=0.9)
    logits[0, 3], logits[2, 5], logits[4] = torch.nan, torch.inf, NEVER
    tokens = draw(logits, top_p=0.9)
    assert ((tokens >= 0) & (tokens < 20)).all()
    assert torch.equal(tokens[1::2], clean[1::2])
    tokens = draw(logits, temperature=0.0)
    assert ((tokens >= 0) & (tokens < 20)).all()


def test_an_empty_batch_and_a_vocabulary_of_one() -> None:
    assert draw(torch.empty(0, 5)).shape == (0,)
    assert draw(torch.zeros(3, 1), top_k=1, top_p=0.5, min_p=0.5).tolist() == [0, 0, 0]


# --- rows on their own ---


@pytest.mark.parametrize("vocab_size", [7, 1003, 4096])
def test_a_draw_depends_on_its_row_only(vocab_size: int) -> None:
    """Alone, in another place, among rows of other parameters: the same token."""
    num_rows = 33
    logits = random_logits(num_rows, vocab_size, spread=1.0)
    generator = torch.Generator().manual_seed(9)

    def choose(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (num_rows,), generator=generator)]

    parameters = {
        "temperature": choose(0.0, 0.7, 1.0, 2.0),
        "top_k": choose(0, 0, 3, 50),
        "top_p": choose(1.0, 1.0, 0.9, 0.3),
        "min_p": choose(0.0, 0.0, 0.05),
        "seed": torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        "sample_index": choose(0, 1, 2),
        "position": torch.arange(num_rows) + 1000,
    }
    together = draw(logits, **parameters)
    assert together.unique().numel() > 5 or vocab_size == 7
    for rows in (*([b] for b in range(num_rows)), torch.randperm(num_rows, generator=generator), range(3, 20)):
        rows = torch.as_tensor(rows)
        apart = draw(logits[rows], **{name: value[rows] for name, value in parameters.items()})
        assert torch.equal(apart, together[rows])


@pytest.mark.parametrize("vocab_size", [7, 1003, 2048])
def test_masses_are_the_same_bits_in_every_batch(vocab_size: int) -> None:
    """What a draw alone would show only once in 2^40: the addends themselves."""
    logits = random_logits(40, vocab_size)
    anchor = logits.amax(1, keepdim=True)
    scale = exponent_scale(torch.linspace(0.3, 3.0, 40)).unsqueeze(1)
    together = token_mass(logits, anchor, scale)
    for start, size in ((0, 1), (1, 1), (17, 1), (39, 1), (3, 2), (5, 7), (11, 16)):
        rows = slice(start, start + size)
        assert torch.equal(token_mass(logits[rows], anchor[rows], scale[rows]), together[rows])


def test_the_scale_of_exponents_is_rounded_once() -> None:
    """As the kernels round it; by way of a reciprocal a quarter of them would differ."""
    temperatures = torch.linspace(0.01, 3.0, 2000)
    exact = (torch.full_like(temperatures, LOG2_E).double() / temperatures.double()).float()
    assert torch.equal(exponent_scale(temperatures), exact)


def test_a_switched_off_filter_is_no_filter_at_all() -> None:
    """A neighbour's top-p sends a row through the sort; a tail of tiny masses must survive it."""
    logits = torch.zeros(2, 40_007)
    logits[:, 40_000:] = -26.0  # masses of 1 beside 40,000 of 2^38: float64 rounds them off the total
    mass = token_mass(logits, torch.zeros(1), exponent_scale(torch.ones(1)))
    assert mass.unique().tolist() == [1, 2**UNIT_BITS]
    threshold = min_kept(logits, mass, torch.tensor([40_007, 40_007]), torch.tensor([1.0, 0.5]))
    assert threshold.tolist() == [-26.0, 0.0]


def test_finite_rows() -> None:
    rows = torch.tensor(
        [
            [0.0, 1.0, -1e38],
            [0.0, NEVER, NEVER],
            [NEVER, NEVER, NEVER],
            [0.0, torch.inf, 1.0],
            [0.0, torch.nan, 1.0],
            [torch.inf, NEVER, torch.nan],
        ]
    )
    for dtype in (torch.float32, torch.bfloat16):
        assert finite_rows(rows.to(dtype)).tolist() == [True, True, False, False, False, False]
    assert finite_rows(torch.empty(0, 3)).tolist() == []


# --- the kernels, which draw what the reference draws ---

KERNEL_DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def assert_same_draws(logits: Tensor, device: torch.device, **parameters: Any) -> None:
    """Tokens and finiteness, by the kernels and the reference."""
    num_rows = logits.shape[0]
    keywords: dict[str, Any] = {
        "temperatures": torch.ones(num_rows),
        "seeds": torch.arange(num_rows) * 7919 - 3,
        "sample_indices": torch.arange(num_rows, dtype=torch.int32) % 3,
        "positions": torch.arange(num_rows, dtype=torch.int32) + 11,
    }
    for name, value in parameters.items():
        dtype = torch.int32 if name == "top_ks" else torch.float32
        keywords[name] = torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous()
    keywords = {name: value.to(device) for name, value in keywords.items()}
    logits = logits.to(device)
    drawn = {}
    for impl in ("torch", "triton"):
        finite = torch.zeros(num_rows, dtype=torch.bool, device=device)
        tokens = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        assert sample(logits, **keywords, out=tokens, finite=finite, impl=impl) is tokens  # type: ignore[arg-type]
        assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
        drawn[impl] = (tokens * finite).tolist(), finite.tolist()
    assert drawn["triton"] == drawn["torch"]


KERNEL_FILTERS: list[dict[str, Any]] = [
    {},
    {"temperatures": [0.0, 1e-45, 1e-3, 0.5, 100.0]},
    {"top_ks": [1, 7, 900, 0, 10**6]},
    {"top_ps": [1e-9, 0.5, 0.95, 0.999999, 1.0]},
    {"top_ks": 50, "top_ps": [0.2, 0.9, 1.0, 0.99, 0.5], "temperatures": [1.0, 0.7, 1.3, 2.0, 0.0]},
    {"min_ps": [0.0, 1.0, 0.1, 0.5, 1e-6]},
    {"top_ks": [3, 100, 0, 0, 20], "top_ps": [1.0, 0.9, 0.6, 1.0, 1.0], "min_ps": 0.05},
]


@pytest.mark.each_once
@pytest.mark.parametrize("parameters", KERNEL_FILTERS, ids=lambda p: " ".join(p) or "none")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("vocab_size", "spread"), [(100, 2.0), (BLOCK + 905, 1.0), (3 * BLOCK, 6.0)])
def test_kernels_draw_what_the_reference_draws(
    kernel_device: torch.device,
    vocab_size: int,
    spread: float,
    dtype: torch.dtype,
    parameters: dict[str, Any],
) -> None:
    logits = random_logits(5, vocab_size, spread=spread, seed=vocab_size).to(dtype)
    assert_same_draws(logits, kernel_device, **parameters)


@pytest.mark.each_once
@pytest.mark.parametrize("parameters", [{}, {"top_ks": 3, "top_ps": 0.7}, {"min_ps": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_kernels_at_ties_and_extremes(
    kernel_device: torch.device, parameters: dict[str, Any], dtype: torch.dtype
) -> None:
    logits = torch.full((8, BLOCK + 300), NEVER)
    logits[0, BLOCK + 4] = -3.0  # the only one
    logits[1, 2:4] = 60000.0  # two alike
    logits[2, [1, BLOCK + 7]] = torch.tensor([0.0, -200.0])
    logits[3] = 1.5  # all alike: more candidates than there is place for
    logits[4, ::2] = torch.tensor([2.0, -0.0, 0.0, 2.0]).repeat(2000)[: (BLOCK + 300) // 2]
    logits[5, 3], logits[6, 5] = torch.nan, torch.inf
    assert_same_draws(logits.to(dtype), kernel_device, **parameters)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("parameters", [{}, {"top_ks": 9}], ids=str)
def test_kernels_read_rows_that_begin_anywhere(
    kernel_device: torch.device, parameters: dict[str, Any], dtype: torch.dtype
) -> None:
    wide = random_logits(5, BLOCK + 208).to(dtype).to(kernel_device)
    assert_same_draws(wide[:, 3 : BLOCK + 204], kernel_device, **parameters)
    assert_same_draws(wide.flatten()[1 : 4 * (BLOCK + 207) + 1].view(4, BLOCK + 207), kernel_device, **parameters)


def test_top_p_of_a_small_vocabulary_finds_its_candidates(kernel_device: torch.device) -> None:
    """Llama 2's: it has fewer chunks than others have tokens of the first guess."""
    logits = random_logits(4, 32_000, spread=8.0).to(kernel_device)
    assert_same_draws(logits, kernel_device, top_ps=0.95)
    assert rows_drawn_early(logits, top_ps=0.95).all()


@pytest.mark.each_once
@pytest.mark.parametrize("parameters", [{"top_ks": [3, 40, 9, 9, 9]}, {"top_ps": 0.9}], ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_few_candidates_many_and_too_many(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device, parameters: dict[str, Any], dtype: torch.dtype
) -> None:
    """Rows that the first attempt draws from, those that need the second, and those that no attempt is for."""
    attempts = (CandidateConfig(16, 3, 1.0, 4, 4), CandidateConfig(64, 20, 1.0, 4, 4))
    logits = random_logits(5, 3 * BLOCK, spread=0.3, seed=2)
    logits[0, 5], logits[1, 100:140], logits[3, :40] = 30.0, 20.0, 10.0
    logits[4, 3:10_003:1000] = torch.linspace(11.0, 12.0, 10)
    logits[2] = 1.0
    logits = logits.to(dtype)
    done = {}
    for count in (1, 2):
        monkeypatch.setattr(candidate_draw, "CANDIDATES", attempts[:count])
        assert_same_draws(logits, kernel_device, **parameters)
        done[count] = rows_drawn_early(logits.to(kernel_device), **parameters)
    assert (done[1] <= done[2]).all()
    assert done[1].any()
    assert (done[1] < done[2]).any()
    assert not done[2].all()


def rows_drawn_early(logits: Tensor, top_ks: Any = None, top_ps: Any = None) -> Tensor:
    """Of which rows `draw_from_candidates` gives tokens: int32 `[R]`."""

    def rows(value: Any, dtype: torch.dtype) -> Any:
        tensor = None if value is None else torch.as_tensor(value, dtype=dtype, device=logits.device)
        return None if tensor is None else tensor.expand(logits.shape[0]).contiguous()

    integers = rows(0, torch.int32)
    draws = (rows(1.0, torch.float32), rows(0, torch.int64), integers, integers)
    filters = (rows(top_ks, torch.int32), rows(top_ps, torch.float32), None)
    done = candidate_draw.draw_from_candidates(
        logits, torch.empty_like(integers), chunk_maxima(logits), None, draws, *filters
    )
    return done.int().cpu()


def test_greedy_and_finite_kernels(kernel_device: torch.device) -> None:
    logits = random_logits(6, BLOCK + 100).round().to(kernel_device)  # many ties
    logits[1] = 0.0
    logits[2, 8], logits[3, 9], logits[4] = torch.nan, torch.inf, NEVER
    logits[5, BLOCK:] += 100.0
    finite = torch.empty(6, dtype=torch.bool, device=kernel_device)
    tokens = torch.empty(len(logits), dtype=torch.int32, device=kernel_device)
    assert greedy(logits, out=tokens, finite=finite, impl="triton") is tokens
    good = [0, 1, 5]
    assert torch.equal(tokens[good], greedy(logits, impl="torch")[good])
    assert ((tokens >= 0) & (tokens < BLOCK + 100)).all()
    assert finite.tolist() == finite_rows(logits, impl="torch").tolist() == [True, True, False, False, False, True]
    assert torch.equal(finite_rows(logits, impl="triton"), finite)
    strided = logits.flip(1)[:, 3:80]
    assert torch.equal(greedy(strided, impl="triton")[good], greedy(strided, impl="torch")[good])
    assert greedy(logits[:0], impl="triton").shape == (0,)
