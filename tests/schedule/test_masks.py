"""The masks of a pass, gathered from its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from radixrt.forms.matcher import Matcher, Matchers
from radixrt.output import FinishReason
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer, RequestLog
from radixrt.schedule.masks import PassForms
from radixrt.schedule.passes import Features, SamplingInputs
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


def forms_of(answers: list[Answer], logits_rows: list[int], masked: list[int]) -> PassForms:
    rows, draws = np.array(logits_rows, np.int32), np.array(masked, np.int32)
    return PassForms(answers, SamplingInputs(rows, Features(), None, None, {}, draws))


def filled(forms: PassForms) -> np.ndarray:
    masks = np.full(forms.masks_shape, 0x5A5A5A5A, np.int32)
    forms.fill(masks)
    return masks


def test_each_draw_has_the_mask_of_its_answer() -> None:
    """Several draws of one answer have the same; those of answers without a form have none."""
    answers = [answer(None), answer(form(7)), answer(form(69, 33, kind=OtherForm)), answer(form(8))]
    for token in (0, 1):
        answers[3].matcher.push(token)  # type: ignore[union-attr]
    masks = filled(forms_of(answers, [0, 1, 1, 2, 3], [1, 2, 3, 4]))
    assert masks.shape == (4, 3)
    assert [allowed_by(mask, VOCAB_SIZE) for mask in masks] == [[0, 7], [0, 7], [0, 33, 69], [2, 8]]


def test_the_draw_of_an_answer_that_has_ended_may_be_anything() -> None:
    """It may have ended since the pass was planned."""
    answers = [answer(form(7)), answer(form(8))]
    forms = forms_of(answers, [0, 1], [0, 1])
    assert allowed_by(filled(forms)[0], VOCAB_SIZE) == [0, 7]
    answers[0].log.finish_reason = FinishReason.ABORT
    masks = filled(forms)
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
    one = forms_of(answers, list(range(9)), list(range(9)))
    assert one.forced(filled(one)) == answers[:5]


def test_tokens_go_to_their_answers_and_say_which_rows_end() -> None:
    """Those of several kinds of forms; what one kind raises costs the answers whose tokens it was given."""

    @dataclass(frozen=True)
    class Failing(RuleForm):
        def joined(self, matchers: Mapping[int, Matcher]) -> Matchers:
            joined = super().joined(matchers)
            joined.push = lambda token_ids: {}[7]  # type: ignore[method-assign]
            return joined

    failing, ends = form(8, kind=Failing), RuleForm(VOCAB_SIZE, lambda tokens: set() if tokens else {3})
    each = (None, form(7), form(69, kind=OtherForm), failing, form(9), ends, failing)
    answers = [answer(one) for one in each]
    forms = forms_of(answers, list(range(7)), list(range(1, 7)))
    ended = forms.push(np.array([7, 69, 8, 5, 3, -1], np.int32))
    assert {row: repr(error).partition("(")[0] for row, error in ended.items()} == {
        3: "KeyError",
        4: "ValueError",
        5: "None",
    }
    assert [one.matcher.tokens for one in answers[1:]] == [[7], [69], [], [], [3], []]  # type: ignore[union-attr]
