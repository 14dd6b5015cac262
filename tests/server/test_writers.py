"""Streams that processes write beside the server: the same events, whatever happens to them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from radixrt.engine.calls import StreamCall
from radixrt.errors import PassError
from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.event_frame import EventFrame, chunk_of, json_bytes
from radixrt.server.protocol import BodyWriter
from radixrt.server.writers.process import Answer, Stream, Writing
from radixrt.server.writers.records import (
    Kind,
    begin_record,
    end_of,
    end_record,
    record,
    take_records,
    tokens_of,
    tokens_record,
)
from radixrt.server.writers.writers import StreamWriters
from radixrt.text.builder import Detokenizer
from radixrt.text.plain_tokenizer import plain_tokenizer
from tests.support.processes import children_that_run
from tests.support.serving import GREEDY, LONG, QUESTIONS, Served, Serving, until

STREAM = {**GREEDY, "stream": True}
SAMPLED = {**STREAM, "temperature": 1.5, "seed": 7, "max_tokens": 60}


@pytest.fixture(scope="module")
def writers(runtime: Runtime) -> Iterator[StreamWriters]:
    with StreamWriters(runtime.tokenizer, 2, late_seconds=30) as found:
        yield found


def num_lent(writers: StreamWriters) -> int:
    """Streams that were lent until now."""
    return sum(process.num_streams for process in writers.processes)


def told(url: str, body: dict[str, Any], path: str = "completions") -> tuple[list[str], list[dict[str, Any]]]:
    """The texts of all answers as they came together, and what else the events say, in the order of answers."""
    response = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    *events, end = response.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    texts: dict[int, str] = {}
    others: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        value = json.loads(event.removeprefix("data: "))
        for choice in value["choices"]:
            text = choice.pop("text", None) or choice.get("delta", {}).pop("content", None) or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"] is not None or choice.get("delta"):
                others.setdefault(choice["index"], []).append(choice)
        if not value["choices"]:
            others.setdefault(-1, []).append(value["usage"])
    return [texts[index] for index in sorted(texts)], [one for i in sorted(others) for one in others[i]]


@pytest.mark.parametrize(
    ("body", "path", "is_lent"),
    [
        ({**STREAM, "prompt": QUESTIONS[0], "ignore_eos": True, "max_tokens": 60}, "completions", True),
        ({**SAMPLED, "prompt": QUESTIONS, "n": 3, "stream_options": {"include_usage": True}}, "completions", True),
        ({**SAMPLED, "prompt": QUESTIONS[1], "ignore_eos": True, "max_tokens": 80}, "completions", True),
        ({**SAMPLED, "prompt": QUESTIONS[1], "skip_special_tokens": False}, "completions", True),
        (
            {**SAMPLED, "prompt": "A", "allowed_token_ids": [300, 310, 320, 198, 172], "ignore_eos": True},
            "completions",
            True,
        ),
        (
            {**SAMPLED, "messages": [{"role": "user", "content": QUESTIONS[2]}], "n": 2, "ignore_eos": True},
            "chat/completions",
            True,
        ),
        (
            {
                **SAMPLED,
                "prompt": QUESTIONS[0],
                "stop_token_ids": list(range(259, 387)),
                "min_tokens": 20,
                "ignore_eos": True,
            },
            "completions",
            True,
        ),
        ({**SAMPLED, "prompt": QUESTIONS[0], "stop": ["a"]}, "completions", False),
        ({**SAMPLED, "prompt": QUESTIONS[0], "logprobs": 1}, "completions", False),
        ({**STREAM, "prompt": QUESTIONS[0], "max_tokens": 1}, "completions", False),
    ],
)
def test_events_are_the_same(
    body: dict[str, Any], path: str, is_lent: bool, serving: Serving, runtime: Runtime, writers: StreamWriters
) -> None:
    """As those that the server writes by itself. What is not plain text stays with it."""
    before = num_lent(writers)
    lent, own = serving(Server(runtime, "built-in", writers=writers)), serving()
    told(own, body, path)  # prompts are cached from now on, and counted so
    expected = told(own, body, path)
    for _ in range(2):
        assert told(lent, body, path) == expected
    assert (num_lent(writers) > before) is is_lent


def test_many_on_kept_connections(serving: Serving, runtime: Runtime, writers: StreamWriters) -> None:
    """Each gets its own, one after the other on a connection, and several connections at once."""
    lent, own = serving(Server(runtime, "built-in", writers=writers)), serving()
    bodies = [{**SAMPLED, "seed": seed, "prompt": QUESTIONS[seed % 3], "ignore_eos": True} for seed in range(20)]
    before = num_lent(writers)

    def run(url: str) -> list[str]:
        with (
            httpx.Client(timeout=60, limits=httpx.Limits(max_connections=8)) as client,
            ThreadPoolExecutor(8) as threads,
        ):
            return list(threads.map(lambda body: _text(client.post(f"{url}/v1/completions", json=body)), bodies))

    assert run(lent) == run(own)
    assert num_lent(writers) - before > 5  # on a busy machine some have ended before they can be lent


def _text(response: httpx.Response) -> str:
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_a_client_that_goes(serving: Serving, runtime: Runtime, writers: StreamWriters) -> None:
    """Its answer ends, and no process keeps its connection."""
    url, began = serving(Server(runtime, "built-in", writers=writers)), runtime.activity().decoded_tokens
    pids = [process._process.pid for process in writers.processes]

    def num_connections() -> int:
        return sum(psutil.Process(pid).num_fds() for pid in pids)

    until(lambda: not any(process.has_streams for process in writers.processes))
    before = num_connections()
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        for _ in range(8):
            next(lines)
        until(lambda: num_connections() == before + 1)
    until(lambda: not runtime.has_work)
    assert runtime.activity().decoded_tokens - began < 890
    until(lambda: num_connections() == before)


def reading_slowly(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection with little room, on which a body was sent."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def test_a_client_that_is_slow_loses_nothing(serving: Serving, runtime: Runtime, writers: StreamWriters) -> None:
    """What it has no room for is joined to fewer events, in the right order, the end last."""
    url = serving(Server(runtime, "built-in", writers=writers), send_buffer=2048)
    body = {**SAMPLED, "prompt": QUESTIONS[:2], "ignore_eos": True, "max_tokens": 250}
    with reading_slowly(url, body) as connection:
        until(lambda: not runtime.has_work)
        received = b""
        while read := connection.recv(65_536):
            received += read
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    pieces, rest = [], received.partition(b"\r\n\r\n")[2]
    while rest:
        length, _, rest = rest.partition(b"\r\n")
        pieces.append(rest[: int(length, 16)])
        rest = rest[int(length, 16) + 2 :]
    events = b"".join(pieces).decode().removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    texts = ["", ""]
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    assert len(events) < 470
    assert texts == told(serving(), body)[0]


def test_a_client_that_reads_nothing_is_sent_away(serving: Serving, runtime: Runtime) -> None:
    with StreamWriters(runtime.tokenizer, 1, late_seconds=1) as few:
        url = serving(Server(runtime, "built-in", writers=few), send_buffer=2048)
        body = {**SAMPLED, "prompt": QUESTIONS[0], "ignore_eos": True, "max_tokens": 900, "n": 4}
        with reading_slowly(url, body):
            until(lambda: num_lent(few) == 1)
            until(lambda: not any(process.has_streams for process in few.processes))
            until(lambda: not runtime.has_work)


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_process_that_is_killed(when: str, serving: Serving, runtime: Runtime) -> None:
    """Streams that it writes are cut off; the server writes those that come after."""
    with StreamWriters(runtime.tokenizer, 1, late_seconds=30) as one:
        url = serving(Server(runtime, "built-in", writers=one))
        body = {**STREAM, "prompt": QUESTIONS[0], "ignore_eos": True, "max_tokens": 60}
        expected = told(url, body)
        if when == "before":
            os.kill(one.processes[0]._process.pid, signal.SIGKILL)
            until(lambda: one.processes[0].has_ended)
        else:
            body_of_long = {**LONG, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body_of_long, timeout=30) as response:
                lines = response.iter_lines()
                for _ in range(8):
                    next(lines)
                os.kill(one.processes[0]._process.pid, signal.SIGKILL)
                with pytest.raises(httpx.RemoteProtocolError):
                    deque(lines)
        until(lambda: not runtime.has_work)
        assert told(url, body) == expected
        assert num_lent(one) == 1 + (when != "before")


def test_a_process_that_stops_holds_nothing_up(serving: Serving, runtime: Runtime) -> None:
    """Tokens wait in the server until it goes on."""
    with StreamWriters(runtime.tokenizer, 1, late_seconds=30) as one, ThreadPoolExecutor(1) as threads:
        url, own = serving(Server(runtime, "built-in", writers=one)), serving()
        body = {**SAMPLED, "prompt": QUESTIONS[0], "ignore_eos": True, "max_tokens": 100, "n": 4}
        os.kill(one.processes[0]._process.pid, signal.SIGSTOP)
        found = threads.submit(told, url, body)
        until(lambda: num_lent(one) == 1)
        until(lambda: not runtime.has_work)
        assert told(own, {**GREEDY, "stream": True, "prompt": QUESTIONS[1]})[0]
        os.kill(one.processes[0]._process.pid, signal.SIGCONT)
        assert found.result(30) == told(own, body)


def test_a_process_that_dies_while_it_is_behind(
    serving: Serving, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who wait for it learn of it, though no tokens come any more."""
    monkeypatch.setattr("radixrt.server.writers.writers._MOST_UNSENT", 100)
    with StreamWriters(runtime.tokenizer, 1, late_seconds=30) as one, ThreadPoolExecutor(1) as threads:
        (process,) = one.processes
        process._records.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        url = serving(Server(runtime, "built-in", writers=one))
        os.kill(process._process.pid, signal.SIGSTOP)
        body = {**SAMPLED, "prompt": QUESTIONS[0], "ignore_eos": True, "max_tokens": 200, "n": 4}
        found = threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=20)
        until(lambda: num_lent(one) == 1)
        until(lambda: not runtime.has_work)
        assert process.is_behind
        assert len(process.when_ahead) == 1
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            found.result(20)


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_token_that_ends_an_answer_is_no_text(
    is_lent: bool, serving: Serving, runtime: Runtime, writers: StreamWriters
) -> None:
    """As in an answer that is not streamed."""
    url = serving(Server(runtime, "built-in", writers=writers if is_lent else None))
    body = {
        **SAMPLED,
        "prompt": QUESTIONS[0],
        "stop_token_ids": list(range(259, 387)),
        "min_tokens": 20,
        "ignore_eos": True,
    }
    (choice,) = httpx.post(f"{url}/v1/completions", json={**body, "stream": False}, timeout=60).json()["choices"]
    texts, (end,) = told(url, body)
    assert texts == [choice["text"]]
    assert end["finish_reason"] == choice["finish_reason"] == "stop"


def test_where_no_process_can_take_a_stream(
    serving: Serving, runtime: Runtime, writers: StreamWriters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes it."""
    monkeypatch.setattr(StreamWriters, "begin", lambda *_, **__: None)
    lent, own = serving(Server(runtime, "built-in", writers=writers)), serving()
    body = {**SAMPLED, "prompt": QUESTIONS[0], "ignore_eos": True}
    assert told(lent, body) == told(own, body)


def test_a_client_that_goes_after_a_second_request(
    serving: Serving, runtime: Runtime, writers: StreamWriters
) -> None:
    """Nothing is read of its connection then: who writes to it learns of it."""
    url, began = serving(Server(runtime, "built-in", writers=writers)), runtime.activity().decoded_tokens
    content = json.dumps({**LONG, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    before = num_lent(writers)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(head + content)
        connection.recv(2000)
        connection.sendall(head + content)
        until(lambda: num_lent(writers) > before)
        connection.recv(100_000)
    until(lambda: not runtime.has_work)
    assert runtime.activity().decoded_tokens - began < 800
    until(lambda: not any(process.has_streams for process in writers.processes))


@pytest.mark.parametrize("prompt", [QUESTIONS[0], QUESTIONS])
def test_a_stream_that_fails(
    prompt: str | list[str],
    serving: Serving,
    runtime: Runtime,
    writers: StreamWriters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last event says why, after all text."""
    url = serving(Server(runtime, "built-in", writers=writers))
    before, taken = num_lent(writers), StreamCall.lent_news
    count = itertools.count()

    def fails(call: StreamCall) -> Iterator[Any]:
        yield from taken(call)
        if next(count) == 20:
            raise PassError("it went wrong")

    monkeypatch.setattr(StreamCall, "lent_news", fails)
    body = {**STREAM, "prompt": prompt, "ignore_eos": True, "max_tokens": 600}
    *events, last, nothing = httpx.post(f"{url}/v1/completions", json=body, timeout=60).text.split("\n\n")
    assert num_lent(writers) > before
    assert "it went wrong" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert nothing == ""
    assert events  # a busy machine merges tokens into few
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
    until(lambda: not runtime.has_work)


def test_stop_strings_are_looked_for_by_the_server(
    serving: Serving, runtime: Runtime, writers: StreamWriters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of answers that have ended before a stream would be lent."""
    lending = BodyWriter.lent

    async def slowly(writer: BodyWriter) -> int | None:
        await asyncio.sleep(0.5)
        return await lending(writer)

    monkeypatch.setattr(BodyWriter, "lent", slowly)
    lent, own = serving(Server(runtime, "built-in", writers=writers)), serving()
    body = {**STREAM, "prompt": QUESTIONS[0], "max_tokens": 20, "ignore_eos": True, "stop": ["Lima"]}
    assert told(lent, body) == told(own, body)


@pytest.mark.parametrize("ends", ["SIGTERM", "SIGKILL"])
def test_when_the_server_ends(ends: str, tmp_path: Path) -> None:
    """At SIGTERM streams are written to their ends. Its processes end with it in any case."""
    with Served(tmp_path, "--stream-writers", "1") as served:
        (writer,) = children_that_run("writers.process", psutil.Process(served.process.pid))
        body = {**LONG, "stream": True, "max_tokens": 300}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            for _ in range(8):
                next(lines)
            served.process.send_signal(getattr(signal, ends))
            if ends == "SIGTERM":
                assert [line for line in lines if line][-1] == "data: [DONE]"
                assert served.process.wait(20) == 128 + signal.SIGTERM
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    deque(lines)
        psutil.wait_procs([writer], 20)
        assert not writer.is_running()


# --- in the process ---


@pytest.fixture
def written(runtime: Runtime) -> Iterator[tuple[Stream, socket.socket]]:
    """A stream of two answers, and its client."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.settimeout(10)
    assert runtime.tokenizer is not None
    answers = [Answer(EventFrame(b"<", b">"), Detokenizer(runtime.tokenizer)) for _ in range(2)]
    stream = Stream(ours.detach(), answers)
    with theirs:
        yield stream, theirs
    stream.close()


def test_ends_come_in_order(written: tuple[Stream, socket.socket], runtime: Runtime) -> None:
    """The stream's is the last, whichever answer has it; a failure comes after ends that were known before."""
    stream, client = written
    ids = runtime.tokenizer.encode("Oslo").tolist()  # type: ignore[union-attr]
    stream.tokens(1, ids)
    stream.tokens(0, ids)
    stream.end(1, False, b"(one)")
    stream.end(0, True, b"(none)(all)")
    stream.write()
    assert client.recv(1000) == chunk_of(b'<"Oslo">(one)<"Oslo">(none)(all)')
    assert stream.is_over
    stream.tokens(0, ids)
    stream.end(0, False, b"(end)")
    stream.fail(b"(failure)")
    stream.write()
    assert client.recv(1000) == chunk_of(b'<" Oslo">(end)(failure)')


def test_what_was_held_back_comes_with_the_end(written: tuple[Stream, socket.socket], runtime: Runtime) -> None:
    """Half a character, of which there is no more."""
    stream, client = written
    assert runtime.tokenizer is not None
    *half, _ = runtime.tokenizer.encode("🎈").tolist()
    expected = json_bytes(runtime.tokenizer.decode(half))
    assert "\ufffd" in expected.decode()
    stream.tokens(0, half)
    stream.write()
    stream.end(0, True, b"(all)")
    stream.write()
    assert client.recv(1000) == chunk_of(b"<" + expected + b">(all)")


def test_a_client_that_reads_slowly_is_not_late(written: tuple[Stream, socket.socket], runtime: Runtime) -> None:
    stream, client = written
    ids = runtime.tokenizer.encode("Oslo likes Mira. " * 2000).tolist()  # type: ignore[union-attr]
    stream.tokens(0, ids)
    stream.write()
    since = stream.late_since
    assert since is not None
    while (now := stream.late_since) == since:
        client.recv(500)
        stream.write()
    assert now is not None, "there is more to write"
    client.close()
    stream.tokens(0, ids)
    stream.write()
    assert stream.is_gone


def test_one_stream_does_not_cost_the_others(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that fails at one text."""
    server, own = socket.socketpair()
    pairs = [socket.socketpair() for _ in range(2)]

    def fails(answer: Answer) -> bytes:
        if answer.token_ids == [5]:
            raise RuntimeError("a panic")
        answer.ending = None
        return b"piece"

    monkeypatch.setattr(Answer, "piece", fails)
    assert runtime.tokenizer is not None
    thread = threading.Thread(target=Writing(own, runtime.tokenizer, 30).run)
    thread.start()
    value = {"answers": [[["<", ">"], None]], "skip_special_tokens": True}
    for number, (connection, _) in enumerate(pairs):
        connection.setblocking(False)
        socket.send_fds(server, [begin_record(number, value)], [connection.fileno()])
    server.sendall(tokens_record(0, 0, [5]))
    server.settimeout(10)
    received = bytearray(server.recv(1000))
    assert [*take_records(received)] == [(Kind.GONE, 0, b"")]
    server.sendall(tokens_record(0, 0, [5]) + tokens_record(1, 0, [6]))
    assert pairs[1][1].recv(100).startswith(chunk_of(b"piece"))
    server.close()
    thread.join(10)
    assert not thread.is_alive()
    for pair in pairs:
        for one in pair:
            one.close()
    own.close()


def test_records() -> None:
    sent = tokens_record(7, 2, [5, 2**31 - 1]) + end_record(8, 1, b"piece", is_last=True) + record(Kind.CLOSE, 9)
    received, found = bytearray(), []
    for place in range(len(sent)):
        received += sent[place : place + 1]
        found += take_records(received)
    assert not received
    (tokens, first, ids), (end, second, ending), (close, third, nothing) = found
    assert (tokens, first, tokens_of(ids)) == (Kind.TOKENS, 7, (2, [5, 2**31 - 1]))
    assert (end, second, end_of(ending)) == (Kind.END, 8, (1, True, b"piece"))
    assert (close, third, nothing) == (Kind.CLOSE, 9, b"")


def test_a_text_goes_on_elsewhere(runtime: Runtime) -> None:
    """From any token on, with what was not certain yet."""
    tokenizer = runtime.tokenizer
    assert tokenizer is not None
    plain = tokenizer.serialized()
    assert plain is not None
    other = plain_tokenizer(plain)
    assert (other.vocab_size, other.byte_ids) == (tokenizer.vocab_size, tokenizer.byte_ids)
    ids = tokenizer.encode("Mira likes 文字 and 🎈🎈, \x80 too.").tolist()
    for place in range(len(ids)):
        first, second = Detokenizer(tokenizer), Detokenizer(other)
        text = first.push(*ids[:place])
        second.restore(json.loads(json.dumps(first.state())))
        rest = "".join(second.push(one) for one in ids[place:]) + second.finish()
        assert text + rest == tokenizer.decode(ids)


def test_without_a_plain_tokenizer_there_is_none(runtime: Runtime) -> None:
    with StreamWriters(None, 2, late_seconds=30) as none:
        assert not none.processes
