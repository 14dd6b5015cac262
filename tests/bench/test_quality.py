"""The table of quality: what its numbers mean."""

from __future__ import annotations

import math

import pytest

from radixrt.output import TokenLogprob
from scripts.bench_quality import Measured, options_of


def scored(*pairs: tuple[float, int]) -> tuple[TokenLogprob, ...]:
    """Tokens with their log-probability, and the likeliest token in place of each."""
    return tuple(TokenLogprob(5, logprob, 2, ((best, -0.1),)) for logprob, best in pairs)


def test_two_settings() -> None:
    first = Measured(scored((-1.0, 3), (-3.0, 4)), ((1, 2, 3), (4, 5)))
    other = Measured(scored((-1.5, 3), (-3.0, 9)), ((1, 2, 9), (4, 5)))
    assert first.perplexity == pytest.approx(math.exp(2.0))
    assert first.compared(first) == ("0.0000", "100.00%", "2 of 2", "100.0%")
    assert other.compared(first) == ("0.2500", "50.00%", "1 of 2", "80.0%")


def test_options() -> None:
    assert options_of("dtype=bfloat16,kv_dtype=fp8") == {"dtype": "bfloat16", "kv_dtype": "fp8"}
    for wrong in ("", "dtype", "dtype=", "=fp8"):
        with pytest.raises(SystemExit, match="a setting is a list of options"):
            options_of(wrong)
