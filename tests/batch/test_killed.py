"""`radixrt batch` over a model, killed in the middle of its work and called again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from radixrt.batch.journal.run_folder import run_path
from radixrt.bench.catalogue import write_shape
from radixrt.planning.batch_plan import plan_batch
from radixrt.planning.token_store import TokenStore
from radixrt.workloads.lists import fewshot

KILLS = 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "device", "subjects", "questions"),
    [
        ("tiny", "cpu", 20, 10),
        pytest.param("qwen3-0.6b", "cuda", 1000, 20, marks=pytest.mark.gpu),
    ],
)
def test_killed_three_times(tmp_path: Path, shape: str, device: str, subjects: int, questions: int) -> None:
    """Each line has one record, and records kept after a kill are in the output byte for byte."""
    model, files = tmp_path / "model", (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    model.mkdir()
    write_shape(shape, model)
    prompts = fewshot(subjects=subjects, questions=questions)
    with files[0].open("w") as lines:
        for number, prompt in enumerate(prompts):
            line = {"token_ids": prompt.prompt_ids.tolist(), "custom_id": f"line {number}"}
            lines.write(json.dumps(line) + "\n")
    journal = run_path(files[1]) / "journal"
    options = ["--model", str(model), "--load-format", "dummy", "--device", device, "--max-total-tokens", "400000"]
    options += ["--max-new-tokens", str(prompts[0].max_new_tokens), "--ignore-eos", "--temperature", "0"]

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "radixrt", "batch", "--input", files[0], "--output", files[1], *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, env=environment)

    def journalled() -> list[bytes]:
        lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
        return [line[line.index(b"{") :] for line in lines if b"{" in line]

    kept: list[bytes] = []
    rng = random.Random(0)
    for kill in range(KILLS):
        enough = len(kept) + rng.uniform(0.05, 0.25) * len(prompts)
        process = start()
        deadline = time.monotonic() + 300
        while len(journalled()) < enough:
            assert process.poll() is None, "it ended too early"
            assert time.monotonic() < deadline, "it hangs"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not files[1].exists()
        found = journalled()
        print(f"kill {kill + 1}: {len(found):,} of {len(prompts):,} records in the journal")
        assert found[: len(kept)] == kept
        assert len(kept) < len(found) < len(prompts)
        kept = found
    process = start()
    told, _ = process.communicate()
    print(told.decode())
    assert process.returncode == 0
    assert not run_path(files[1]).exists()
    lines = files[1].read_bytes().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [f"line {n}" for n in range(len(prompts))]
    for record in kept:
        assert lines[json.loads(record)["index"]] == record
    records = [json.loads(line) for line in lines]
    assert all(record["error"] is None for record in records)
    best = plan_batch(
        TokenStore.of([prompt.prompt_ids for prompt in prompts]), np.array([1])
    ).statistics.best_hit_rate
    usage = [record["usage"] for record in records]
    hit_rate = sum(u["cached_tokens"] for u in usage) / sum(u["prompt_tokens"] for u in usage)
    print(f"hit rate of all four runs {hit_rate:.2%}, best possible in one {best:.2%}")
    assert hit_rate > 0.9 * best
