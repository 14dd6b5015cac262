"""Checks of parameters. Errors name the parameter, its value and the bound."""

# Tests: tests/test_sampling_params.py

from __future__ import annotations

import math
from numbers import Integral, Real

from radixrt.errors import ParameterError


def check_int(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int, low <= value <= high. Raises ParameterError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ParameterError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
    return int(value)


def check_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a float, low <= value <= high, or low < value with `above`. Raises ParameterError."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not ((low < number if above else low <= number) and number <= high):  # NaN is never inside
        bound = f"above {low:g}" if above else f"from {low:g}"
        raise ParameterError(f"{name} is {value!r}; it must be a number {bound} to {high:g}")
    return number
