"""What requests do to their logits."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.sampling_params import SamplingParams as Params
from radixrt.schedule.logits_processors import BadWords, LogitsProcessors, ProcessedDraw
from radixrt.schedule.passes import NO_TOKEN
from tests.schedule.test_sampling_table import END, request


def test_ends_are_banned_up_to_a_position() -> None:
    longer = LogitsProcessors.of(request(0, Params(min_new_tokens=4, presence_penalty=1)))
    assert longer is not None
    known = np.array([5, 6, 7], dtype=np.int32)
    bans = [ProcessedDraw(longer, 0, position, known).bans().tolist() for position in (6, 7)]
    assert bans == [[[END, NO_TOKEN]], []]


def test_requests_that_change_nothing_have_no_processors() -> None:
    assert LogitsProcessors.of(request(0, Params(min_new_tokens=0))) is None
    assert LogitsProcessors.of(request(0, Params(min_new_tokens=4), stop_ids=frozenset())) is None


@pytest.mark.parametrize("last_is_unknown", [False, True])
def test_bad_words_against_a_search(last_is_unknown: bool) -> None:
    random = np.random.default_rng(3)
    found = 0
    for _ in range(400):
        words = [tuple(random.integers(0, 3, random.integers(1, 5)).tolist()) for _ in range(6)]
        history = random.integers(0, 3, random.integers(2, 7)).tolist()
        known = np.array(history[:-1] if last_is_unknown else history, dtype=np.int32)
        ids, afters = BadWords.of(words, last_is_unknown).bans(known).T
        applies = (afters == NO_TOKEN) | (afters == history[-1])
        if not last_is_unknown:
            assert (afters == NO_TOKEN).all()
        expected = {last for *before, last in words if history[len(history) - len(before) :] == before}
        assert set(ids[applies].tolist()) == expected
        found += len(expected)
    assert found > 400
