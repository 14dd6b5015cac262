"""Requests, outputs, options and errors on their way between processes."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.config import RuntimeConfig, config_as_json
from radixrt.errors import ModelError, ParameterError, PassError
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings, TokenLogprob, Usage
from radixrt.replicas.messages import (
    ended_message,
    ended_of,
    output_of,
    requests_message,
    requests_of,
)
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.policy import SchedulePolicy
from radixrt.schedule.request import Request
from radixrt.workers.channel import error_as_json, error_of
from tests.support.local_replicas import as_sent
from tests.support.runtimes import scheduled_runtime


def test_requests() -> None:
    """All that a request is comes back, but for its text's builder, from a Runtime of its own."""
    ours, theirs = (scheduled_runtime(pool_tokens=1000, context_length=100) for _ in range(2))
    params = SamplingParams(
        max_new_tokens=5,
        n=2,
        temperature=0.5,
        logit_bias={7: 1.5},
        bad_words=[[3, 4]],
        stop_token_ids=[9],
        logprobs=2,
    )
    sent = [
        ours.prepare([1, 2, 3], params, index=4, keep=2),
        ours.prepare([5], params, index=0),
        ours.prepare([5, 6], SamplingParams(seed=11, max_new_tokens=None), index=9, priority=-3),
    ]
    sent[1] = replace(sent[1], seed=77, params=replace(params))  # as of a later call, with equal parameters
    message = as_sent(requests_message(sent))
    assert len(message.body["params"]) == 2
    found = list(requests_of(message, theirs))
    for request, back in zip(sent, found, strict=True):
        assert not isinstance(back, RequestOutput)
        for field in fields(request):
            if field.name != "prompt_ids":
                assert getattr(back, field.name) == getattr(request, field.name), field.name
        assert back.prompt_ids.tolist() == request.prompt_ids.tolist()


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8))
def test_tokens_that_a_prompt_shares_with_the_one_before_are_sent_once(prompts: list[list[int]]) -> None:
    runtime = scheduled_runtime(pool_tokens=1000, context_length=100)
    message = as_sent(requests_message([runtime.prepare(prompt, index=i) for i, prompt in enumerate(prompts)]))
    back = [made for made in requests_of(message, runtime) if isinstance(made, Request)]
    assert [request.prompt_ids.tolist() for request in back] == prompts
    shared = sum(
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairwise(prompts)
    )
    assert len(message.numbers) == sum(map(len, prompts)) - shared


def test_a_request_that_the_replica_cannot_run() -> None:
    ours, theirs = (scheduled_runtime(pool_tokens=tokens, context_length=100) for tokens in (1000, 4))
    sent = [ours.prepare([1] * length, SamplingParams(max_new_tokens=2), index=length) for length in (9, 3)]
    refused, fine = requests_of(as_sent(requests_message(sent)), theirs)
    assert isinstance(refused, RequestOutput)
    assert (refused.id, refused.index, refused.finish_reason) == (sent[0].id, 9, FinishReason.ERROR)
    assert "KV slots" in str(refused.error)
    assert not isinstance(fine, RequestOutput)


@pytest.mark.parametrize("cause", [None, PassError("out of memory")])
def test_outputs(cause: PassError | None) -> None:
    request = scheduled_runtime(pool_tokens=100, context_length=50).prepare([1, 2], index=3)
    logprobs = (TokenLogprob(5, -0.1, 1, ((5, -0.1), (6, float("-inf")))), TokenLogprob(6, -1e-300, 2))
    output = RequestOutput(
        index=3,
        id=request.id,
        outputs=(
            CompletionOutput(0, "é\u2028", (5, 6), FinishReason.STOP, matched="x", logprobs=logprobs),
            CompletionOutput(1, "", (), FinishReason.ERROR, matched=6, error="no"),
        ),
        usage=Usage(2, 1, 1, 2, 3),
        timings=Timings(0.1, None, 1 / 3),
        prompt_ids=request.prompt_ids,
        prompt_logprobs=logprobs[:1],
        cause=cause,
    )
    message = as_sent(ended_message([replace(output, outputs=output.outputs[:1]), output], {"begun": [7]}))
    assert message.body["begun"] == [7]
    one, both = (output_of(ended, request) for ended in ended_of(message))
    assert one.outputs == output.outputs[:1]
    back = both
    assert [getattr(back, each.name) for each in fields(back) if each.name not in ("prompt_ids", "cause")] == [
        getattr(output, each.name) for each in fields(output) if each.name not in ("prompt_ids", "cause")
    ]
    assert back.prompt_token_ids == (1, 2)
    assert str(back.cause) == ("None" if cause is None else "PassError: out of memory")
    assert isinstance(back.cause, type(cause))


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones come out, with the seed that was drawn, and a folder that another process finds, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = RuntimeConfig(
        Path("model"),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        schedule_policy=SchedulePolicy.FCFS,
        chat_template_kwargs={"enable_thinking": False},
        seed=None,
        max_total_tokens=100,
    )
    told = json.loads(json.dumps(config_as_json(config)))
    back = RuntimeConfig(**told)
    assert (back.model, back.dtype, back.device) == (str(tmp_path / "model"), "bfloat16", "cpu")
    assert (back.schedule_policy, back.seed) == (SchedulePolicy.FCFS, config.run_seed)
    assert (back.chat_template_kwargs, back.max_total_tokens) == ({"enable_thinking": False}, 100)
    assert RuntimeConfig(**config_as_json(RuntimeConfig())) == RuntimeConfig()
    assert config_as_json(RuntimeConfig("Qwen/Qwen3-0.6B"))["model"] == "Qwen/Qwen3-0.6B"
    assert config_as_json(RuntimeConfig("n" * 300))["model"] == "n" * 300  # its Runtime refuses it


def test_errors() -> None:
    back = error_of(json.loads(json.dumps(error_as_json(ParameterError("seed is -1")))))
    assert isinstance(back, ParameterError)
    assert str(back) == "seed is -1"
    assert isinstance(error_of(["NoSuchError", "what"]), ModelError)
