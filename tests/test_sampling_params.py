"""Every parameter is refused outside its bounds, by name, with its value and the bound."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from radixrt import ParameterError, SamplingParams

BAD: list[tuple[str, Any]] = [
    ("max_new_tokens", 0),
    ("max_new_tokens", -1),
    ("max_new_tokens", 1.5),
    ("max_new_tokens", True),
    ("max_new_tokens", "8"),
    ("max_new_tokens", 2**31),
    ("max_new_tokens", None),
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("temperature", "warm"),
    ("temperature", None),
    ("top_k", -2),
    ("top_k", 1.0),
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
    ("stop_token_ids", None),
    ("ignore_eos", 1),
    ("ignore_eos", None),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_out_of_bounds(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name} "):
        SamplingParams(**{name: value})


def test_the_message_names_value_and_bound() -> None:
    with pytest.raises(ParameterError) as error:
        SamplingParams(top_p=0)
    assert str(error.value) == "top_p is 0; it must be a number above 0 to 1"


def test_bounds_themselves_are_inside() -> None:
    low = SamplingParams(1, 0, -1, 1e-9, 0, 0, (), False)
    assert (low.top_k, low.temperature) == (0, 0.0)
    SamplingParams(2**31 - 1, 100, 2**31 - 1, 1, 1, 2**63 - 1, tuple(range(128)), True)


def test_values_are_plain_and_frozen() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=1, stop_token_ids=[np.int32(4)])
    assert params == SamplingParams(max_new_tokens=3, temperature=1.0, stop_token_ids=(4,))
    assert type(params.max_new_tokens) is int
    assert type(params.temperature) is float
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(3, 1.0, stop_token_ids=(4,)))
