"""Draws under top-k and top-p from the few tokens that can pass, without a sort.

A program draws for one row:

1. The k-th greatest of the row's chunk maxima is a lower bound of the k-th greatest logit: k chunks hold a logit
   at or above it. Without top-k a guess takes its place, and the total of which p is a share was added up before.
2. Only the chunks whose maximum reaches the bound are read. Their tokens at or above it, the candidates, are
   listed in vocabulary order: about k.
3. The smallest logit kept is found among them by bisection of the logits' bits, ordered as integers: each step is
   a count (top-k) or an exact sum of masses (top-p).
4. The draw is that of `token_draw`, from the candidates alone.

A second launch, with a larger capacity and another guess, serves the rows with more candidates than fit the first
one, or whose candidates weigh less than p. Rows where that fails too are left to `draw_tokens`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import cdiv, next_power_of_2, tl, triton
from triton_ops.sampling.logit_bits import key_of, widened
from triton_ops.sampling.philox import load_uniform
from triton_ops.sampling.row_maxima import CHUNK, greatest
from triton_ops.sampling.token_draw import Draws, choose_block, is_likely
from triton_ops.sampling.token_mass import (
    BLOCK,
    exp2_alike,
    join_halves,
    load_scale,
    mass_halves,
    share_of_mass,
    sum_masses,
)
from triton_ops.tuning import CANDIDATES, SUM_REGISTERS, TOTALS_PARTS, TOTALS_WARPS


def draw_from_candidates(
    rows: Tensor,
    chosen: Tensor,
    maxima: Tensor,
    finite: Tensor | None,
    draws: Draws,
    top_ks: Tensor | None,
    top_ps: Tensor | None,
    min_log2: Tensor | None,
) -> Tensor:
    """Write a token of each row of `rows [R, vocab_size]` to `chosen`, int32 `[R]`. Returns which rows have one,
    bool `[R]`.

    `maxima` are the rows' `chunk_maxima`; `finite` receives `finite_rows` of all rows. The others are as in
    `sample`.
    """
    num_rows, vocab_size = rows.shape
    device, num_chunks = rows.device, maxima.shape[1]
    num_blocks = next_power_of_2(cdiv(vocab_size, BLOCK))
    done = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return done
    size = max(attempt.size for attempt in CANDIDATES)
    chunks = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    values = torch.empty(num_rows, size, dtype=rows.dtype, device=device)
    tokens = torch.empty(num_rows, size, dtype=torch.int32, device=device)
    cumulative = torch.empty(num_rows, size, dtype=torch.int64, device=device)
    anchors = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    totals = torch.empty(num_rows, TOTALS_PARTS, dtype=torch.int64, device=device)
    if top_ps is not None:
        _totals_kernel[(num_rows * TOTALS_PARTS,)](
            rows,
            maxima,
            draws[0],
            top_ks,
            top_ps,
            totals,
            rows.stride(0),
            VOCAB_SIZE=vocab_size,
            NUM_CHUNKS=num_chunks,
            MAXIMA=next_power_of_2(num_chunks),
            BLOCK=BLOCK,
            PARTS=TOTALS_PARTS,
            num_warps=TOTALS_WARPS,
            maxnreg=SUM_REGISTERS,
        )
    for attempt in CANDIDATES:
        _candidates_kernel[(num_rows,)](
            rows,
            maxima,
            *draws,
            top_ks,
            top_ps,
            min_log2,
            chunks,
            values,
            tokens,
            cumulative,
            anchors,
            totals,
            chosen,
            finite,
            done,
            rows.stride(0),
            VOCAB_SIZE=vocab_size,
            NUM_CHUNKS=num_chunks,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            BLOCKS=num_blocks,
            SIZE=attempt.size,
            GUESS=max(1, min(attempt.guess, int(attempt.max_chunks * cdiv(vocab_size, CHUNK)))),
            PARTS=TOTALS_PARTS,
            CHUNKS_AT_ONCE=attempt.chunks,
            IS_FIRST=attempt is CANDIDATES[0],
            num_warps=attempt.num_warps,
            maxnreg=attempt.max_registers,
        )
    return done


@triton.jit
def _nth_key(keys, rank):
    """The greatest key, int64, that at least `rank` of the `keys` reach; there are that many."""
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= rank
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _mass_from(keys, upper, lower, bound):
    """The mass, given in halves, of the keys that reach `bound`."""
    reach = keys >= bound.to(tl.int32)
    return join_halves(tl.sum(tl.where(reach, upper, 0), axis=0), tl.sum(tl.where(reach, lower, 0), axis=0))


@triton.jit
def _list(
    row_ptr, chunks_ptr, num_active, values_ptr, tokens_ptr, bound,
    VOCAB_SIZE: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """List the tokens of these chunks that reach `bound`, and count them."""
    count = tl.zeros((), tl.int32)
    for start in range(0, num_active, CHUNKS_AT_ONCE):
        nth = start + tl.arange(0, CHUNKS_AT_ONCE)
        chunk = tl.load(chunks_ptr + nth, mask=nth < num_active, other=0)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        mask = (nth < num_active)[:, None] & (token < VOCAB_SIZE)
        x = tl.load(row_ptr + token, mask=mask, other=-float("inf"))
        taken = mask & (key_of(x) >= bound)
        numbers = taken.to(tl.int32)
        counts = tl.sum(numbers, 1)
        before = count + tl.cumsum(counts, 0) - counts
        place = before[:, None] + tl.cumsum(numbers, 1) - 1
        taken = taken & (place < SIZE)
        tl.store(values_ptr + place, x, mask=taken)
        tl.store(tokens_ptr + place, token, mask=taken)
        count += tl.sum(counts, 0)
    return count


@triton.jit
def _draw_listed(
    values_ptr, tokens_ptr, cumulative_ptr, anchors_ptr, num_candidates, k, p, total, scale, likeliest, row,
    min_log2_ptr, seeds_ptr, sample_indices_ptr, positions_ptr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token drawn from at most SIZE candidates, or -1 where they weigh less than p of the row.

    `k` is 0 where all of them pass top-k; then p is a share of `total`, otherwise of what top-k leaves.
    """
    i = tl.arange(0, SIZE)
    valid = i < num_candidates
    x = tl.load(values_ptr + i, mask=valid, other=-float("inf"))
    token = tl.load(tokens_ptr + i, mask=valid, other=BLOCK * BLOCKS - 1)
    keys = key_of(x)
    x = x.to(tl.float32)
    least = tl.min(keys, axis=0).to(tl.int64)
    if k > 0:
        least = _nth_key(keys, k)
    chosen = tl.full((), 0, tl.int32)
    if p < 1.0:
        upper, lower = mass_halves(exp2_alike((x - likeliest) * scale))
        if k > 0:
            total = _mass_from(keys, upper, lower, least)
        wanted = share_of_mass(p, total)
        if _mass_from(keys, upper, lower, least) < wanted:
            chosen = tl.full((), -1, tl.int32)
        high = tl.max(keys, axis=0).to(tl.int64) + 1
        while high - least > 1:
            middle = least + (high - least) // 2
            enough = _mass_from(keys, upper, lower, middle) >= wanted
            least = tl.where(enough, middle, least)
            high = tl.where(enough, high, middle)
    if chosen == 0:
        block = token // BLOCK
        kept = valid & (keys >= least.to(tl.int32))
        if min_log2_ptr is not None:
            kept = kept & is_likely(x, likeliest, scale, row, min_log2_ptr)
        relative = exp2_alike((x - tl.load(anchors_ptr + block)) * scale)
        upper, lower = mass_halves(tl.where(kept, relative, 0.0))
        cumulative = tl.cumsum(join_halves(upper, lower), axis=0)
        tl.store(cumulative_ptr + i, cumulative)
        # Places beyond the candidates count in the last block, without mass.
        ends = tl.cumsum(tl.histogram(block, BLOCKS), axis=0)
        tl.debug_barrier()  # other threads read the sums
        until = tl.load(cumulative_ptr + ends - 1, mask=ends > 0, other=0)
        starts = ends - tl.histogram(block, BLOCKS)
        before = tl.load(cumulative_ptr + starts - 1, mask=starts > 0, other=0)
        anchors = tl.load(anchors_ptr + tl.arange(0, BLOCKS))
        uniform = load_uniform(seeds_ptr, sample_indices_ptr, positions_ptr, row)
        is_chosen, target = choose_block(anchors, until - before, likeliest, scale, uniform)
        target += tl.sum(tl.where(is_chosen, before, 0), axis=0)
        nth = tl.sum((cumulative <= target).to(tl.int32), axis=0)
        chosen = tl.load(tokens_ptr + nth)
    return chosen


@triton.jit
def _totals_kernel(
    logits_ptr,
    maxima_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    totals_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    MAXIMA: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The mass of every PARTS-th block of a row that only top-p filters, relative to the row's likeliest token."""
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    scale, temperature = load_scale(temperatures_ptr, row)
    by_rank = False
    if top_ks_ptr is not None:
        k = tl.load(top_ks_ptr + row)
        by_rank = (k > 0) & (k < VOCAB_SIZE)
    if (tl.load(top_ps_ptr + row) >= 1.0) | (temperature <= 0.0) | by_rank:
        return
    index = tl.arange(0, MAXIMA)
    maxima = tl.load(maxima_ptr + row * NUM_CHUNKS + index, mask=index < NUM_CHUNKS, other=-float("inf"))
    likeliest = greatest(maxima, 0)
    total = tl.zeros((), tl.int64)
    if tl.abs(likeliest) < float("inf"):
        for start in range(part * BLOCK, VOCAB_SIZE, PARTS * BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + row * logits_stride + token, mask=token < VOCAB_SIZE, other=-float("inf"))
            total += sum_masses(exp2_alike((widened(x) - likeliest) * scale))
    tl.store(totals_ptr + row * PARTS + part, total)


@triton.jit
def _candidates_kernel(
    logits_ptr,
    maxima_ptr,
    temperatures_ptr,
    seeds_ptr,
    sample_indices_ptr,
    positions_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_log2_ptr,
    chunks_ptr,
    values_ptr,
    tokens_ptr,
    cumulative_ptr,
    anchors_ptr,
    totals_ptr,
    chosen_ptr,
    finite_ptr,
    done_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    GUESS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if not IS_FIRST:
        is_done = tl.load(done_ptr + row)
        if is_done:
            return
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    row_ptr = logits_ptr + row * logits_stride
    maxima_ptr += row * NUM_CHUNKS
    chunks_ptr += row * NUM_CHUNKS
    values_ptr += row * SIZE
    tokens_ptr += row * SIZE
    cumulative_ptr += row * SIZE
    anchors_ptr += row * BLOCKS

    per_block: tl.constexpr = BLOCK // CHUNK
    index = tl.arange(0, BLOCKS)[:, None] * per_block + tl.arange(0, per_block)[None, :]
    by_block = tl.load(maxima_ptr + index, mask=index < NUM_CHUNKS, other=-float("inf"))
    anchors = greatest(by_block, 1)
    likeliest = greatest(anchors, 0)
    tl.store(anchors_ptr + tl.arange(0, BLOCKS), anchors)
    if finite_ptr is not None:
        tl.store(finite_ptr + row, tl.abs(likeliest) < float("inf"))

    k = tl.zeros((), tl.int32)
    if top_ks_ptr is not None:
        asked = tl.load(top_ks_ptr + row)
        k = tl.where((asked > 0) & (asked < VOCAB_SIZE), asked, 0)
    p = tl.full((), 1.0, tl.float32)
    if top_ps_ptr is not None:
        p = tl.load(top_ps_ptr + row)
    scale, temperature = load_scale(temperatures_ptr, row)
    chosen = tl.full((), -1, tl.int32)
    index = tl.arange(0, BLOCKS * per_block)
    maxima = tl.load(maxima_ptr + index, mask=index < NUM_CHUNKS, other=-float("inf"))
    if tl.abs(likeliest) < float("inf"):
        if temperature > 0.0:
            rank = tl.where(k > 0, k, GUESS)
            if ((k > 0) | (p < 1.0)) & (rank <= NUM_CHUNKS) & (k <= SIZE):
                keys = key_of(maxima.to(dtype))
                bound = _nth_key(keys, rank).to(tl.int32)
                active = ((index < NUM_CHUNKS) & (keys >= bound)).to(tl.int32)
                tl.store(chunks_ptr + tl.cumsum(active, axis=0) - 1, index, mask=active > 0)
                tl.debug_barrier()  # other threads read them
                num_candidates = _list(
                    row_ptr, chunks_ptr, tl.sum(active, axis=0), values_ptr, tokens_ptr, bound,
                    VOCAB_SIZE, CHUNK, SIZE, CHUNKS_AT_ONCE,
                )  # fmt: skip
                if num_candidates <= SIZE:
                    tl.debug_barrier()
                    total = tl.zeros((), tl.int64)
                    if k == 0:
                        total = tl.sum(tl.load(totals_ptr + row * PARTS + tl.arange(0, PARTS)), axis=0)
                    chosen = _draw_listed(
                        values_ptr, tokens_ptr, cumulative_ptr, anchors_ptr, num_candidates, k, p, total, scale,
                        likeliest, row, min_log2_ptr, seeds_ptr, sample_indices_ptr, positions_ptr,
                        SIZE, BLOCK, BLOCKS,
                    )  # fmt: skip
        else:  # the first of the greatest
            chunk = tl.min(tl.where(maxima == likeliest, index, NUM_CHUNKS - 1), axis=0)
            inner = tl.arange(0, CHUNK)
            token = chunk * CHUNK + inner
            x = tl.load(row_ptr + token, mask=token < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
            chosen = chunk * CHUNK + tl.min(tl.where(x == likeliest, inner, CHUNK - 1), axis=0)
    else:
        chosen = tl.zeros((), tl.int32)  # the row is rejected: some token
    tl.store(chosen_ptr + row, chosen)
    tl.store(done_ptr + row, chosen >= 0)
