"""The masks of a pass, gathered from its answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from radixrt.output import FinishReason
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer, RequestLog
from radixrt.schedule.booking import Booking
from radixrt.schedule.masks import PassMasks
from radixrt.schedule.passes import NO_ROWS, Features, SamplingInputs
from radixrt.schedule.request import Request
from tests.support.forms import RuleForm, allowed_by

VOCAB_SIZE = 70


@dataclass(frozen=True)
class OtherForm(RuleForm):
    """Of another kind: its matchers are filled apart."""


def form(*allowed: int, kind: type[RuleForm] = RuleForm) -> RuleForm:
    return kind(VOCAB_SIZE, lambda tokens: {*allowed, len(tokens)})


def answer(form: RuleForm | None) -> Answer:
    prompt = np.array([1, 2], np.int32)
    request = Request(0, prompt, SamplingParams(), max_new_tokens=9, seed=0, form=form)
    return Answer(request, 0, RequestLog(0.0))


def booking(answers: list[Answer], logits_rows: list[int], masked: list[int]) -> Booking:
    rows, draws = np.array(logits_rows, np.int32), np.array(masked, np.int32)
    return Booking(replace(NO_ROWS, sampling=SamplingInputs(rows, Features(), None, None, {}, draws)), (*answers,))


def memory(num_masks: int, num_words: int) -> np.ndarray:
    return np.full((num_masks, num_words), 0x5A5A5A5A, np.int32)


def filled(booking: Booking) -> PassMasks:
    masks = PassMasks(booking, memory)
    masks.fill()
    return masks


def test_each_draw_has_the_mask_of_its_answer() -> None:
    """Several draws of one answer have the same; those of answers without a form have none."""
    answers = [answer(None), answer(form(7)), answer(form(69, 33, kind=OtherForm)), answer(form(8))]
    for token in (0, 1):
        answers[3].matcher.push(token)  # type: ignore[union-attr]
    masks = filled(booking(answers, [0, 1, 1, 2, 3], [1, 2, 3, 4])).masks
    assert masks.shape == (4, 3)
    assert [allowed_by(mask, VOCAB_SIZE) for mask in masks] == [[0, 7], [0, 7], [0, 33, 69], [2, 8]]


def test_the_draw_of_an_answer_that_has_ended_may_be_anything() -> None:
    answers = [answer(form(7)), answer(form(8))]
    answers[0].log.finish_reason = FinishReason.ABORT
    masks = filled(booking(answers, [0, 1], [0, 1])).masks
    assert allowed_by(masks[0], VOCAB_SIZE) == list(range(VOCAB_SIZE))
    assert allowed_by(masks[1], VOCAB_SIZE) == [0, 8]


def test_a_form_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="9 must not follow"):
        answer(form(7)).matcher.push(9)  # type: ignore[union-attr]


def test_which_masks_leave_one_token() -> None:
    """A token in any bit of any word; no row of an answer that has ended, which has every bit."""
    rules = [{0}, {31}, {32}, {63}, {69}, {3, 4}, {3, 40}, {31, 63}]
    answers = [answer(RuleForm(VOCAB_SIZE, lambda tokens, rule=rule: rule)) for rule in rules]  # type: ignore[misc]
    answers.append(answer(form(7)))
    answers[-1].log.finish_reason = FinishReason.ABORT
    one = booking(answers, list(range(9)), list(range(9)))
    assert filled(one).forced() == answers[:5]
