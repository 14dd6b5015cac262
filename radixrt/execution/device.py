"""Where a model runs, what computes it, and how much KV fits there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import torch

from radixrt.checks import check_float, check_int
from radixrt.errors import ParameterError
from triton_ops.implementation import Impl, gpu_of, runs_triton
from triton_ops.kv.e4m3 import FIRST_CAPABILITY


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device of that name; None is CUDA where there is a GPU, else the CPU. Raises ParameterError."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ParameterError(f"device is {device!r}: {error}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ParameterError(f"device is {device!r}; it must be on cpu or cuda")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ParameterError(f"device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return chosen


@contextmanager
def started_meanwhile(device: torch.device) -> Iterator[None]:
    """Have a GPU make its context beside what stands inside, in a thread that holds Python up little.

    Reading a config imports much of transformers, which keeps the host as busy as the context keeps the driver.
    """
    if device.type != "cuda":
        yield
        return
    with ThreadPoolExecutor(max_workers=1) as starter:
        started = starter.submit(lambda: torch.empty(1, device=device))
        yield
        started.result()


def check_impl(impl: Impl, device: torch.device) -> None:
    """Raise ParameterError unless the implementation can run on the device."""
    try:
        runs_triton(impl, device)
    except ValueError as error:
        raise ParameterError(str(error)) from error


def host_pool_slots(host_memory_gb: float | None, bytes_per_slot: int, *, promised: int) -> int:
    """Slots of a KV pool in `host_memory_gb` 10^9 bytes of the host's memory; 0 for none of it, or None.

    `promised` bytes that count as free are somebody's: memory is handed out when it is first written to.

    Raises:
        ParameterError: that is more than is free, or too little for two slots, of which one is reserved.
    """
    if host_memory_gb is None:
        return 0
    free = max(0, psutil.virtual_memory().available - promised)
    num_bytes = 1e9 * check_float("host_memory_gb", host_memory_gb, 0.0, free / 1e9)
    slots = int(num_bytes) // bytes_per_slot
    if num_bytes and slots < 2:
        raise ParameterError(
            f"host_memory_gb is {host_memory_gb:g}: two KV slots of {bytes_per_slot:,} bytes need more"
        )
    return slots


def check_kv_dtype(kv_dtype: str, impl: Impl, device: torch.device) -> None:
    """Raise ParameterError unless `kv_dtype` is known, also where kernels would have to read e4m3 on a GPU that
    does not know it.
    """
    if kv_dtype not in ("auto", "fp8"):
        raise ParameterError(f"kv_dtype is {kv_dtype!r}; it must be one of: auto, fp8")
    capability = gpu_of(device).capability
    if kv_dtype == "fp8" and runs_triton(impl, device) and capability < FIRST_CAPABILITY:
        raise ParameterError(
            f"kv_dtype is 'fp8', but {device} has compute capability {capability / 10}; kernels for fp8 need "
            f"{FIRST_CAPABILITY / 10} or higher"
        )


def pool_slots(
    device: torch.device,
    bytes_per_slot: int,
    *,
    memory_fraction: float,
    max_total_tokens: int | None,
    promised: int = 0,
) -> int:
    """Slots of a KV pool, the reserved one included: `max_total_tokens`, or what a share of free memory holds.

    `promised` bytes that are free are needed by passes.

    Raises:
        ParameterError: `max_total_tokens` exceeds what is free, or the share does not hold two slots.
    """
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if max_total_tokens is not None:
        return check_int("max_total_tokens", max_total_tokens, 1, max(1, free // bytes_per_slot - 1)) + 1
    fitting = int((free - promised) * memory_fraction) // bytes_per_slot
    if fitting < 2:
        needs = f", of which passes need {promised:,}" if promised else ""
        raise ParameterError(
            f"memory_fraction is {memory_fraction:g}: of {free:,} free bytes{needs}, that is less than a KV slot "
            f"of {bytes_per_slot:,} bytes needs"
        )
    return fitting
