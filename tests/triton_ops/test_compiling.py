"""Kernels that threads compile at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_are_compiled_instead_of_launched(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compiling_without_gpu"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["elsewhere"] == "CompiledKernel"
    assert told["compiled"] == 4
    assert told["found"], "launches afterwards find what was compiled"
    assert len(list(tmp_path.rglob("_twice.cubin"))) == 4, "a launch finds them on the disk, too"
    assert "a kernel that does not compile" in told["error"]
    assert told["hook"] is None
