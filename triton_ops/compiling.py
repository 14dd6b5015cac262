"""Compiling many kernels at once, on threads: Triton holds Python's lock for a fifth of the time alone."""

# Tests: tests/triton_ops/test_compiling.py

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from triton_ops.implementation import triton

_one_at_a_time = threading.Lock()  # Triton has one hook for all


@contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Within it, launches by this thread of kernels that this process lacks are left out; threads compile these
    kernels, or load them from the disk, and on leaving they are ready. Raises what the first that fails raises.

    What follows a launch that is left out must not run: it would read what nobody has written.
    """
    launching = threading.get_ident()
    started: dict[tuple[Any, str], Future[None]] = {}

    def make(kernel: Any, data: str) -> None:
        with torch.cuda.device(device):
            kernel.preload(data)

    def left_out(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != launching:
            return False
        kernel = fn.jit_function
        if (kernel, key) not in started:
            _ = kernel.cache_key  # before threads need it: Triton 3.6 and others may read it half made
            started[kernel, key] = threads.submit(make, kernel, compile["specialization_data"])
        return True

    # As many as there are processors: ptxas runs beside them in processes of its own.
    with _one_at_a_time, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, left_out
        try:
            yield
        finally:
            triton.knobs.runtime.jit_cache_hook = before
        for made in started.values():
            made.result()
