"""A plain dict of parameters, spelled as in SGLang or in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from radixrt.errors import ParameterError
from radixrt.frontend import sampling_aliases as parameter_names
from radixrt.frontend.sampling_aliases import SPELLINGS, sampling_params_from_dict
from radixrt.sampling_params import SamplingParams


def test_both_spellings() -> None:
    sglang = {"max_new_tokens": 7, "temperature": 0.5, "sampling_seed": 3, "stop_token_ids": [4], "top_k": -1}
    vllm = {"max_tokens": 7, "temperature": 0.5, "seed": 3, "stop_token_ids": (4,), "top_k": 0}
    expected = SamplingParams(max_new_tokens=7, temperature=0.5, seed=3, stop_token_ids=(4,))
    assert sampling_params_from_dict(sglang) == sampling_params_from_dict(vllm) == expected
    assert sampling_params_from_dict({}) == SamplingParams()


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_field_has_its_own_name(name: str) -> None:
    default = getattr(SamplingParams(), name)
    assert sampling_params_from_dict({name: default}) == SamplingParams()


@dataclass(frozen=True)
class AllFields:
    """What SamplingParams may become: every field that a spelling stands for."""

    max_new_tokens: int = 0
    min_new_tokens: int = 0
    seed: int = 0
    include_stop_str: bool = False
    json_schema: object = None
    regex: object = None
    grammar: object = None
    choice: object = None
    json_object: object = None


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS.items())
def test_every_spelling(spelling: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_names, "SamplingParams", AllFields)
    assert sampling_params_from_dict({spelling: 5}) == AllFields(**{name: 5})  # type: ignore[comparison-overlap, arg-type]
    for keys in ((spelling, name), (name, spelling)):
        with pytest.raises(ParameterError, match=f"{keys[0]} and {keys[1]} are the same parameter"):
            sampling_params_from_dict(dict.fromkeys(keys, 5))


def test_a_spelling_of_no_field_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPELLINGS, "beams", "num_beams")
    with pytest.raises(ParameterError, match="unknown sampling parameter 'beams'; known are max_new_tokens, "):
        sampling_params_from_dict({"beams": 2})


def test_unknown_names_are_all_named() -> None:
    values = {"temprature": 1, "top_p": 0.5, "max_token": 3, "qqq": None, 7: 8}
    with pytest.raises(ParameterError) as caught:
        sampling_params_from_dict(values)  # type: ignore[arg-type]
    assert str(caught.value).startswith(
        "unknown sampling parameters 'temprature' (did you mean 'temperature'?), "
        "'max_token' (did you mean 'max_tokens'?), 'qqq', 7; known are max_new_tokens, "
    )


def test_values_keep_their_bounds() -> None:
    with pytest.raises(ParameterError, match="max_new_tokens is -1"):
        sampling_params_from_dict({"max_tokens": -1})


def test_none_is_the_default_but_of_a_length_no_limit() -> None:
    """JSON users send it."""
    given = dict.fromkeys(field.name for field in fields(SamplingParams) if field.name != "max_new_tokens")
    defaults = SamplingParams(top_p=0.5, seed=3, logprobs=2, max_new_tokens=9)
    assert sampling_params_from_dict(given) == SamplingParams()
    assert sampling_params_from_dict(given, defaults) == defaults
    endless = SamplingParams(max_new_tokens=None)
    assert sampling_params_from_dict({"max_tokens": None}) == endless
    assert sampling_params_from_dict({"max_new_tokens": None, "top_p": None}) == endless


@pytest.mark.parametrize("values", [None, "temperature", [("temperature", 1)], 3])
def test_what_is_no_dict(values: object) -> None:
    with pytest.raises(ParameterError, match="sampling parameters are a dict or a SamplingParams, not "):
        sampling_params_from_dict(values)  # type: ignore[arg-type]
