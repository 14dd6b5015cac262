"""Scores of tokens after a query with each item."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from tests.support.serving import FACTS, Serving

ITEMS = ["\nQ: Mira likes?\nA:", "\nQ: Ines paints?\nA:"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("item_first", [False, True])
def test_scores(as_ids: bool, item_first: bool, serving: Serving, runtime: Runtime) -> None:
    """They are the model's probabilities, or with softmax those among the labels."""
    assert runtime.tokenizer is not None
    tokenizer = runtime.tokenizer
    labels = [int(tokenizer.encode(f" {text}", add_special_tokens=False)[0]) for text in ("Oslo", "blue", "tea")]
    query: Any = FACTS
    items: list[Any] = ITEMS
    if as_ids:
        query, *items = (tokenizer.encode(text, add_special_tokens=False).tolist() for text in (FACTS, *ITEMS))
    body = {"model": "any", "query": query, "items": items, "label_token_ids": labels, "item_first": item_first}
    prompts = [item + query if item_first else query + item for item in items]
    expected: Any = runtime.score(prompts, [[[label] for label in labels]] * len(prompts))
    url = serving()
    told = httpx.post(f"{url}/v1/score", json=body, timeout=30).json()
    for own, plain in zip(told["scores"], expected, strict=True):
        assert own == pytest.approx([math.exp(one.logprob) for one in plain], rel=1e-4)
    if not item_first:
        assert [max(range(3), key=own.__getitem__) for own in told["scores"]] == [0, 1]
    told = httpx.post(f"{url}/v1/score", json={**body, "apply_softmax": True}, timeout=30).json()
    for own, plain in zip(told["scores"], expected, strict=True):
        weights = [math.exp(one.logprob) for one in plain]
        assert own == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-4)
    lengths = [len(prompt) if as_ids else len(tokenizer.encode(prompt)) for prompt in prompts]
    assert told["usage"]["prompt_tokens"] == sum(lengths)
    assert (told["object"], told["model"]) == ("scoring", "any")


def test_one_item(serving: Serving) -> None:
    body = {"query": FACTS, "items": ITEMS[0], "label_token_ids": [5]}
    assert [len(own) for own in httpx.post(f"{serving()}/v1/score", json=body).json()["scores"]] == [1]


GOOD = {"query": "a", "items": ["b"], "label_token_ids": [1]}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"query": None}, "query is null"),
        ({"items": None}, "items is null; it must be a string or a list"),
        ({"items": []}, "items is empty"),
        ({"items": [[1]]}, "query and items[0] must both be text, or both token ids"),
        ({"items": ["a", 1]}, "items[1] is a number"),
        ({"items": ["a"] * 5}, "the body asks for 5 x 1 answers"),
        ({"label_token_ids": [1] * 9}, "the body asks for 1 x 9 answers"),
        ({"label_token_ids": []}, "label_token_ids is empty"),
        ({"label_token_ids": "a"}, "label_token_ids is a string"),
        ({"label_token_ids": [10**6]}, "holds token id 1000000"),
        ({"apply_softmax": 1}, "apply_softmax is 1; it must be true or false"),
        ({"item_first": "yes"}, 'item_first is "yes"'),
        ({"text_1": "a"}, "unknown parameter text_1"),
        ({"query": "a" * 200_000}, "characters and by far more tokens"),
    ],
)
def test_what_cannot_be_scored(more: dict[str, Any], message: str, serving: Serving, runtime: Runtime) -> None:
    url = serving(Server(runtime, "built-in", limits=Limits(prompts=4, answers=8)))
    response = httpx.post(f"{url}/v1/score", json={**GOOD, **more})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
