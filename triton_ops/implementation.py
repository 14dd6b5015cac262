"""Which implementation of an operation runs, torch or the Triton kernel, and on which GPU."""

# Tests: tests/triton_ops/test_compile.py, tests/triton_ops/test_tuning.py

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_LAUNCHES = torch.version.cuda is not None or torch.version.hip is not None
try:
    # To import Triton and to read all kernels takes half a second, in vain where torch is built for CPUs. Whoever
    # compiles kernels there for a GPU imports Triton first.
    if not (_LAUNCHES or _INTERPRETED or "triton" in sys.modules):
        raise ModuleNotFoundError
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ModuleNotFoundError:  # Triton exists for Linux alone; torch runs everywhere

    class triton:  # type: ignore[no-redef]
        """Lets kernels be defined, though not launched, without Triton."""

        __version__ = ""

        @staticmethod
        def jit(fn: Any = None, **options: Any) -> Any:
            return fn or triton.jit

    tl = gdc_launch_dependents = gdc_wait = None

__all__ = [
    "GPU",
    "INTERPRETED",
    "Impl",
    "Vendor",
    "cdiv",
    "compiling_for",
    "gdc_launch_dependents",
    "gdc_wait",
    "gpu_of",
    "has_gluon",
    "next_power_of_2",
    "overlapped",
    "runs_triton",
    "tl",
    "triton",
]

# For kernels: whether they run in Triton's interpreter, which differs from a GPU here and there.
INTERPRETED: tl.constexpr = _INTERPRETED if tl is None else tl.constexpr(_INTERPRETED)

Impl = Literal["auto", "torch", "triton"]

FEW_ROWS = 64  # a launch of so many takes hardly longer than to begin and to end
_GLUON_VERSIONS = ("3.6.", "3.7.")  # whose Gluon is the one that kernels are written in: it is experimental


class Vendor(Enum):
    """Who made a GPU."""

    NVIDIA = "nvidia"
    AMD = "amd"


VENDOR = Vendor.AMD if torch.version.hip else Vendor.NVIDIA  # of all GPUs that this build of torch runs on


@dataclass(frozen=True)
class GPU:
    """What a kernel's configuration depends on: compute capability (90 is 9.0), multiprocessors, vendor."""

    capability: int
    num_sms: int
    vendor: Vendor = Vendor.NVIDIA

    def __hash__(self) -> int:  # each launch looks a configuration up; enums hash slowly
        return hash((self.capability, self.num_sms))

    @cached_property
    def has_wgmma(self) -> bool:
        """Whether tensor cores are driven by Hopper's warpgroup instructions; no later architecture has them."""
        return self.vendor is Vendor.NVIDIA and self.capability == 90

    @cached_property
    def overlaps_launches(self) -> bool:
        """Whether a kernel can start before the previous one ends, and wait for its results itself (NVIDIA's
        programmatic dependent launch, since Hopper). Triton's interpreter does not implement it.
        """
        return not _INTERPRETED and self.vendor is Vendor.NVIDIA and self.capability >= 90


INTERPRETER = GPU(capability=90, num_sms=4)  # as a Hopper, with little to share work among
_compiling_for: GPU | None = None


def runs_triton(impl: Impl, device: torch.device) -> bool:
    """Whether an operation on `device` runs its kernel: "auto" does on a CUDA device where Triton is installed.

    Raises ValueError where `impl` is "triton" and the kernel cannot run: on a CPU it does only in Triton's
    interpreter, with TRITON_INTERPRET=1 set before the kernel's module is imported. Raises it, too, for any `impl`
    other than "torch" on a GPU that no kernel is configured for.
    """
    if impl == "torch":
        return False
    if VENDOR is not Vendor.NVIDIA and device.type == "cuda":
        raise ValueError(
            f'impl is "{impl}", but {device} is a GPU of {VENDOR.name}, for which no kernel is configured; '
            'impl "torch" runs there'
        )
    if impl == "auto":
        return device.type == "cuda" and bool(triton.__version__)
    if impl != "triton":
        raise ValueError(f'impl must be "auto", "torch" or "triton", but is {impl!r}')
    if device.type != "cuda" and _compiling_for is None and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f'impl is "triton", but the tensors are on {device}; a kernel needs a CUDA device')
    if not triton.__version__:
        if not (_LAUNCHES or _INTERPRETED) and find_spec("triton") is not None:
            raise ValueError(
                'impl is "triton", but Triton was not imported, as this build of torch is for CPUs; set '
                "TRITON_INTERPRET=1, or import triton, before radixrt is imported"
            )
        raise ValueError('impl is "triton", but Triton is not installed')
    return True


def has_gluon() -> bool:
    """Whether kernels in Gluon, Triton's language of a lower level, can be launched; they are not interpreted."""
    return triton.__version__.startswith(_GLUON_VERSIONS) and not _INTERPRETED


def overlapped(device: torch.device, num_rows: int) -> dict[str, bool]:
    """Keywords of a kernel's launch over `num_rows`. If they are few, it begins before the launch before it has
    ended, where the GPU can; with many, programs that wait would take the place of others. With `EARLY` the kernel
    calls `gdc_wait` before it writes, or reads what others have written, however it is launched: its code, and so
    the bits of a row, do not depend on the number of rows.
    """
    early = gpu_of(device).overlaps_launches
    return {"EARLY": early, **({"launch_pdl": True} if early and num_rows <= FEW_ROWS else {})}


def gpu_of(device: torch.device) -> GPU:
    """The GPU that kernels on `device` are configured for."""
    if _compiling_for is not None:
        return _compiling_for
    return _gpu_of(device)


# Triton's functions of the same names take microseconds on the host, as much as some launches.


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up; both are positive."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, which is positive."""
    return 1 << (n - 1).bit_length()


@cache  # of all devices: each launch asks, and even a device's type takes as long as to find it here
def _gpu_of(device: torch.device) -> GPU:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return GPU(properties.major * 10 + properties.minor, properties.multi_processor_count, VENDOR)


@contextmanager
def compiling_for(gpu: GPU) -> Iterator[None]:
    """Within it, kernels launch on CPU tensors too, configured for `gpu`: for tests that record launches and
    compile them ahead of time.
    """
    global _compiling_for
    before, _compiling_for = _compiling_for, gpu
    try:
        yield
    finally:
        _compiling_for = before
