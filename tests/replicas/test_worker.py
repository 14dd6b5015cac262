"""What a replica does with messages that have come together."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest

from radixrt.errors import ModelError, RadixrtError
from radixrt.output import RequestOutput
from radixrt.replicas import worker
from radixrt.replicas.messages import ended_of, requests_message
from radixrt.replicas.worker import serve
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request
from radixrt.workers.channel import Message
from tests.support.local_replicas import as_sent
from tests.support.runtimes import scheduled_runtime


class GivenChannel:
    """Messages come as they are given, some at a time, and none is waited for in vain."""

    def __init__(self, *given: list[Message]) -> None:
        self.given, self.sent = list(given), list[Message]()
        self.is_closed = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self) -> list[Message]:
        return self.given.pop(0) if self.given else []

    def wait(self) -> None:
        self.is_closed = not self.given


def served(monkeypatch: pytest.MonkeyPatch, *given: list[Message]) -> tuple[list[str], dict[Any, int]]:
    """What the Runtime of a replica is asked for, and how many tokens each request has got."""
    runtime, done = scheduled_runtime(pool_tokens=1000, context_length=100), list[str]()
    submit, step, abort = runtime.submit, runtime.step, runtime.abort

    def submitted(*requests: Request, in_order: bool = False) -> None:
        done.append(f"submit {len(requests)}")
        submit(*requests, in_order=in_order)

    def stepped() -> list[RequestOutput]:
        done.append("step")
        return step()

    def aborted(request_id: Any) -> bool:
        done.append("abort")
        return abort(request_id)

    for name, own in (("submit", submitted), ("step", stepped), ("abort", aborted)):
        monkeypatch.setattr(runtime, name, own)
    channel: Any = GivenChannel(*given)
    made: list[Runtime] = []
    serve(channel, lambda options: made.append(runtime) or runtime)
    assert made == [runtime]
    ended = [each for message in channel.sent if "ended" in message.body for each in ended_of(message)]
    return done, {each.id: len(each.token_ids[0]) for each in ended}


def messages(sizes: Iterable[int]) -> list[Message]:
    source, params = scheduled_runtime(pool_tokens=1000, context_length=100), SamplingParams(max_new_tokens=3)
    return [
        as_sent(requests_message([source.prepare([1, 2, 3 + n], params, index=n) for n in range(size)]))
        for size in sizes
    ]


def test_the_device_gets_work_before_all_requests_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message where it has none, and then so many requests that no pass wants more: the next ones when some of
    these have begun, which first wait for what the pass in flight computes.
    """
    monkeypatch.setattr(worker, "MADE_BEFORE", 5)
    first, *others = messages([2, 3, 2, 4, 1])
    done, tokens = served(monkeypatch, [Message({"config": {}})], [first, *others[:3]], others[3:])
    assert done[:8] == ["submit 2", "step", "submit 3", "submit 2", "step", "step", "submit 4", "submit 1"]
    assert list(tokens.values()) == [3] * 12


def test_what_ends_requests_does_not_wait_for_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = messages([2, 3, 1])
    given = [first, second, Message({"abort": [second.body["run"][0][0]]}), third]
    done, tokens = served(monkeypatch, [Message({"config": {}})], given)
    assert done[:6] == ["submit 2", "submit 3", "abort", "step", "submit 1", "step"]
    assert sorted(tokens.values()) == [0, 3, 3, 3, 3, 3]


def test_messages_behind_the_first_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They came while the Runtime was not there yet."""
    done, tokens = served(monkeypatch, [Message({"config": {}}), *messages([2])])
    assert done[:2] == ["submit 2", "step"]
    assert len(tokens) == 2


def test_old_objects_are_left_alone_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    step, wait = worker.Server.step, GivenChannel.wait

    def stepped(server: worker.Server) -> Message | None:
        frozen.append(gc.get_freeze_count() > 0)
        return step(server)

    def waited(channel: GivenChannel) -> None:
        frozen.append(gc.get_freeze_count() > 0)
        wait(channel)

    monkeypatch.setattr(worker.Server, "step", stepped)
    monkeypatch.setattr(GivenChannel, "wait", waited)
    served(monkeypatch, [Message({"config": {}})], [], messages([2]))
    assert frozen[0] is frozen[-1] is False
    assert len(frozen) > 3
    assert all(frozen[1:-1])


def test_weights_of_both_are_lost_with_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = scheduled_runtime(pool_tokens=1000, context_length=100)

    def update(source: str) -> None:
        raise {"bad": ModelError, "half": RadixrtError}[source](source)

    monkeypatch.setattr(runtime, "update_weights", update)
    told = [[Message({"weights": source, "load": n})] for n, source in enumerate(("bad", "half", "bad"))]
    channel: Any = GivenChannel([Message({"config": {}})], *told)
    serve(channel, lambda options: runtime)
    assert [message.body for message in channel.sent][1:] == [
        {"load": 0, "error": ["ModelError", "bad"]},
        {"lost": "half"},
    ]
