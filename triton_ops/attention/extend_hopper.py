"""`extend_attention`'s kernel for Hopper, in Gluon: some warps gather KV for others, which multiply by turns, one
half of a tile's rows while the other half computes its softmax (as in FlashAttention-3, Shah et al., 2024).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triton_ops.attention.arguments import Scoring
from triton_ops.attention.merge import Partials
from triton_ops.attention.softmax import LOG2_E
from triton_ops.implementation import GPU, has_gluon, tl, triton
from triton_ops.kv.view import KVView

if has_gluon():
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    # Scores and results, both 64 x 128, of a warpgroup; copies of rows by four warps, 16 bytes a thread.
    _PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
    _COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
else:  # the kernel is defined, though not launched
    jit = triton.jit

_HEAD_DIM = 128
_ROWS = 128  # of a tile: 64 for each of the two warpgroups that multiply
_GROUPS = (1, 2, 4, 8)  # no others were tried; they must divide 64
_KEYS: tl.constexpr = 128 if tl is None else tl.constexpr(128)  # of a tile
_STAGES: tl.constexpr = 2 if tl is None else tl.constexpr(2)  # tiles of K, and of V, under way or in use
# Of a thread; ptxas has 168 for each of the 12 warps, which these share out anew.
_MULTIPLYING_REGISTERS: tl.constexpr = 216 if tl is None else tl.constexpr(216)
_LOADING_REGISTERS: tl.constexpr = 72 if tl is None else tl.constexpr(72)


def runs_hopper(
    gpu: GPU, q: Tensor, k: Tensor, v: Tensor, kv: KVView, scoring: Scoring, tile_tokens: int, out: Tensor
) -> bool:
    """Whether the kernel is for arguments that Triton's kernel takes: those of most models with heads of 128 in
    bfloat16, for tiles of long extends.
    """
    group = q.shape[1] // k.shape[1]
    is_plain = all(
        x is None
        for x in (
            scoring.softcap,
            scoring.window,
            scoring.sinks,
            scoring.alibi_slopes,
            kv.k_scale,
            kv.v_scale,
        )
    )
    return (
        has_gluon()
        and gpu.has_wgmma
        and is_plain
        and all(x.dtype == torch.bfloat16 for x in (q, k, kv.k, out))
        and q.shape[2] == _HEAD_DIM
        and group in _GROUPS
        and tile_tokens * group == _ROWS
        and all(map(_is_aligned, (q, k, v, kv.k, kv.v)))
    )


def _is_aligned(rows: Tensor) -> bool:
    """Whether Triton knows that all of them can be copied by 16 bytes."""
    return rows.data_ptr() % 16 == 0 and rows.stride(0) % 16 == 0 and rows.stride(1) % 16 == 0


def launch_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVView,
    scoring: Scoring,
    partials: Partials,
    out: Tensor,
    lse: Tensor | None,
    num_sms: int,
    **work: Tensor,
) -> None:
    """Write the results of all work items. `work`: the tensors of extends and items by the kernel's names."""
    num_kv_heads = k.shape[1]
    total = work["item_requests"].shape[0] * num_kv_heads
    _extend_hopper_kernel[(min(total, num_sms),)](
        q=q,
        k=k,
        v=v,
        k_buffer=kv.k,
        v_buffer=kv.v,
        req_to_token=kv.req_to_token,
        **work,
        out=out,
        lse=lse,
        partial_out=partials.out,
        partial_lse=partials.lse,
        scale=scoring.scale * math.log2(math.e),
        total=total,
        num_rows=q.shape[0],
        q_row_stride=q.stride(0),
        q_head_stride=q.stride(1),
        kv_head_stride=k.stride(1),
        slot_head_stride=kv.k.stride(1),
        table_stride=kv.req_to_token.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads,
        KV_ROW_STRIDE=k.stride(0),
        SLOT_STRIDE=kv.k.stride(0),
        HAS_LSE=lse is not None,
        num_warps=4,
    )


@jit(do_not_specialize=["total", "num_rows"])
def _extend_hopper_kernel(
    q, k, v, k_buffer, v_buffer, req_to_token,
    req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens,
    item_requests, item_query_starts, item_starts, item_lens, item_partials,
    out, lse, partial_out, partial_lse, scale, total, num_rows,
    q_row_stride, q_head_stride, kv_head_stride, slot_head_stride, table_stride,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    KV_ROW_STRIDE: gl.constexpr, SLOT_STRIDE: gl.constexpr,  # so that an address is one instruction
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A program computes pair after pair of an item and a KV head, `total` in all. Four warps load, two times four
    multiply; barriers say which buffers are full and which are empty, and whose turn it is to multiply.
    """
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], swizzled)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, 128], swizzled)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, 128], swizzled)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(q_full, count=128)  # threads that load
    mbarrier.init(q_empty, count=2)  # warpgroups that multiply
    for i in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(i), count=128)
        mbarrier.init(v_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    gl.warp_specialize(
        [
            (_multiply, (
                out, lse, partial_out, partial_lse, prefix_lens, extend_start_loc, extend_seq_lens,
                item_requests, item_query_starts, item_starts, item_lens, item_partials, scale, total, num_rows,
                q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                0, NUM_KV_HEADS, GROUP, HAS_LSE)),
            (_multiply, (
                out, lse, partial_out, partial_lse, prefix_lens, extend_start_loc, extend_seq_lens,
                item_requests, item_query_starts, item_starts, item_lens, item_partials, scale, total, num_rows,
                q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                1, NUM_KV_HEADS, GROUP, HAS_LSE)),
            (_load, (
                q, k, v, k_buffer, v_buffer, req_to_token,
                req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens,
                item_requests, item_query_starts, item_starts, item_lens,
                q_row_stride, q_head_stride, kv_head_stride, slot_head_stride, table_stride, total, num_rows,
                q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                NUM_KV_HEADS, GROUP, KV_ROW_STRIDE, SLOT_STRIDE)),
        ],
        [4, 4], [_MULTIPLYING_REGISTERS, _LOADING_REGISTERS],
    )  # fmt: skip


@jit
def _nth_work(nth, program, num_programs):
    """The pair that a program computes as its nth one. The longest items come first, and waves go to and fro: no
    program has the longest of each.
    """
    return nth * num_programs + gl.where(nth % 2 == 1, num_programs - 1 - program, program)


@jit
def _is_live(work, total, item_query_starts, num_rows, NUM_KV_HEADS: gl.constexpr):
    """Whether there is such a pair. A padded plan ends in items that begin beyond all rows: of few extends it may
    have six times as many as of others.
    """
    query_start = gl.load(item_query_starts + work // NUM_KV_HEADS, mask=work < total, other=num_rows)
    return query_start < num_rows


@jit
def _item(
    item, prefix_lens, extend_start_loc, extend_seq_lens, item_requests, item_query_starts, item_starts, item_lens
):  # fmt: skip
    """What an item reads. Its tiles come in this order: the new tokens that not all rows see (`new_masked` tiles
    from tile `new_whole` on), the rest of the prefix (`prefix_masked`, 1 or 0), `prefix_whole` whole tiles of it,
    `new_whole` whole tiles of new tokens.
    """
    request = gl.load(item_requests + item)
    query_start = gl.load(item_query_starts + item)
    start = gl.load(item_starts + item)
    end = start + gl.load(item_lens + item)
    prefix_len = gl.load(prefix_lens + request)
    extend_len = gl.load(extend_seq_lens + request)
    first_row = gl.load(extend_start_loc + request)
    cached_end = gl.minimum(end, prefix_len)
    cached = gl.maximum(cached_end - start, 0)
    prefix_whole = cached // _KEYS
    new_start = gl.maximum(start - prefix_len, 0)
    new_end = gl.minimum(end - prefix_len, extend_len)
    new_tiles = (gl.maximum(new_end - new_start, 0) + _KEYS - 1) // _KEYS
    new_whole = gl.maximum(gl.minimum(query_start + 1, new_end) - new_start, 0) // _KEYS
    # At least one tile, though of nothing: then the pipeline needs no special case.
    prefix_masked = ((cached % _KEYS > 0) | (new_tiles + prefix_whole == 0)).to(gl.int32)
    return (
        request, query_start, start, cached_end, prefix_whole, prefix_masked, new_start, new_end,
        new_whole, new_tiles - new_whole, extend_len, first_row,
    )  # fmt: skip


# --- the warps that load ---


@jit
def _copy(smem, head, offset, live, MASKED: gl.constexpr):
    """Start to copy the rows at `head + offset [ROWS]` (int64); zeros where not `live [ROWS]`."""
    d = gl.arange(0, 128, gl.SliceLayout(0, _COPY))
    pointers = head + offset[:, None] + d[None, :]
    if MASKED:
        async_copy.async_copy_global_to_shared(smem, pointers, live[:, None] & (d < 128)[None, :])
    else:
        async_copy.async_copy_global_to_shared(smem, pointers)


@jit
def _copy_tile(
    k_head, v_head, offset, live, k_smem, v_smem, k_full, k_empty, v_full, v_empty, t, MASKED: gl.constexpr
):  # fmt: skip
    """Copy K and V of tile t of this program. Each thread arrives at a barrier when its copies have landed."""
    stage = t % _STAGES
    phase = ((t // _STAGES) & 1) ^ 1
    mbarrier.wait(k_empty.index(stage), phase)
    _copy(k_smem.index(stage), k_head, offset, live, MASKED)
    async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
    mbarrier.wait(v_empty.index(stage), phase)
    _copy(v_smem.index(stage), v_head, offset, live, MASKED)
    async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
    return t + 1


@jit
def _load(
    q, k, v, k_buffer, v_buffer, req_to_token,
    req_pool_indices, prefix_lens, extend_start_loc, extend_seq_lens,
    item_requests, item_query_starts, item_starts, item_lens,
    q_row_stride, q_head_stride, kv_head_stride, slot_head_stride, table_stride, total, num_rows,
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, KV_ROW_STRIDE: gl.constexpr, SLOT_STRIDE: gl.constexpr,
):  # fmt: skip
    """Load the queries and the tiles of each pair."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    n = gl.arange(0, _KEYS, gl.SliceLayout(1, _COPY))
    m = gl.arange(0, 64, gl.SliceLayout(1, _COPY))
    t = 0
    nth = 0
    work = program
    while _is_live(work, total, item_query_starts, num_rows, NUM_KV_HEADS):
        (
            request, query_start, start, cached_end, prefix_whole, prefix_masked, new_start, new_end,
            new_whole, new_masked, extend_len, first_row,
        ) = _item(
            work // NUM_KV_HEADS, prefix_lens, extend_start_loc, extend_seq_lens,
            item_requests, item_query_starts, item_starts, item_lens,
        )  # fmt: skip
        kv_head = work % NUM_KV_HEADS
        slots = req_to_token + gl.load(req_pool_indices + request).to(gl.int64) * table_stride
        # The next tile's slots are carried along, so that copies do not wait for loads.
        first = gl.where(prefix_masked == 1, start + prefix_whole * _KEYS, start)
        slot = gl.load(slots + first + n, mask=first + n < cached_end, other=0)

        mbarrier.wait(q_empty, (nth & 1) ^ 1)
        for half in gl.static_range(2):
            token = query_start + (half * 64 + m) // GROUP
            head = kv_head * GROUP + m % GROUP
            row = (first_row + token).to(gl.int64)
            _copy(q_smem.index(half), q, row * q_row_stride + head * q_head_stride, token < extend_len, True)
        async_copy.mbarrier_arrive(q_full, increment_count=False)

        k_new = k + first_row.to(gl.int64) * KV_ROW_STRIDE + kv_head * kv_head_stride
        v_new = v + first_row.to(gl.int64) * KV_ROW_STRIDE + kv_head * kv_head_stride
        k_head = k_buffer + kv_head.to(gl.int64) * slot_head_stride
        v_head = v_buffer + kv_head.to(gl.int64) * slot_head_stride
        for j in range(new_whole, new_whole + new_masked):
            key = new_start + j * _KEYS + n
            t = _copy_tile(
                k_new, v_new, key.to(gl.int64) * KV_ROW_STRIDE, key < new_end,
                k_smem, v_smem, k_full, k_empty, v_full, v_empty, t, True,
            )  # fmt: skip
        if prefix_masked == 1:
            # Other requests' slots may hold NaN, and 0 * NaN is NaN: neither K nor V is read there.
            offset = slot.to(gl.int64) * SLOT_STRIDE
            live = first + n < cached_end
            slot = gl.load(slots + start + n, mask=start + n < cached_end, other=0)
            t = _copy_tile(k_head, v_head, offset, live, k_smem, v_smem, k_full, k_empty, v_full, v_empty, t, True)
        for j in range(prefix_whole):
            offset = slot.to(gl.int64) * SLOT_STRIDE
            following = start + (j + 1) * _KEYS + n
            slot = gl.load(slots + following, mask=following < cached_end, other=0)
            t = _copy_tile(
                k_head, v_head, offset, n >= 0, k_smem, v_smem, k_full, k_empty, v_full, v_empty, t, False
            )
        for j in range(new_whole):
            key = new_start + j * _KEYS + n
            t = _copy_tile(
                k_new, v_new, key.to(gl.int64) * KV_ROW_STRIDE, n >= 0,
                k_smem, v_smem, k_full, k_empty, v_full, v_empty, t, False,
            )  # fmt: skip
        nth += 1
        work = _nth_work(nth, program, num_programs)


# --- the warps that multiply ---


@jit
def _wait_full(barriers, t):
    """Until tile t has landed. Copies write by another way than products read by."""
    mbarrier.wait(barriers.index(t % _STAGES), (t // _STAGES) & 1)
    fence_async_shared()


@jit
def _weigh(s, row_max, row_sum, limit, scale, MASKED: gl.constexpr):
    """The softmax of a tile's scores, of which row r sees the first `limit[r]` if MASKED, and the factor on what
    came before.
    """
    if MASKED:
        n = gl.arange(0, _KEYS, gl.SliceLayout(0, _PRODUCT))
        s = gl.where(n[None, :] < limit[:, None], s, float("-inf"))
    greatest = gl.maximum(row_max, gl.max(s, 1) * scale)
    # A row that has seen nothing yet subtracts 0, as -inf less -inf would be NaN.
    base = gl.where(greatest == float("-inf"), 0.0, greatest) if MASKED else greatest
    weights = gl.exp2(s * scale - base[:, None])
    keep = gl.exp2(row_max - base)
    return weights, keep, greatest, row_sum * keep + gl.sum(weights, 1)


@jit
def _limit(j, token, start, cached_end, prefix_whole, new_start, new_end, new_whole, new_masked):
    """How many keys of masked tile j each row sees."""
    in_new = gl.minimum(token + 1, new_end) - (new_start + (new_whole + j) * _KEYS)
    return gl.where(j < new_masked, in_new, cached_end - start - prefix_whole * _KEYS)


@jit
def _packed(weights):
    """Pairs of bfloat16, int32 `[64, 64]`: a loop would carry each bfloat16 in a register of its own."""
    even, odd = gl.split(gl.reshape(weights, [64, _KEYS // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@jit
def _unpacked(pairs):
    even = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    weights = gl.reshape(gl.join(even, odd), [64, _KEYS])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, _PRODUCT, 2))


@jit
def _scores(q_tile, k_smem, t):
    """Start to multiply with K of tile t."""
    zeros = gl.zeros([64, _KEYS], gl.float32, _PRODUCT)
    keys = k_smem.index(t % _STAGES).permute((1, 0))
    return warpgroup_mma(q_tile, keys, zeros, use_acc=False, is_async=True)


@jit
def _step(
    q_tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn, pairs, keep, acc, row_max, row_sum, t, limit,
    scale, HALF: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The scores of tile t and the products of the weights of tile t - 1, which run during the softmax of t. The
    factor `keep` on `acc` is due.
    """
    _wait_full(k_full, t)
    mbarrier.wait(turn.index(HALF), (t & 1) ^ (1 - HALF))
    s = _scores(q_tile, k_smem, t)
    acc = acc * keep[:, None]
    weights = _unpacked(pairs)
    _wait_full(v_full, t - 1)
    acc = warpgroup_mma(weights, v_smem.index((t - 1) % _STAGES), acc, is_async=True)
    mbarrier.arrive(turn.index(1 - HALF), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(t % _STAGES), count=1)
    next_weights, keep, row_max, row_sum = _weigh(s, row_max, row_sum, limit, scale, MASKED)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(v_empty.index((t - 1) % _STAGES), count=1)
    return _packed(next_weights), keep, acc, row_max, row_sum


@jit
def _multiply(
    out, lse, partial_out, partial_lse, prefix_lens, extend_start_loc, extend_seq_lens,
    item_requests, item_query_starts, item_starts, item_lens, item_partials, scale, total, num_rows,
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    HALF: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Attention of a half of each tile's rows, from 64 HALF on."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, _PRODUCT))
    q_tile = q_smem.index(HALF)
    t = 0
    nth = 0
    work = program
    while _is_live(work, total, item_query_starts, num_rows, NUM_KV_HEADS):
        item = work // NUM_KV_HEADS
        (
            _request, query_start, start, cached_end, prefix_whole, prefix_masked, new_start, new_end,
            new_whole, new_masked, extend_len, first_row,
        ) = _item(
            item, prefix_lens, extend_start_loc, extend_seq_lens,
            item_requests, item_query_starts, item_starts, item_lens,
        )  # fmt: skip
        token = query_start + row // GROUP
        row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, _PRODUCT))
        row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, _PRODUCT))
        acc = gl.zeros([64, 128], gl.float32, _PRODUCT)

        mbarrier.wait(q_full, nth & 1)
        _wait_full(k_full, t)
        mbarrier.wait(turn.index(HALF), (t & 1) ^ (1 - HALF))
        s = _scores(q_tile, k_smem, t)
        mbarrier.arrive(turn.index(1 - HALF), count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(t % _STAGES), count=1)
        limit = _limit(0, token, start, cached_end, prefix_whole, new_start, new_end, new_whole, new_masked)
        # Where nothing is masked, the first tile is whole.
        limit = gl.where(new_masked + prefix_masked > 0, limit, _KEYS)
        weights, keep, row_max, row_sum = _weigh(s, row_max, row_sum, limit, scale, True)
        pairs = _packed(weights)
        t += 1
        masked = gl.maximum(new_masked + prefix_masked, 1)
        for j in range(1, masked):
            limit = _limit(j, token, start, cached_end, prefix_whole, new_start, new_end, new_whole, new_masked)
            pairs, keep, acc, row_max, row_sum = _step(
                q_tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn,
                pairs, keep, acc, row_max, row_sum, t, limit, scale, HALF, True,
            )  # fmt: skip
            t += 1
        for _ in range(masked, new_masked + prefix_masked + prefix_whole + new_whole):
            pairs, keep, acc, row_max, row_sum = _step(
                q_tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn,
                pairs, keep, acc, row_max, row_sum, t, limit, scale, HALF, False,
            )  # fmt: skip
            t += 1
        mbarrier.arrive(q_empty, count=1)
        _wait_full(v_full, t - 1)
        acc = acc * keep[:, None]
        last = _unpacked(pairs)
        acc = warpgroup_mma(last, v_smem.index((t - 1) % _STAGES), acc, is_async=True)
        acc, last = warpgroup_mma_wait(0, deps=(acc, last))
        mbarrier.arrive(v_empty.index((t - 1) % _STAGES), count=1)

        kv_head = work % NUM_KV_HEADS
        head = kv_head * GROUP + row % GROUP
        in_tile = token < extend_len
        # A row that has seen nothing becomes zero.
        weight = gl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc * (1.0 / weight)[:, None]
        row_lse = gl.where(row_sum == 0.0, float("-inf"), row_max + gl.log2(weight))
        first_partial = gl.load(item_partials + item)
        if first_partial < 0:
            m = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, _COPY))
            out_token = query_start + m // GROUP
            at = (first_row + out_token).to(gl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
            d = gl.arange(0, 128, gl.SliceLayout(0, _COPY))
            result = gl.convert_layout(acc.to(gl.bfloat16), _COPY)
            gl.store(out + at[:, None] * 128 + d[None, :], result, mask=(out_token < extend_len)[:, None])
            if HAS_LSE:
                lse_at = (first_row + token).to(gl.int64) * (NUM_KV_HEADS * GROUP) + head
                gl.store(lse + lse_at, row_lse / LOG2_E, mask=in_tile)
        else:
            partial = (first_partial + row // GROUP).to(gl.int64) * (NUM_KV_HEADS * GROUP) + head
            gl.store(partial_lse + partial, row_lse, mask=in_tile)
            column = gl.arange(0, 128, gl.SliceLayout(0, _PRODUCT))
            gl.store(partial_out + partial[:, None] * 128 + column[None, :], acc, mask=in_tile[:, None])
        nth += 1
        work = _nth_work(nth, program, num_programs)
