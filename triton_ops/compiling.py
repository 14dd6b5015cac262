"""Compiling many kernels at once, on threads: Triton holds Python's lock for a fifth of the time alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from triton_ops.implementation import triton

_one_at_a_time = threading.Lock()  # Triton has one hook for all


@contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Within it, launches by this thread of kernels that this process lacks are left out; on leaving, threads
    compile these kernels, or load them from the disk. Raises what the first that fails raises.

    What follows a launch that is left out must not run: it would read what nobody has written.
    """
    launching = threading.get_ident()
    wanted: dict[tuple[Any, str], str] = {}  # by kernel and key, what Triton needs to compile it

    def left_out(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != launching:
            return False
        wanted[fn.jit_function, key] = compile["specialization_data"]
        return True

    def make(wanted: tuple[tuple[Any, str], str]) -> None:
        (kernel, _), data = wanted
        with torch.cuda.device(device):
            kernel.preload(data)

    with _one_at_a_time:
        before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, left_out
        try:
            yield
        finally:
            triton.knobs.runtime.jit_cache_hook = before
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(make, wanted.items()))
