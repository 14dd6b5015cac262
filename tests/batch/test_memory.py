"""What a whole batch of many long lines takes of the host's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_PROCESS = """
import json, sys, time
from pathlib import Path

import radixrt.batch.job as job
from radixrt.batch.run import BatchRun
from radixrt.batch.journal.run_folder import RunFolder
from tests.support.scheduled_runtime import ScheduledRuntime

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))

def measured(what, call):
    def measure(*args, **kwargs):
        Path("/proc/self/clear_refs").write_text("5")  # the greatest resident size begins anew
        began, busy = time.perf_counter(), time.process_time()
        result = call(*args, **kwargs)
        parts[what] = [time.perf_counter() - began, time.process_time() - busy, memory("VmHWM") - loaded]
        return result
    return measure

runtime = ScheduledRuntime(pool_tokens=400_000, context_length=1100)
loaded, parts = memory("VmRSS"), {}
job.Batch.scan = measured("scan", job.Batch.scan)
BatchRun.planned_lines = measured("order", BatchRun.planned_lines)
RunFolder.finish = measured("output", RunFolder.finish)
BatchRun.run = measured("run", BatchRun.run)  # the order among it
report = job.run_batch(runtime, sys.argv[1], sys.argv[2])
assert "torch" not in sys.modules
print(json.dumps({"parts": parts, "records": report.written, "errors": report.errors, "hit_rate": report.hit_rate,
                  "best_hit_rate": report.best_hit_rate, "tokens": report.prompt_tokens}))
"""

LINES, TOKENS, SHARED, GROUPS, ANSWER = 100_000, 1000, 600, 200, 16


@pytest.mark.long
@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="the system does not tell sizes of processes"
)
def test_100_000_lines_of_1000_tokens(tmp_path: Path) -> None:
    """`pytest -s -m long tests/batch/test_memory.py` prints the figures."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, str(source), str(output)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    print(f"\n{LINES:,} lines of {TOKENS:,} tokens, {source.stat().st_size / 2**20:,.0f} MiB")
    for part, (seconds, busy, mebibytes) in told["parts"].items():
        print(f"{part:8} {seconds:6.1f} s ({busy:.1f} s of CPU), at most {mebibytes:4.0f} MiB more than before")
    print(f"hit rate {told['hit_rate']:.2%}, best possible {told['best_hit_rate']:.2%}")
    assert (told["records"], told["errors"], told["tokens"]) == (LINES, 0, LINES * TOKENS)
    with open(output, "rb") as file:
        assert [json.loads(line)["custom_id"] for line in file] == [f"id-{n}" for n in range(LINES)]
    assert told["hit_rate"] > 0.99 * told["best_hit_rate"] > 0.5
    assert max(mebibytes for _, _, mebibytes in told["parts"].values()) < 1024  # half of what is promised


def write(path: Path) -> None:
    """Prompts of some groups, in no order, each with a beginning of its group's."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 150_000, (GROUPS, SHARED)).tolist()
    beginnings = [", ".join(map(str, tokens)) for tokens in shared]
    with open(path, "w") as file:
        for line in range(LINES):
            own = ", ".join(map(str, rng.integers(0, 150_000, TOKENS - SHARED).tolist()))
            ids = f"[{beginnings[rng.integers(GROUPS)]}, {own}]"
            file.write(f'{{"token_ids": {ids}, "custom_id": "id-{line}", "max_tokens": {ANSWER}}}\n')
