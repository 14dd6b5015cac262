"""Many clients at once: none gets another's answer, whoever vanishes meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx

from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from tests.support.serving import ANSWERS, GREEDY, QUESTIONS, Serving, until


async def ask(client: httpx.AsyncClient, url: str, number: int) -> str:
    """One request of a kind that follows from its number. Returns what became of it."""
    source = random.Random(number)
    which, kind = source.randrange(3), source.random()
    stream = source.random() < 0.5
    body: dict[str, Any] = {**GREEDY, "prompt": QUESTIONS[which], "stream": stream}
    if kind < 0.05:
        response = await client.post(url, json={**body, "temperature": -1})
        assert response.status_code == 400
        return "bad"
    if kind < 0.1:
        body |= {"max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", url, json=body) as response:
            async for _ in response.aiter_lines():
                return "vanished"
    response = await client.post(url, json=body)
    if response.status_code == 429:
        await asyncio.sleep(0.05)  # as it is told: else all are refused before the first ones are answered
        return "refused"
    assert response.status_code == 200, response.text
    if not stream:
        text = response.json()["choices"][0]["text"]
    else:
        events = [line[6:] for line in response.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == ANSWERS[which]
    return "answered"


def test_many_clients(serving: Serving, runtime: Runtime) -> None:
    requests, clients, pending = 400, 64, 56
    url = f"{serving(Server(runtime, 'built-in', limits=Limits(pending=pending)))}/v1/completions"

    async def everything() -> Counter[str]:
        numbers, found = iter(range(requests)), Counter[str]()
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:

            async def one_client() -> None:
                for number in numbers:
                    found[await ask(client, url, number)] += 1

            await asyncio.gather(*(one_client() for _ in range(clients)))
        return found

    found = asyncio.run(everything())
    assert found.total() == requests
    assert found["answered"] > requests / 3
    assert found["refused"]
    until(lambda: not runtime.has_work)
    stats = runtime.cache_stats()
    assert stats.capacity == stats.free + stats.evictable
