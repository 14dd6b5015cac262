"""Answers to one prompt that run as several requests: those of one request, and one output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import radixrt
from radixrt.batch.parts import Part, PartialOutputs, part_at
from radixrt.errors import PassError
from radixrt.output import FinishReason, RequestOutput
from radixrt.planning.shards import Pieces
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from tests.support.runtimes import simulated_runtime

PARTS = [Part(0, 2, 7), Part(2, 1, 7), Part(3, 4, 7)]
PROMPT = "Mira likes Oslo. Tarek counts 374.\nQ: Tarek counts?\nA:"


def run(runtime: Runtime, prompt: Any, params: SamplingParams) -> tuple[RequestOutput, dict[Part, RequestOutput]]:
    """The output of a request, and those of its parts."""
    whole = runtime.prepare(prompt, params, index=3)
    requests = {part.request(whole).id: (part, part.request(whole)) for part in PARTS}
    runtime.submit(whole)
    (output,) = finished(runtime)
    runtime.submit(*(request for _, request in requests.values()))
    return output, {requests[each.id][0]: each for each in finished(runtime)}


def finished(runtime: Runtime) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while runtime.has_work:
        outputs += runtime.step()
    return outputs


def joined(found: dict[Part, RequestOutput]) -> RequestOutput:
    """Of parts that end in any order."""
    partial = PartialOutputs()
    *first, last = reversed(found.items())
    assert [partial.add(9, *each) for each in first] == [None] * len(first)
    output = partial.add(9, *last)
    assert output is not None
    return output


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "top_p": 0.9, "logprobs": 2}, {"seed": 5, "min_p": 0.01}]
)
def test_the_built_in_model(params: dict[str, Any]) -> None:
    asked = SamplingParams(max_new_tokens=12, n=7, ignore_eos=True, **{"temperature": 2.0, **params})
    with radixrt.Runtime(device="cpu", deterministic=True, max_total_tokens=4096) as runtime:
        whole, parts = run(runtime, PROMPT, asked)
    found = joined(parts)
    assert len({answer.token_ids for answer in whole.outputs}) > 3, "they differ"
    assert found.outputs == whole.outputs
    assert found.usage.completion_tokens == whole.usage.completion_tokens


def test_usage_counts_a_prompt_once() -> None:
    with simulated_runtime() as runtime:
        whole, parts = run(runtime, [1, 2, 3, 4], SamplingParams(max_new_tokens=4, n=7))
    found = joined(parts)
    assert found.outputs == whole.outputs
    usage = found.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (4, 3, 1)
    assert usage.recomputed_tokens >= 2, "the last token of the prompt, by each further part"


def test_a_part_that_fails() -> None:
    """The output has the answers of all, and says what was wrong; parts that have not run need not."""
    with simulated_runtime() as runtime:
        _, parts = run(runtime, [1, 2, 3, 4], SamplingParams(max_new_tokens=4, n=7))
    partial = PartialOutputs()
    assert partial.failure(9) is None
    refused = RequestOutput.refused(3, "broken", "0/2")
    parts[PARTS[1]] = replace(refused, cause=PassError("broken"))
    assert partial.add(9, PARTS[1], parts[PARTS[1]]) is None
    failure = partial.failure(9)
    assert failure is not None
    assert failure.error == "broken"
    parts[PARTS[2]] = failure
    found = joined(parts)
    assert [answer.index for answer in found.outputs] == list(range(7))
    assert [answer.finish_reason is FinishReason.ERROR for answer in found.outputs] == [False] * 2 + [True] * 5
    assert found.failure == "broken"
    assert isinstance(found.cause, PassError)


def test_which_answers_a_piece_has() -> None:
    places = np.array([0, 1, 1, 2])
    pieces = Pieces(places, np.array([0, 0, 3, 0]), np.array([2, 3, 2, 1]), places, 1.0 * places, 1.0 * places)
    assert [part_at(pieces, piece, 5) for piece in range(4)] == [None, Part(0, 3, 5), Part(3, 2, 5), None]
