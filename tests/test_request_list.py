"""The requests of a list are those that a builder makes of all prompts at once, or its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixrt import request_list as module
from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.arguments import Call
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.planning.simulated import NoWeights
from radixrt.planning.token_store import TokenStore
from radixrt.request_list import TokenRequests, demands_of, request_list, store_of
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request
from radixrt.text.tokenizer import Tokenizer
from scripts.bench_streams import letters

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


def check(requests: Sequence[Request], expected: Sequence[Request]) -> None:
    store = TokenStore.of(request.prompt_ids for request in expected)
    found, demands = store_of(requests)
    if isinstance(requests, TokenRequests):
        in_order, by_tokens = requests.in_order(), sorted(expected, key=lambda each: each.prompt_ids.tolist())
        assert list(in_order.ids) == [request.id for request in in_order]
        assert list(map(told, in_order[1:])) == list(map(told, by_tokens[1:]))
        assert told(in_order[0]) == told(by_tokens[0])
        assert list(requests.ids) == [request.id for request in requests]
        assert {requests.priority} == {request.priority for request in expected}
    backwards = [told(requests[i]) for i in reversed(range(len(requests)))]
    assert backwards[::-1] == [told(request) for request in expected]
    assert [request.id for request in requests] == [requests[i].id for i in range(len(requests))]
    assert len({request.id for request in requests}) == len(expected)
    assert found.tokens.tolist() == store.tokens.tolist()
    assert found.offsets.tolist() == store.offsets.tolist()
    for name, numbers in vars(demands_of(expected)).items():
        assert getattr(demands, name).tolist() == numbers.tolist(), name


def result_or_error(build: Callable[..., Any], prompts: list[Any], params: Any, call: Call) -> tuple[Any, Any]:
    """Outputs and requests, or an error and None."""
    try:
        return build(prompts, params, call)
    except (PromptError, ParameterError) as error:
        return (type(error), str(error)), None


DEFAULTS: dict[str, Any] = {"tenant": None, "request_ids": None, "priority": 0, "number": 0}
OPTIONS = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from([None, "t", 3]),
        "request_ids": st.sampled_from([None, ["a", "b"], ["a", "a"], list("abcdefgh"), "ab"]),
        "priority": st.sampled_from([0, -2, 1.0, 1.5, "high", [4] * 8, []]),
        "number": st.integers(0, 1),
    }
)


@given(
    lists=given_prompts(),
    on_error=st.sampled_from(["raise", "raise", "return", "what"]),
    options=st.one_of(st.just(DEFAULTS), OPTIONS),
)
@example((arrays([1, 2], [3]), [PARAMS[2], PARAMS[1]]), "raise", DEFAULTS | {"number": 1})
@example((arrays([1, 2], [3]), [PARAMS[2]] * 2), "raise", DEFAULTS | {"request_ids": ["a", "b"], "priority": 2.0})
@example((arrays([1] * 9, [3]), [PARAMS[5], PARAMS[4]]), "raise", DEFAULTS)
@example((arrays([1] * 12, [3]), [PARAMS[2]] * 2), "return", DEFAULTS)  # too long
@example((arrays([1] * 12, [3]), [PARAMS[4]] * 2), "return", DEFAULTS)  # too many slots
@example((arrays([1, 2, 3], [-1]), [PARAMS[2]] * 2), "return", DEFAULTS)
@example((arrays([1, 2, 3], [VOCAB_SIZE]), [PARAMS[2]] * 2), "return", DEFAULTS)
@example((arrays([1, 2, 3, 4], [1, 2]), [PARAMS[6]] * 2), "return", DEFAULTS)  # nothing to score
@example((arrays([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]), [PARAMS[7]] * 2), "return", DEFAULTS)
def test_it_is_that_of_a_builder(lists: tuple[list[Any], list[Any]], on_error: Any, options: Any) -> None:
    prompts, params = lists
    arguments = {"on_error": on_error, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COPIED_AT_ONCE", 3)  # by several threads
        patch.setattr(module, "FEWEST", 1)
        once = {name: iter(value) if isinstance(value, list) else value for name, value in arguments.items()}
        outputs, found = result_or_error(partial(request_list, builder()), prompts, iter(params), Call(**once))
        refused, expected = result_or_error(builder().build_all, prompts, params, Call(**arguments))
    if found is None or expected is None:
        assert outputs == refused, "the same error"
        return
    assert [(each.index, each.id, each.error) for each in outputs] == [
        (each.index, each.id, each.error) for each in refused
    ]
    if options["request_ids"] is not None:
        assert [request.id for request in found] == [request.id for request in expected]
    check(found, expected)


def test_requests_are_made_when_they_are_wanted_and_keep_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [np.arange(1 + n % 5, dtype=np.int32) for n in range(module.FEWEST)]
    made: list[Any] = []
    alike = RequestBuilder.alike
    monkeypatch.setattr(RequestBuilder, "alike", lambda *given: made.append(given) or alike(*given))
    _, requests = request_list(builder(), prompts, PARAMS[2], Call())
    assert isinstance(requests, TokenRequests)
    expected = [prompt.tolist() for prompt in prompts]
    for prompt in prompts:
        prompt[:] = 9
    assert requests[-1].prompt_ids.tolist() == expected[-1]
    assert len(made) == 1
    assert requests[-1].index == len(prompts) - 1
    assert len(set(requests.ids)) == len(prompts)
    assert [request.prompt_ids.tolist() for request in requests] == expected
    assert not any(np.shares_memory(request.prompt_ids, requests.store.tokens) for request in requests), (
        "an output that is kept would keep the prompts of the whole list"
    )
    made.clear()
    _, few = request_list(builder(), prompts[1:], PARAMS[2], Call())
    assert len(few) == len(prompts) - 1
    assert [*few] == [*few]
    assert not made, "those of a short list are made at once"


def test_parameters_that_are_made_when_they_are_asked_for() -> None:
    """Such as those of a data set's column: each time others, perhaps where those before were."""
    count = module.FEWEST

    class Column(Sequence[Any]):
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: Any) -> Any:
            if index >= count:
                raise IndexError
            return SamplingParams(max_new_tokens=1 + index % 4)

    _, found = request_list(builder(), arrays(*([1] for _ in range(count))), Column(), Call())
    assert isinstance(found, TokenRequests)
    assert [request.max_new_tokens for request in found] == [1 + index % 4 for index in range(count)]


def test_no_text_is_encoded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of the others cannot run."""
    encode, encoded = Tokenizer.encode_batch, list[str]()

    def noted(self: Tokenizer, texts: Sequence[str], **options: Any) -> Any:
        encoded.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", noted)
    own = RequestBuilder(NoWeights(256).config, letters(), context_length=CONTEXT)
    prompts: list[Any] = [f"a {n}" for n in range(module.FEWEST)]
    refused, requests = request_list(own, [*prompts, [-1]], PARAMS[2], Call(on_error="return"))
    assert [output.index for output in refused] == [len(prompts)]
    assert len(requests) == len(prompts)
    assert encoded == prompts


def test_the_wrong_number_of_parameters() -> None:
    with pytest.raises(ParameterError, match="2 sampling_params for 64 prompts"):
        request_list(builder(), [[1]] * 64, [None, None], Call())
