"""Odd bodies get an answer or a refusal with a message: never a 5xx."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from radixrt.frontend import openai as protocol
from radixrt.frontend.sampling_aliases import known_parameters
from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.sglang import GENERATE

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, 10**300, 1e300, -0.0, 0.5, 1e-300),
    *(
        "",
        "a",
        "\ud83d",
        "\x00",
        "é" * 50,
        "(a+)+$",
        "[",
        "{",
        '{"type": "object"}',
        'root ::= "a"',
        "none",
        "auto",
        "required",
    ),
    *([], [""], ["a", "b"], [1], [-1], [[1], [2]], [[]], [None], ["\ud83d"], [{}], [10**30], [["a"]], [0.5]),
    *({}, {"a": 1}, {"1": 1}, {"1": "x"}, {"type": "json_object"}, {"\ud83d": "\ud83d"}, {"0": 10**400}),
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"pattern": "("}}},
    [{"type": "function", "function": {"name": "a"}}],
    [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "required": ["\ud83d"]}}}],
    {"type": "function", "function": {"name": "a"}},
    [{"role": "user", "content": "a"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}],
]


TOOLS = [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]


def good_body(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """And where its parameters are: for OpenAI's endpoints, in itself."""
    params: dict[str, Any] = {"max_tokens": 2}
    if url == GENERATE:
        own = ("input_ids", "return_logprob", "top_logprobs_num", "stream", "rid")
        return {"text": "a", "sampling_params": params, **dict.fromkeys(own)}, params
    prompt = {"messages": [{"role": "user", "content": "a"}]} if url == protocol.CHAT else {"prompt": "a"}
    params |= prompt
    return params, params


def bodies(url: str, count: int) -> list[bytes]:
    """A good one with some parameters replaced, and now and then a byte of its text."""
    source = random.Random(0)
    names = [*sorted(protocol._KNOWN[url] if url in protocol._KNOWN else known_parameters()), "unknown", "\ud83d"]
    made = []
    for place in range(count):
        body, params = good_body(url)
        if place % 4 == 0 and url == protocol.CHAT:  # parameters that mean nothing without tools
            body |= {"tools": TOOLS, "tool_choice": source.choice(VALUES), "stream": source.choice((True, False))}
        for _ in range(source.choice((1, 1, 1, 2, 3))):
            place_of = params if source.random() < 0.7 else body
            place_of[source.choice(names if place_of is params else [*body])] = source.choice(VALUES)
        text = bytearray(json.dumps(body).encode())
        if place % 10 == 0:
            text[source.randrange(len(text))] = source.randrange(256)
        made.append(bytes(text))
    return made


@pytest.mark.parametrize("url", [protocol.CHAT, protocol.COMPLETIONS, GENERATE])
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_odd_bodies(url: str, count: int, runtime: Runtime) -> None:
    async def ask() -> None:
        transport = httpx.ASGITransport(Server(runtime, "built-in").app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://a", timeout=60) as client:
            for body in bodies(url, count):
                response = await client.post(url, content=body)
                assert response.status_code in (200, 400), (body, response.text)
                if response.status_code == 400:
                    assert response.json()["error"]["message"], body

    asyncio.run(ask())
