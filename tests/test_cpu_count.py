"""Processors by affinity and by the quotas of control groups, and the threads that follow from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixrt.cpu_count import usable_cpus
from radixrt.runtime import Runtime

PROCESSORS = 12


@pytest.fixture(autouse=True)
def twelve_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(PROCESSORS)), raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, PROCESSORS),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, PROCESSORS),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 3),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "9900000 100000"}, PROCESSORS),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "600000 100000",
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/\n2:cpu,cpuacct:/x",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
    ],
)
def test_quotas(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert usable_cpus(write(tmp_path, files)) == expected


@pytest.mark.parametrize(("usable", "given", "expected"), [(2, None, 2), (8, None, 3), (2, 4, 4)])
def test_threads_of_a_runtime(
    monkeypatch: pytest.MonkeyPatch, usable: int, given: int | None, expected: int
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("radixrt.ranks.rank.usable_cpus", lambda: usable)
    try:
        torch.set_num_threads(3)
        with Runtime(device="cpu", threads=given):
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("module", "given", "expected"),
    [
        pytest.param("radixrt", None, "PASSIVE", marks=pytest.mark.long),
        ("radixrt.cli", None, "PASSIVE"),
        pytest.param("radixrt", "ACTIVE", "ACTIVE", marks=pytest.mark.long),
        pytest.param("radixrt.cli", "ACTIVE", "ACTIVE", marks=pytest.mark.long),
    ],
)
def test_threads_of_openmp_wait_without_spinning(module: str, given: str | None, expected: str) -> None:
    """OpenMP says what it has read from the environment: nothing of radixrt loads torch before it is set."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    command = [sys.executable, "-c", f"import {module}, torch"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if "OMP_WAIT_POLICY" not in shown.stdout + shown.stderr:
        pytest.skip("this build of torch has no OpenMP that shows its settings")
    assert f"OMP_WAIT_POLICY = '{expected}'" in shown.stdout + shown.stderr
