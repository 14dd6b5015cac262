"""`radixrt batch --tp 2`, one of whose processes is killed in the middle of its work, and called again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from radixrt.batch.journal.run_folder import run_path
from radixrt.cli.exit_status import DONE, RESUMABLE
from radixrt.sampling_params import SamplingParams
from tests.batch.test_signals import records_kept
from tests.ranks.test_ranks import runtime
from tests.support.processes import command_line

COUNT = 60
ASKED = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12, "ignore_eos": True}


def started(files: tuple[Path, Path]) -> subprocess.Popen[bytes]:
    options = "--tp 2 --device cpu --threads 1 --max-total-tokens 600 --max-running-requests 6 --no-progress"
    command = ["-m", "radixrt", "batch", "--input", str(files[0]), "--output", str(files[1]), *options.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=environment)


def check_gone(processes: list[psutil.Process], by: float) -> None:
    _, left = psutil.wait_procs(processes, max(0.0, by - time.monotonic()))
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
@pytest.mark.parametrize("killed", ["rank 0", "rank 1"])
@pytest.mark.parametrize("seed", range(3))
def test_killed_and_resumed(killed: str, seed: int, tmp_path: Path) -> None:
    """No process is left; records that were kept stay as they are, and all answers are one rank's."""
    rng, files = random.Random(seed), (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    begin = [rng.randrange(3, 1600) for _ in range(20)]
    prompts = [begin[: rng.randrange(1, 20)] + [rng.randrange(3, 1600) for _ in range(5)] for _ in range(COUNT)]
    params = [ASKED | {"seed": number} for number in range(COUNT)]
    lines = [{"token_ids": prompt, **asked} for prompt, asked in zip(prompts, params, strict=True)]
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))

    process, enough = started(files), rng.randrange(1, COUNT // 2)
    deadline = time.monotonic() + 120
    while len(records_kept(files[1])) < enough:
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    (rank,) = (child for child in children if "radixrt.ranks.follower" in command_line(child))
    os.kill(process.pid if killed == "rank 0" else rank.pid, signal.SIGKILL)
    assert process.wait(20) == (-signal.SIGKILL if killed == "rank 0" else RESUMABLE)
    check_gone(children, time.monotonic() + 20)
    kept = records_kept(files[1])
    assert enough <= len(kept) < COUNT
    assert not files[1].exists()

    process = started(files)
    children = []
    while process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True) or children
        time.sleep(0.2)
    assert process.wait() == DONE
    check_gone(children, time.monotonic() + 10)
    assert not run_path(files[1]).exists()
    records = files[1].read_bytes().splitlines()
    assert kept.items() <= dict(enumerate(records)).items()
    with runtime(1) as alone:
        expected = alone.generate(prompts, [SamplingParams(**each) for each in params])  # type: ignore[arg-type]
    assert [json.loads(record)["token_ids"] for record in records] == [[*each.token_ids] for each in expected]
