"""A server on the built-in model, asked by OpenAI's client and by others."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'radixrt[server]'")

from radixrt.builtin import MODEL_PATH
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from radixrt.server.run import bound_socket, uvicorn_of
from radixrt.server.tenants import Tenants

FACTS = "Mira likes Oslo. Tarek counts 374. Ines paints blue."
QUESTIONS = [f"{FACTS}\nQ: {who}?\nA:" for who in ("Mira likes", "Tarek counts", "Ines paints")]
ANSWERS = ["Oslo", "374", "blue"]
TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% endfor %}"  # the built-in model continues plain text
GREEDY: dict[str, Any] = {"model": "any", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("model") / "built-in"
    shutil.copytree(MODEL_PATH, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with Runtime(folder, device="cpu", max_total_tokens=20_000) as found:
        yield found


Serving = Callable[..., str]


@pytest.fixture
def serving(runtime: Runtime) -> Iterator[Serving]:
    """Serves until the test ends; returns the URL."""
    ends: list[Callable[[], None]] = []

    def serve(server: Server | None = None) -> str:
        bound = bound_socket("127.0.0.1", 0)
        own = uvicorn_of(server or Server(runtime, "built-in"), drain_seconds=5)
        thread = threading.Thread(target=own.run, kwargs={"sockets": [bound]})
        thread.start()

        def end() -> None:
            own.should_exit = True
            thread.join(20)
            bound.close()
            assert not thread.is_alive()

        ends.append(end)
        while not own.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    yield serve
    for end in ends:
        end()
    assert not runtime.has_work


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


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


def test_chats(serving: Serving) -> None:
    messages: Any = [{"role": "user", "content": QUESTIONS[1]}]
    answer = client_of(serving()).chat.completions.create(messages=messages, **GREEDY)
    assert answer.choices[0].message.content == "374"
    assert answer.object == "chat.completion"


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


LONG = {**GREEDY, "prompt": QUESTIONS[0], "max_tokens": 900, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(stream: bool, serving: Serving, runtime: Runtime) -> None:
    url, began = serving(), runtime.activity().decoded_tokens
    with httpx.Client(timeout=httpx.Timeout(30, read=30 if stream else 0.3)) as client:
        try:
            with client.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": stream}) as response:
                next(response.iter_lines())
        except httpx.ReadTimeout:
            assert not stream
    deadline = time.monotonic() + 10
    while runtime.has_work and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runtime.has_work
    assert runtime.activity().decoded_tokens - began < 890


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", b"{", 400, "the body is not JSON"),
        ("/v1/completions", b"\xff", 400, "the body is not UTF-8"),
        ("/v1/completions", b"[1]", 400, "the body is a list; it must be an object"),
        ("/v1/completions", b"[" * 100_000, 400, "more than 64 levels"),
        ("/v1/completions", b'{"a":' * 70 + b"1" + b"}" * 70, 400, "more than 64 levels"),
        ("/v1/completions", b'{"prompt": "a", "prompt": "b"}', 400, "'prompt' appears twice"),
        ("/v1/completions", b" " * 3_000, 413, "the body has more than 2,000 bytes"),
        ("/v1/completions", {"prompt": "a", "max_token": 1}, 400, "did you mean 'max_tokens'?"),
        ("/v1/completions", {"prompt": "a", "n": 10**9}, 400, "n is 1000000000"),
        ("/v1/completions", {"prompt": ["a"] * 5}, 400, "the body asks for 5 x 1 answers"),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 9}, 400, "the body asks for 2 x 9 answers"),
        ("/v1/completions", {"prompt": "a", "stream": True, "n": 2}, 400, "a stream is of one answer"),
        ("/v1/completions", {"prompt": "a", "stream": 1}, 400, "stream is 1; it must be true or false"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "needs a stream"),
        ("/v1/completions", {"prompt": [10**6], "stream": True}, 400, "token"),
        ("/v1/completions", {"prompt": {}}, 400, "prompt"),
        ("/v1/chat/completions", {"messages": "a"}, 400, "messages is a string"),
        ("/v1/chat/completions", {"messages": [], "echo": True}, 400, "echo"),
        ("/tokenize", {"prompt": [1]}, 400, "prompt is a list; it must be a string"),
        ("/tokenize", {"prompt": "a", "more": 1}, 400, "unknown parameter more"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens is a string"),
        ("/v1/embeddings", {}, 404, "POST /v1/embeddings is not known; these are: /v1/chat/completions"),
        ("/v1/models", {}, 405, "POST /v1/models is not known"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    path: str, body: Any, status: int, message: str, serving: Serving, runtime: Runtime
) -> None:
    url = serving(Server(runtime, "built-in", limits=Limits(body_bytes=200_000, prompts=4, answers=8)))
    if status == 413:
        url = serving(Server(runtime, "built-in", limits=Limits(body_bytes=2000)))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{url}{path}", content=content)
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_body_that_does_not_come(serving: Serving, runtime: Runtime) -> None:
    url = serving(Server(runtime, "built-in", limits=Limits(body_seconds=0.1)))
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in slow.recv(4096)


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


def test_keys_and_their_tenants(serving: Serving, runtime: Runtime, tmp_path: Path) -> None:
    """Without a known one nothing is told; each has a cache of its own."""
    (tmp_path / "keys").write_text("# ours\nkey-of-one-tenant-1\n\nkey-of-another-one-2\n")
    url = serving(Server(runtime, "built-in", tenants=Tenants.of_file(tmp_path / "keys")))
    for header in ({}, {"Authorization": "Bearer wrong-key-altogether"}, {"Authorization": "key-of-one-tenant-1"}):
        assert httpx.post(f"{url}/v1/completions", json={}, headers=header).status_code == 401
    assert httpx.get(f"{url}/metrics").status_code == 401
    assert httpx.get(f"{url}/health").status_code == 200
    cached = []
    for key in ("key-of-one-tenant-1", "key-of-another-one-2", "key-of-one-tenant-1"):
        answer: Any = client_of(url, key).completions.create(prompt="A prompt of keys and tenants.", **GREEDY)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_waiting_requests_have_a_bound(serving: Serving, runtime: Runtime) -> None:
    url = serving(Server(runtime, "built-in", limits=Limits(waiting=1)))
    requests = [runtime.prepare(QUESTIONS[0], SamplingParams(max_new_tokens=4)) for _ in range(3)]
    runtime.submit(*requests)
    try:
        response = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"})
    finally:
        runtime.abort_all()
        while runtime.has_work:
            runtime.step()
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "1"


def test_health_and_numbers(serving: Serving, runtime: Runtime) -> None:
    server = Server(runtime, "built-in", limits=Limits(stalled_seconds=0.05))
    url = serving(server)
    client_of(url).completions.create(prompt=QUESTIONS[0], **GREEDY)
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{url}/metrics").text
    assert 'radixrt_responses_total{endpoint="/v1/completions",status="200"} 1.0' in text
    assert f"radixrt_passes_total {float(runtime.activity().passes)}" in text
    (model,) = client_of(url).models.list().data
    assert model.id == "built-in"
    runtime.submit(runtime.prepare("a"))  # nobody steps: no pass advances
    try:
        httpx.get(f"{url}/health")
        time.sleep(0.1)
        stalled = httpx.get(f"{url}/health")
    finally:
        runtime.abort_all()
        while runtime.has_work:
            runtime.step()
    assert (stalled.status_code, stalled.json()["status"][:11]) == (503, "no pass for")
    server.draining = True
    assert httpx.get(f"{url}/health").json() == {"status": "draining"}
    assert httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"}).status_code == 503
