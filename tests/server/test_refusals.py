"""What a server refuses, and how it says so."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixrt.errors import ParameterError
from radixrt.runtime import Runtime
from radixrt.server import app as app_module
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from radixrt.server.tenants import Tenants
from tests.support.serving import ANSWERS, GREEDY, LONG, QUESTIONS, Serving, client_of, counted, held, until

STREAM: dict[str, Any] = {"prompt": "a", "stream": True}


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
        ("/v1/completions", {"prompt": [[1], [10**9]], "stream": True}, 400, "1 of 2 prompts cannot be run"),
        ("/v1/completions", {"prompt": "a", "stream": 1}, 400, "stream is 1; it must be true or false"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "needs a stream"),
        ("/v1/completions", {**STREAM, "stream_options": {"include_usage": 1}}, 400, "must be true or false"),
        ("/v1/completions", {**STREAM, "stream_options": {"x": True}}, 400, "it may have include_usage"),
        ("/v1/completions", {**STREAM, "stream_options": {"continuous_usage_stats": True}}, 400, "needs include"),
        ("/v1/completions", {**STREAM, "stream_options": {"include_obfuscation": True}}, 400, "are not padded"),
        (
            "/v1/completions",
            {**STREAM, "stream_options": {"include_obfuscation": 0}},
            400,
            "must be true or false",
        ),
        ("/v1/completions", {"prompt": [10**6], "stream": True}, 400, "token"),
        ("/v1/completions", {"prompt": [["a"]]}, 400, "prompt[0] is a string; it must be a token id"),
        ("/v1/completions", {"prompt": {}}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "echo": 1}, 400, "echo is 1; it must be true or false"),
        ("/v1/completions", {"prompt": "a", "echo": True, "stream": True}, 400, "echo goes neither with a stream"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 6}, 400, "with echo it is 5 at most"),
        (
            "/v1/completions",
            {"prompt": "a", "best_of": 2},
            400,
            "best_of is 2, which is not n; that cannot be honoured",
        ),
        ("/v1/completions", {"prompt": "a", "best_of": True}, 400, "best_of is true"),
        ("/v1/chat/completions", {"messages": "a"}, 400, "messages is a string"),
        ("/v1/chat/completions", {"messages": [], "echo": True}, 400, "echo"),
        (
            "/v1/completions",
            {"prompt": "a", "model": "m" * 257},
            400,
            "model has 257 characters; 256 are the most",
        ),
        ("/tokenize", {"prompt": [1]}, 400, "prompt is a list; it must be a string"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt and messages are both given"),
        ("/tokenize", {"prompt": "a", "more": 1}, 400, "unknown parameter more; known are prompt, messages"),
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


def test_what_may_come_before_a_body(serving: Serving, runtime: Runtime) -> None:
    """A byte order mark says nothing; a compressed body is refused as such, not as one that is not UTF-8."""
    url = serving(Server(runtime, "built-in"))
    body = json.dumps({"prompt": "a", "max_tokens": 2, **GREEDY}).encode()
    assert httpx.post(f"{url}/v1/completions", content=b"\xef\xbb\xbf" + body).status_code == 200
    for encoding, status in (("identity", 200), ("zstd", 415), ("gzip", 415)):
        response = httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Encoding": encoding})
        assert response.status_code == status
    assert response.json()["error"]["message"] == "the body has the Content-Encoding gzip; send it as it is"


HALF = r"\ud83d"  # of a surrogate pair, as JSON spells it


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"model": HALF, "prompt": "a", "max_tokens": 2}, 200),
        ("/v1/completions", {"model": HALF, "prompt": "a", "max_tokens": 2, "stream": True}, 200),
        ("/v1/completions", {"prompt": HALF}, 400),
        ("/v1/completions", {"prompt": HALF, "stream": True}, 400),
        ("/v1/completions", {"prompt": "a", HALF: 1}, 400),
        ("/v1/completions", {"prompt": "a", "stop": [HALF]}, None),
        ("/v1/completions", {"prompt": "a", "stop_regex": HALF}, None),
        ("/v1/completions", {"prompt": "a", "bad_words": [HALF]}, 400),
        ("/v1/completions", {"prompt": "a", "regex": HALF}, 400),
        ("/v1/completions", {"prompt": "a", "grammar": HALF}, 400),
        ("/v1/completions", {"prompt": "a", "json_schema": {"const": HALF}}, 400),
        ("/v1/completions", {"prompt": "a", "stream_options": HALF}, 400),
        ("/v1/completions", {"prompt": "a", "user": HALF, "max_tokens": 2}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": HALF, "content": "a"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", HALF: 1}], "max_tokens": 2}, 200),
        ("/tokenize", {"prompt": HALF}, 400),
        ("/tokenize", {HALF: 1}, 400),
    ],
)
def test_halves_of_surrogate_pairs(path: str, body: Any, status: int | None, serving: Serving) -> None:
    """They are answered or refused, in JSON."""
    given = json.dumps(body).replace(json.dumps(HALF)[1:-1], HALF)
    response = httpx.post(f"{serving()}{path}", content=given, timeout=30)
    assert response.status_code in ((200, 400) if status is None else (status,)), response.text
    lines = response.text.split("\n\n") if "stream" in body and status == 200 else [f"data: {response.text}"]
    told = [json.loads(line[6:]) for line in lines if line not in ("", "data: [DONE]")]
    if status == 200 and "model" in body:
        assert {one["model"] for one in told} == {"\ud83d"}


def test_a_body_that_does_not_come(serving: Serving, runtime: Runtime) -> None:
    url = serving(Server(runtime, "built-in", limits=Limits(body_seconds=0.1)))
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in slow.recv(4096)


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"k" * 15, "line 1 of FILE is no API key: that has 16 characters at least"),
        (b"# ours\n" + b"k" * 16 + "\nkey-with-an-ümlaut".encode(), "line 3 of FILE is no API key"),
        (b"a key with some blanks", "no blanks"),
        (b"a-key-with-a-bell-\x07", "line 1 of FILE is no API key"),
        (b"a-key-with-a-line-end-of-its-own\x1cin-it", "line 1 of FILE is no API key"),
        ("k".encode("utf-16") * 20, "the API keys in FILE cannot be read"),
        (b"\n# none\n", "FILE must have an API key a line, and has none"),
    ],
)
def test_files_of_keys_that_cannot_be(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ParameterError) as error:
        Tenants.of_file(tmp_path / "keys")
    told = str(error.value).replace(str(tmp_path / "keys"), "FILE")
    assert message in told
    assert "kkkk" not in told


def test_a_file_of_keys_from_windows(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfkey-of-one-tenant-1\r\n  key-of-another-one-2\t\r\n")
    tenants = Tenants.of_file(tmp_path / "keys")
    assert tenants.of("Bearer key-of-one-tenant-1") != tenants.of("bearer key-of-another-one-2")


def test_hosts(serving: Serving, runtime: Runtime) -> None:
    """A page whose name resolves to this machine gets nothing."""
    url = serving(Server(runtime, "built-in", hosts=("localhost", "127.0.0.1", "::1", "Box.local")))
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "box.local:80"):
        assert httpx.get(f"{url}/health", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "::1", "a]", ""):
        for path in ("/health", "/v1/models", "/metrics", "/nothing"):
            response = httpx.get(f"{url}{path}", headers={"Host": host})
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "unknown_host"
    everywhere = serving(Server(runtime, "built-in"))  # it has keys, or is not alone
    assert httpx.get(f"{everywhere}/health", headers={"Host": "a.example"}).status_code == 200


# -- how much --------------------------------------------------------------------------------------------------


def test_pending_answers_have_a_bound(serving: Serving, runtime: Runtime) -> None:
    """Those of a body all count, also before they are known to the engine; streams hold theirs to their end."""
    url = serving(Server(runtime, "built-in", limits=Limits(pending=5)))

    def ask(prompts: int, n: int = 1, **more: Any) -> httpx.Response:
        return httpx.post(
            f"{url}/v1/completions",
            json={**GREEDY, "prompt": QUESTIONS[:1] * prompts, "n": n, **more},
            timeout=30,
        )

    assert "the body asks for 3 x 2 answers" in ask(3, 2).json()["error"]["message"]
    with ThreadPoolExecutor(2) as threads:
        with held(runtime):
            asked = [threads.submit(ask, 2), threads.submit(ask, 1, stream=True)]
            until(lambda: runtime.num_waiting == 3)
            refused = ask(1, 3)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert "3 answers are pending, and 5 are the most" in refused.json()["error"]["message"]
        assert [one.result().status_code for one in asked] == [200, 200]
    assert ask(1, 5).status_code == 200


def test_connections_have_a_bound(serving: Serving, runtime: Runtime) -> None:
    """An idle one is closed, and so is one whose head comes byte by byte, after a request as before one."""
    url = serving(Server(runtime, "built-in", limits=Limits(connections=3, idle_seconds=2)))
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with (
        socket.create_connection(address, timeout=10) as slow,
        socket.create_connection(address, timeout=10) as idle,
    ):
        slow.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" in slow.recv(4096)
        assert httpx.get(f"{url}/v1/models").status_code == 503
        began = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):
            for byte in b"GET /" + b"a" * 500:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        assert idle.recv(1) == b""
        assert time.monotonic() - began < 10
    assert httpx.get(f"{url}/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [1128] * 1_000_000}),
        ("/v1/completions", {**LONG, "max_tokens": 500, "n": 16, "stream": True}),
    ],
)
def test_a_client_that_does_not_read(path: str, body: Any, serving: Serving, runtime: Runtime) -> None:
    """Its connection ends, whether the server has all of the response to send or waits to send more."""
    url = serving(Server(runtime, "built-in", limits=Limits(connections=2, idle_seconds=2)), send_buffer=4096)
    content = json.dumps(body).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
        deaf.sendall(head.encode() + content)
        assert b"200" in deaf.recv(100)
        assert httpx.get(f"{url}/v1/models").status_code == 503
        until(lambda: httpx.get(f"{url}/v1/models").status_code == 200)
    until(lambda: not runtime.has_work)


@pytest.mark.parametrize(
    ("more", "send_buffer", "rate"),
    [("", 4096, 100_000), ("Connection: close\r\n", 4096, 100_000), ("", 100_000, 40_000)],
)
def test_a_client_that_reads_slowly(
    more: str, send_buffer: int, rate: int, serving: Serving, runtime: Runtime
) -> None:
    """It gets all of an answer that was complete long before, though the system takes more but seldom."""
    url = serving(Server(runtime, "built-in", limits=Limits(idle_seconds=1)), send_buffer=send_buffer)
    content = json.dumps({"prompt": "Oslo " * 60_000}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(10)
        slow.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\n{more}Content-Length: {len(content)}\r\n\r\n"
        slow.sendall(head.encode() + content)
        answer = b""
        began = time.monotonic()
        while not answer.endswith(b"]}"):
            time.sleep(max(0.0, len(answer) / rate - (time.monotonic() - began)))
            answer += (piece := slow.recv(4096))
            assert piece
    assert time.monotonic() - began > 2


def test_bodies_that_take_long_to_read_do_not_delay_streams(
    serving: Serving, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop's own threads step the engine: nothing else runs there."""
    read, goes_on = app_module.object_in, threading.Event()

    def slowly(body: bytes, limits: Limits) -> dict[str, Any]:
        if b"slow" in body:
            goes_on.wait(60)
        return read(body, limits)

    monkeypatch.setattr(app_module, "object_in", slowly)
    url = serving()
    with (
        ThreadPoolExecutor(40) as threads,
        httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=10) as response,
    ):
        try:
            events = response.iter_lines()
            next(events)
            for _ in range(40):
                long = b'{"prompt": "slow"}' + b" " * 2**15  # a short one is read at once
                threads.submit(httpx.post, f"{url}/tokenize", content=long, timeout=60)
            assert list(events)[-2:] == ["data: [DONE]", ""]
        finally:
            goes_on.set()


# -- what goes wrong -------------------------------------------------------------------------------------------


@contextmanager
def failing(runtime: Runtime) -> Iterator[None]:
    """Passes fail inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.parts.engine.runner, "launch", lambda batch: [][0])
        yield


def test_failed_passes_are_told_and_logged(
    serving: Serving, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    url = serving()
    with failing(runtime):
        response = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "pass_failed")
    (record,) = [one for one in caplog.records if one.name == "radixrt.server.refusal"]
    assert record.exc_info is not None
    assert counted(url, 500) == 1
    assert client_of(url).completions.create(prompt=QUESTIONS[0], **GREEDY).choices[0].text == ANSWERS[0]


@pytest.mark.parametrize("more", [{"prompt": ["a", "b"]}, {"prompt": "a", "stream": True}])
def test_answers_that_all_failed_are_no_success(more: Any, serving: Serving, runtime: Runtime) -> None:
    """Nor is a stream of which nothing was sent."""
    url = serving()
    with ThreadPoolExecutor(1) as thread:
        with held(runtime):
            asked = thread.submit(httpx.post, f"{url}/v1/completions", json={**GREEDY, **more})
            until(lambda: runtime.num_waiting == len(more["prompt"]))
            runtime.abort_all()
        response = asked.result()
    assert response.status_code == 500
    assert "ended before its answer was whole" in response.json()["error"]["message"]


def test_a_defect_is_not_blamed_on_the_client(
    serving: Serving, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a ValueError; nothing of it is told, and all of it is logged."""
    url = serving()

    def broken(*_: object, **__: object) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(app_module, "read_request", broken)
    with caplog.at_level(logging.ERROR, "uvicorn.error"):
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        try:
            response = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"})
            until(lambda: "a secret" in caplog.text)
        finally:
            logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert "Traceback" in caplog.text
    assert counted(url, 500) == 1


def test_long_values_are_not_repeated_whole(serving: Serving) -> None:
    url = serving()
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "temperature": "9" * 100_000})
    assert response.status_code == 400
    assert len(response.content) < 5000
