"""Sampling parameters by the names that users of other engines know: SGLang's Engine and vLLM's LLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from radixrt.errors import ParameterError
from radixrt.form_spec import FORM_FIELDS, NESTED
from radixrt.sampling_params import MAX_NEW_TOKENS, SPELLINGS, SamplingParams, by_field

_NOTHING = SamplingParams()


@cache
def known_parameters() -> Mapping[str, str]:
    """Every name by which a parameter may be given, and the field of SamplingParams that it means.

    What holds a form, such as `response_format`, stands for itself.
    """
    names = {field.name: field.name for field in fields(SamplingParams)}
    spellings = {spelling: name for spelling, name in SPELLINGS.items() if name in names}
    return MappingProxyType(names | spellings | {name: name for name in NESTED})


def sampling_params_from_dict(values: Mapping[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
    """SamplingParams from a dict in either spelling; `defaults` for what is not in it, or is None.

    But a max_new_tokens of None is a value: to the end of the context. A form takes the place of the defaults'.
    Raises ParameterError if keys are unknown (it names all, with the nearest known ones), two spellings of a
    parameter are given, or a value is outside its bounds.
    """
    if not isinstance(values, Mapping):
        raise ParameterError(f"sampling parameters are a dict or a SamplingParams, not {values!r}")
    known = known_parameters()
    if unknown := [key for key in values if key not in known]:
        many = "s" if len(unknown) > 1 else ""
        listed = ", ".join(with_nearest(key, known) for key in unknown)
        names = ", ".join(dict.fromkeys(known.values()))
        raise ParameterError(f"unknown sampling parameter{many} {listed}; known are {names}")
    own = by_field(values)
    if defaults is None:
        return SamplingParams(**own)
    if not own.keys().isdisjoint(FORM_FIELDS):
        own = {name: getattr(_NOTHING, name) for name in FORM_FIELDS} | own
    return replace(defaults, **own)


def chosen_length(params: SamplingParams | Mapping[str, Any] | None, defaults: SamplingParams) -> int:
    """The maximum of new tokens that somebody has chosen: by these parameters, or by defaults. If nobody has,
    MAX_NEW_TOKENS: all that the context leaves. A SamplingParams has a maximum in any case: its default counts as
    not chosen.
    """
    if isinstance(params, Mapping) and "max_new_tokens" in (own := by_field(params)):
        chosen: int | None = own["max_new_tokens"]
        return MAX_NEW_TOKENS if chosen is None else chosen
    if isinstance(params, SamplingParams):
        defaults = params
    return MAX_NEW_TOKENS if defaults.max_new_tokens == _NOTHING.max_new_tokens else defaults.max_new_tokens


def with_nearest(key: object, known: Iterable[str]) -> str:
    """A name that is not known, for an error message, with the nearest one that is."""
    nearest = get_close_matches(key, list(known), n=1) if isinstance(key, str) else []
    return f"{key!r} (did you mean {nearest[0]!r}?)" if nearest else repr(key)
