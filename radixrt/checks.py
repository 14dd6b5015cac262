"""Checks of parameters and of JSON. Errors name the parameter, its value and the bound."""

# Tests: tests/test_sampling_params.py

from __future__ import annotations

import math
from collections import Counter
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

from radixrt.errors import ParameterError, PromptError

T = TypeVar("T")

_MAX_TOKEN_ID = 2**31 - 1


def check_int(name: str, value: object, low: int, high: int) -> int:
    """`value`, an integer or a float such as 3.0, as an int, low <= value <= high. Raises ParameterError."""
    if type(value) is int and low <= value <= high:  # before others, which are asked for by abstract classes
        return value
    if isinstance(value, Real) and not isinstance(value, Integral) and (number := float(value)).is_integer():
        value = int(number)  # tables have floats in a column with gaps
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ParameterError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
    return int(value)


def check_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a float, low <= value <= high, or low < value with `above`. Raises ParameterError."""
    if type(value) is float and low < value <= high:  # before others, as in `check_int`
        return value
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not ((low < number if above else low <= number) and number <= high):  # NaN is never inside
        bound = f"above {low:g}" if above else f"from {low:g}"
        raise ParameterError(f"{name} is {value!r}; it must be a number {bound} to {high:g}")
    return number


def check_kind(name: str, value: object, wanted: type[T], told: str) -> T:
    """`value`, if it is of the type `wanted`; an error calls that `told`. Raises PromptError."""
    if not isinstance(value, wanted):
        raise PromptError(f"{name} is {kind(value)}; it must be {told}")
    return value


def check_prompt(name: str, value: object) -> str | list[int]:
    """`value` as text, or as token ids of some model, not none. Raises PromptError, which names a bad id."""
    if not isinstance(value, list):
        value = check_kind(name, value, str, "a string or a list of token ids")
    if isinstance(value, str):
        return value  # an empty one may have a token before it
    if not value:
        raise PromptError(f"{name} is empty")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _MAX_TOKEN_ID:
        return value
    for position, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError(f"{name}[{position}] is {kind(token)}; it must be a token id")
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise PromptError(f"{name}[{position}] is {short(str(token))}; that is no token id")
    return value


def refuse_constant(name: str) -> NoReturn:
    """In place of what json takes for numbers, such as NaN. Raises ValueError."""
    raise ValueError(f"{name} is not a JSON number")


def finite(text: str) -> float:
    """A number as JSON has it, as a float. Raises ValueError where no float holds it."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{short(text)} is out of range")
    return value


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError where a key appears twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {short(repr(key))} appears twice")
    return value


def nests_deeper(value: object, limit: int) -> bool:
    """Whether lists and objects nest more than `limit` deep."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return bool(level)


def kind(value: object) -> str:
    """What a JSON value is, for people."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return kinds[type(value)]


def short(text: str, most: int = 60) -> str:
    """`text`, or its beginning where it is longer than `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
