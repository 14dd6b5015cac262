"""The KV of tokens that have left the device: one allocation on the host, and the free list of its slots."""

from __future__ import annotations

import contextlib
import weakref

import torch

from memory_pool.slot_allocator import SlotAllocator


class HostKVPool:
    """Host memory for the KV of `num_slots` tokens in all layers; page-locked if `device`, the other end of the
    transfers, is a GPU.

    The memory is token-major, `[num_slots, num_layers, 2, num_kv_heads, head_dim]`: the KV of a token crosses the
    link in one piece. Raises RuntimeError where the memory cannot be allocated or page-locked.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.allocator = SlotAllocator(num_slots)
        self._buffer = torch.empty((num_slots, num_layers, 2, num_kv_heads, head_dim), dtype=dtype, device="cpu")
        if device.type == "cuda":
            page_lock(self._buffer, device)
            weakref.finalize(self, _unlock_pages, self._buffer.data_ptr(), device).atexit = False

    @property
    def buffer(self) -> torch.Tensor:
        """All KV as a view `[num_layers, 2, num_slots, num_kv_heads, head_dim]`: keys, then values."""
        return self._buffer.permute(1, 2, 0, 3, 4)


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


def _unlock_pages(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a copy under way reads or writes these pages
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
