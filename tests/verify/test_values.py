"""Values of two computations are compared as bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings, TokenLogprob, Usage
from radixrt.verify.values import Difference, Value, Values, values_of

ABOVE = float(np.nextafter(np.float32(-1.5), np.float32(0)))


def values(start: int, *pairs: tuple[int, float], prompt_len: int = 4, **more: Any) -> Values:
    ids, logprobs = zip(*pairs, strict=True) if pairs else ((), ())
    known: dict[str, Any] = {"request_id": 0, "prompt": 2, "sample": 0, **more}
    return Values(
        start=start,
        prompt_len=prompt_len,
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        **known,
    )


ALONE = values(1, (7, -1.5), (8, -2.0), (9, 0.0)).followed_by(values(4, (5, -1.5), (6, -3.0)))


def test_equal_values_differ_nowhere() -> None:
    assert ALONE.difference(ALONE) is None
    assert ALONE.difference(values(3, (9, 0.0))) is None  # the end of the prompt alone
    assert ALONE.difference(values(4, (5, -1.5), (6, -3.0))) is None


def test_the_first_difference_is_found() -> None:
    found = ALONE.difference(values(3, (9, -0.0)))
    assert found == Difference(2, 0, 3, 4, Value(9, 0.0), Value(9, -0.0))
    assert (found.in_prompt, found.ulps) == (True, 0)  # other bits, the same number
    assert (found.expected and found.expected.bits, found.found and found.found.bits) == (
        "0x00000000",
        "0x80000000",
    )
    found = ALONE.difference(values(4, (5, ABOVE), (1, -3.0)))
    assert found is not None
    assert (found.position, found.in_prompt, found.ulps) == (4, False, 1)
    found = ALONE.difference(values(4, (5, -1.5), (1, -3.0)))
    assert found is not None
    assert (found.position, found.ulps) == (5, None)


def test_an_answer_that_ends_elsewhere_differs() -> None:
    short = ALONE.difference(values(4, (5, -1.5)))
    assert short == Difference(2, 0, 5, 4, Value(6, -3.0), None)
    long = ALONE.difference(values(4, (5, -1.5), (6, -3.0), (7, -1.0)))
    assert long == Difference(2, 0, 6, 4, None, Value(7, -1.0))


@pytest.mark.parametrize(("one", "other", "ulps"), [(-1.5, ABOVE, 1), (-0.0, 0.0, 0), (-1e-45, 1e-45, 2)])
def test_ulps(one: float, other: float, ulps: int) -> None:
    assert Difference(0, 0, 0, 1, Value(3, one), Value(3, other)).ulps == ulps


def test_values_of_an_output() -> None:
    scored, drawn = TokenLogprob(8, -1.5, 1), TokenLogprob(3, -math.inf, 2)
    answers = tuple(CompletionOutput(k, "", (3,), FinishReason.LENGTH, logprobs=(drawn,)) for k in range(2))
    output = RequestOutput(7, "a", answers, Usage(5, 0, 5, 2), Timings(0, 0, 0), (), prompt_logprobs=(scored,) * 2)
    found = [*values_of(4, output)]
    assert [(v.request_id, v.prompt, v.sample, v.start, v.prompt_len) for v in found] == [
        ("a", 4, 0, 3, 5),
        ("a", 4, 0, 5, 5),
        ("a", 4, 1, 5, 5),
    ]
    assert found[0].at(4) == Value(8, -1.5)
    assert found[0].at(5) is None
    assert found[2].at(5) == Value(3, -math.inf)
