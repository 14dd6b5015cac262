"""Sums over GPUs by one kernel, and the addition of a residual and the norm after it in the same one; and parts of
GPUs side by side, by another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triton_ops.activations.elementwise import check_residual, check_vector
from triton_ops.activations.quantised_rows import QuantisedRows
from triton_ops.implementation import cdiv, next_power_of_2, tl, triton
from triton_ops.norms.rms_norm import row_scale, store_norm, weighted
from triton_ops.ranks.exchange import end_sum, exchanged, sum_in_one_shot, sum_in_two_shots
from triton_ops.tuning import row_blocks

BLOCK, TWO_SHOTS_BLOCK = 2048, 4096  # elements of a program that only adds, in one shot and in two
JOIN_BLOCK = 4096  # of one that joins, at most
_WARPS = 8  # of such programs
TWO_SHOTS_TILES = 1  # blocks of `row_blocks` of a program that norms, in two shots
# Bytes of a part of more than two ranks above which a sum takes two shots: it waits twice, but sends less.
TWO_SHOTS_ABOVE = 2**19
# Attempts at a signal, of a quarter of a microsecond each: hosts notice before that a rank has gone.
PATIENCE = 400_000_000
_LEAST_BYTES = 1024  # of a program's part
_COUNTERS = 3  # of a rank by itself: sums that have ended, programs of this one that have, if one was given up


@dataclass(frozen=True)
class PeerMemory:
    """What the ranks write into, as one of them sees it; all are on GPUs that reach each other's memory.

    Attributes:
        rank: the own one.
        data: of each rank, uint8: two places for a part of each rank, or for what it has summed of others.
        signals: of each rank, int64 `[programs, ranks]`, zeros: the latest sum for which that is there.
        counters: its own, int64 `[3]`, zeros.
    """

    rank: int
    data: Sequence[Tensor]
    signals: Sequence[Tensor]
    counters: Tensor

    @staticmethod
    def own(num_ranks: int, num_bytes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """`data`, `signals` and `counters` of one rank, for parts of up to so many bytes."""
        data = torch.empty(2 * num_ranks * num_bytes, dtype=torch.uint8, device=device)
        signals = torch.zeros(cdiv(num_bytes, _LEAST_BYTES) * num_ranks, dtype=torch.int64, device=device)
        return data, signals, torch.zeros(_COUNTERS, dtype=torch.int64, device=device)

    def addresses(self) -> Tensor:
        """Of data and signals, int64 `[2, ranks]`, on the device."""
        told = [[each.data_ptr() for each in some] for some in (self.data, self.signals)]
        return torch.tensor(told, dtype=torch.int64, device=self.counters.device)


class PeerSum:
    """Sums parts over ranks, or joins them. All launch the same sums in the same order, each on one stream of its
    own.

    A rank whose part has not come after so many attempts ends the kernel, and the device is lost: a sum without it
    would be wrong. With `traps` False it is given up instead, and so are all later ones: see `has_given_up`.
    Parts of more bytes than `two_shots_above`, of more than two ranks, are summed in two shots.
    """

    def __init__(
        self,
        memory: PeerMemory,
        patience: int = PATIENCE,
        *,
        traps: bool = True,
        two_shots_above: int = TWO_SHOTS_ABOVE,
    ) -> None:
        self._memory, self._addresses, self._patience = memory, memory.addresses(), patience
        self._traps, self._two_shots_above = traps, two_shots_above
        own = memory.signals[memory.rank]
        self._all_come = torch.full_like(own, 2**62, device="cpu", pin_memory=own.is_cuda)
        self._size = len(memory.data)
        self.num_bytes = memory.data[memory.rank].numel() // (2 * self._size)
        self._most_programs = memory.signals[memory.rank].numel() // self._size

    @property
    def has_given_up(self) -> bool:
        """Whether a part has not come; waits for the device."""
        return bool(self._memory.counters[2])

    def release(self) -> None:
        """Let sums of this rank end that wait for others, now and from now on: what they add is wrong. From any
        thread, by a copy that waits for no kernel.
        """
        own = self._memory.signals[self._memory.rank]
        beside: Any = nullcontext()
        if own.is_cuda:
            beside = torch.cuda.stream(torch.cuda.Stream(own.device))  # type: ignore[no-untyped-call]
        with beside:
            own.copy_(self._all_come, non_blocking=True)

    def takes(self, part: Tensor) -> bool:
        """Whether a part fits."""
        fits = part.is_floating_point() and part.itemsize >= 2 and part.nbytes <= self.num_bytes
        return fits and part.is_contiguous()

    def takes_rows(self, part: Tensor) -> bool:
        """Whether `add_rms_norm` takes a part `[num_tokens, size]`."""
        return self.takes(part) and part.dim() == 2 and len(part) <= self._most_programs

    def __call__(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts, in the place of `part`, which is contiguous."""
        two_shots = self._takes_two_shots(part)
        block = TWO_SHOTS_BLOCK if two_shots else BLOCK
        num_programs = cdiv(part.numel(), block)
        if num_programs:
            _peer_sum_kernel[(num_programs,)](
                part,
                *self._arguments(part, num_programs),
                part.numel(),
                **self._constants,
                TWO_SHOTS=two_shots,
                STEP=_step_of(block, part, _WARPS),
                BLOCK=block,
                num_warps=_WARPS,
            )
        return part

    def joins(self, part: Tensor) -> bool:
        """Whether `join` takes parts `[num_rows, size]`: a row fits."""
        return part.dim() == 2 and part.is_contiguous() and self.takes(part[:1])

    def join(self, part: Tensor, out: Tensor) -> Tensor:
        """Fill `out` `[num_rows, ranks * size]`, contiguous, with the ranks' parts `[num_rows, size]` side by
        side, by as many launches as it takes for each one's rows to fit. Returns it. All are of one dtype: raises
        ValueError where `out` is of another one, or of another shape.
        """
        num_rows, size = part.shape
        if out.shape != (num_rows, self._size * size) or out.dtype != part.dtype or not out.is_contiguous():
            raise ValueError(f"out must be contiguous, {part.dtype} [{num_rows}, {self._size * size}]")
        block = min(JOIN_BLOCK, next_power_of_2(size))
        blocks = cdiv(size, block)  # of a row
        most_rows = min(self.num_bytes // (size * part.itemsize), self._most_programs // blocks)
        rows = max(1, cdiv(num_rows, max(1, cdiv(num_rows, most_rows))))  # of a launch
        for start in range(0, num_rows, rows):
            own = part[start : start + rows]
            num_programs = len(own) * blocks
            _peer_join_kernel[(num_programs,)](
                own,
                *self._arguments(own, num_programs),
                out[start : start + rows],
                **self._constants,
                WIDTH=size,
                BLOCK=block,
                num_warps=_WARPS,
            )
        return out

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`triton_ops.norms.rms_norm.add_rms_norm` of the sum of the ranks' parts, rounded to their dtype: the
        norm, and the sum with the residual. `part` and `residual` are `[num_tokens, size]`, contiguous, `weight`
        is `[size]`, all of one dtype. Raises ValueError where they are not.
        """
        normed = torch.empty_like(part)
        return normed, self._normed(part, residual, weight, eps, normed, None)

    def quantised_rms_norm(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, *, groups: bool
    ) -> tuple[QuantisedRows, Tensor]:
        """`triton_ops.norms.rms_norm.quantised_rms_norm` of the sum, as `add_rms_norm`. Rows have at least 128
        elements where they are quantised in groups.
        """
        rows = QuantisedRows.empty(len(part), part.shape[1], part, groups=groups)
        return rows, self._normed(part, residual, weight, eps, rows.codes, rows.scale, groups=groups)

    def _normed(
        self,
        part: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        scale: Tensor | None,
        *,
        groups: bool = False,
    ) -> Tensor:
        """Write the norm of the sum with the residual, and scales where it is quantised. Returns that sum."""
        check_residual(residual, part)
        check_vector("weight", weight, part)
        if not residual.is_contiguous():
            raise ValueError("residual must be contiguous")
        (num_rows, size), total = part.shape, torch.empty_like(part)
        if num_rows:
            # Rows by as many warps as by `add_rms_norm`, so that squares are added in the same order.
            block, rows, num_warps = row_blocks(size, part.dtype)
            two_shots = self._takes_two_shots(part)
            tiles = TWO_SHOTS_TILES if two_shots else 1
            num_programs = cdiv(num_rows, tiles * rows)
            _peer_add_rms_norm_kernel[(num_programs,)](
                part,
                *self._arguments(part, num_programs),
                residual,
                weight,
                out,
                scale,
                total,
                num_rows,
                eps,
                **self._constants,
                TWO_SHOTS=two_shots,
                GROUPS=groups,
                STEP=_step_of(tiles * rows * size, part, num_warps),
                WIDTH=size,
                BLOCK=block,
                ROWS=rows,
                TILES=tiles,
                num_warps=num_warps,
            )
        return total

    def _takes_two_shots(self, part: Tensor) -> bool:
        return self._size > 2 and part.nbytes > self._two_shots_above

    def _arguments(self, part: Tensor, num_programs: int) -> tuple[object, ...]:
        places = self.num_bytes // part.itemsize
        return self._addresses, self._memory.counters, places, num_programs, self._patience

    @property
    def _constants(self) -> dict[str, int | bool]:
        return {"RANK": self._memory.rank, "SIZE": self._size, "TRAPS": self._traps}


def _step_of(num_elements: int, part: Tensor, num_warps: int) -> int:
    """How many of a program's elements are sent at a time: of each thread two accesses of 16 bytes."""
    return min(next_power_of_2(num_elements), num_warps * 32 * 32 // part.itemsize)


@triton.jit(do_not_specialize=["num_programs", "patience"])
def _peer_sum_kernel(
    part_ptr,
    addresses_ptr,
    counters_ptr,
    most,
    num_programs,
    patience,
    size,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TRAPS: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    element: tl.constexpr = part_ptr.dtype.element_ty
    if TWO_SHOTS:
        sum_ptr = sum_in_two_shots(
            part_ptr, size, addresses_ptr, counters_ptr, most, patience, RANK, SIZE, TRAPS, BLOCK, STEP
        )
        total = tl.load(sum_ptr + offs, mask=mask, other=0.0, volatile=True)
    else:
        own = tl.load(part_ptr + offs, mask=mask, other=0.0)
        total = sum_in_one_shot(own, offs, mask, addresses_ptr, counters_ptr, most, patience, RANK, SIZE, TRAPS)
    tl.store(part_ptr + offs, total.to(element), mask=mask)
    end_sum(counters_ptr, num_programs)


@triton.jit(do_not_specialize=["num_programs", "patience"])
def _peer_join_kernel(
    part_ptr,
    addresses_ptr,
    counters_ptr,
    most,
    num_programs,
    patience,
    out_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TRAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = col < WIDTH
    offs = row * WIDTH + col
    own = tl.load(part_ptr + offs, mask=mask, other=0.0)
    received = exchanged(own, offs, mask, addresses_ptr, counters_ptr, most, patience, RANK, SIZE, TRAPS)
    for peer in tl.static_range(SIZE):
        part = own
        if peer != RANK:
            part = tl.load(received + peer * most + offs, mask=mask, other=0.0, volatile=True)
        tl.store(out_ptr + (row * SIZE + peer) * WIDTH + col, part, mask=mask)
    end_sum(counters_ptr, num_programs)


@triton.jit(do_not_specialize=["num_programs", "patience", "num_rows"])
def _peer_add_rms_norm_kernel(
    part_ptr,
    addresses_ptr,
    counters_ptr,
    most,
    num_programs,
    patience,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    sum_ptr,
    num_rows,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TRAPS: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    if TWO_SHOTS:
        size = num_rows.to(tl.int64) * WIDTH
        elements: tl.constexpr = TILES * ROWS * WIDTH
        total_ptr = sum_in_two_shots(
            part_ptr, size, addresses_ptr, counters_ptr, most, patience, RANK, SIZE, TRAPS, elements, STEP
        )
    for tile in tl.static_range(TILES):
        first_row = (tl.program_id(0) * TILES + tile) * ROWS
        row = (first_row + tl.arange(0, ROWS))[:, None].to(tl.int64)
        col = tl.arange(0, BLOCK)[None, :]
        mask = (row < num_rows) & (col < WIDTH)
        offs = row * WIDTH + col
        if TWO_SHOTS:
            total = tl.load(total_ptr + offs, mask=mask, other=0.0, volatile=True)
        else:
            own = tl.load(part_ptr + offs, mask=mask, other=0.0)
            total = sum_in_one_shot(
                own, offs, mask, addresses_ptr, counters_ptr, most, patience, RANK, SIZE, TRAPS
            )
        other = tl.load(residual_ptr + offs, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + tl.zeros_like(row) + col, mask=mask, other=0.0)
        x = (total.to(dtype).to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + offs, x, mask=mask)
        normed = weighted(x.to(tl.float32) * row_scale(x, eps, WIDTH), weight, dtype, None)
        store_norm(normed, out_ptr, scale_ptr, first_row, num_rows, GROUPS, WIDTH, BLOCK, ROWS)
    end_sum(counters_ptr, num_programs)
