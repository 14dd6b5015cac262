"""What a pass is told of its draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from radixrt.sampling_params import SamplingParams as Params
from radixrt.schedule.answer import Answer, RequestLog
from radixrt.schedule.passes import Features, SamplingInputs
from radixrt.schedule.request import Request
from radixrt.schedule.sampling_table import SamplingTable
from tests.support.forms import RuleForm

NUM_ROWS = 40
END = 2
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


def request(index: int, params: Params, prompt: Sequence[int] = (5, 6, 7), **more: Any) -> Request:
    more = {"stop_ids": frozenset([END]), **more}
    prompt_ids = np.array(prompt, dtype=np.int32)
    return Request(index, prompt_ids, params, max_new_tokens=50, seed=index * 7919 + 1, **more)


def answer(
    index: int, params: Params, prompt: Sequence[int] = (5, 6, 7), sample_index: int = 0, **more: Any
) -> Answer:
    """One that has two tokens, and a third in flight."""
    log = RequestLog(submitted_at=0.0)
    made = Answer(request(index, params, prompt, **more), arrival=index, log=log, sample_index=sample_index)
    made.append(9)
    made.append(11)
    return made


def prepared(
    answers: Sequence[Answer], rows: Sequence[int], num_samples: Sequence[int], *, asked: bool = True
) -> SamplingInputs:
    """What a pass is told of the draws of answers in some rows, which are admitted with it."""
    table = SamplingTable(NUM_ROWS)
    for row, one in zip(rows, answers, strict=True):
        table.admit(row, one)
    seq_lens = np.array([one.known_len + 1 for one in answers], dtype=np.int32)
    owners: Any = answers if asked else [None] * len(answers)
    columns = np.array(rows, dtype=np.int32), seq_lens, np.array(num_samples, dtype=np.int32)
    return table.prepare(owners, *columns)


def test_a_plain_pass_asks_no_answer() -> None:
    answers = [answer(i, params) for i, params in enumerate(PLAIN[:-1])]
    inputs = prepared(answers, range(len(answers)), [1] * len(answers), asked=False)
    arrays = inputs.arrays
    assert inputs.features == Features(is_random=True, has_top=True, has_min_p=True)
    assert inputs.logits_rows.tolist() == [*range(8)]
    assert inputs.processed is None
    assert set(arrays) == {*inputs.features.array_names, "logprob_rows"}
    np.testing.assert_allclose(arrays["temperatures"], [p.temperature for p in PLAIN[:-1]])
    assert arrays["top_ks"].tolist() == [0, 0, 0, 0, 4, 0, 0, 0]  # a greedy row has no filters
    np.testing.assert_allclose(arrays["top_ps"], [1, 1, 1, 1, 1, 0.6, 1, 1])
    np.testing.assert_allclose(arrays["min_ps"], [0, 0, 0, 0, 0, 0, 0.1, 0])
    assert arrays["seeds"].tolist() == [one.request.seed for one in answers]
    assert arrays["draw_positions"].tolist() == [6] * 8
    assert arrays["logprob_rows"].tolist() == [7]


def test_several_draws_of_one_answer_and_none_of_another() -> None:
    params = [Params(n=8), Params(n=8), Params(n=8, presence_penalty=1), Params(n=8)]
    answers = [answer(i, own, sample_index=i) for i, own in enumerate(params)]
    inputs = prepared(answers, [7, 3, 9, 1], [1, 0, 3, 2])
    arrays, plain, processed = inputs.arrays, [0, 4, 5], [1, 2, 3]
    assert inputs.logits_rows.tolist() == [0, 2, 2, 2, 3, 3]
    assert arrays["sample_indices"][plain].tolist() == [0, 3, 4]
    assert arrays["seeds"][plain].tolist() == [answers[i].request.seed for i in (0, 3, 3)]
    assert arrays["processed_rows"].tolist() == processed
    assert arrays["processed_sample_indices"].tolist() == [2, 3, 4]
    assert arrays["processed_seeds"].tolist() == [answers[2].request.seed] * 3
    assert prepared(answers, [7, 3, 9, 1], [0, 0, 0, 0]).arrays == {}


def test_rows_that_want_what_they_are_drawn_from_are_processed() -> None:
    raw, drawn = Params(logprobs=1), Params(logprobs=0, logprobs_mode="processed_logprobs", n=4)
    params = [raw, drawn, Params(presence_penalty=1), replace(drawn, temperature=0), replace(drawn, logprobs=None)]
    answers = [answer(i, own) for i, own in enumerate(params)]
    inputs = prepared(answers, range(5), [1, 2, 1, 1, 1])
    arrays = inputs.arrays
    assert arrays["logprob_rows"].tolist() == [0, 1, 2, 4]
    assert arrays["processed_rows"].tolist() == [1, 2, 3, 4]
    assert arrays["filtered_rows"].tolist() == [0, 1, 3]  # of the processed ones
    assert arrays["filtered_logprobs"].tolist() == [1, 2, 3]  # of those with log-probabilities
    without = prepared([answers[0], answers[2]], [0, 2], [1, 1]).arrays
    assert not {"filtered_rows", "filtered_logprobs"} & set(without)
    assert "processed_rows" not in prepared([answers[4]], [0], [1]).arrays


def test_a_row_forgets_who_was_there_before() -> None:
    table = SamplingTable(1)
    row, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
    everything = Params(top_k=3, top_p=0.5, min_p=0.1, logprobs=4, repetition_penalty=2, allowed_token_ids=(3,))
    asking, plain = answer(0, everything), answer(1, Params())
    table.admit(0, asking)
    inputs = table.prepare([asking], row, row + 6, one)
    assert inputs.processed is not None
    assert inputs.num_top == 4
    table.admit(0, plain)
    inputs = table.prepare([plain], row, row + 6, one)
    assert inputs.processed is None
    assert inputs.num_top is None
    assert inputs.features == Features(is_random=True)
    drawn = Params(logprobs=0, logprobs_mode="processed_logprobs")
    raw = Params(logprobs=0, presence_penalty=1)
    for params, is_wanted in ((drawn, True), (raw, False)):
        asking = answer(2, params)
        table.admit(0, asking)
        assert ("filtered_rows" in table.prepare([asking], row, row + 6, one).arrays) == is_wanted


def test_draws_of_answers_with_a_form_are_masked() -> None:
    """All else is as without: they are processed only where their requests ask for more."""
    form = RuleForm(100, lambda tokens: {1})
    params = [Params(top_k=3), Params(), Params(presence_penalty=1), Params(temperature=0)]
    params.append(Params(min_new_tokens=9))
    plain = prepared([answer(i, own) for i, own in enumerate(params)], range(5), [2, 1, 1, 0, 1])
    assert plain.masked is None
    answers = [answer(i, own, **({} if i == 1 else {"form": form})) for i, own in enumerate(params)]
    inputs = prepared(answers, range(5), [2, 1, 1, 0, 1])
    assert inputs.masked is not None
    assert inputs.masked.tolist() == [0, 1, 3, 4]
    assert inputs.arrays["masked_rows"] is inputs.masked
    assert (inputs.features, inputs.processed) == (plain.features, plain.processed)
    assert {name: array.tolist() for name, array in inputs.arrays.items() if name != "masked_rows"} == {
        name: array.tolist() for name, array in plain.arrays.items()
    }


def test_ends_are_held_back_no_longer_than_asked() -> None:
    table = SamplingTable(1)
    held = answer(0, Params(min_new_tokens=4))
    table.admit(0, held)  # after a prompt of three
    rows, positions = np.zeros(7, dtype=np.int32), np.arange(3, 10, dtype=np.int32)
    inputs = table.prepare([held] * 7, rows, positions, np.ones(7, dtype=np.int32))
    assert inputs.arrays["processed_rows"].tolist() == [0, 1, 2, 3]
