"""Where a model runs, and what computes it there."""

from __future__ import annotations

import torch

from radixrt.errors import ParameterError
from triton_ops.e4m3 import FIRST_CAPABILITY
from triton_ops.implementation import Impl, gpu_of, runs_triton


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device of that name; None is CUDA where there is a GPU, else the CPU. Raises ParameterError."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ParameterError(f"device is {device!r}; it must be on cpu or cuda, such as 'cuda:0'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ParameterError(f"device is {device!r}; it must be on cpu or cuda")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ParameterError(f"device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return chosen


def check_kernels(impl: Impl, kv_dtype: str, device: torch.device) -> None:
    """Raise ParameterError unless the implementation runs on the device. Its kernels may not know e4m3 there."""
    try:
        has_kernels = runs_triton(impl, device)
    except ValueError as error:
        raise ParameterError(str(error)) from error
    capability = gpu_of(device).capability
    if has_kernels and kv_dtype == "fp8" and capability < FIRST_CAPABILITY:
        raise ParameterError(
            f"kv_dtype is 'fp8', but {device} has compute capability {capability / 10}; kernels for fp8 need "
            f"{FIRST_CAPABILITY / 10} or higher"
        )
