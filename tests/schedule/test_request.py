"""What is asked does not change, and what follows from it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request


def request(max_new_tokens: int = 4, **more: object) -> Request:
    prompt_ids = np.array([5, 6, 7], dtype=np.int32)
    return Request(0, prompt_ids, SamplingParams(), max_new_tokens, seed=0, **more)  # type: ignore[arg-type]


def test_a_request_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        request().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(("new", "max_len", "max_slots"), [(4, 7, 6), (1, 4, 3), (0, 3, 3)])
def test_the_last_token_wants_no_slot(new: int, max_len: int, max_slots: int) -> None:
    asked = request(new)
    assert (asked.prompt_len, asked.max_len, asked.max_slots) == (3, max_len, max_slots)


def test_only_tokens_and_text_stop_an_answer_early() -> None:
    assert not request().may_stop
    assert request(stop_ids=frozenset([1])).may_stop
    assert request(make_text=lambda: None).may_stop
