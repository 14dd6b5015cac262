"""Moves KV and states between the device and the host's pool, beside the passes."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch

from memory_pool.kv_transfers import KVTransfer
from memory_pool.state_pool import as_slots
from memory_pool.token_to_kv_pool import HostKVPool, TokenToKVPool
from radixrt.execution.staging import Staging, packed
from triton_ops.implementation import Impl
from triton_ops.kv.kv_copy import kv_copy


class KVMover:
    """Makes transfers in order; on a GPU on a stream of its own, while the pass before is computed.

    Nothing on this stream waits for passes: a store reads what passes that have ended computed, and no pass in
    flight writes these slots or states, nor reads or writes those that a load writes (see PrefixCache and States).
    Whatever is launched on the passes' stream later waits for all transfers.
    """

    def __init__(self, kv_pool: TokenToKVPool, host_pool: HostKVPool, device: torch.device, impl: Impl) -> None:
        self._device, self._impl = device, impl
        self._host_pool = host_pool  # not its tensors alone: the pages are locked as long as the pool lives
        # What kv_copy takes, of the device and of the host.
        self._kv, self._states = [(kv_pool.buffer, host_pool.buffer)], list[tuple[torch.Tensor, torch.Tensor]]()
        if kv_pool.states is not None and host_pool.states is not None:
            for pair in zip(kv_pool.states.parts, host_pool.states.parts, strict=True):
                self._states.append((as_slots(pair[0]), as_slots(pair[1])))
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
                    # If a part of states cannot be copied, all are copied again: nothing else was made meanwhile.
                    for on_device, on_host in self._states if transfers[0].of_states else self._kv:
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
