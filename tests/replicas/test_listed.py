"""The requests of a list are those that a builder makes of all prompts at once, or its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.planning.simulated import NoWeights
from radixrt.planning.token_store import TokenStore
from radixrt.replicas import listed
from radixrt.replicas.listed import Listed, demands_of, listed_requests
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request

VOCAB_SIZE, CONTEXT, SLOTS = 100, 12, 14
PARAMS: list[Any] = [
    None,
    {"max_tokens": 3},
    SamplingParams(max_new_tokens=3),
    SamplingParams(max_new_tokens=3, temperature=0.5),
    SamplingParams(max_new_tokens=0),
    SamplingParams(max_new_tokens=None, n=3, seed=5, stop_token_ids=[4]),
    SamplingParams(max_new_tokens=2, prompt_logprobs=1, prompt_logprobs_start=2),
    SamplingParams(max_new_tokens=2, truncate_prompt_tokens=4),
    SamplingParams(stop=["no tokenizer"]),
    {"temperature": -1},
]


def builder() -> RequestBuilder:
    def refusal(request: Request) -> str | None:
        return f"needs {request.max_slots} slots" if request.max_slots > SLOTS - 3 else None

    return RequestBuilder(NoWeights(VOCAB_SIZE).config, None, context_length=CONTEXT, seed=3, refusal=refusal)


def arrays(*prompts: list[int]) -> list[Any]:
    return [np.array(prompt, np.int32) for prompt in prompts]


IDS = st.integers(0, VOCAB_SIZE - 1)
SOUND = st.lists(IDS, min_size=1, max_size=7)
UNKNOWN = st.sampled_from([-1, 0, VOCAB_SIZE, 2**31, 2**40])
BAD = st.one_of(st.just([]), st.lists(UNKNOWN, max_size=3), st.lists(IDS, max_size=14))
KINDS: list[Any] = [np.int32, np.int64, list, tuple]


@st.composite
def given_prompts(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """Prompts of all kinds, mostly sound, with a few parameters among them."""
    one = draw(st.sampled_from([SOUND, SOUND, st.one_of(SOUND, BAD)]))
    most = draw(st.sampled_from([6, 6, len(PARAMS)]))
    few = draw(st.lists(st.sampled_from(PARAMS[:most]), min_size=1, max_size=3))
    prompts: list[Any] = []
    for ids in draw(st.lists(one, max_size=8)):
        kind = draw(st.sampled_from(KINDS))
        fits = all(-(2**31) <= i < 2**31 for i in ids)
        prompts.append(kind(ids) if kind in (list, tuple) else np.array(ids, kind if fits else np.int64))
    return prompts, [draw(st.sampled_from(few)) for _ in prompts]


def told(request: Request) -> list[Any]:
    return [
        value.tolist() if isinstance(value, np.ndarray) else value
        for value in (getattr(request, each.name) for each in fields(request) if each.name != "id")
    ]


def check(found: Listed, expected: Sequence[Request]) -> None:
    requests, store = found.requests, TokenStore.of(request.prompt_ids for request in expected)
    backwards = [told(requests[i]) for i in reversed(range(len(requests)))]
    assert backwards[::-1] == [told(request) for request in expected]
    assert list(requests) == [requests[i] for i in range(len(requests))], "each is made once"
    assert len({request.id for request in requests}) == len(expected)
    assert found.store.tokens.tolist() == store.tokens.tolist()
    assert found.store.offsets.tolist() == store.offsets.tolist()
    for name, numbers in vars(demands_of(expected)).items():
        assert getattr(found.demands, name).tolist() == numbers.tolist(), name


def built_or_error(prompts: list[Any], params: list[Any], on_error: Any, call: int) -> tuple[Any, Any]:
    """What a builder makes of a list, or its error and None."""
    try:
        return builder().build_all(prompts, params, True, None, None, on_error, call=call)
    except (PromptError, ParameterError) as error:
        return (type(error), str(error)), None


def listed_or_error(prompts: list[Any], params: list[Any], on_error: Any, call: int) -> tuple[Any, Any]:
    try:
        return listed_requests(builder(), prompts, iter(params), on_error, call)  # which has them once
    except (PromptError, ParameterError) as error:
        return (type(error), str(error)), None


@given(lists=given_prompts(), call=st.integers(0, 1), on_error=st.sampled_from(["raise", "return", "what"]))
@example((arrays([1, 2], [3]), [PARAMS[2], PARAMS[1]]), 1, "raise")
@example((arrays([1] * 9, [3]), [PARAMS[5], PARAMS[4]]), 0, "raise")
@example((arrays([1] * 12, [3]), [PARAMS[2]] * 2), 0, "return")  # too long
@example((arrays([1] * 12, [3]), [PARAMS[4]] * 2), 0, "return")  # too many slots
@example((arrays([1, 2, 3], [-1]), [PARAMS[2]] * 2), 0, "return")
@example((arrays([1, 2, 3], [VOCAB_SIZE]), [PARAMS[2]] * 2), 0, "return")
@example((arrays([1, 2, 3, 4], [1, 2]), [PARAMS[6]] * 2), 0, "return")  # nothing to score
@example((arrays([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]), [PARAMS[7]] * 2), 0, "return")
def test_it_is_that_of_a_builder(lists: tuple[list[Any], list[Any]], call: int, on_error: Any) -> None:
    prompts, params = lists
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listed, "COPIED_AT_ONCE", 3)  # by several threads
        outputs, found = listed_or_error(prompts, params, on_error, call)
        refused, expected = built_or_error(prompts, params, on_error, call)
    if found is None or expected is None:
        assert outputs == refused, "the same error"
        return
    assert [(each.index, each.error) for each in outputs] == [(each.index, each.error) for each in refused]
    check(found, expected)


def test_requests_are_made_when_they_are_wanted_and_keep_their_prompts() -> None:
    prompts = [np.arange(1 + n % 5, dtype=np.int32) for n in range(40)]
    made = builder()
    _, found = listed_requests(made, prompts, PARAMS[2], "raise", 0)
    before = next(made._ids)
    expected = [prompt.tolist() for prompt in prompts]
    for prompt in prompts:
        prompt[:] = 9
    assert found.requests[-1].prompt_ids.tolist() == expected[-1]
    assert found.requests[-1].index == 39
    assert next(made._ids) == before + 2, "none but that one"
    assert [request.prompt_ids.tolist() for request in found.requests] == expected
    assert not any(np.shares_memory(request.prompt_ids, found.store.tokens) for request in found.requests), (
        "an output that is kept would keep the prompts of the whole list"
    )


def test_parameters_that_are_made_when_they_are_asked_for() -> None:
    """Such as those of a data set's column: each time others, perhaps where those before were."""

    class Column(Sequence[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: Any) -> Any:
            if index >= 8:
                raise IndexError
            return SamplingParams(max_new_tokens=1 + index % 4)

    _, found = listed_requests(builder(), arrays(*([n] for n in range(8))), Column(), "raise", 0)
    assert [request.max_new_tokens for request in found.requests] == [1, 2, 3, 4] * 2


def test_the_wrong_number_of_parameters() -> None:
    with pytest.raises(ParameterError, match="2 sampling_params for 1 prompts"):
        listed_requests(builder(), [[1]], [None, None], "raise", 0)
