"""Processes of replicas: where they run, that they end, and that their death costs no line."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from radixrt.config import RuntimeConfig
from radixrt.errors import DeviceLostError, ParameterError
from radixrt.output import RequestOutput
from radixrt.replicas import links
from radixrt.replicas.group import ReplicaGroup
from radixrt.replicas.links import Placement, Processes, placements
from radixrt.sampling_params import SamplingParams
from radixrt.workers.process import Process
from tests.replicas.test_group import PARAMS, alone, records, told, tree
from tests.support.runtimes import simulated_runtime

PROGRAM = "tests.support.simulated_worker"


def processes(count: int, step_seconds: float = 0.0, killing: str = "") -> Processes:
    environment = {
        "STEP_SECONDS": str(step_seconds),
        "KILLING_LINES": killing,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return Processes([Placement(RuntimeConfig(), environment)] * count, PROGRAM)


def group_of(count: int, step_seconds: float = 0.0) -> ReplicaGroup:
    return ReplicaGroup(num_replicas=count, links=processes(count, step_seconds))


def pids(group: ReplicaGroup) -> list[int]:
    """Of the replicas that are there."""
    return [lane.link.pid for lane in group.lanes if isinstance(lane.link, Process) and not lane.is_gone]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("real_workers")
def test_answers_and_the_end() -> None:
    with group_of(2) as group:
        found = group.generate(tree(40), PARAMS)
        assert told(found) == alone(tree(40))
        own = pids(group)
        assert len(set(own)) == 2
        # Signals that all processes of a terminal or a job get are for the group.
        for pid in own:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
        assert len(group.generate(tree(4), PARAMS)) == 4
        assert pids(group) == own
    assert not any(map(is_running, own))
    group.close()


def test_a_group_that_is_dropped_ends_its_replicas() -> None:
    """Nothing is left of their processes either."""
    group = group_of(2)
    own = pids(group)
    assert all(map(is_running, own))
    del group
    gc.collect()
    assert not any(map(is_running, own))


def test_replicas_end_with_their_group() -> None:
    """Of a process that was killed, they see that its end of the socket is closed."""
    program = (
        "import sys, time; from tests.replicas.test_links import group_of, pids\n"
        "group = group_of(2); print(*pids(group), flush=True); time.sleep(100)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    own = list(map(int, parent.stdout.readline().split()))
    assert all(map(is_running, own))
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while any(map(is_running, own)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Killer:
    """Kills replicas of groups at random moments, so often.

    Attributes:
        left: kills that are still to come.
    """

    def __init__(self, kills: int) -> None:
        self.left = kills
        self._chance = random.Random(kills)
        self._moment = 0.0

    def watch(self, group: ReplicaGroup) -> None:
        """Kill replicas of a group between its steps."""
        self._wait()
        step = group.step

        def stepped() -> list[RequestOutput]:
            if self.left and time.monotonic() > self._moment:
                os.kill(self._chance.choice(pids(group)), signal.SIGKILL)
                self.left -= 1
                self._wait()
            return step()

        group.step = stepped  # type: ignore[method-assign]

    def _wait(self) -> None:
        self._moment = time.monotonic() + self._chance.uniform(0.0, 1.0)


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.long)])
def test_kills(kills: int, tmp_path: Path) -> None:
    """At random moments; where all replicas were lost too often, the same call goes on with others. A line that
    happens to be lost with four processes, by itself at last, is taken for their killer.
    """
    killer = Killer(kills)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"token_ids": prompt, "max_tokens": 12, "custom_id": str(n)} for n, prompt in enumerate(tree(300))]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with simulated_runtime() as runtime:
        assert not runtime.run_batch(source, tmp_path / "one.jsonl").errors
    expected = records(tmp_path / "one.jsonl")

    def check() -> None:
        found = records(output)
        blamed = [n for n, each in enumerate(found) if "ends each process" in str(each["error"])]
        assert len(blamed) <= (kills - 1) // 4
        for n in blamed:
            found[n] = expected[n]
        assert found == expected

    while killer.left:
        with group_of(2, step_seconds=0.01) as group:
            killer.watch(group)
            try:
                group.run_batch(source, output, overwrite=True)
            except DeviceLostError:
                continue
        check()
    if not output.exists():
        with group_of(3) as group:
            group.run_batch(source, output)
        check()


def test_a_line_that_kills_its_process(tmp_path: Path) -> None:
    """It has an error record, the others their own."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"token_ids": prompt, "max_tokens": 6} for prompt in tree(50)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with simulated_runtime() as runtime:
        runtime.run_batch(source, tmp_path / "one.jsonl")
    with ReplicaGroup(num_replicas=2, links=processes(2, killing="31")) as group:
        report = group.run_batch(source, output)
        restarts = sum(each["restarts"] for each in report.run.replicas)
    assert report.is_complete
    assert (report.errors, report.written) == (1, 50)
    assert 4 <= restarts <= 7
    found, expected = records(output), records(tmp_path / "one.jsonl")
    assert "ends each process that runs it" in found[31]["error"]["message"]
    assert "signal 9" in found[31]["error"]["message"]
    found[31] = expected[31]
    assert found == expected


@pytest.mark.long
def test_a_line_that_kills_the_built_in_model(tmp_path: Path) -> None:
    examples = Path(links.__file__).resolve().parents[2] / "examples" / "questions.jsonl"
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line + "\n" for line in examples.read_text().splitlines()[:40]))
    environment = {"KILLING_LINES": "11", "PYTHONPATH": os.pathsep.join(sys.path)}
    placed = placements(RuntimeConfig(device="cpu", max_total_tokens=60_000), 2)
    own = Processes(
        [Placement(each.config, environment) for each in placed], "tests.support.worker_that_is_killed"
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=8)
    with ReplicaGroup(num_replicas=2, links=own) as group:
        report = group.run_batch(source, output, default_params=params)
    assert (report.errors, report.written) == (1, 40)
    assert "ends each process that runs it" in records(output)[11]["error"]["message"]


def test_replicas_of_a_cpu_share_it() -> None:
    placed = placements(RuntimeConfig(device="cpu", seed=None), 3)
    assert len(placed) == 3
    assert len({each.config.seed for each in placed}) == 1
    assert placed[0].config.memory_fraction == pytest.approx(0.25 / 3)
    assert placed[0].config.threads is not None
    assert len(placements(RuntimeConfig(device="cpu"), None)) == 1
    assert placements(RuntimeConfig(device="cpu", threads=5), 2)[0].config.threads == 5


@pytest.mark.parametrize(
    ("visible", "wanted", "chosen"),
    [
        (None, None, ["0", "1"]),
        ("3,GPU-7f", None, ["3", "GPU-7f"]),
        (None, 1, ["0"]),
        ("5,6", 3, ["5", "6", "5"]),
    ],
)
def test_cards_in_turn(
    visible: str | None, wanted: int | None, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import radixrt.execution.device

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(radixrt.execution.device, "choose_device", lambda given: torch.device(given or "cuda"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    placed = placements(RuntimeConfig(), wanted)
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in placed] == chosen
    assert {each.config.device for each in placed} == {"cuda"}
    shared = len(chosen) > 2
    assert {each.config.memory_fraction for each in placed} == ({0.95 / 2} if shared else {None})
    with pytest.raises(ParameterError, match="CUDA_VISIBLE_DEVICES"):
        placements(RuntimeConfig(device="cuda:1"), 2)


def test_ranks_have_cards_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import radixrt.execution.device

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setattr(radixrt.execution.device, "choose_device", lambda given: torch.device(given or "cuda"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = RuntimeConfig(tensor_parallel_size=2)
    for wanted, chosen in ((None, ["0,1", "2,3"]), (3, ["0,1", "2,3", "0,1"])):
        assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in placements(config, wanted)] == chosen
    with pytest.raises(ParameterError, match="tensor_parallel_size is 6"):
        placements(RuntimeConfig(tensor_parallel_size=6), None)
    staged = RuntimeConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    (each,) = placements(staged, None)
    assert each.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    with pytest.raises(ParameterError, match="pipeline_parallel_size 6: 6 ranks, but torch sees 5 CUDA devices"):
        placements(RuntimeConfig(pipeline_parallel_size=6), None)


def test_the_built_in_model_on_two_replicas(tmp_path: Path) -> None:
    """Bytes of the output are those of one replica, but for times; also with other weights, which a process in the
    place of a killed one loads, too.
    """
    source = Path(links.__file__).resolve().parents[2] / "examples" / "questions.jsonl"
    lines = source.read_text().splitlines()[:60]
    short = tmp_path / "in.jsonl"
    short.write_text("".join(line + "\n" for line in lines))
    import radixrt

    params = SamplingParams(temperature=0.0, max_new_tokens=8)
    with radixrt.Runtime(max_total_tokens=60_000) as runtime:
        runtime.run_batch(short, tmp_path / "one.jsonl", default_params=params)
        own = dict(runtime.parts.model.decoder.checkpoint_tensors())  # type: ignore[attr-defined]
        other = {name: tensor.flip(0) if "o_proj" in name else tensor.clone() for name, tensor in own.items()}
        runtime.update_weights(other)
        runtime.run_batch(short, tmp_path / "other.jsonl", default_params=params)
        identity = runtime.identity()
    with ReplicaGroup(num_replicas=2, max_total_tokens=60_000) as group:
        group.run_batch(short, tmp_path / "two.jsonl", default_params=params)
        group.update_weights(other)
        assert group.identity() == group.identity() == identity
        os.kill(pids(group)[0], signal.SIGKILL)
        report = group.run_batch(short, tmp_path / "killed.jsonl", default_params=params)
        assert [each["restarts"] for each in report.run.replicas] == [1, 0]
    expected = records(tmp_path / "one.jsonl")
    assert records(tmp_path / "two.jsonl") == expected
    assert records(tmp_path / "killed.jsonl") == records(tmp_path / "other.jsonl") != expected
