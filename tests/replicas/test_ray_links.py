"""Replicas that are actors of a local Ray: their answers, their deaths, and that nothing of them stays."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'radixrt[ray]'")

import numpy as np
import psutil
import ray
from ray.exceptions import ActorDiedError

import radixrt
from radixrt.cli import main
from radixrt.config import RuntimeConfig
from radixrt.errors import ModelError, ParameterError
from radixrt.output import RequestOutput
from radixrt.replicas import ray_links
from radixrt.replicas.group import ReplicaGroup
from radixrt.replicas.ray_links import Actor, RayLink, RayLinks, connect
from radixrt.sampling_params import SamplingParams
from radixrt.workers.channel import Channel, Message, decode, encode
from tests.replicas.test_group import records
from tests.support.ray_session import ray_session

HOME = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"max_total_tokens": 20_000, "device": "cpu", "threads": 1}
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=8)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray on this host, to which this process is connected."""
    path = os.pathsep.join(sys.path)
    environment = {"env_vars": {"PYTHONPATH": path}}
    with ray_session(num_cpus=3, logging_level=logging.WARNING, runtime_env=environment) as context:
        yield context.address_info["gcs_address"]


def actors() -> list[psutil.Process]:
    """Processes of this test's replicas."""
    return [each for each in psutil.Process().children(recursive=True) if each.name().startswith("ray::Actor")]


@pytest.fixture(scope="module")
def group(address: str) -> Iterator[ReplicaGroup]:
    with ReplicaGroup(num_replicas=2, ray=address, **OPTIONS) as group:
        assert len(actors()) == 2
        yield group
    psutil.wait_procs(actors(), timeout=20)
    assert actors() == []


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Questions with one bad line, and the records of one Runtime."""
    folder = tmp_path_factory.mktemp("batch")
    lines = (HOME / "examples" / "questions.jsonl").read_text().splitlines()[:60]
    lines[3] = '{"prompt": "Who?", "temperature": -1}'
    source = folder / "in.jsonl"
    source.write_text("".join(line + "\n" for line in lines))
    with radixrt.Runtime(**OPTIONS) as runtime:
        runtime.run_batch(source, folder / "one.jsonl", default_params=PARAMS)
    return source, records(folder / "one.jsonl")


def test_a_batch(group: ReplicaGroup, batch: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Bytes of the output are those of one Runtime, but for times. Ctrl-C, which all get, ends no actor."""
    for process in actors():
        process.send_signal(signal.SIGINT)
    source, expected = batch
    report = group.run_batch(source, tmp_path / "out.jsonl", default_params=PARAMS)
    assert records(tmp_path / "out.jsonl") == expected
    assert [each["requests"] > 0 for each in report.run.replicas] == [True, True]
    assert [each["restarts"] for each in report.run.replicas] == [0, 0]
    assert sum(each["requests"] for each in report.run.replicas) == 59
    assert group.identity() == group.identity()


@pytest.mark.long
def test_an_actor_is_killed_on_the_way(
    group: ReplicaGroup, batch: tuple[Path, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = batch
    step, steps = group.step, [0]

    def stepped() -> list[RequestOutput]:
        steps[0] += 1
        if steps[0] == 2:
            link = group.lanes[0].link
            assert isinstance(link, RayLink)
            ray.kill(link.actor)
        return step()

    monkeypatch.setattr(group, "step", stepped)
    report = group.run_batch(source, tmp_path / "out.jsonl", default_params=PARAMS)
    assert [each["restarts"] for each in report.run.replicas] == [1, 0]
    assert records(tmp_path / "out.jsonl") == expected


def test_what_a_runtime_refuses(address: str) -> None:
    options = OPTIONS | {"dtype": "bfloat8"}
    with pytest.raises(ModelError) as alone:
        radixrt.Runtime(**options)
    with pytest.raises(ModelError) as refused:
        ReplicaGroup(num_replicas=1, ray=address, **options)
    assert str(refused.value) == str(alone.value)


@pytest.mark.long
def test_the_command(address: str, batch: tuple[Path, list[Any]], tmp_path: Path) -> None:
    source, expected = batch
    files = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    options = ["--max-total-tokens", "20000", "--device", "cpu", "--threads", "1", "--no-progress"]
    sampling = ["--temperature", "0", "--max-new-tokens", "8"]
    assert main(["batch", "--ray", address, *files, *options, *sampling]) == 0
    assert records(tmp_path / "out.jsonl") == expected


# -- without actors --------------------------------------------------------------------------------------------


def served(monkeypatch: pytest.MonkeyPatch, serve: Callable[[Channel], None]) -> Actor:
    """An actor in this process, around another `serve`."""

    def exit_actor() -> None:
        raise ActorDiedError

    monkeypatch.setattr(ray_links, "serve", serve)
    monkeypatch.setattr(ray.actor, "exit_actor", exit_actor)
    return Actor()


def test_large_messages_pass_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for room while the other does."""

    def echo(channel: Channel) -> None:
        while True:
            channel.wait()
            for message in channel.receive():
                channel.send(message)
                if "last" in message.body:
                    return

    sent = [Message({"n": n}, np.arange(n, n + 1_000_000, dtype=np.int32)) for n in range(4)]
    sent.append(Message({"last": True}))
    actor, received = served(monkeypatch, echo), bytearray()
    found = []
    for message in sent:
        received += actor.exchange(encode(message))
        found += decode(received)
    while len(found) < len(sent):
        received += actor.exchange(b"")
        found += decode(received)
    assert [(each.body, each.numbers.tolist()) for each in found] == [
        (each.body, each.numbers.tolist()) for each in sent
    ]
    with pytest.raises(ActorDiedError):
        actor.exchange(b"more")


def test_the_last_words_of_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that its device is lost; then its process ends, and an error of ours is told."""

    def lost(channel: Channel) -> None:
        channel.send(Message({"lost": "an illegal access"}))

    actor = served(monkeypatch, lost)
    said = bytearray(actor.exchange(encode(Message({"config": {}}))))
    assert [each.body for each in decode(said)] == [{"lost": "an illegal access"}]
    with pytest.raises(ActorDiedError):
        actor.exchange(b"")

    def fails(channel: Channel) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        served(monkeypatch, fails).exchange(b"")


@pytest.mark.parametrize(
    ("processors", "cards", "options", "wanted", "chosen", "resources"),
    [
        ([4, 8], 3, {}, None, (3, "cuda", None), {"num_gpus": 1, "num_cpus": 1}),
        ([4, 8], 3, {"device": "cuda", "threads": 2}, 2, (2, "cuda", None), {"num_gpus": 1, "num_cpus": 2}),
        ([4, 8], 3, {"device": "cuda"}, 5, (5, "cuda", None), {"num_gpus": 1, "num_cpus": 1}),
        ([4, 8], 0, {"device": "cuda"}, None, (1, "cuda", None), {"num_gpus": 1, "num_cpus": 1}),
        ([4, 8], 3, {"device": "cpu"}, None, (1, "cpu", 0.25), {"num_cpus": 8}),
        ([4, 8], 0, {}, 2, (2, "cpu", 0.125), {"num_cpus": 4}),
        ([4, 8], 0, {}, 4, (4, "cpu", 0.25 / 4), {"num_cpus": 2}),
        ([4, 8, 0], 0, {}, 99, (99, "cpu", 0.25 / 8), {"num_cpus": 1}),
        ([4, 8], 0, {"threads": 3}, 2, (2, "cpu", 0.125), {"num_cpus": 3}),
    ],
)
def test_places(
    processors: list[int],
    cards: int,
    options: dict[str, Any],
    wanted: int | None,
    chosen: tuple[int, str, float | None],
    resources: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(cards)} if cards else {})
    nodes = [{"Alive": True, "Resources": {"CPU": float(own)} if own else {}} for own in processors]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {}}])
    links = RayLinks(RuntimeConfig(**options), wanted)
    assert (links.num_replicas, links.config["device"], links.config["memory_fraction"]) == chosen
    assert links.resources == resources
    assert ("want a card each" in caplog.text) == (chosen[1] == "cuda" and chosen[0] > cards)


def test_one_card_is_no_place() -> None:
    with pytest.raises(ParameterError, match="leave the number out"):
        RayLinks(RuntimeConfig(device="cuda:1"), 2)


def test_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals have the handlers that they had."""

    def init(address: str, **options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise ConnectionError(f"nothing runs at {address}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ParameterError, match="no Ray cluster at 'auto': nothing runs"):
        connect("auto")
    assert signal.getsignal(signal.SIGTERM) is before
