"""The draws of a pass: which rows each operation sees; no row depends on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixrt import SamplingParams as Params
from radixrt.execution.sampling import sampler
from radixrt.execution.sampling.sampler import draw_logprobs, sample_plain, sample_processed
from radixrt.schedule.answer import Answer
from radixrt.schedule.passes import Features, SamplingInputs
from tests.schedule.test_sampling_table import NUM_ROWS, PLAIN, answer, prepared
from triton_ops.sampling.logit_masks import mask_rows
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.sample import sample_distribution

pytestmark = pytest.mark.usefixtures("device")

V = 61


@dataclass
class Drawn:
    inputs: SamplingInputs
    token_ids: list[int]
    finite: list[bool]
    logprobs: tuple[Tensor, ...] | None


def draw(
    answers: Sequence[Answer],
    rows: Sequence[int],
    logits: Tensor,
    last_token: Tensor,
    num_samples: Sequence[int] | None = None,
) -> Drawn:
    """What a pass draws for answers in some rows, which are admitted with it."""
    inputs = prepared(answers, rows, num_samples or [1] * len(answers))
    for name, array in inputs.arrays.items():
        assert array.ndim == 1, name
        assert array.dtype in (np.int32, np.int64, np.float32), name  # what the staging takes
    arrays = {name: torch.as_tensor(array, device=logits.device) for name, array in inputs.arrays.items()}
    token_ids = torch.full((len(inputs.logits_rows),), -7, dtype=torch.int32)
    finite = torch.empty(len(token_ids), dtype=torch.bool)
    before = logits.clone()
    sample_plain(logits, arrays, inputs.features, (token_ids, finite))
    filtered = logprobs = None
    if inputs.processed is not None:
        filtered = sample_processed(logits, arrays, inputs.processed, last_token, (token_ids, finite))
    if inputs.num_top is not None:
        logprobs = draw_logprobs(logits, token_ids, arrays, inputs.num_top, filtered)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())  # raw log-probabilities are the model's
    return Drawn(inputs, token_ids.tolist(), finite.tolist(), logprobs)


def drawn_from(index: int, **params: Any) -> Answer:
    """One that wants log-probabilities of what its tokens are drawn from."""
    return answer(index, Params(**{"logprobs": 4, **params}, logprobs_mode="processed_logprobs"))


PROCESSED: list[tuple[Params, dict[str, Any]]] = [
    (Params(repetition_penalty=1.4), {}),
    (Params(temperature=0, presence_penalty=2, frequency_penalty=1.5, logprobs=0), {}),
    (Params(temperature=0.6, logit_bias={3: 4.0, 8: -50}, top_p=0.8), {}),
    (Params(allowed_token_ids=(3, 4, 30)), {}),
    (Params(temperature=0, allowed_token_ids=(60, 1), logit_bias={1: -100}), {}),
    (Params(top_k=2), {"bad_words": ((1,), (9, 11, 40, 2), (40, 3), (7, 4))}),
    (Params(min_new_tokens=8, min_p=0.05), {}),
]


UNCHANGED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "allowed_token_ids": None,
    "min_new_tokens": 0,
}


def mixed_answers() -> list[Answer]:
    processed = [answer(100 + i, params, **more) for i, (params, more) in enumerate(PROCESSED)]
    return [answer(i, params) for i, params in enumerate(PLAIN)] + processed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_whoever_is_beside_it(dtype: torch.dtype) -> None:
    answers = mixed_answers()
    rows = np.random.default_rng(0).permutation(NUM_ROWS)[: len(answers)].tolist()
    last_token = torch.full((NUM_ROWS,), 40, dtype=torch.int32)
    plain = range(len(PLAIN))
    processed = range(len(PLAIN), len(answers))
    changed = False
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(len(answers), V, generator=generator) * 3).to(dtype)

        def tokens(chosen: Sequence[int], logits: Tensor = logits) -> list[int]:
            own = [answers[i] for i in chosen], [rows[i] for i in chosen]
            return draw(*own, logits[list(chosen)], last_token).token_ids

        together = tokens(range(len(answers)))
        assert [tokens([i])[0] for i in range(len(answers))] == together
        assert tokens(plain) == together[: len(PLAIN)]
        assert tokens([*processed, 0]) == [*together[len(PLAIN) :], together[0]]
        alike = [replace(one.request.params, **UNCHANGED) for one in answers]
        twins = [answer(one.request.index, params) for one, params in zip(answers, alike, strict=True)]
        unchanged = draw(twins, rows, logits, last_token).token_ids
        assert unchanged[: len(PLAIN)] == together[: len(PLAIN)]
        changed |= unchanged != together
    assert changed


def test_changes_are_those_of_the_own_row() -> None:
    """Each change by hand, greedy, with others before and behind it."""
    logits = torch.zeros(7, V)
    logits[:, 20:25] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    last_token = torch.zeros(NUM_ROWS, dtype=torch.int32)
    last_token[[3, 4]] = torch.tensor([20, 21], dtype=torch.int32)
    greedy = Params(temperature=0)
    answers = [
        answer(0, replace(greedy, presence_penalty=2)),  # 20 is in flight: 3 is left of it
        answer(1, replace(greedy, presence_penalty=2)),  # 21 is
        answer(2, greedy),
        answer(3, replace(greedy, repetition_penalty=2.5), prompt=(20, 21)),
        answer(4, replace(greedy, logit_bias={24: 5.0})),
        answer(5, replace(greedy, allowed_token_ids=(22, 24))),
        answer(6, greedy, bad_words=((20,), (21, 22), (0, 21), (9, 11, 0, 22))),
    ]
    drawn = draw(answers, [3, 4, 5, 6, 7, 8, 9], logits, last_token)
    assert drawn.token_ids == [21, 20, 20, 22, 24, 22, 23]
    assert drawn.finite == [True] * 7


def test_operations_see_only_the_rows_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        op: Callable[..., Any] = getattr(sampler, name)

        def watched(logits: Tensor, *arguments: Any, **keywords: Any) -> Any:
            filters = [k for k in ("top_ks", "top_ps", "min_ps") if keywords.get(k) is not None]
            seen.append((" ".join([name, *filters]), logits.shape[0]))
            return op(logits, *arguments, **keywords)

        monkeypatch.setattr(sampler, name, watched)

    masks = ("apply_penalties", "add_bias", "ban_tokens", "keep_only")
    for name in (*masks, "filtered_logits", "token_logprobs", "greedy", "sample"):
        watch(name)
    last_token = torch.zeros(NUM_ROWS, dtype=torch.int32)

    def operations(*answers: Answer) -> list[tuple[str, int]]:
        seen.clear()
        logits = torch.randn(len(answers), V, generator=torch.Generator().manual_seed(1))
        draw(answers, range(len(answers)), logits, last_token)
        return seen.copy()

    plain = [answer(i, Params()) for i in range(5)]
    assert operations(*plain) == [("sample", 5)]
    penalized = answer(5, Params(presence_penalty=1, top_k=3, logprobs=1))
    assert operations(*plain, penalized) == [
        ("sample", 6),
        ("apply_penalties", 1),
        ("sample top_ks top_ps", 1),
        ("token_logprobs", 1),
    ]
    assert operations(*plain, penalized, drawn_from(6, min_p=0.1), drawn_from(7, temperature=0)) == [
        ("sample", 8),
        ("apply_penalties", 3),
        ("sample top_ks top_ps min_ps", 3),
        ("filtered_logits top_ks top_ps min_ps", 2),
        ("token_logprobs", 3),
        ("token_logprobs", 2),
    ]
    assert operations(answer(0, Params(temperature=0)), drawn_from(1, temperature=0)) == [
        ("greedy", 2),
        ("greedy", 1),
        ("token_logprobs", 1),
    ]
    others = [answer(6, Params(allowed_token_ids=(3, 4), temperature=0)), answer(7, Params(logit_bias={3: 1}))]
    assert operations(*plain, *others) == [("sample", 7), ("add_bias", 2), ("keep_only", 2), ("sample", 2)]
    held_back = answer(8, Params(temperature=0, min_new_tokens=9))
    assert operations(held_back, answer(0, Params(temperature=0, top_p=0.5))) == [
        ("greedy", 2),
        ("ban_tokens", 1),
        ("greedy", 1),
    ]
    assert operations(*(answer(i, Params(min_p=0.1, logprobs=0)) for i in range(3))) == [
        ("sample min_ps", 3),
        ("token_logprobs", 3),
    ]


def test_what_is_not_finite_is_found_in_its_row_alone() -> None:
    logits = torch.zeros(10, V)
    logits[[1, 4, 6, 7], 8], logits[2, 8] = torch.nan, torch.inf
    plain = Params(temperature=0)
    restricted = replace(plain, allowed_token_ids=(3, 4))
    answers = [
        answer(0, plain),
        answer(1, plain),
        answer(2, restricted),  # which hides what the model computed
        answer(3, restricted),
        answer(4, replace(plain, repetition_penalty=2)),
        answer(5, restricted, bad_words=((3,), (4,))),  # leaves nothing
        *(drawn_from(6 + i, temperature=t, top_k=3) for i, t in enumerate((1, 0, 1, 0))),
    ]
    drawn = draw(answers, range(10), logits, torch.zeros(NUM_ROWS, dtype=torch.int32))
    assert drawn.finite == [True, False, False, True, False, False, False, False, True, True]
    assert drawn.token_ids[3] == 3


def test_logprobs_are_of_the_draws_that_want_them() -> None:
    wanted = [None, 2, None, 0, 100]
    answers = [answer(i, Params(logprobs=w, n=4)) for i, w in enumerate(wanted)]
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(2))
    last_token = torch.zeros(NUM_ROWS, dtype=torch.int32)
    drawn = draw(answers, range(5), logits, last_token, num_samples=[1, 3, 1, 1, 1])
    assert drawn.inputs.num_top == 100
    at = [1, 2, 3, 5, 6]
    assert drawn.logprobs is not None
    tokens = torch.tensor(drawn.token_ids, dtype=torch.int32)
    for got, expected in zip(drawn.logprobs, token_logprobs(logits[at], tokens[at], V), strict=True):
        torch.testing.assert_close(got, expected)
    assert draw(answers[:1], [0], logits[:1], last_token).logprobs is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_what_a_token_was_drawn_from(dtype: torch.dtype) -> None:
    """Among raw ones and rows without any: of each the exact distribution, and the same bits as when alone."""
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 1.6, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {3: 9.0}, "top_k": 1},
        {"allowed_token_ids": (3, 4, 30, 31), "temperature": 2.0, "top_k": 3},
        {"logit_bias": {5: 4.0}, "top_p": 0.9},
    ]
    wanted = [drawn_from(i, **own) for i, own in enumerate(params)]
    others = [
        answer(20, Params(logprobs=2)),
        answer(21, Params(presence_penalty=1, top_k=4)),
        answer(22, Params()),
    ]
    answers = [others[0], *wanted[:3], others[1], *wanted[3:], others[2]]
    rows, last_token = list(range(len(answers))), torch.zeros(NUM_ROWS, dtype=torch.int32)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(len(answers), V, generator=generator) * 3).to(dtype)
        drawn = draw(answers, rows, logits, last_token)
        assert drawn.logprobs is not None
        chosen, ranks, top_ids, top = drawn.logprobs
        at = [i for i, one in enumerate(answers) if one.request.params.logprobs is not None]
        for place, i in enumerate(at):
            alone = draw([answers[i]], [rows[i]], logits[i : i + 1], last_token)
            assert alone.token_ids == drawn.token_ids[i : i + 1]
            assert alone.logprobs is not None
            for got, own in zip(drawn.logprobs, alone.logprobs, strict=True):
                assert torch.equal(got[place][: own.shape[1]] if own.dim() > 1 else got[place], own[0])
            exact = exactly(logits[i], answers[i].request.params)
            token = drawn.token_ids[i]
            assert chosen[place].item() == pytest.approx(exact[token].item(), abs=1e-4)
            assert ranks[place] == int((exact > exact[token]).sum()) + 1
            found = exact[top_ids[place].long()]
            torch.testing.assert_close(top[place].double(), found, atol=1e-4, rtol=1e-4)


def exactly(logits: Tensor, params: Params) -> Tensor:
    """float64 log-probabilities of the distribution that a token is drawn from, or, raw, of the model's."""
    own = logits.double()
    if not params.wants_processed_logprobs:
        return own.log_softmax(-1)
    for token, bias in params.logit_bias:
        own[token] += bias
    if params.allowed_token_ids is not None:
        kept = torch.full_like(own, -torch.inf)
        kept[list(params.allowed_token_ids)] = 0.0
        own = own + kept
    if params.temperature == 0:
        return own.log_softmax(-1)
    names = (params.temperature, params.top_k, params.top_p, params.min_p)
    return sample_distribution(own.unsqueeze(0), *(torch.tensor([value]) for value in names))[0].log()


def test_what_others_want_changes_no_log_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels add logits of 16 and of 32 bits in another order: a row is computed in its own dtype, whoever is
    beside it.
    """
    seen = []

    def recorded(logits: Tensor, token_ids: Tensor, num_top: int, **given: Any) -> tuple[Tensor, ...]:
        seen.append((logits.dtype, len(logits)))
        return token_logprobs(logits, token_ids, num_top, **given)

    monkeypatch.setattr(sampler, "token_logprobs", recorded)
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    raw, last = Params(logprobs=4), torch.zeros(3, dtype=torch.int32)
    alone = draw([answer(0, raw)], [0], logits[:1], last).logprobs
    among = draw([answer(0, raw), drawn_from(1, top_k=3), answer(2, raw)], [0, 1, 2], logits, last).logprobs
    other = draw([drawn_from(1, top_k=3)], [1], logits[1:2], last).logprobs
    assert alone is not None
    assert among is not None
    assert other is not None
    assert seen == [
        (torch.bfloat16, 1),
        (torch.bfloat16, 3),
        (torch.float32, 1),
        (torch.float32, 1),
    ]
    for single, several in zip(alone, among, strict=True):
        assert torch.equal(single[0], several[0])
    for single, several in zip(other, among, strict=True):
        assert torch.equal(single[0], several[1])


@pytest.mark.parametrize("top_k", [0, 6])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("min_p", [0.0, 0.12])
def test_masked_draws_follow_what_the_mask_leaves(top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square of 20,000 draws. Filters work on the renormalised distribution: masked tokens, some of them the
    likeliest of all, count for nothing. Half of the rows have no mask.
    """
    count, temperature = 40_000, 1.2
    likely = torch.randn(V, generator=torch.Generator("cpu").manual_seed(3), device="cpu") * 2
    allowed = likely < likely.sort().values[-5]
    allowed[::4] = False
    logits = likely.to(torch.get_default_device()).expand(count, V).contiguous()
    bits = np.packbits(np.pad(allowed.numpy(), (0, 64 - V)), bitorder="little").view(np.int32)
    masked = np.arange(0, count, 2, dtype=np.int32)
    features = Features(True, bool(top_k) or top_p < 1, min_p > 0)
    drawn = {
        "temperatures": np.full(count, temperature, np.float32),
        "seeds": np.arange(count, dtype=np.int64),
        "sample_indices": np.zeros(count, np.int32),
        "draw_positions": np.full(count, 9, np.int32),
        "top_ks": np.full(count, top_k, np.int32),
        "top_ps": np.full(count, top_p, np.float32),
        "min_ps": np.full(count, min_p, np.float32),
    }
    arrays = {name: torch.as_tensor(array) for name, array in drawn.items()}
    mask_rows(logits, torch.as_tensor(masked), torch.as_tensor(bits).expand(len(masked), 2).contiguous())
    out = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.bool)
    sample_plain(logits, arrays, features, out)
    assert out[1].all()
    for tokens, own in (
        (out[0][masked], likely.where(allowed, torch.tensor(-torch.inf, device="cpu"))),
        (out[0][masked + 1], likely),
    ):
        parameters = (torch.tensor([value], device="cpu") for value in (temperature, top_k, top_p, min_p))
        expected = sample_distribution(own[None], *parameters)[0]
        counts, used = torch.bincount(tokens.cpu(), minlength=V), expected > 0
        assert (counts[~used] == 0).all()
        freedom, total = int(used.sum()) - 1, expected[used] * len(tokens)
        chi_square = ((counts[used] - total) ** 2 / total).sum().item()
        assert freedom >= 2
        assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5
