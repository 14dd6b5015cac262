"""Processes that compile a model's kernels beside its first start, which compiles them one after the other."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from radixrt.processors import usable_processors
from radixrt.workers.process import own_environment

MAX_LINE = 4096  # bytes of what a process says
FEWEST, MOST = 2, 8  # processes: each one imports torch first, and a start has some forty kernels

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """What kernels depend on: a model of one rank, its options, and the GPU."""

    folder: str
    dtype: str
    kv_dtype: str
    quantization: Literal["fp8"] | None
    context_length: int
    max_running_requests: int
    chunked_prefill_size: int
    captures: bool
    tree: bool
    capability: int
    num_sms: int


@contextmanager
def compilers_beside(compiled: Compiled) -> Iterator[None]:
    """Within it, the first kernel that is not on the disk starts processes that compile the kernels of all passes,
    each its share. Nobody waits for them: whoever comes to a kernel that is not there yet compiles it, and
    Triton's cache takes both.
    """
    from triton import knobs  # here: there is none on a CPU

    count = min(MOST, usable_processors() - 1)
    if count < FEWEST:
        yield
        return
    before, is_started = knobs.compilation.listener, False

    def heard(**told: Any) -> None:
        nonlocal is_started
        if before is not None:
            before(**told)
        if not told["cache_hit"] and not is_started:
            is_started = True
            try:
                start_compilers(compiled, count)
            except OSError as error:  # no more processes, or no memory for one: the start does without
                _log.warning("no process compiles kernels beside this one: %s", error)

    knobs.compilation.listener = heard
    try:
        yield
    finally:
        if knobs.compilation.listener is heard:  # else another start, in another thread, has put its own there
            knobs.compilation.listener = before


def start_compilers(compiled: Compiled, count: int) -> list[threading.Thread]:
    """Start `count` processes. Returns the threads that wait for them, and say why one has failed."""
    _log.info("kernels are not on the disk: %d processes compile them, too", count)
    threads, asked = [], json.dumps(asdict(compiled))
    for nth in range(count):
        process = subprocess.Popen(
            [sys.executable, "-m", "radixrt.execution.compilers", str(nth), str(count), asked],
            env={**os.environ, **own_environment(), "CUDA_VISIBLE_DEVICES": ""},  # they take nothing of a GPU
            stdin=subprocess.PIPE,  # it closes when this process ends, and they end with it
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process
        )
        threads.append(threading.Thread(target=_wait_for, args=(process,), daemon=True))
        threads[-1].start()
    return threads


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None
    last = b""
    while line := process.stderr.readline(MAX_LINE):
        last = line.strip() or last
    if process.wait():
        said = last.decode(errors="replace") or "it said nothing"
        _log.warning("a process that compiles kernels ended with status %d: %s", process.returncode, said)


class _Driver:
    """Stands in for a GPU's driver: Triton asks it what to compile for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_share(compiled: Compiled, nth: int, count: int) -> int:
    """Launch all passes of a model that has shapes and no numbers, and compile the `nth` of `count` parts of their
    kernels, in order. Returns how many kernels there are. Nothing can be launched in this process any more.
    """
    import torch
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from memory_pool.req_to_token_pool import ReqToTokenPool
    from memory_pool.token_to_kv_pool import TokenToKVPool
    from radixrt.execution.graphs import GraphRecorder, Launch
    from radixrt.execution.in_flight import HostCopies, HostCopy
    from radixrt.execution.memory_budget import largest_pass
    from radixrt.execution.model_runner import ModelRunner, Tuning
    from radixrt.limits import NO_PASSES, PassLimits
    from radixrt.models.loader import load_model
    from triton_ops.implementation import GPU, compiling_for

    class NoGraphs(GraphRecorder):
        def __init__(self, device: torch.device) -> None:
            pass

        def captured(self, compute: Launch, warm_up: Launch) -> Launch:
            warm_up()
            return compute

    class NoCopies(HostCopies):
        def start(self, tensor: torch.Tensor) -> HostCopy:
            return tensor, tensor

    numbers: dict[tuple[str, object], int] = {}

    def is_left_out(*, key: object, fn: Any, **_: Any) -> bool:
        number = numbers.setdefault((fn.name, key), len(numbers))
        return number % count != nth

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *arguments, grid=grid, warmup=True, **options)

    driver.set_active(_Driver(compiled.capability))
    knobs.runtime.jit_cache_hook = is_left_out
    launch, JITFunction.run = JITFunction.run, compile_only
    device, gpu = torch.device("meta"), GPU(compiled.capability, compiled.num_sms)
    with compiling_for(gpu), torch.inference_mode():
        model, _ = load_model(
            Path(compiled.folder),
            dtype=compiled.dtype,
            device=device,
            context_length=compiled.context_length,
            load_format="dummy",
            impl="triton",
            quantization=compiled.quantization,
        )
        limits = PassLimits(compiled.max_running_requests, compiled.chunked_prefill_size)
        rows = ReqToTokenPool(limits.num_rows, compiled.context_length)
        pool = TokenToKVPool(2, model.kv_layout(getattr(torch, compiled.kv_dtype)), device=device)
        captured = limits if compiled.captures else NO_PASSES
        tuning = Tuning(recorder=NoGraphs)
        runner = ModelRunner(model, rows, pool, device, captured=captured, tree=compiled.tree, tuning=tuning)
        runner.copies = NoCopies(device)
        runner.launch(largest_pass(limits, compiled.context_length))
        runner.capture_largest()
        while runner.capture_next():
            pass
    return len(numbers)


def main() -> None:
    """`python -m radixrt.execution.compilers NTH COUNT JSON`; it ends when its input does."""

    def end() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    nth, count, compiled = int(sys.argv[1]), int(sys.argv[2]), Compiled(**json.loads(sys.argv[3]))
    compile_share(compiled, nth, count)


if __name__ == "__main__":
    main()
