"""`/generate` as SGLang's clients use it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from radixrt.runtime import Runtime
from tests.support.serving import ANSWERS, QUESTIONS, Serving

GREEDY = {"temperature": 0, "max_new_tokens": 8}


def asked(url: str, **body: Any) -> Any:
    response = httpx.post(f"{url}/generate", json={"sampling_params": GREEDY, **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_prompts_of_text_and_of_tokens(serving: Serving, runtime: Runtime) -> None:
    url = serving()
    one = asked(url, text=QUESTIONS[0])
    assert one["text"].strip() == ANSWERS[0]
    assert runtime.tokenizer is not None
    ids = runtime.tokenizer.encode(QUESTIONS[0]).tolist()
    meta = one["meta_info"]
    assert meta["prompt_tokens"] == len(ids)
    assert meta["completion_tokens"] == len(one["output_ids"])
    assert (meta["finish_reason"]["type"], type(meta["id"])) == ("stop", str)
    by_ids = asked(url, input_ids=ids)
    assert (by_ids["text"], by_ids["output_ids"]) == (one["text"], one["output_ids"])
    assert by_ids["meta_info"]["cached_tokens"] > 0
    assert [each["text"].strip() for each in asked(url, text=QUESTIONS)] == ANSWERS
    assert len(asked(url, input_ids=[ids])) == 1, "a list is answered by one"


def test_parameters_of_each_prompt_and_several_answers(serving: Serving) -> None:
    url = serving()
    params = [{**GREEDY, "max_new_tokens": most, "ignore_eos": True} for most in (1, 3)]
    short, long = asked(url, text=QUESTIONS[:2], sampling_params=params)
    assert [len(each["output_ids"]) for each in (short, long)] == [1, 3]
    assert long["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert len(asked(url, text=QUESTIONS[0], sampling_params={**GREEDY, "temperature": 1, "n": 3})) == 3


def test_logprobs(serving: Serving) -> None:
    url = serving()
    meta = asked(url, text=QUESTIONS[0], return_logprob=True, top_logprobs_num=2)["meta_info"]
    chosen, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
    assert len(chosen) == len(top) == meta["completion_tokens"]
    for (logprob, token, _), likeliest in zip(chosen, top, strict=True):
        assert likeliest[0][:2] == [logprob, token], "it is greedy"
        assert len(likeliest) == 2


def test_a_stream(serving: Serving) -> None:
    url = serving()
    whole = asked(url, text=QUESTIONS[1])
    body = {"text": QUESTIONS[1], "sampling_params": GREEDY, "stream": True}
    lines = httpx.post(f"{url}/generate", json=body, timeout=60).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len({event["meta_info"]["id"] for event in events}) == 1
    assert not any("index" in event for event in events)
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts == [len(event["output_ids"]) for event in events]


def test_a_stream_of_a_list(serving: Serving) -> None:
    """Events have the place of their answer in the list as their index, as SGLang's do."""
    url = serving()
    for text, n in ((QUESTIONS, 1), (QUESTIONS[:2], 2), (QUESTIONS[0], 2), (QUESTIONS[:1], 1)):
        params = {**GREEDY, "temperature": 1.5, "seed": 3, "n": n}
        whole = asked(url, text=text, sampling_params=params)
        body = {"text": text, "sampling_params": params, "stream": True}
        lines = httpx.post(f"{url}/generate", json=body, timeout=60).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert {event["index"] for event in events} == {*range(len(whole))}
        for index, answer in enumerate(whole):
            *before, last = [event for event in events if event["index"] == index]
            assert (last["text"], last["output_ids"]) == (answer["text"], answer["output_ids"])
            assert last["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]
            assert {event["meta_info"]["finish_reason"] for event in before} <= {None}
            texts = [event["text"] for event in (*before, last)]
            assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "must have text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "must have text or input_ids"),
        ({"text": 7}, "text"),
        ({"text": [[1]]}, "text must be strings"),
        ({"input_ids": "a"}, "input_ids must be token ids"),
        ({"input_ids": []}, "input_ids"),
        ({"text": "a", "rid": "mine"}, "rid is not supported"),
        ({"text": "a", "lora_path": "x"}, "unknown parameter lora_path"),
        ({"text": "a", "sampling_params": 1}, "sampling_params"),
        ({"text": "a", "sampling_params": {"heat": 1}}, "unknown sampling parameter 'heat'"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params are 1, and prompts 2"),
        ({"text": "a", "stream": 1}, "stream is 1"),
        ({"input_ids": [[1], [10**9]], "stream": True}, "1 of 2 prompts cannot be run:\nprompt 1 "),
        ({"text": "a", "top_logprobs_num": 2}, "needs return_logprob"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num is 1000000"),
        ({"text": "a", "sampling_params": {"n": 10**6}}, "n"),
    ],
)
def test_what_is_refused(body: dict[str, Any], message: str, serving: Serving) -> None:
    response = httpx.post(f"{serving()}/generate", json=body, timeout=60)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
