"""Concurrent streams stream: each gets its tokens one by one, and nobody pays passes for the others."""

from __future__ import annotations

import subprocess
import sys
from statistics import median

import pytest

from scripts import bench_streams
from scripts.bench_streams import main, measure

TOKENS = 12


@pytest.mark.parametrize("kind", ["tasks", "threads"])
@pytest.mark.parametrize("count", [1, 16, 256])
def test_each_stream_gets_its_tokens_one_by_one(kind: str, count: int) -> None:
    found = measure(kind, count, tokens=TOKENS, seconds=0.02 if count < 256 else 0.1)
    assert len(found.chunks) == count
    assert {sum(sizes) for sizes in found.chunks} == {TOKENS}
    # Of so many threads a slow machine wakes some late, which then find two at once.
    least = count if count < 256 else count // 2
    assert sum(median(sizes) == 1 for sizes in found.chunks) >= least
    assert found.passes <= TOKENS + 2
    assert found.stall < 0.5  # of seconds: a machine that others keep busy stalls too


def test_a_loop_is_never_held_up_by_passes() -> None:
    """Half a second a pass, and a task that sleeps a millisecond at a time."""
    assert measure("tasks", 4, tokens=3, seconds=0.5).stall < 0.4


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_streams, "STREAMS", (1, 4))
    monkeypatch.setattr(bench_streams, "TOKENS", 3)
    monkeypatch.setattr(bench_streams, "PASS_SECONDS", 0.001)
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert sum("tasks" in line or "threads" in line for line in lines) == 4


def test_it_needs_no_torch() -> None:
    code = "import sys, scripts.bench_streams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
