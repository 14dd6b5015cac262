"""Ten thousand requests of clients of all kinds, at a server in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from radixrt.builtin.task import Question, ask_alone, make_document
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from tests.support.serving import Served

BAD: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b'{"prompt": 7}',
    b'{"prompt": "a", "n": 1000000}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "best_of": 2}',
    b'{"prompt": "\\ud800", "max_tokens": -1}',
    b"[" * 1000,
]


def drawn_questions(count: int) -> list[Question]:
    """Of small documents, each with several questions."""
    rng = random.Random(1)
    documents = (make_document(rng, max_tokens=64, facts_per_name=1) for _ in itertools.count())
    return list(itertools.islice((one for document in documents for one in ask_alone(rng, document, 4)), count))


@dataclass
class Clients:
    """Asks a server, as many at a time as there are tasks, and notes what became of each request."""

    url: str
    client: httpx.AsyncClient
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    async def run(self, work: Iterator[tuple[int, Question, str]]) -> None:
        for number, question, expected in work:
            kind = "gone" if number % 20 == 7 else "bad" if number % 20 == 13 else ("whole", "stream")[number % 2]
            text = await getattr(self, f"_{kind}")(number, question)
            self.outcomes[kind] += 1
            if kind in ("whole", "stream") and text != expected:
                self.wrong.append((question.prompt, text, expected))

    def _body(self, question: Question, **more: Any) -> dict[str, Any]:
        return {"model": "any", "prompt": question.prompt, "temperature": 0, "max_tokens": 6, **more}

    async def _whole(self, number: int, question: Question) -> str:
        response = await self.client.post(self.url, json=self._body(question))
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    async def _stream(self, number: int, question: Question) -> str:
        texts, ended = [], False
        async with self.client.stream("POST", self.url, json=self._body(question, stream=True)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line:
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
        assert ended
        return "".join(texts)

    async def _gone(self, number: int, question: Question) -> None:
        """Before the first event, or after it."""
        body = self._body(question, stream=True, max_tokens=300, ignore_eos=True)
        if number % 40 == 7:
            with suppress(httpx.ReadTimeout):
                await self.client.post(self.url, json=body, timeout=httpx.Timeout(60, read=0.01))
            return
        async with self.client.stream("POST", self.url, json=body) as response:
            await anext(response.aiter_lines())

    async def _bad(self, number: int, question: Question) -> None:
        response = await self.client.post(self.url, content=BAD[number // 20 % len(BAD)])
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["error"]["message"]


def numbers(url: str) -> dict[str, float]:
    """Of `/metrics`."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@pytest.mark.long
def test_ten_thousand_requests_of_512_clients(tmp_path: Path) -> None:
    """None is lost or mixed up, memory stays, and in the end the pool holds what is cached, and nothing more."""
    questions = drawn_questions(10_000)
    with Runtime(device="cpu") as runtime:
        prompts = [question.prompt for question in questions]
        outputs = runtime.generate(prompts, SamplingParams(temperature=0, max_new_tokens=6))
    expected = [output.outputs[0].text for output in outputs]
    right = [one.answer == text.strip() for one, text in zip(questions, expected, strict=True)]
    assert statistics.mean(right) > 0.99
    memory = []

    async def ask(url: str, process: psutil.Process) -> Clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=512)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            clients = Clients(f"{url}/v1/completions", client)
            every = list(zip(itertools.count(), questions, expected, strict=False))
            for part in range(4):
                work = iter(every[part * 2500 : part * 2500 + 2500])
                await asyncio.gather(*(clients.run(work) for _ in range(512)))
                memory.append(process.memory_info().rss)
        return clients

    # A small pool: memory of a larger one would only be touched by and by.
    with Served(tmp_path, "--max-total-tokens", "40000") as served:
        clients = asyncio.run(ask(served.url, psutil.Process(served.process.pid)))
        while (told := numbers(served.url))["radixrt_running_requests"] or told["radixrt_waiting_requests"]:
            assert served.process.poll() is None
        assert httpx.get(f"{served.url}/health").status_code == 200
    assert clients.wrong == []
    assert sum(clients.outcomes.values()) == 10_000
    assert clients.outcomes["gone"] == clients.outcomes["bad"] == 500
    assert "Traceback" not in served.told()
    free = told["radixrt_pool_free_tokens"] + told["radixrt_pool_evictable_tokens"]
    assert free == told["radixrt_pool_tokens"], "nobody holds any"
    assert memory[-1] < 1.1 * memory[1], memory
