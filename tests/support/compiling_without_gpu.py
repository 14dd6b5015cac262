"""A program that compiles two kernels within `compiled_together`, for a Hopper that is not there, and tells what
became of them. Run it in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from triton_ops.compiling import compiled_together


class Driver:
    """Of a GPU that compiles, and launches nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit
def _twice(x_ptr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(x_ptr + place, 2 * tl.load(x_ptr + place))


@triton.jit
def _wrong(x_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 0, "a kernel that does not compile")


def _cached(kernel: Any) -> int:
    return len(kernel.device_caches[0][0])


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    device, x = torch.device("cuda"), torch.zeros(64)
    told: dict[str, Any] = {}
    elsewhere: list[object] = []
    with compiled_together(device):
        for size in (16, 32, 32, 64):
            _twice[(1,)](x, size)
        # A kernel that another thread wants is compiled there, and is not left out.
        other = threading.Thread(target=lambda: elsewhere.append(_twice.run(x, 8, grid=(1,), warmup=True)))
        other.start()
        other.join()
    told["elsewhere"] = type(elsewhere[0]).__name__
    told["compiled"] = _cached(_twice)
    again = [_twice.run(x, size, grid=(1,), warmup=True) for size in (16, 32, 64)]
    told["found"] = _cached(_twice) == told["compiled"] and all("cubin" in kernel.asm for kernel in again)
    _twice.device_caches.clear()
    _twice.run(x, 16, grid=(1,), warmup=True)  # from the disk
    try:
        with compiled_together(device):
            _wrong[(1,)](x, 16)
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    told["hook"] = triton.knobs.runtime.jit_cache_hook
    print(json.dumps(told))


if __name__ == "__main__":
    main()
