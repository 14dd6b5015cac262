"""Moves KV and states between the device and the host's pool, beside the passes."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch

from memory_pool.kv_transfers import KVTransfer
from memory_pool.pool import HostPool, Pool, as_slots
from radixrt.execution.staging import Staging, packed
from triton_ops.implementation import Impl
from triton_ops.kv.kv_copy import kv_copy


class KVMover:
    """Makes transfers in order; on a GPU on a stream of its own, while the pass before is computed.

    Nothing on this stream waits for passes: a store reads what passes that have ended computed, and no pass in
    flight writes these slots or states, nor reads or writes those that a load writes (see PrefixCache and States).
    Whatever is launched on the passes' stream later waits for all transfers.
    """

    def __init__(self, kv_pool: Pool, host_pool: HostPool, device: torch.device, impl: Impl) -> None:
        self._device, self._impl = device, impl
        self._host_pool = host_pool  # not its tensors alone: the pages are locked as long as the pool lives
        # What kv_copy takes, of the device and of the host: each part of tokens, each part of states.
        self._parts = [
            [(as_slots(memory), as_slots(on_host.memory[name])) for name, memory in pool.memory.items()]
            for pool, on_host in zip(kv_pool.kinds, host_pool.kinds, strict=True)
        ]
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with self._on_stream():
            self._staging = Staging(device)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def run(self, transfers: deque[KVTransfer]) -> None:
        """What `Runner.transfer` promises."""
        slots = {f"source{i}": transfer.sources for i, transfer in enumerate(transfers)}
        slots |= {f"target{i}": transfer.targets for i, transfer in enumerate(transfers)}
        words, layout = packed(slots)
        try:
            with self._on_stream():
                arrays = layout.tensors(self._staging.upload(words))
                for i in range(len(transfers)):
                    sources, targets = arrays[f"source{i}"], arrays[f"target{i}"]
                    # If a part cannot be copied, all are copied again: nothing else was made meanwhile.
                    for on_device, on_host in self._parts[transfers[0].of_states]:
                        if transfers[0].to_host:
                            kv_copy(on_device, sources, on_host, targets, impl=self._impl)
                        else:
                            kv_copy(on_host, sources, on_device, targets, impl=self._impl)
                    transfers.popleft()
        finally:
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait_for_passes(self) -> None:
        """Let later transfers wait for a pass that was launched in part: it counts as ended, computed or not."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
