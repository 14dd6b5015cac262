"""The kernel of deterministic attention: decodes, extends and shared segments, by the canonical sum."""

from __future__ import annotations

from triton_ops.attention.ordered_softmax import (
    add_superblock,
    finish_sums,
    finish_values,
    ordered_tile,
    quarters,
    rebase,
    sum_places,
    superblock_factors,
)
from triton_ops.attention.softmax import LOG2_E, overflows
from triton_ops.implementation import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit(do_not_specialize=["level"])
def ordered_kernel(
    q, k_buffer, v_buffer, req_to_token, seq_lens,
    req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens, item_requests,
    item_req_pool_indices, item_starts, item_lens, item_query_starts, item_query_lens, item_queries, item_partials,
    item_sources, item_levels, level, taken_starts, taken,
    k_scale, v_scale, sinks, alibi_slopes, out, lse, partial_out, partial_sum, partial_base,
    total_out, total_sums, total_bases, scale, softcap, window,
    q_row_stride, q_head_stride, slot_stride, slot_head_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, SUPERBLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_LSE: tl.constexpr, EXTENDS: tl.constexpr, LISTED: tl.constexpr, HAS_SOURCES: tl.constexpr,
    HAS_TAKEN: tl.constexpr, TOTAL_IN_MEMORY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program is one item and KV head; its tile's rows are the item's query rows times the heads of the group.

    Keys are read through the pool, those of the pass's new tokens too. EXTENDS: items are those of an
    `ExtendPlan`, else of an `AttentionPlan`. LISTED: they are the shared ones of `level`. HAS_SOURCES: items may
    go on from states. HAS_TAKEN: they take partial results in. A tile with TOTAL_IN_MEMORY keeps the sum of
    finished superblocks there: registers have no room for it. EARLY: it begins while the launch before it runs.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    # With a window every tile is masked, and in small ones masks cost less than a second loop.
    MASK_ALL: tl.constexpr = HAS_WINDOW or BLOCK_M == 16 or q.dtype.element_ty == tl.float32
    # The base that a superblock has after its first tile serves for all others that all rows see. If far greater
    # scores turn up, its tiles are computed again by the careful loop, which looks for them in each tile. For
    # ALiBi that loop is the only one: its scores grow from tile to tile.
    FIXED_BASE: tl.constexpr = not (MASK_ALL or HAS_ALIBI)
    MASKED_STAGES: tl.constexpr = NUM_STAGES if MASK_ALL else 1
    item, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, 16)[None, :]
    start = tl.load(item_starts + item)
    end = start + tl.load(item_lens + item)
    first_partial = tl.load(item_partials + item)
    first_query = tl.load(item_query_starts + item)
    if EXTENDS:
        request = tl.load(item_requests + item)
        line = tl.load(req_pool_indices + request)
        query_len = tl.minimum(tl.load(extend_seq_lens + request) - first_query, BLOCK_M // GROUP)
        first_position = tl.load(prefix_lens + request) + first_query
        first_query += tl.load(extend_start_loc + request)
    else:
        line = tl.load(item_req_pool_indices + item)
        query_len = tl.load(item_query_lens + item)
    if LISTED:
        query_len = tl.where(tl.load(item_levels + item) == level, query_len, 0)
    if EARLY:
        if LISTED:
            gdc_launch_dependents()
        gdc_wait()  # without rows, too: later launches rely on all before them
    if not (EXTENDS or LISTED):  # noqa: SIM102 a constant is not joined with what is loaded
        if start == end:
            # An item of nothing has rows that no other has, and may have more than a tile.
            for tile in range(tl.cdiv(query_len * GROUP, BLOCK_M)):
                nth = tile * BLOCK_M + m
                place = (first_query + nth // GROUP).to(tl.int64) * NUM_HEADS + kv_head * GROUP + nth % GROUP
                is_row = nth < query_len * GROUP
                nothing = tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty)
                mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
                tl.store(out + place[:, None] * HEAD_DIM + d[None, :], nothing, mask=mask)
                if HAS_LSE:
                    tl.store(lse + place, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            query_len = 0
    if query_len > 0:
        in_tile = m < query_len * GROUP
        # Beyond the end the last row is read again: a mask unknown to the compiler takes many registers.
        nth = tl.minimum(m // GROUP, query_len - 1)
        row = first_query + nth
        if LISTED:
            row = tl.load(item_queries + row)
        position = first_position + nth if EXTENDS else tl.load(seq_lens + row) - 1
        row = row.to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        in_head = (d < HEAD_DIM)[None, :]
        queries = tl.load(
            q + row[:, None] * q_row_stride + head[:, None] * q_head_stride + d[None, :], mask=in_head, other=0.0
        )
        slopes = tl.zeros([BLOCK_M], tl.float32)
        if HAS_ALIBI:
            slopes = tl.load(alibi_slopes + head)
        slots = req_to_token + line.to(tl.int64) * table_stride
        k_head = k_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
        v_head = v_buffer + kv_head.to(tl.int64) * slot_head_stride + d[None, :]
        if k_scale is not None:
            scale *= tl.load(k_scale + kv_head)
        # Of these tokens every row sees all, whatever the window.
        seen_by_all = tl.minimum(tl.min(position, 0) + 1, end)
        last = tl.maximum(end - 1, 0)
        at = row * NUM_HEADS + head

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_sum = tl.zeros([BLOCK_M, 16], tl.float32)
        base = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if HAS_SOURCES:
            acc, row_sum, base = _go_on(
                acc, row_sum, base, partial_out, partial_sum, partial_base, item_sources + item, True,
                nth, head, NUM_HEADS, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total_sum = tl.zeros([BLOCK_M], tl.float32)
        total_base = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if HAS_TAKEN:
            first_taken, end_taken = tl.load(taken_starts + row), tl.load(taken_starts + row + 1)
            for nth_taken in range(tl.max(end_taken - first_taken, 0)):
                part = tl.load(taken + first_taken + nth_taken).to(tl.int64) * NUM_HEADS + head
                total, total_sum, total_base = _add_partial(
                    total, total_sum, total_base, partial_out, partial_sum, partial_base, part, HEAD_DIM, BLOCK_D
                )

        # A shared item is of one superblock, or of a part of it.
        end_block = start // SUPERBLOCK + 1 if LISTED else (end + SUPERBLOCK - 1) // SUPERBLOCK
        for block in range(start // SUPERBLOCK, end_block):
            block_start = tl.maximum(block * SUPERBLOCK, start)
            block_end = tl.minimum((block + 1) * SUPERBLOCK, end)
            is_next = False if LISTED else block * SUPERBLOCK > start
            if is_next:
                if TOTAL_IN_MEMORY:
                    has_total = (block - 1) * SUPERBLOCK > start
                    tl.debug_barrier()
                    before_sum = tl.load(total_sums + at, mask=has_total, other=0.0)
                    before_base = tl.load(total_bases + at, mask=has_total, other=float("-inf"))
                    left, right, before_base = superblock_factors(before_base, base)
                    # Registers have no room for more of it at once.
                    parts = quarters(acc)
                    for nth_part in tl.static_range(4):
                        column = nth_part * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)[None, :]
                        kept = total_out + at[:, None] * HEAD_DIM + column
                        before = tl.load(kept, mask=(column < HEAD_DIM) & has_total, other=0.0)
                        before = before * left[:, None] + parts[nth_part] * right[:, None]
                        tl.debug_barrier()
                        tl.store(kept, before, mask=column < HEAD_DIM)
                    tl.store(total_sums + at, before_sum * left + sum_places(row_sum) * right)
                    tl.store(total_bases + at, before_base)
                else:
                    total, total_sum, total_base = add_superblock(
                        total, total_sum, total_base, acc, sum_places(row_sum), base
                    )
                # The next tile's factor on `acc` and `row_sum` is 0 then. Were they set to 0 here, ptxas would let
                # every wgmma wait for the one before.
                base = tl.full([BLOCK_M], float("-inf"), tl.float32)
            # Whole tiles that all rows see, then the masked rest.
            whole = tl.minimum(block_end, seen_by_all)
            rest = block_start + tl.maximum(whole - block_start, 0) // BLOCK_N * BLOCK_N
            if MASK_ALL:
                rest = block_start
            # The next tile's slots are carried along, so that loads do not wait for other loads. Beyond the end
            # the last position is read again: other slots may hold NaN, and 0 * NaN is NaN.
            slot = tl.load(slots + tl.minimum(block_start + n, last))
            first_end = block_start
            has_first = FIXED_BASE if LISTED or not FIXED_BASE else rest > block_start
            if has_first:
                # This tile gives the base. A shared item may have no other one, so it is masked there.
                first_end = block_start + BLOCK_N
                offset = slot.to(tl.int64)[:, None] * slot_stride
                slot = tl.load(slots + tl.minimum(first_end + n, last))
                keys = tl.load(k_head + offset, mask=in_head, other=0.0)
                values = tl.load(v_head + offset, mask=in_head, other=0.0)
                acc, row_sum, base = ordered_tile(
                    queries, keys, values, acc, row_sum, base, block_start + n, position, slopes,
                    (block_start + n < block_end)[None, :], scale, softcap, LISTED, HAS_SOFTCAP, False,
                )  # fmt: skip
            for first in tl.range(first_end, rest, BLOCK_N, num_stages=NUM_STAGES):
                offset = slot.to(tl.int64)[:, None] * slot_stride
                slot = tl.load(slots + tl.minimum(first + BLOCK_N + n, last))
                keys = tl.load(k_head + offset, mask=in_head, other=0.0)
                values = tl.load(v_head + offset, mask=in_head, other=0.0)
                acc, row_sum, base = ordered_tile(
                    queries, keys, values, acc, row_sum, base, first + n, position, slopes, in_tile[:, None],
                    scale, softcap, False, HAS_SOFTCAP, HAS_ALIBI, FIXED_BASE,
                )  # fmt: skip
            if FIXED_BASE:
                rest = tl.maximum(first_end, rest)
                again = overflows(tl.max(row_sum, 1), q.dtype.element_ty)
                if again:
                    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                    row_sum = tl.zeros([BLOCK_M, 16], tl.float32)
                    base = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    rest = block_start
                if HAS_SOURCES:  # such an item has no other superblock
                    acc, row_sum, base = _go_on(
                        acc, row_sum, base, partial_out, partial_sum, partial_base, item_sources + item, again,
                        nth, head, NUM_HEADS, HEAD_DIM, BLOCK_D,
                    )  # fmt: skip
                acc, row_sum, base = rebase(acc, row_sum, base)
                slot = tl.load(slots + tl.minimum(rest + n, last))
            for first in tl.range(rest, block_end, BLOCK_N, num_stages=MASKED_STAGES):
                offset = slot.to(tl.int64)[:, None] * slot_stride
                slot = tl.load(slots + tl.minimum(first + BLOCK_N + n, last))
                keys = tl.load(k_head + offset, mask=in_head, other=0.0)
                values = tl.load(v_head + offset, mask=in_head, other=0.0)
                key = first + n
                visible = (key < block_end)[None, :]
                if not LISTED:
                    visible = visible & (key[None, :] <= position[:, None])
                if HAS_WINDOW:
                    visible = visible & (key[None, :] > position[:, None] - window)
                acc, row_sum, base = ordered_tile(
                    queries, keys, values, acc, row_sum, base, key, position, slopes, visible,
                    scale, softcap, True, HAS_SOFTCAP, HAS_ALIBI,
                )  # fmt: skip

        stored = in_tile[:, None] & in_head
        is_alone = False if LISTED else first_partial < 0
        if is_alone:
            before_sum, before_base = total_sum, total_base
            has_total = False
            if TOTAL_IN_MEMORY:
                has_total = (end - 1) // SUPERBLOCK * SUPERBLOCK > start
                tl.debug_barrier()
                before_sum = tl.load(total_sums + at, mask=has_total, other=0.0)
                before_base = tl.load(total_bases + at, mask=has_total, other=float("-inf"))
            left, right, total_base = superblock_factors(before_base, base)
            total_sum = before_sum * left + sum_places(row_sum) * right
            sink = total_base
            if HAS_SINKS:
                sink = tl.load(sinks + head)
            of_sink, factor, divisor, result_lse = finish_sums(total_sum, total_base, sink, HAS_SINKS)
            value_scale = 1.0
            if v_scale is not None:
                value_scale = tl.load(v_scale + kv_head)
            parts, totals = quarters(acc), quarters(total)
            for nth_part in tl.static_range(4):
                column = nth_part * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)[None, :]
                before = totals[nth_part]
                if TOTAL_IN_MEMORY:
                    kept = total_out + at[:, None] * HEAD_DIM + column
                    before = tl.load(kept, mask=(column < HEAD_DIM) & has_total, other=0.0)
                result = before * left[:, None] + parts[nth_part] * right[:, None]
                result = finish_values(result, of_sink, factor, divisor) * value_scale
                tl.store(
                    out + at[:, None] * HEAD_DIM + column, result.to(out.dtype.element_ty),
                    mask=in_tile[:, None] & (column < HEAD_DIM),
                )  # fmt: skip
            if HAS_LSE:
                tl.store(lse + at, result_lse / LOG2_E, mask=in_tile)
        else:
            # The state of its one superblock, which may be open.
            part = (first_partial + m // GROUP).to(tl.int64) * NUM_HEADS + head
            tl.store(partial_out + part[:, None] * HEAD_DIM + d[None, :], acc, mask=stored)
            tl.store(partial_sum + part[:, None] * 16 + lane, row_sum, mask=in_tile[:, None])
            tl.store(partial_base + part, base, mask=in_tile)


@triton.jit
def ordered_merge_kernel(
    partial_out, partial_sum, partial_base, row_partial_starts, row_partials, v_scale, sinks, out, lse,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Add a row's partial results one after the other, in the order of the plan; a row without any is left."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(row_partial_starts + row), tl.load(row_partial_starts + row + 1)
    if start < end:
        d = tl.arange(0, BLOCK_D)[None, :]
        one = tl.zeros([1], tl.int64)
        total = tl.zeros([1, BLOCK_D], tl.float32)
        total_sum = tl.zeros([1], tl.float32)
        total_base = tl.full([1], float("-inf"), tl.float32)
        for index in range(start, end):
            part = tl.load(row_partials + index).to(tl.int64) * NUM_HEADS + head + one
            total, total_sum, total_base = _add_partial(
                total, total_sum, total_base, partial_out, partial_sum, partial_base, part, HEAD_DIM, BLOCK_D
            )
        sink = tl.load(sinks + head + one) if HAS_SINKS else total_base
        of_sink, factor, divisor, result_lse = finish_sums(total_sum, total_base, sink, HAS_SINKS)
        result = finish_values(total, of_sink, factor, divisor)
        if v_scale is not None:
            result *= tl.load(v_scale + head // GROUP)
        at = row.to(tl.int64) * NUM_HEADS + head
        tl.store(out + at * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
        if HAS_LSE:
            tl.store(lse + at + one, result_lse / LOG2_E)


@triton.jit
def _go_on(
    acc, row_sum, base, partial_out, partial_sum, partial_base, source, wanted, nth, head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """States from the number on that `source` points to, of an item's `nth [BLOCK_M]` rows, in place of what is
    given; if they are `wanted`, and there are any.

    Loads are masked, not skipped: with a branch ptxas lets every wgmma wait for the one before.
    """
    first = tl.load(source)
    exists = wanted & (first >= 0)
    part = (tl.maximum(first, 0) + nth).to(tl.int64) * NUM_HEADS + head
    d, lane = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, 16)[None, :]
    acc = tl.load(partial_out + part[:, None] * HEAD_DIM + d, mask=(d < HEAD_DIM) & exists, other=acc)
    row_sum = tl.load(partial_sum + part[:, None] * 16 + lane, mask=exists, other=row_sum)
    return acc, row_sum, tl.load(partial_base + part, mask=exists, other=base)


@triton.jit
def _add_partial(
    total, total_sum, total_base, partial_out, partial_sum, partial_base, part,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The superblocks before, and the partial results `part [BLOCK_M]` of the next one."""
    d = tl.arange(0, BLOCK_D)[None, :]
    acc = tl.load(partial_out + part[:, None] * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
    row_sum = sum_places(tl.load(partial_sum + part[:, None] * 16 + tl.arange(0, 16)[None, :]))
    return add_superblock(total, total_sum, total_base, acc, row_sum, tl.load(partial_base + part))
