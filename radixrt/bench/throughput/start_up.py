"""Times a fresh process to its first token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from radixrt.bench.throughput.figures import StartUp
from radixrt.errors import RadixrtError

MAX_SECONDS = 600


def cold_and_warm(runtime_options: Mapping[str, Any]) -> tuple[StartUp, StartUp]:
    """Time two processes: the first compiles all kernels, the second finds them on the disk."""
    with tempfile.TemporaryDirectory() as kernels:
        own = {"TRITON_CACHE_DIR": kernels}
        return measure_start_up(runtime_options, own), measure_start_up(runtime_options, own)


def measure_start_up(runtime_options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> StartUp:
    """Time a process that makes a Runtime and a token, with `environment` added to this process's own.

    `runtime_options` are keyword arguments of Runtime, of JSON's types.

    Raises:
        RadixrtError: the process failed, or took more than MAX_SECONDS.
    """
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "radixrt.bench.throughput.first_token", json.dumps(dict(runtime_options))],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise RadixrtError(f"a fresh process had no first token after {MAX_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RadixrtError(f"a fresh process ended with status {done.returncode} before its first token: {last}")
    times = json.loads(done.stdout.splitlines()[-1])
    return StartUp(
        imports=times["imported"] - began,
        runtime=times["made"] - times["imported"],
        parts=times["parts"],
        first_token=times["first_token"] - times["made"],
        total=times["first_token"] - began,
    )
