"""A server on the built-in model, asked by OpenAI's client and by others."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from radixrt.errors import ParameterError
from radixrt.frontend.openai import _KNOWN, CHAT, COMPLETIONS, chunk_body
from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.event_frame import EventFrame, event_bytes
from radixrt.server.run import switching_soon
from tests.support.serving import ANSWERS, GREEDY, LONG, QUESTIONS, Serving, client_of, until


def test_completions(serving: Serving) -> None:
    """Several prompts with n answers each are numbered one after the other."""
    client = client_of(serving())
    answer = client.completions.create(prompt=QUESTIONS, n=2, logprobs=1, **GREEDY)
    assert [choice.text for choice in answer.choices] == [text for text in ANSWERS for _ in range(2)]
    assert [choice.index for choice in answer.choices] == [*range(6)]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 6
    (one,) = client.completions.create(prompt=[1, 1128, 1379], **GREEDY).choices
    assert one.index == 0


def test_prompts_are_echoed(serving: Serving, runtime: Runtime) -> None:
    """With their log-probabilities, if these are asked for: but the first token's, as nothing comes before it."""
    client, context, continuation = client_of(serving()), QUESTIONS[0], " Oslo"
    (score,) = runtime.score([context], [continuation])
    assert runtime.tokenizer is not None
    ids = runtime.tokenizer.encode(context + continuation).tolist()
    answer = client.completions.create(prompt=[context + continuation, ids], echo=True, logprobs=1, n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        told = choice.logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert told.text_offset is not None
        assert told.top_logprobs is not None
        assert choice.text.startswith(context + continuation, choice.text.index("Mira"))
        scored = slice(len(ids) - len(score.tokens), len(ids))
        assert told.token_logprobs[scored] == [token.logprob for token in score.tokens]
        assert [len(values) for values in (told.tokens, told.top_logprobs, told.text_offset)] == [
            len(told.token_logprobs)
        ] * 3
        assert (told.token_logprobs[0], told.top_logprobs[0], told.text_offset[0]) == (None, None, 0)
        joined = "".join(told.tokens)
        assert all(joined[at:].startswith(token) for at, token in zip(told.text_offset, told.tokens, strict=True))
    (plain,) = client.completions.create(prompt=context, echo=True, model="any", max_tokens=0).choices
    assert (plain.text, plain.logprobs) == (context, None)


def test_answers_in_the_form_of_a_class(serving: Serving) -> None:
    pytest.importorskip("llguidance")

    class Count(pydantic.BaseModel):
        count: Literal["374", "12"]
        is_even: bool

    answer = client_of(serving()).chat.completions.parse(
        messages=[{"role": "user", "content": QUESTIONS[1]}],
        response_format=Count,
        **{**GREEDY, "max_tokens": 60, "frequency_penalty": 2},  # or it writes blanks without end
    )
    assert isinstance(answer.choices[0].message.parsed, Count)


def test_models(serving: Serving, runtime: Runtime) -> None:
    client = client_of(serving(Server(runtime, "ours/built-in")))
    (model,) = client.models.list().data
    assert model.id == "ours/built-in"
    assert client.models.retrieve("ours/built-in") == model
    with pytest.raises(openai.NotFoundError, match="there is no model 'another'; this is 'ours/built-in'"):
        client.models.retrieve("another")


def test_chats(serving: Serving) -> None:
    messages: Any = [{"role": "user", "content": QUESTIONS[1]}]
    answer = client_of(serving()).chat.completions.create(messages=messages, **GREEDY)
    assert answer.choices[0].message.content == "374"
    assert answer.object == "chat.completion"


def test_what_is_null_is_not_given(serving: Serving) -> None:
    url = serving()
    body = {**dict.fromkeys(_KNOWN[COMPLETIONS]), "prompt": QUESTIONS[0], "temperature": 0}
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": None}
    more = {"stream": True, "stream_options": options}
    for asked in (body, {**body, **more}):
        response = httpx.post(f"{url}{COMPLETIONS}", json=asked, timeout=30)
        assert response.status_code == 200, response.text
        assert "Oslo" in response.text
    asked = {"text": QUESTIONS[0], "stream": None, "sampling_params": {"temperature": 0, "stop_token_ids": None}}
    assert httpx.post(f"{url}/generate", json=asked, timeout=30).json()["text"].strip() == "Oslo"


def test_who_names_no_model_is_told_the_served_one(serving: Serving, runtime: Runtime) -> None:
    name = f"/models/{'built-in' * 40}"  # longer than what others may say
    url = serving(Server(runtime, name))
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2, "model": None}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2, "model": name}),
        ("/v1/score", {"query": "a", "items": "b", "label_token_ids": [5]}),
    ]
    for path, body in bodies:
        assert httpx.post(f"{url}{path}", json=body, timeout=30).json()["model"] == name
    streamed = httpx.post(f"{url}{COMPLETIONS}", json={**bodies[0][1], "stream": True}, timeout=30).text
    told = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
    assert {chunk["model"] for chunk in told} == {name}


@pytest.mark.parametrize("is_chat", [False, True])
def test_streams(is_chat: bool, serving: Serving) -> None:
    """Their texts join to the answer without a stream; the last chunk counts tokens."""
    client, asked = client_of(serving()), {**GREEDY, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if is_chat:
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        whole = client.chat.completions.create(messages=messages, **asked).choices[0].message.content
        chunks: list[Any] = [*client.chat.completions.create(messages=messages, **asked, **more)]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert chunks[0].choices[0].delta.role == "assistant"
    else:
        whole = client.completions.create(prompt=QUESTIONS[0], **asked).choices[0].text
        chunks = [*client.completions.create(prompt=QUESTIONS[0], **asked, **more)]
        texts = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(texts) == whole
    assert sum(map(bool, texts)) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("is_chat", [False, True])
def test_streams_that_count_as_they_go(is_chat: bool, serving: Serving) -> None:
    """As vLLM's do: each chunk has the counts of its answer so far."""
    client, asked = client_of(serving()), {**GREEDY, "n": 2, "extra_body": {"ignore_eos": True}}
    more: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if is_chat:
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        *chunks, last = client.chat.completions.create(messages=messages, **asked, **more)
    else:
        *chunks, last = client.completions.create(prompt=QUESTIONS[0], **asked, **more)
    assert last.usage.completion_tokens == 16
    for index in range(2):
        own = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
        assert {usage.prompt_tokens for usage in own} == {last.usage.prompt_tokens}
        counts = [usage.completion_tokens for usage in own]
        assert (counts[-1], counts) == (8, sorted(counts))
        assert counts[0] == 0 if is_chat else counts[0] > 0
        assert len(set(counts)) > 2, "more than a beginning and an end, though a late reader gets several at once"
        assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in own)


def nearly(value: Any) -> Any:
    """Log-probabilities with other last bits, such as those after a prefix that was cached, or was not; all else
    as it is.
    """
    if isinstance(value, dict):
        return {name: nearly(one) for name, one in value.items()}
    if isinstance(value, list):
        return [nearly(one) for one in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.mark.parametrize("prompt", [QUESTIONS[0], QUESTIONS, [[1, 1128, 1379], [1, 1379]]], ids=type)
@pytest.mark.parametrize("stop", [None, ["a", " "]])
def test_streams_of_completions_with_logprobs(prompt: Any, stop: list[str] | None, serving: Serving) -> None:
    """Their pieces join to the answers without a stream, also to several prompts, which come side by side."""
    client = client_of(serving())
    drawn: dict[str, Any] = {"temperature": 1.5, "seed": 3, "n": 3, "logprobs": 2, "max_tokens": 12}
    asked: dict[str, Any] = {**GREEDY, **drawn, "extra_body": {"ignore_eos": True}}
    client.completions.create(prompt=prompt, **GREEDY)  # which caches them: equal passes round equally
    whole = client.completions.create(prompt=prompt, stop=stop, **asked)
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(prompt=prompt, stop=stop, **more, **asked)
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    numbers = [chunk.choices[0].index for chunk in chunks]
    assert {*numbers} == {choice.index for choice in whole.choices}
    if stop is None:
        assert [*numbers[: len(whole.choices)]] == [*range(len(whole.choices))], "each after one token"
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own if one.finish_reason is not None] == [choice.finish_reason]
        told: dict[str, list[Any]] = {}
        for one in own:
            for name, values in (one.logprobs.model_dump() if one.logprobs else {}).items():
                told.setdefault(name, []).extend(values)
        assert choice.logprobs is not None
        assert told == nearly(choice.logprobs.model_dump())


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_log_probabilities_of_a_token_that_stops(url: str, serving: Serving, runtime: Runtime) -> None:
    """They are told where its text is a part of the answer, with and without a stream."""
    want = runtime.generate(QUESTIONS[0], {"temperature": 0, "max_tokens": 8, "logprobs": 0})
    assert want.finish_reason == "stop"
    assert want.logprobs is not None
    asked: dict[str, Any] = {"logprobs": 0, "prompt": QUESTIONS[0]}
    if url == CHAT:
        asked = {"logprobs": True, "messages": [{"role": "user", "content": QUESTIONS[0]}]}

    def told(*choices: dict[str, Any]) -> list[float]:
        found = [choice["logprobs"] or {} for choice in choices]
        if url == CHAT:
            return [token["logprob"] for each in found for token in each.get("content", ())]
        return [logprob for each in found for logprob in each.get("token_logprobs", ())]

    for is_included, place in ((False, -1), (True, None)):
        more = {"include_stop_str_in_output": is_included, "skip_special_tokens": False}
        body = {**GREEDY, **asked, **more}
        address = f"{serving()}{url}"
        whole = httpx.post(address, json=body).json()["choices"]
        events = httpx.post(address, json={**body, "stream": True}).text.split("\n\n")[:-2]
        pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        expected = [token.logprob for token in want.logprobs][:place]
        assert told(*whole) == told(*pieces) == pytest.approx(expected, abs=1e-5)


def test_a_stream_ends_with_the_first_answer_that_fails(serving: Serving, runtime: Runtime) -> None:
    body = {**LONG, "prompt": QUESTIONS, "stream": True}
    with httpx.stream("POST", f"{serving()}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        assert runtime.abort([*runtime._driver._calls][1])
        *_, last = filter(None, lines)
    assert "the request was ended before its answer was whole" in json.loads(last[6:])["error"]["message"]
    until(lambda: not runtime.has_work)


def test_streams_of_chats_with_logprobs(serving: Serving) -> None:
    client = client_of(serving())
    asked: dict[str, Any] = {**GREEDY, "temperature": 1.5, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2}
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    whole = client.chat.completions.create(messages=messages, **asked)
    chunks = [*client.chat.completions.create(messages=messages, stream=True, **asked)]
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert [one.delta.role for one in own if one.delta.role] == ["assistant"]
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own if one.finish_reason is not None] == [choice.finish_reason]
        told = [token for one in own if one.logprobs for token in one.logprobs.content or ()]
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert [one.model_dump() for one in told] == nearly([one.model_dump() for one in choice.logprobs.content])


def test_many_at_once_get_their_own_answers(serving: Serving, runtime: Runtime) -> None:
    url = serving()

    def ask(number: int) -> str:
        with httpx.Client(timeout=60) as client:
            body = {**GREEDY, "prompt": QUESTIONS[number % 3], "stream": number % 2 == 0}
            response = client.post(f"{url}/v1/completions", json=body)
        if number % 2:
            return str(response.json()["choices"][0]["text"])
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    with ThreadPoolExecutor(16) as threads:
        assert [*threads.map(ask, range(60))] == ANSWERS * 20


def test_tokens_and_back(serving: Serving, runtime: Runtime) -> None:
    url, text = serving(), "Mira likes Oslo."
    got = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()
    assert runtime.tokenizer is not None
    assert got["tokens"] == runtime.tokenizer.encode(text).tolist()
    assert got["count"] == len(got["tokens"])
    chat = httpx.post(f"{url}/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()
    assert chat["count"] > 0
    back = httpx.post(f"{url}/detokenize", json={"tokens": got["tokens"][1:]}).json()
    assert back["prompt"] == text
    assert httpx.post(f"{url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("text", ["a", '"\\', "\n\u2028", "\x0b\x0c\r\x1c\x1d\x1e\x85\u2029é", "\ud83d", "é😀\0"])
def test_events_that_differ_in_a_text_are_those_of_all_values(url: str, text: str) -> None:
    def value_of(text: str) -> dict[str, object]:
        return chunk_body(url, 2, text, id_digest="0", model="\0 text", created=7)

    event = EventFrame.around(value_of).of(text)
    assert event == event_bytes(value_of(text))
    assert len(event.decode().splitlines()) == 2  # where clients break lines by it
    assert json.loads(event[6:]) == value_of(text)


def test_threads_are_switched_soon_in_a_process_that_serves() -> None:
    before = sys.getswitchinterval()
    with switching_soon():
        assert sys.getswitchinterval() == pytest.approx(5e-4)
    assert sys.getswitchinterval() == before


def test_a_stream_under_another_server_of_asgi(runtime: Runtime) -> None:
    """Which has no way past ASGI's `send`."""
    body = {**GREEDY, "prompt": QUESTIONS[0], "stream": True}

    async def asked() -> str:
        transport = httpx.ASGITransport(Server(runtime, "built-in").app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post("/v1/completions", json=body)).text

    *events, done, end = asyncio.run(asked()).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events).strip().startswith("Oslo")


@pytest.mark.parametrize(
    ("path", "body", "is_soon"),
    [
        (COMPLETIONS, {"prompt": [5] * 100}, True),
        (COMPLETIONS, {"prompt": "a" * 2**15}, False),
        (COMPLETIONS, {"prompt": [5], "stop_regex": "a+"}, False),
        (CHAT, {"messages": [{"role": "user", "content": "Who?"}]}, False),
        ("/generate", {"input_ids": [5], "sampling_params": {"stop_regex": "a+"}}, False),
    ],
)
def test_bodies_that_may_take_time_are_read_beside_the_loop(
    serving: Serving, path: str, body: dict[str, Any], is_soon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(*_: Any, **__: Any) -> Any:
        threads.append(threading.current_thread().name)
        raise ParameterError("noted")

    for name in ("read_request", "read_generate"):
        monkeypatch.setattr(f"radixrt.server.app.{name}", noted)
    assert "noted" in httpx.post(serving() + path, json=body).text
    assert [not name.startswith("radixrt-server") for name in threads] == [is_soon]
