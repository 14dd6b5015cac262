"""Host memory whose pages are locked, so that a GPU reads and writes it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch


def lock_with(owner: object, buffer: torch.Tensor, device: torch.device) -> None:
    """Lock a buffer's pages as long as `owner` lives, if `device` is a GPU. Raises RuntimeError."""
    if device.type == "cuda" and buffer.nbytes:
        page_lock(buffer, device)
        weakref.finalize(owner, _unlock_pages, buffer.data_ptr(), device).atexit = False


def page_lock(buffer: torch.Tensor, device: torch.device) -> None:
    """Lock a buffer's pages, so that a GPU reads and writes them. Raises RuntimeError."""
    # Not `pin_memory=True`: that rounds the size up to a power of two.
    with torch.cuda.device(device):
        status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        # CUDA reports the failure again at the next call: swallow it here.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise RuntimeError(f"{buffer.nbytes:,} bytes of host memory cannot be page-locked: {status}")


@contextlib.contextmanager
def page_locked(buffer: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Lock a buffer's pages inside, if `device` is a GPU. Raises RuntimeError."""
    if device.type != "cuda":
        yield
        return
    page_lock(buffer, device)
    try:
        yield
    finally:
        _unlock_pages(buffer.data_ptr(), device)


def _unlock_pages(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a copy under way reads or writes these pages
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
