"""Memory of cards of this host that others write into."""

# Tests: tests/ranks/test_on_cards.py, tests/ranks/test_sums_on_cards.py

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from triton_ops.ranks.peer_sum import PeerMemory

# Of a part that is summed so; greater ones are summed by NCCL (docs/lab-notebook/2026-11-26-sums-over-cards.md).
NUM_BYTES = 16 * 2**20


def reaches_all(rank: int, size: int, device: torch.device) -> bool:
    """Whether a card reaches the memory of all others, which are numbered as ranks are."""
    own = _index_of(device)
    cards = range(own - rank, own - rank + size)
    return all(card == own or torch.cuda.can_device_access_peer(own, card) for card in cards)


def shared_memory(store: Any, rank: int, size: int, device: torch.device) -> PeerMemory:
    """That of all ranks, each of which offers its own at the store; waits for the others."""
    data, signals, counters = PeerMemory.own(size, NUM_BYTES, device)
    torch.cuda.synchronize(device)  # signals are 0 before others see them
    for name, tensor in (("data", data), ("signals", signals)):
        told = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        plain = [part.hex() if isinstance(part, bytes) else part for part in told]
        store.set(f"{name} {rank}", json.dumps(plain))

    def of(name: str, own: Tensor, peer: int) -> Tensor:
        if peer == rank:
            return own
        _, *plain = json.loads(store.get(f"{name} {peer}"))
        told = [bytes.fromhex(part) if isinstance(part, str) else part for part in plain]
        # As memory of this card, which is what kernels here may use.
        storage = torch.UntypedStorage._new_shared_cuda(_index_of(device), *told)
        return own.new_empty(0).set_(storage, 0, own.shape, (1,))

    peers = range(size)
    return PeerMemory(
        rank,
        [of("data", data, peer) for peer in peers],
        [of("signals", signals, peer) for peer in peers],
        counters,
    )


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
