"""Requests and their ids; what is refused is in tests/test_runtime.py and tests/test_generation.py."""

from __future__ import annotations

from typing import Any

import pytest

from radixrt.errors import PromptError
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.planning.simulated import NoWeights


@pytest.fixture
def builder() -> RequestBuilder:
    return RequestBuilder(NoWeights(50).config, None, context_length=20, seed=0)


def test_a_request_has_one_id(builder: RequestBuilder) -> None:
    requests, errors = builder.build_all([[1], [99], [2], [3]], [None] * 4, None, {0: "a", 1: "b", 3: "d"})
    assert [request.index for request in requests] == [0, 2, 3]
    assert (requests[0].id, requests[2].id) == ("a", "d")
    assert isinstance(requests[1].id, int)
    assert builder.build([1]).id != builder.build([1]).id
    assert builder.build([1], request_id="c").id == "c"
    assert list(errors) == [1]
    assert "holds token id 99" in str(errors[1])


def test_scored_requests_know_their_prompts(builder: RequestBuilder) -> None:
    requests, owners = builder.build_scored([[1, 2], [3]], [[[4], [5, 6]], [7]], None)
    assert [request.prompt_ids.tolist() for request in requests] == [[1, 2, 4], [1, 2, 5, 6], [3, 7]]
    assert [request.params.prompt_logprobs_start for request in requests] == [2, 2, 1]
    assert owners == [0, 0, 1]


@pytest.mark.parametrize("none", [[], (), {}, b"x", 7, None])
def test_a_prompt_without_continuations_is_named(builder: RequestBuilder, none: Any) -> None:
    with pytest.raises(PromptError, match="1 of 2 prompts cannot be run:\nprompt 1 has no continuations"):
        builder.build_scored([[1], [2]], [[3], none], None)


def test_parameters_are_read_and_checked_once_for_many_prompts(builder: RequestBuilder) -> None:
    given = {"max_tokens": 3, "bad_words": [[4]]}
    requests, _ = builder.build_all([[1], [2]], [given, given], None, {})
    assert requests[0].params is requests[1].params
    assert requests[0].bad_words is requests[1].bad_words
    assert builder.build([1], requests[0].params).bad_words is requests[0].bad_words
    for number in range(200):  # more than are remembered
        assert builder.build([1], {"max_tokens": 3, "bad_words": [[number % 50]]}).bad_words == ((number % 50,),)
    assert builder.build([1], requests[0].params).bad_words == ((4,),)
