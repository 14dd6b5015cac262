"""The least logits that top-k and top-p keep, found without a sort.

The kernel, one program a row, bisects over the bits of the logits, ordered as integers: 16 or 32 halvings, each
a count (top-k) or an exact sum of masses (top-p) of the logits at or above a bound. What makes it cheap is how
little it looks at:

1. The k-th greatest of the row's chunk maxima is a lower bound of the k-th greatest logit: k chunks hold a logit
   at or above it. Without top-k, the maximum of rank GUESS is tried in its place.
2. Only the chunks whose maximum reaches the bound are read. Their logits at or above it, the candidates, are
   copied together: about k.
3. Halvings go over the candidates. They go over the row itself, in L2, where the candidates do not fit CAPACITY, k
   exceeds the number of chunks, or what they weigh is less than p of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import tl, triton
from triton_ops.row_maxima import CHUNK, greatest
from triton_ops.token_mass import exp2_alike, exponent_scale, join_halves, load_scale, mass_halves, token_mass

CAPACITY = 4096  # candidates of a row
GUESS = 128  # rank of the chunk maximum that is tried as a bound of top-p
TILE = 4096  # logits at a time; with fewer a thread, it spills
NUM_WARPS = 8


def reference_thresholds(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor | None, top_ps: Tensor | None
) -> Tensor:
    """The least logits of rows of float32 `logits [R, vocab_size]` that top-k, then top-p, keep: float32 `[R]`."""
    descending = logits.sort(dim=-1, descending=True).values
    scale = exponent_scale(temperatures).unsqueeze(1)
    return least_kept(descending, token_mass(descending, descending[:, :1], scale), top_ks, top_ps)


def least_kept(values: Tensor, mass: Tensor, top_ks: Tensor | None, top_ps: Tensor | None) -> Tensor:
    """The least of `values [R, vocab_size]`, descending, of int64 `mass`, that top-k, then top-p, keep: `[R]`."""
    vocab_size = values.shape[1]
    if top_ks is not None:
        last = torch.where((top_ks > 0) & (top_ks < vocab_size), top_ks, vocab_size).long() - 1
        mass = mass * (values >= values.gather(1, last.unsqueeze(1)))
    else:
        last = torch.full((values.shape[0],), vocab_size - 1, device=values.device)
    if top_ps is not None:
        cumulative = mass.cumsum(dim=-1)
        # A token is kept if those before it fall short of p; all are where p is 1, which float64 might round off.
        wanted = (top_ps.double().unsqueeze(1) * cumulative[:, -1:]).ceil().long()
        short = (cumulative - mass < wanted).sum(dim=-1) - 1
        last = torch.where(top_ps < 1.0, torch.minimum(short.clamp_(min=0), last), last)
    return values.gather(1, last.unsqueeze(1)).squeeze(1)


def logit_thresholds(
    rows: Tensor, maxima: Tensor, temperatures: Tensor, top_ks: Tensor | None, top_ps: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `reference_thresholds`, of `rows [R, vocab_size]` in any float dtype with their `chunk_maxima`, by the
    kernel; -inf where neither filter is on. And the rows' greatest logits, float32 `[R]`.
    """
    num_rows, vocab_size = rows.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    maximum = torch.empty_like(thresholds)
    if num_rows:
        candidates = torch.empty(num_rows, CAPACITY, dtype=rows.dtype, device=rows.device)
        chunks = torch.empty(maxima.shape, dtype=torch.int32, device=rows.device)
        _thresholds_kernel[(num_rows,)](
            rows,
            maxima,
            temperatures,
            top_ks,
            top_ps,
            chunks,
            candidates,
            thresholds,
            maximum,
            rows.stride(0),
            VOCAB_SIZE=vocab_size,
            NUM_CHUNKS=maxima.shape[1],
            MAXIMA=triton.next_power_of_2(maxima.shape[1]),
            CHUNK=CHUNK,
            CAPACITY=CAPACITY,
            GUESS=GUESS,
            TILE=TILE,
            num_warps=NUM_WARPS,
        )
    return thresholds, maximum


@triton.jit
def _key(x):
    """An int32 for each float that is ordered as they are."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 15) & 0x7FFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key


@triton.jit
def _value(key, dtype: tl.constexpr):
    """The float32 whose `_key`, as `dtype`, is the int64 `key`."""
    if dtype.primitive_bitwidth == 16:
        bits = key ^ ((key >> 15) & 0x7FFF)
        value = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _nth_in_tile(keys, rank, BITS: tl.constexpr):
    """The greatest key, int64, that `rank` of the `keys` reach; the least there is where fewer do."""
    least = tl.full((), -(2 ** (BITS - 1)), tl.int64)
    for i in range(BITS):
        tried = least + (tl.full((), 2 ** (BITS - 1), tl.int64) >> i)
        enough = tl.sum((keys >= tried.to(tl.int32)).to(tl.int32), axis=0) >= rank
        least = tl.where(enough, tried, least)
    return least


@triton.jit
def _count(src_ptr, length, bound, TILE: tl.constexpr):
    """How many of `length` floats at `src_ptr` have keys of `bound` or more."""
    index = tl.arange(0, TILE)
    count = tl.zeros((TILE,), tl.int32)
    for start in range(0, length, TILE):
        mask = start + index < length
        x = tl.load(src_ptr + start + index, mask=mask, other=-float("inf"))
        count += (mask & (_key(x) >= bound)).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _mass(src_ptr, length, bound, maximum, scale, TILE: tl.constexpr):
    """The mass, relative to `maximum`, of those of `length` floats whose keys are `bound` or more."""
    index = tl.arange(0, TILE)
    upper = tl.zeros((TILE,), tl.uint32)
    lower = tl.zeros((TILE,), tl.int32)
    for start in range(0, length, TILE):
        x = tl.load(src_ptr + start + index, mask=start + index < length, other=-float("inf"))
        relative = exp2_alike((x.to(tl.float32) - maximum) * scale)
        high, low = mass_halves(tl.where(_key(x) >= bound, relative, 0.0))
        upper += high
        lower += low
    return tl.sum(join_halves(upper, lower), axis=0)


@triton.jit
def _nth(src_ptr, length, rank, BITS: tl.constexpr, TILE: tl.constexpr):
    """The key of the rank-th greatest of `length` floats."""
    least = tl.full((), -(2 ** (BITS - 1)), tl.int64)
    for i in range(BITS):
        tried = least + (tl.full((), 2 ** (BITS - 1), tl.int64) >> i)
        enough = _count(src_ptr, length, tried.to(tl.int32), TILE) >= rank
        least = tl.where(enough, tried, least)
    return least


@triton.jit
def _nth_mass(src_ptr, length, wanted, maximum, scale, BITS: tl.constexpr, TILE: tl.constexpr):
    """The greatest key such that those that reach it weigh `wanted`."""
    least = tl.full((), -(2 ** (BITS - 1)), tl.int64)
    for i in range(BITS):
        tried = least + (tl.full((), 2 ** (BITS - 1), tl.int64) >> i)
        enough = _mass(src_ptr, length, tried.to(tl.int32), maximum, scale, TILE) >= wanted
        least = tl.where(enough, tried, least)
    return least


@triton.jit
def _gather(
    row_ptr, chunks_ptr, num_active, candidates_ptr, bound,
    VOCAB_SIZE: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the logits of the listed chunks whose keys are `bound` or more; how many there are."""
    index = tl.arange(0, TILE)
    count = tl.zeros((), tl.int32)
    for start in range(0, num_active * CHUNK, TILE):
        nth = (start + index) // CHUNK
        chunk = tl.load(chunks_ptr + nth, mask=nth < num_active, other=0)
        col = chunk * CHUNK + index % CHUNK
        mask = (nth < num_active) & (col < VOCAB_SIZE)
        x = tl.load(row_ptr + col, mask=mask, other=-float("inf"))
        taken = mask & (_key(x) >= bound)
        place = count + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + place, x, mask=taken & (place < CAPACITY))
        count += tl.sum(taken.to(tl.int32), axis=0)
    return count


@triton.jit
def _thresholds_kernel(
    logits_ptr,
    maxima_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    chunks_ptr,
    candidates_ptr,
    thresholds_ptr,
    maximum_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    MAXIMA: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
    GUESS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    bits: tl.constexpr = dtype.primitive_bitwidth
    row_ptr = logits_ptr + row * logits_stride
    chunks_ptr += row * NUM_CHUNKS
    candidates_ptr += row * CAPACITY

    index = tl.arange(0, MAXIMA)
    maxima = tl.load(maxima_ptr + row * NUM_CHUNKS + index, mask=index < NUM_CHUNKS, other=-float("inf"))
    maximum = greatest(maxima, 0)
    tl.store(maximum_ptr + row, maximum)

    k = tl.full((), VOCAB_SIZE, tl.int32)
    if top_ks_ptr is not None:
        asked = tl.load(top_ks_ptr + row)
        k = tl.where((asked > 0) & (asked < VOCAB_SIZE), asked, VOCAB_SIZE)
    p = tl.full((), 1.0, tl.float32)
    if top_ps_ptr is not None:
        p = tl.load(top_ps_ptr + row)
    scale, temperature = load_scale(temperatures_ptr, row)
    by_rank = k < VOCAB_SIZE
    threshold = tl.full((), -float("inf"), tl.float32)
    # A greedy row has no use for filters; one with NaN or without a finite logit is rejected anyway.
    if (by_rank | (p < 1.0)) & (temperature > 0.0) & (tl.abs(maximum) < float("inf")):
        keys = _key(maxima.to(dtype))
        rank = tl.where(by_rank, k, GUESS)
        lowest = tl.full((), -(2 ** (bits - 1)), tl.int64)
        bound = lowest
        num_candidates = tl.zeros((), tl.int32)
        if rank <= NUM_CHUNKS:
            bound = _nth_in_tile(keys, rank, bits)
            active = (index < NUM_CHUNKS) & (keys >= bound.to(tl.int32))
            place = tl.cumsum(active.to(tl.int32), axis=0) - 1
            tl.store(chunks_ptr + place, index, mask=active)
            tl.debug_barrier()  # other threads read them
            num_candidates = _gather(
                row_ptr,
                chunks_ptr,
                tl.sum(active.to(tl.int32), axis=0),
                candidates_ptr,
                bound.to(tl.int32),
                VOCAB_SIZE,
                CHUNK,
                CAPACITY,
                TILE,
            )
            tl.debug_barrier()
        few = (rank <= NUM_CHUNKS) & (num_candidates <= CAPACITY)
        key = lowest
        if by_rank:
            if few:
                key = _nth(candidates_ptr, num_candidates, k, bits, TILE)
            else:
                key = _nth(row_ptr, VOCAB_SIZE, k, bits, TILE)
        if p < 1.0:
            if by_rank & few:
                total = _mass(candidates_ptr, num_candidates, key.to(tl.int32), maximum, scale, TILE)
            else:
                total = _mass(row_ptr, VOCAB_SIZE, key.to(tl.int32), maximum, scale, TILE)
            # At least 1: the likeliest token is kept.
            share = p.to(tl.float64) * total.to(tl.float64)
            wanted = share.to(tl.int64)
            wanted = tl.maximum(wanted + (wanted.to(tl.float64) < share).to(tl.int64), 1)  # rounded up
            if few:
                few = by_rank | (
                    _mass(candidates_ptr, num_candidates, bound.to(tl.int32), maximum, scale, TILE) >= wanted
                )
            # No less than the k-th: what top-k left weighs more than p of itself.
            if few:
                key = _nth_mass(candidates_ptr, num_candidates, wanted, maximum, scale, bits, TILE)
            else:
                key = _nth_mass(row_ptr, VOCAB_SIZE, wanted, maximum, scale, bits, TILE)
        threshold = _value(key, dtype)
    tl.store(thresholds_ptr + row, threshold)
