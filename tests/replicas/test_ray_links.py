"""Replicas that are actors of a local Ray: their answers, their deaths, and that nothing of them stays."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'radixrt[ray]'")

import psutil
import ray

import radixrt
from radixrt.config import RuntimeConfig
from radixrt.errors import ParameterError
from radixrt.output import RequestOutput
from radixrt.replicas.channel import Message
from radixrt.replicas.group import ReplicaGroup
from radixrt.replicas.ray_links import Actor, RayLink, RayLinks, _share
from radixrt.replicas.worker import BEAT
from radixrt.sampling_params import SamplingParams
from tests.replicas.test_group import records, told

HOME = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"max_total_tokens": 20_000, "device": "cpu"}
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=8)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray with two processors, to which this process is connected."""
    path = os.pathsep.join(sys.path)
    context = ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


def actors(of: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes of replicas on this host."""
    return [process for process in psutil.process_iter(["cmdline"]) if "ray::Actor" in (process.info["cmdline"] or [""])[0]]


def eventually(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def group(address: str) -> Iterator[ReplicaGroup]:
    with ReplicaGroup(num_replicas=2, ray=address, **OPTIONS) as group:
        yield group
    eventually(lambda: not actors())


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Questions with one bad line, and the records of one Runtime."""
    folder = tmp_path_factory.mktemp("batch")
    lines = (HOME / "examples" / "questions.jsonl").read_text().splitlines()[:120]
    lines[3] = '{"prompt": "Who?", "temperature": -1}'
    source = folder / "in.jsonl"
    source.write_text("".join(line + "\n" for line in lines))
    with radixrt.Runtime(**OPTIONS) as runtime:
        runtime.run_batch(source, folder / "one.jsonl", default_params=PARAMS)
    return source, records(folder / "one.jsonl")


def test_a_batch(group: ReplicaGroup, batch: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Bytes of the output are those of one Runtime, but for times."""
    source, expected = batch
    report = group.run_batch(source, tmp_path / "out.jsonl", default_params=PARAMS)
    assert records(tmp_path / "out.jsonl") == expected
    assert [each["requests"] > 0 for each in report.run.replicas] == [True, True]
    assert sum(each["requests"] for each in report.run.replicas) == 119
    assert group.identity() == group.identity()


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
