"""The draws of a pass: what is sent for them, which rows each operation sees; no row depends on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memory_pool.req_to_token_pool import RowChanges
from radixrt import SamplingParams as Params
from radixrt.execution.sampling import sampler
from radixrt.execution.sampling.sampler import draw_logprobs, plan_draws, sample_plain, sample_processed
from radixrt.schedule.logits_processors import BadWords, LogitsProcessors
from radixrt.schedule.passes import Pass
from radixrt.schedule.request import Request
from radixrt.schedule.sampling_table import Features, SamplingTable
from triton_ops.sampling.logprobs import token_logprobs

pytestmark = pytest.mark.usefixtures("device")

V = 61
NUM_ROWS = 40
NONE = np.zeros(0, dtype=np.int32)
END = 2


def request(index: int, params: Params, prompt: Sequence[int] = (5, 6, 7), **more: Any) -> Request:
    """One that has two tokens of its answer, and a third in flight."""
    made = Request(
        index=index,
        prompt_ids=np.array(prompt, dtype=np.int32),
        params=params,
        max_new_tokens=50,
        seed=index * 7919 + 1,
        stop_ids=frozenset([END]),
        **more,
    )
    made.append(9)
    made.append(11)
    return made


def batch_of(requests: Sequence[Request], rows: Sequence[int], num_samples: Sequence[int]) -> Pass:
    return Pass(
        requests=tuple(requests),
        leases=(),
        num_extends=0,
        req_pool_indices=np.array(rows, dtype=np.int32),
        prefix_lens=NONE,
        seq_lens=np.array([r.num_known + 1 for r in requests], dtype=np.int32),
        input_ids=NONE,
        out_cache_loc=NONE,
        num_samples=np.array(num_samples, dtype=np.int32),
        scored=NONE,
        scored_targets=NONE,
        num_scored=NONE,
        row_changes=RowChanges(NONE, NONE, NONE),
        admitted=tuple(zip(rows, requests, strict=True)),
    )


@dataclass
class Drawn:
    plan: sampler.DrawPlan
    token_ids: list[int]
    finite: list[bool]
    logprobs: tuple[Tensor, ...] | None


def draw(
    requests: Sequence[Request],
    rows: Sequence[int],
    logits: Tensor,
    last_token: Tensor,
    num_samples: Sequence[int] | None = None,
) -> Drawn:
    """What a pass draws for requests in some rows, which are admitted with it."""
    batch = batch_of(requests, rows, num_samples or [1] * len(requests))
    table = SamplingTable(NUM_ROWS)
    for row, one in batch.admitted:
        table.admit(row, one)
    sampling = np.repeat(np.arange(len(requests), dtype=np.int32), batch.num_samples)
    plan = plan_draws(table, batch, sampling)
    for name, array in plan.arrays.items():
        assert array.ndim == 1, name
        assert array.dtype in (np.int32, np.int64, np.float32), name  # what the staging takes
    arrays = {name: torch.as_tensor(array, device=logits.device) for name, array in plan.arrays.items()}
    token_ids = torch.full((len(sampling),), -7, dtype=torch.int32)
    finite = torch.empty(len(sampling), dtype=torch.bool)
    before = logits.clone()
    sample_plain(logits, arrays, plan.features, token_ids, finite)
    if plan.special is not None:
        sample_processed(logits, arrays, plan.special, last_token, token_ids, finite)
    logprobs = None if plan.num_top is None else draw_logprobs(logits, token_ids, arrays, plan.num_top)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())  # log-probabilities are the model's
    return Drawn(plan, token_ids.tolist(), finite.tolist(), logprobs)


PLAIN = [
    Params(temperature=0),
    Params(),
    Params(temperature=1.7),
    Params(temperature=0, top_k=3, top_p=0.5, min_p=0.2),
    Params(top_k=4),
    Params(top_p=0.6),
    Params(min_p=0.1),
    Params(logprobs=2),
    Params(min_new_tokens=3),  # which are there, or in flight
]
SPECIAL: list[tuple[Params, dict[str, Any]]] = [
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


def mixed_requests() -> list[Request]:
    special = [request(100 + i, params, **more) for i, (params, more) in enumerate(SPECIAL)]
    return [request(i, params) for i, params in enumerate(PLAIN)] + special


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_whoever_is_beside_it(dtype: torch.dtype) -> None:
    requests = mixed_requests()
    rows = np.random.default_rng(0).permutation(NUM_ROWS)[: len(requests)].tolist()
    last_token = torch.full((NUM_ROWS,), 40, dtype=torch.int32)
    plain = range(len(PLAIN))
    special = range(len(PLAIN), len(requests))
    changed = False
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(len(requests), V, generator=generator) * 3).to(dtype)

        def tokens(chosen: Sequence[int], logits: Tensor = logits) -> list[int]:
            own = [requests[i] for i in chosen], [rows[i] for i in chosen]
            return draw(*own, logits[list(chosen)], last_token).token_ids

        together = tokens(range(len(requests)))
        assert [tokens([i])[0] for i in range(len(requests))] == together
        assert tokens(plain) == together[: len(PLAIN)]
        assert tokens([*special, 0]) == [*together[len(PLAIN) :], together[0]]
        alike = [replace(r.params, **UNCHANGED) for r in requests]
        twins = [request(r.index, params) for r, params in zip(requests, alike, strict=True)]
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
    requests = [
        request(0, replace(greedy, presence_penalty=2)),  # 20 is in flight: 3 is left of it
        request(1, replace(greedy, presence_penalty=2)),  # 21 is
        request(2, greedy),
        request(3, replace(greedy, repetition_penalty=2.5), prompt=(20, 21)),
        request(4, replace(greedy, logit_bias={24: 5.0})),
        request(5, replace(greedy, allowed_token_ids=(22, 24))),
        request(6, greedy, bad_words=((20,), (21, 22), (0, 21), (9, 11, 0, 22))),
    ]
    drawn = draw(requests, [3, 4, 5, 6, 7, 8, 9], logits, last_token)
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

    for name in ("apply_penalties", "add_bias", "ban_tokens", "keep_only", "token_logprobs", "greedy", "sample"):
        watch(name)
    last_token = torch.zeros(NUM_ROWS, dtype=torch.int32)

    def operations(*requests: Request) -> list[tuple[str, int]]:
        seen.clear()
        logits = torch.randn(len(requests), V, generator=torch.Generator().manual_seed(1))
        draw(requests, range(len(requests)), logits, last_token)
        return seen.copy()

    plain = [request(i, Params()) for i in range(5)]
    assert operations(*plain) == [("sample", 5)]
    penalized = request(5, Params(presence_penalty=1, top_k=3, logprobs=1))
    assert operations(*plain, penalized) == [
        ("sample", 6),
        ("apply_penalties", 1),
        ("sample top_ks top_ps", 1),
        ("token_logprobs", 1),
    ]
    others = [request(6, Params(allowed_token_ids=(3, 4), temperature=0)), request(7, Params(logit_bias={3: 1}))]
    assert operations(*plain, *others) == [("sample", 7), ("add_bias", 2), ("keep_only", 2), ("sample", 2)]
    held_back = request(8, Params(temperature=0, min_new_tokens=9))
    assert operations(held_back, request(0, Params(temperature=0, top_p=0.5))) == [
        ("greedy", 2),
        ("ban_tokens", 1),
        ("greedy", 1),
    ]
    assert operations(*(request(i, Params(min_p=0.1, logprobs=0)) for i in range(3))) == [
        ("sample min_ps", 3),
        ("token_logprobs", 3),
    ]


def test_a_plain_pass_asks_no_request() -> None:
    requests = [request(i, params) for i, params in enumerate(PLAIN[:-1])]
    batch = batch_of(requests, range(len(requests)), [1] * len(requests))
    table = SamplingTable(NUM_ROWS)
    for row, one in batch.admitted:
        table.admit(row, one)
    plan = plan_draws(table, replace(batch, requests=()), np.arange(len(requests), dtype=np.int32))
    assert plan.features == Features(is_random=True, has_top=True, has_min_p=True)
    assert set(plan.arrays) == {*plan.features.array_names, "logprob_rows"}
    np.testing.assert_allclose(plan.arrays["temperatures"], [p.temperature for p in PLAIN[:-1]])
    assert plan.arrays["top_ks"].tolist() == [0, 0, 0, 0, 4, 0, 0, 0]  # a greedy row has no filters
    np.testing.assert_allclose(plan.arrays["top_ps"], [1, 1, 1, 1, 1, 0.6, 1, 1])
    np.testing.assert_allclose(plan.arrays["min_ps"], [0, 0, 0, 0, 0, 0, 0.1, 0])
    assert plan.arrays["seeds"].tolist() == [r.seed for r in requests]
    assert plan.arrays["draw_positions"].tolist() == [6] * 8
    assert plan.arrays["logprob_rows"].tolist() == [7]


def test_several_draws_of_one_request_and_none_of_another() -> None:
    params = [Params(n=8), Params(n=8), Params(n=8, presence_penalty=1), Params(n=8)]
    requests = [request(i, own, sample_index=i) for i, own in enumerate(params)]
    batch = batch_of(requests, [7, 3, 9, 1], [1, 0, 3, 2])
    table = SamplingTable(NUM_ROWS)
    for row, one in batch.admitted:
        table.admit(row, one)
    plan = plan_draws(table, batch, np.array([0, 2, 2, 2, 3, 3], dtype=np.int32))
    plain, special = [0, 4, 5], [1, 2, 3]
    assert plan.arrays["sample_indices"][plain].tolist() == [0, 3, 4]
    assert plan.arrays["seeds"][plain].tolist() == [requests[i].seed for i in (0, 3, 3)]
    assert plan.arrays["special_rows"].tolist() == special
    assert plan.arrays["special_sample_indices"].tolist() == [2, 3, 4]
    assert plan.arrays["special_seeds"].tolist() == [requests[2].seed] * 3
    assert plan_draws(table, batch, NONE).arrays == {}


def test_a_row_forgets_who_was_there_before() -> None:
    table = SamplingTable(1)
    row = np.zeros(1, dtype=np.int32)
    everything = Params(top_k=3, top_p=0.5, min_p=0.1, logprobs=4, repetition_penalty=2, allowed_token_ids=(3,))
    table.admit(0, request(0, everything))
    assert table.is_special(row, row + 6).all()
    assert table.num_top(row).tolist() == [4]
    table.admit(0, request(1, Params()))
    assert not table.is_special(row, row + 6).any()
    assert table.num_top(row).tolist() == [-1]
    assert table.draws(row, row, row)[0] == Features(is_random=True)
    with pytest.raises(KeyError):
        table.changes(0)


def test_ends_are_held_back_no_longer_than_asked() -> None:
    table = SamplingTable(1)
    table.admit(0, request(0, Params(min_new_tokens=4)))  # behind a prompt of three
    positions = np.arange(3, 10, dtype=np.int32)
    assert table.is_special(np.zeros(7, dtype=np.int32), positions).tolist() == [True] * 4 + [False] * 3
    longer = LogitsProcessors.of(request(0, Params(min_new_tokens=4, presence_penalty=1)))
    assert longer is not None
    known = np.array([5, 6, 7], dtype=np.int32)
    assert [longer.bans(position, known, False).ids.tolist() for position in (6, 7)] == [[END], []]
    assert LogitsProcessors.of(request(0, Params(min_new_tokens=0))) is None
    endless = request(0, Params(min_new_tokens=4))
    endless.stop_ids = frozenset()
    assert LogitsProcessors.of(endless) is None


@pytest.mark.parametrize("last_is_unknown", [False, True])
def test_bad_words_against_a_search(last_is_unknown: bool) -> None:
    random = np.random.default_rng(3)
    found = 0
    for _ in range(400):
        words = [tuple(random.integers(0, 3, random.integers(1, 5)).tolist()) for _ in range(6)]
        history = random.integers(0, 3, random.integers(2, 7)).tolist()
        known = np.array(history[:-1] if last_is_unknown else history, dtype=np.int32)
        bans = BadWords.of(words, last_is_unknown).bans(known)
        applies = (bans.afters == NO_TOKEN) | (bans.afters == history[-1])
        if not last_is_unknown:
            assert (bans.afters == NO_TOKEN).all()
        expected = {last for *before, last in words if history[len(history) - len(before) :] == before}
        assert set(bans.ids[applies].tolist()) == expected
        found += len(expected)
    assert found > 400


def test_what_is_not_finite_is_found_in_its_row_alone() -> None:
    logits = torch.zeros(6, V)
    logits[1, 8], logits[2, 8], logits[4, 8] = torch.nan, torch.inf, torch.nan
    plain = Params(temperature=0)
    restricted = replace(plain, allowed_token_ids=(3, 4))
    requests = [
        request(0, plain),
        request(1, plain),
        request(2, restricted),  # which hides what the model computed
        request(3, restricted),
        request(4, replace(plain, repetition_penalty=2)),
        request(5, restricted, bad_words=((3,), (4,))),  # leaves nothing
    ]
    drawn = draw(requests, range(6), logits, torch.zeros(NUM_ROWS, dtype=torch.int32))
    assert drawn.finite == [True, False, False, True, False, False]
    assert drawn.token_ids[3] == 3


def test_logprobs_are_of_the_draws_that_want_them() -> None:
    wanted = [None, 2, None, 0, 100]
    requests = [request(i, Params(logprobs=w, n=4)) for i, w in enumerate(wanted)]
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(2))
    last_token = torch.zeros(NUM_ROWS, dtype=torch.int32)
    drawn = draw(requests, range(5), logits, last_token, num_samples=[1, 3, 1, 1, 1])
    assert drawn.plan.num_top == 100
    at = [1, 2, 3, 5, 6]
    assert drawn.logprobs is not None
    tokens = torch.tensor(drawn.token_ids, dtype=torch.int32)
    for got, expected in zip(drawn.logprobs, token_logprobs(logits[at], tokens[at], V), strict=True):
        torch.testing.assert_close(got, expected)
    assert draw(requests[:1], [0], logits[:1], last_token).logprobs is None
