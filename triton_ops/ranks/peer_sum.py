"""Sums over GPUs by one kernel: each writes its part into the others' memory, signals, and adds what has come.

All ranks do the same at once, as in the one-shot all-reduce of TensorRT-LLM. Addends are in the order of ranks, on
each of them and for each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.implementation import cdiv, tl, triton

BLOCK = 2048  # elements of a program
# Attempts at a signal, of about a microsecond each: then its rank is given up, and so are all later ones.
PATIENCE = 10_000_000
_COUNTERS = 4  # of a rank by itself: sums begun, programs of the last one that have ended, whether it gave up


@dataclass(frozen=True)
class PeerMemory:
    """What the ranks write into, as one of them sees it; all are on GPUs that reach each other's memory.

    Attributes:
        rank: the own one.
        data: of each rank, uint8: two places for a part of each rank.
        signals: of each rank, int32 `[programs, ranks]`, zeros.
        counters: its own, int32 `[4]`, zeros.
    """

    rank: int
    data: Sequence[Tensor]
    signals: Sequence[Tensor]
    counters: Tensor

    @staticmethod
    def own(num_ranks: int, num_bytes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """`data`, `signals` and `counters` of one rank, for parts of up to so many bytes."""
        data = torch.empty(2 * num_ranks * num_bytes, dtype=torch.uint8, device=device)
        programs = cdiv(num_bytes // 2, BLOCK)
        signals = torch.zeros(programs * num_ranks, dtype=torch.int32, device=device)
        return data, signals, torch.zeros(_COUNTERS, dtype=torch.int32, device=device)

    def addresses(self) -> Tensor:
        """Of data and signals, int64 `[2, ranks]`, on the device."""
        told = [[each.data_ptr() for each in some] for some in (self.data, self.signals)]
        return torch.tensor(told, dtype=torch.int64, device=self.counters.device)


class PeerSum:
    """Sums parts over ranks. All launch the same sums in the same order, each on one stream of its own."""

    def __init__(self, memory: PeerMemory, patience: int = PATIENCE) -> None:
        self._memory, self._addresses, self._patience = memory, memory.addresses(), patience
        self.num_bytes = memory.data[memory.rank].numel() // (2 * len(memory.data))

    def takes(self, part: Tensor) -> bool:
        """Whether a part fits."""
        return part.is_floating_point() and part.itemsize >= 2 and part.nbytes <= self.num_bytes

    def __call__(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts, in the place of `part`, which is contiguous."""
        memory = self._memory
        if not (num_programs := cdiv(part.numel(), BLOCK)):
            return part
        _peer_sum_kernel[(num_programs,)](
            part,
            self._addresses,
            memory.counters,
            part.numel(),
            self.num_bytes // part.itemsize,
            num_programs,
            self._patience,
            RANK=memory.rank,
            SIZE=len(memory.data),
            BLOCK=BLOCK,
            num_warps=8,
        )
        return part


@triton.jit(do_not_specialize=["num_programs", "patience"])
def _peer_sum_kernel(
    part_ptr,
    addresses_ptr,
    counters_ptr,
    size,
    most,
    num_programs,
    patience,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    own = tl.load(part_ptr + offs, mask=mask, other=0.0)
    # The place that the sum before did not use: others may still read that one.
    parity = (tl.load(counters_ptr, volatile=True) & 1).to(tl.int64)
    patience = tl.where(tl.load(counters_ptr + 2, volatile=True) != 0, 0, patience)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            place = tl.load(addresses_ptr + peer).to(tl.pointer_type(part_ptr.dtype.element_ty))
            tl.store(place + (parity * SIZE + RANK) * most + offs, own, mask=mask)
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            signal = tl.load(addresses_ptr + SIZE + peer).to(tl.pointer_type(tl.int32)) + pid * SIZE + RANK
            tries = 0
            while (tl.atomic_cas(signal, 0, 1, sem="acq_rel", scope="sys") != 0) & (tries < patience):
                tries += 1
    total = tl.zeros([BLOCK], tl.float32)
    received = tl.load(addresses_ptr + RANK).to(tl.pointer_type(part_ptr.dtype.element_ty))
    signals = tl.load(addresses_ptr + SIZE + RANK).to(tl.pointer_type(tl.int32)) + pid * SIZE
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            tries = 0
            while (tl.atomic_cas(signals + peer, 1, 0, sem="acq_rel", scope="sys") != 1) & (tries < patience):
                tries += 1
            if tries >= patience:
                tl.store(counters_ptr + 2, 1)
            tl.debug_barrier()
            place = received + (parity * SIZE + peer) * most + offs
            total += tl.load(place, mask=mask, other=0.0, volatile=True).to(tl.float32)
    tl.store(part_ptr + offs, total.to(part_ptr.dtype.element_ty), mask=mask)
    # The last program to end turns the places.
    if tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        tl.store(counters_ptr + 1, 0)
        tl.atomic_add(counters_ptr, 1, sem="release", scope="gpu")
