"""Every parameter is refused outside its bounds, by name, with its value and the bound."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from radixrt import ParameterError, SamplingParams
from radixrt.form_spec import FORM_FIELDS, NESTED
from radixrt.frontend.sampling_aliases import sampling_params_from_dict
from radixrt.sampling_params import _CHECKS, SPELLINGS

BAD: list[tuple[str, Any]] = [
    ("max_new_tokens", -2),
    ("max_new_tokens", -1),
    ("max_new_tokens", 1.5),
    ("max_new_tokens", True),
    ("max_new_tokens", "8"),
    ("max_new_tokens", 2**31),
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("temperature", "warm"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", float("inf")),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("top_p", False),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("stop_token_ids", 5),
    ("stop_token_ids", "ab"),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", list(range(129))),
    ("ignore_eos", 1),
    ("min_new_tokens", -1),
    ("min_new_tokens", 129),  # more than max_new_tokens
    ("n", 0),
    ("n", 4097),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-30),  # it would make a logit infinite
    ("repetition_penalty", 10.5),
    ("presence_penalty", 2.5),
    ("presence_penalty", float("nan")),
    ("frequency_penalty", -2.5),
    ("logit_bias", [1, 2]),
    ("logit_bias", {1: 101}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1" * 5000: 1}),  # more digits than Python reads
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", 3),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [[]]),
    ("bad_words", [[-1]]),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", ["x" * 1025]),
    ("stop", ["x"] * 65),
    ("stop", 7),
    ("stop_regex", ["("]),
    ("stop_regex", ["a*"]),
    ("stop_regex", [3]),
    ("stop_regex", ["x" * 1025]),
    ("stop_regex", ["x"] * 65),
    ("include_stop_str", 1),
    ("logprobs", -1),
    ("logprobs", 129),
    ("prompt_logprobs", 1.5),
    ("logprobs_mode", "raw_logits"),
    ("logprobs_mode", ["raw_logprobs"]),
    ("prompt_logprobs_start", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_out_of_bounds(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name} "):
        SamplingParams(**{name: value})


def test_the_message_names_value_and_bound() -> None:
    with pytest.raises(ParameterError) as error:
        SamplingParams(top_p=0)
    assert str(error.value) == "top_p is 0; it must be a number above 0 to 1"


def test_what_may_stop_is_named_as_it_may_be_given() -> None:
    with pytest.raises(ParameterError, match="stop is 7; it must be a string or a list of strings"):
        SamplingParams(stop=7)  # type: ignore[arg-type]


def test_bounds_themselves_are_inside() -> None:
    low = SamplingParams(1, 0, -1, 1e-9, 0, 0, (), False)
    assert (low.top_k, low.temperature) == (0, 0.0)
    SamplingParams(2**31 - 1, 100, 2**31 - 1, 1, 1, 2**63 - 1, tuple(range(128)), True)


def test_nothing_to_draw_several_times() -> None:
    with pytest.raises(ParameterError, match="n is 2, but max_new_tokens is 0"):
        SamplingParams(n=2, max_new_tokens=0)


def test_where_scores_begin_needs_scores() -> None:
    with pytest.raises(ParameterError, match="prompt_logprobs_start is 3; it needs prompt_logprobs"):
        SamplingParams(prompt_logprobs_start=3)
    assert SamplingParams(prompt_logprobs_start=0) == SamplingParams()


def test_the_mode_of_log_probabilities_matters_where_they_are_wanted() -> None:
    processed = SamplingParams(logprobs_mode="processed_logprobs", prompt_logprobs=1)
    assert not processed.wants_processed_logprobs
    assert replace(processed, logprobs=0).wants_processed_logprobs
    assert not SamplingParams(logprobs=0).wants_processed_logprobs
    with pytest.raises(ParameterError) as error:
        SamplingParams(logprobs_mode="raw_logits")  # type: ignore[arg-type]
    assert str(error.value) == ("logprobs_mode is 'raw_logits'; it must be 'raw_logprobs' or 'processed_logprobs'")


def test_lists_and_mappings_become_values() -> None:
    params = SamplingParams(stop="end", logit_bias={"7": 1, 3: -2}, bad_words=["a", [1, 2]], allowed_token_ids=[5])
    assert params.stop == ("end",)
    assert params.logit_bias == ((3, -2.0), (7, 1.0))
    assert params.bad_words == ("a", (1, 2))
    assert params.allowed_token_ids == (5,)
    assert hash(params) == hash(replace(params))
    assert SamplingParams(max_new_tokens=0).max_new_tokens == 0


def test_values_are_plain_and_frozen() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=1, stop_token_ids=[np.int32(4)])
    assert params == SamplingParams(max_new_tokens=3, temperature=1.0, stop_token_ids=(4,))
    assert type(params.max_new_tokens) is int
    assert type(params.temperature) is float
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(3, 1.0, stop_token_ids=(4,)))


def test_whole_floats_are_whole_numbers() -> None:
    params = SamplingParams(max_new_tokens=3.0, n=np.float32(2), stop_token_ids=[4.0], seed=2.0**62)  # type: ignore[arg-type, list-item]
    assert params == SamplingParams(max_new_tokens=3, n=2, stop_token_ids=(4,), seed=2**62)
    assert type(params.max_new_tokens) is type(params.n) is int


def test_the_spellings_of_other_engines_are_keywords() -> None:
    values = {"max_new_tokens": 7, "min_new_tokens": 5, "seed": 3, "include_stop_str": True}
    for spelling, name in SPELLINGS.items():
        if name in FORM_FIELDS:  # of which there is one: see tests/test_form_spec.py
            continue
        params = SamplingParams(**{**values, name: values[name]})
        others = {other: value for other, value in values.items() if other != name}
        assert SamplingParams(**{spelling: values[name]}, **others) == params
        with pytest.raises(ParameterError, match=f"{name} and {spelling} are the same parameter; give one"):
            SamplingParams(**{name: values[name], spelling: values[name]})
        with pytest.raises(ParameterError, match=f"^{name} is -1"):
            SamplingParams(**{spelling: -1})
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)
    assert copy.copy(params) == pickle.loads(pickle.dumps(params)) == params


def test_none_is_not_given() -> None:
    names = {field.name for field in fields(SamplingParams)} | SPELLINGS.keys() | NESTED.keys()
    names -= {"max_new_tokens", "max_tokens"}
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams(guided_json=None, json_schema="{}") == SamplingParams(json_schema="{}")
    given = SamplingParams(temperature=0, stop="x", seed=3, regex="a")
    assert sampling_params_from_dict(dict.fromkeys(names), given) == given
    assert replace(given, stop=None).stop == ()


def test_no_limit_but_the_context() -> None:
    assert SamplingParams(max_tokens=None) == SamplingParams(max_new_tokens=2**31 - 1)


def test_every_parameter_is_checked() -> None:
    for field in fields(SamplingParams):
        with pytest.raises(ParameterError, match=field.name):
            SamplingParams(**{field.name: object()})  # type: ignore[arg-type]


def test_parameters_by_their_places() -> None:
    assert SamplingParams(3.0, 0.5, n=2) == SamplingParams(max_new_tokens=3, temperature=0.5, n=2)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="temperature is -1"):
        SamplingParams(3, -1)
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams(3, max_new_tokens=3)  # type: ignore[misc]


def test_the_first_error_is_that_of_the_first_check() -> None:
    with pytest.raises(ParameterError, match="max_new_tokens is -1"):
        SamplingParams(temperature=-1, n=0, max_new_tokens=-1)


def test_checks_leave_defaults_as_they_are() -> None:
    defaults = SamplingParams()
    own = SamplingParams(**{field.name: field.default for field in fields(SamplingParams)})
    assert own == defaults
    for field in fields(SamplingParams):
        if field.default is not None:  # which is not given
            assert _CHECKS[field.name](field.name, field.default) == field.default


@dataclass(frozen=True)
class Own(SamplingParams):
    temperature: float = 0.5
    label: str = ""


def test_parameters_of_a_dataclass_made_of_it_are_checked() -> None:
    """Its `__init__` comes from its own fields."""
    own = Own(top_k=-1, label="a")
    assert (own.temperature, own.top_k, own.top_p, own.label) == (0.5, 0, 1.0, "a")
    with pytest.raises(ParameterError, match="temperature"):
        Own(temperature=-3.0)
    with pytest.raises(ParameterError, match="max_new_tokens is 0"):
        Own(n=2, max_new_tokens=0)
