"""The product of experts in MXFP4 for Hopper, in Gluon: some warps load for others, which unpack and multiply."""

# Tests: tests/triton_ops/moe/test_mxfp4.py

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.activations.clamped_swiglu import ALPHA, LIMIT
from triton_ops.implementation import GPU, cdiv, has_gluon, tl, triton
from triton_ops.moe.mxfp4 import Mxfp4
from triton_ops.tuning import mxfp4_stages

if has_gluon():
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Words of the left side of a product, [rows, groups, 4]: of each four neighbouring threads one has the nth
    # word of each group of two rows, which lie 8 apart.
    _WORDS = gl.constexpr(
        gl.DistributedLinearLayout(
            [[8, 0, 0], [0, 1, 0], [0, 2, 0]],
            [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]],
            [],
            [64, 4, 4],
        )
    )
    # The same as they are loaded, and of gate or up, whose rows follow each other by eights.
    _LANES: list[list[int]] = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    _LOADED = gl.constexpr(
        gl.DistributedLinearLayout([[8, 0], [0, 4], [0, 8]], _LANES, [[16, 0], [32, 0]], [], [64, 16])
    )
    _LOADED_HALF = gl.constexpr(
        gl.DistributedLinearLayout([[0, 4], [0, 8]], _LANES, [[8, 0], [16, 0]], [], [32, 16])
    )
    _COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes a thread
else:  # the kernel is defined, though not launched
    jit = triton.jit

COLUMNS = 256  # of a tile. Half as many load x twice as often: 12 % slower with 16,384 tokens, 20 % with 512
DEPTH = 128  # of a step
# For the kernel.
_COLUMNS: tl.constexpr = COLUMNS if tl is None else tl.constexpr(COLUMNS)
_DEPTH: tl.constexpr = DEPTH if tl is None else tl.constexpr(DEPTH)
_ALPHA: tl.constexpr = ALPHA if tl is None else tl.constexpr(ALPHA)
_LIMIT: tl.constexpr = LIMIT if tl is None else tl.constexpr(LIMIT)
# Of a thread; ptxas has 168 for each of the 12 warps, which these share out anew.
_MULTIPLYING_REGISTERS: tl.constexpr = 216 if tl is None else tl.constexpr(216)
_LOADING_REGISTERS: tl.constexpr = 72 if tl is None else tl.constexpr(72)

# Eight codes of a word to four pairs of bfloat16. As bits of a bfloat16 a code is 2^126 times too small: twice, as
# factors up to 2^113 would not be finite otherwise.
_UNPACK_TEXT = """
{
.reg .b32 first, second, third, fourth, sign, scale;
mov.b32 scale, 0x7E007E00;
and.b32 first, $4, 0x81C081C0;
shl.b32 second, $4, 3;
and.b32 second, second, 0x81C081C0;
shl.b32 third, $4, 6;
and.b32 third, third, 0x01C001C0;
shl.b32 sign, $4, 2;
lop3.b32 third, sign, 0x80008000, third, 0xEA;
shr.u32 fourth, $4, 3;
and.b32 fourth, fourth, 0x01C001C0;
shl.b32 sign, $4, 1;
lop3.b32 fourth, sign, 0x80008000, fourth, 0xEA;
mul.rn.bf16x2 first, first, scale;
mul.rn.bf16x2 second, second, scale;
mul.rn.bf16x2 third, third, scale;
mul.rn.bf16x2 fourth, fourth, scale;
mul.rn.bf16x2 $0, first, $5;
mul.rn.bf16x2 $1, second, $5;
mul.rn.bf16x2 $2, third, $5;
mul.rn.bf16x2 $3, fourth, $5;
}
"""
_UNPACK: tl.constexpr = _UNPACK_TEXT if tl is None else tl.constexpr(_UNPACK_TEXT)


def takes_words(gpu: GPU, dtype: torch.dtype) -> bool:
    """Whether the kernel is for these: then matrices have to be in words."""
    return has_gluon() and gpu.has_wgmma and dtype == torch.bfloat16


def launch_hopper(
    a: Tensor,
    matrices: Mxfp4,
    biases: Tensor | None,
    weights: Tensor,
    out: Tensor,
    order: Tensor,
    tiles: Tensor,
    tile_rows: int,
    num_sms: int,
    *,
    num_tokens: int,
    rows_of_a: int,
    top_k: int,
    gate: str,
    to: str,
) -> None:
    """Write to `out` what `_expert_product_kernel` of moe.py does of these, with matrices in words."""
    num_experts, size, inner = matrices.shape
    words = matrices.blocks.view(torch.int32).view(num_experts * size, inner // 8)
    block = [COLUMNS // 2, DEPTH // 8]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
    column_tiles = cdiv(size, COLUMNS)
    _experts_hopper_kernel[(min(len(tiles) * column_tiles, num_sms),)](
        a,
        TensorDescriptor.from_tensor(words, block, layout),
        matrices.scales.view(torch.int32),
        biases,
        weights,
        out,
        order,
        tiles,
        num_tokens,
        len(tiles),
        CHOICES=rows_of_a,
        TOP_K=top_k,
        GATE=bool(gate),
        TO=to,
        HAS_BIAS=biases is not None,
        SIZE=size,
        INNER=inner,
        ROWS=tile_rows,
        STAGES=mxfp4_stages(tile_rows),
        num_warps=4,
        maxnreg=168,
    )


@jit(do_not_specialize=["num_tokens", "max_tiles"])
def _experts_hopper_kernel(
    a, words, scales, biases, weights, out, order, tiles, num_tokens, max_tiles,
    CHOICES: gl.constexpr, TOP_K: gl.constexpr, GATE: gl.constexpr, TO: gl.constexpr, HAS_BIAS: gl.constexpr,
    SIZE: gl.constexpr, INNER: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program computes tile after tile of an expert's rows and 256 of its outputs, which are the left side of
    the product. Four warps load steps of 128 inputs into a ring of STAGES, two times four unpack and multiply.

    With a GATE, a tile has 128 columns of gate and those of up, and their activation is written. See
    `_expert_product_kernel` for all else.
    """
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, _DEPTH], swizzled)
    word_ring = gl.allocate_shared_memory(gl.int32, [2 * STAGES, _COLUMNS // 2, _DEPTH // 8], words.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=129)  # threads that load, and the copy of the words
        mbarrier.init(empty.index(stage), count=2)  # warpgroups that multiply
    fence_async_shared()
    ring = x_ring, word_ring, full, empty
    records = order, tiles, max_tiles
    results = scales, biases, weights, out, num_tokens
    gl.warp_specialize(
        [
            (_multiply, (results, records, ring, 0, TOP_K, GATE, TO, HAS_BIAS, SIZE, INNER, ROWS, STAGES)),
            (_multiply, (results, records, ring, 1, TOP_K, GATE, TO, HAS_BIAS, SIZE, INNER, ROWS, STAGES)),
            (_load, (a, words, records, ring, CHOICES, GATE, SIZE, INNER, ROWS, STAGES)),
        ],
        [4, 4], [_MULTIPLYING_REGISTERS, _LOADING_REGISTERS],
    )  # fmt: skip


@jit
def _expert(records, work, SIZE: gl.constexpr):
    """Whose tile it is; -1 after the last one."""
    _, tiles, max_tiles = records
    tile = work // ((SIZE + _COLUMNS - 1) // _COLUMNS)
    return gl.load(tiles + tile * 3, mask=tile < max_tiles, other=-1)


@jit
def _tile(records, work, GATE: gl.constexpr, SIZE: gl.constexpr):
    """The first row of a tile, the end of its expert's rows, and its first column, of gate if there is one."""
    _, tiles, _ = records
    column_tiles: gl.constexpr = (SIZE + _COLUMNS - 1) // _COLUMNS
    record = tiles + work // column_tiles * 3
    step: gl.constexpr = _COLUMNS // 2 if GATE else _COLUMNS
    return gl.load(record + 1), gl.load(record + 2), work % column_tiles * step


@jit
def _load(
    a, words, records, ring,
    CHOICES: gl.constexpr, GATE: gl.constexpr, SIZE: gl.constexpr, INNER: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    x_ring, word_ring, full, empty = ring
    order, _, _ = records
    n = gl.arange(0, ROWS, gl.SliceLayout(1, _COPY))
    d = gl.arange(0, _DEPTH, gl.SliceLayout(0, _COPY))
    second: gl.constexpr = SIZE // 2 if GATE else _COLUMNS // 2
    t = 0
    work = gl.program_id(0)
    expert = _expert(records, work, SIZE)
    while expert >= 0:
        first, end, column = _tile(records, work, GATE, SIZE)
        # Rows beyond the expert's are not stored: any will do.
        row = gl.where(first + n < end, first + n, first)
        if CHOICES > 0:
            row = gl.load(order + row) // CHOICES
        pointers = a + row.to(gl.int64)[:, None] * INNER + d[None, :]
        box = expert * SIZE + column
        for start in range(0, INNER, _DEPTH):
            stage = t % STAGES
            mbarrier.wait(empty.index(stage), (t // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * words.block_type.nbytes)
            for half in gl.static_range(2):
                at = [box + half * second, start // 8]
                tma.async_copy_global_to_shared(words, at, full.index(stage), word_ring.index(2 * stage + half))
            # Zeros beyond the end, as words are there: 0 * NaN is NaN.
            is_inner = (start + d < INNER)[None, :] & (n >= 0)[:, None]
            async_copy.async_copy_global_to_shared(x_ring.index(stage), pointers + start, is_inner)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            t += 1
        work += gl.num_programs(0)
        expert = _expert(records, work, SIZE)


@jit
def _unpacked(words, factors):
    """Four of pairs of bfloat16, int32 `[64, 2, 4]`, of `words` as large."""
    return gl.inline_asm_elementwise(
        _UNPACK,
        "=&r,=&r,=&r,=&r,r,r",
        [words, factors],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@jit
def _left(pairs, product: gl.constexpr):
    """bfloat16 `[64, 64]`, as the left side of a product."""
    first, second, third, fourth = pairs
    pairs = gl.join(gl.join(first, third), gl.join(second, fourth))
    even = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    values = gl.join(even, odd).reshape([64, 2, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
    return gl.convert_layout(values, gl.DotOperandLayout(0, product, 2))


@jit
def _halves(x):
    """Of groups: `[64, 4, 4]` to two of `[64, 2, 4]`."""
    return x.reshape([64, 2, 2, 4]).permute([0, 2, 3, 1]).split()


@jit
def _multiply(
    results, records, ring, HALF: gl.constexpr, TOP_K: gl.constexpr, GATE: gl.constexpr, TO: gl.constexpr,
    HAS_BIAS: gl.constexpr, SIZE: gl.constexpr, INNER: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Two quarters of a tile's columns, by turns: products of one run while the other is unpacked."""
    scales, biases, weights, out, num_tokens = results
    x_ring, word_ring, full, empty = ring
    order, _, _ = records
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    scale_words: gl.constexpr = (INNER + _DEPTH - 1) // _DEPTH  # of a row
    first_quarter: gl.constexpr = 2 * HALF
    second_quarter: gl.constexpr = 2 * HALF + 1
    t = 0
    work = gl.program_id(0)
    expert = _expert(records, work, SIZE)
    while expert >= 0:
        first, end, column = _tile(records, work, GATE, SIZE)
        scales_0 = _scales(scales, expert, column, scale_words, first_quarter, GATE, SIZE)
        scales_1 = _scales(scales, expert, column, scale_words, second_quarter, GATE, SIZE)
        factors_0 = _factors(gl.load(scales_0))
        factors_1 = _factors(gl.load(scales_1))
        total_0 = gl.zeros([64, ROWS], gl.float32, product)
        total_1 = gl.zeros([64, ROWS], gl.float32, product)
        mbarrier.wait(full.index(t % STAGES), t // STAGES & 1)
        fence_async_shared()
        words_0 = _words(word_ring, t % STAGES, first_quarter, GATE)
        words_1 = _words(word_ring, t % STAGES, second_quarter, GATE)
        pairs = _unpacked(words_0[0], factors_0[0])
        for step in range(1, scale_words):
            next_0 = gl.load(scales_0 + step)
            next_1 = gl.load(scales_1 + step)
            x_tile = x_ring.index(t % STAGES)
            total_0, total_1 = _products(
                total_0, total_1, pairs, words_0, words_1, factors_0, factors_1, x_tile, product
            )
            t += 1
            mbarrier.wait(full.index(t % STAGES), t // STAGES & 1)
            fence_async_shared()
            factors_0 = _factors(next_0)
            factors_1 = _factors(next_1)
            words_0 = _words(word_ring, t % STAGES, first_quarter, GATE)
            words_1 = _words(word_ring, t % STAGES, second_quarter, GATE)
            pairs = _unpacked(words_0[0], factors_0[0])
            # No product may run into the next round: ptxas would wait after each.
            total_0, total_1 = warpgroup_mma_wait(0, deps=(total_0, total_1))
            mbarrier.arrive(empty.index((t - 1) % STAGES), count=1)
        x_tile = x_ring.index(t % STAGES)
        total_0, total_1 = _products(
            total_0, total_1, pairs, words_0, words_1, factors_0, factors_1, x_tile, product
        )
        total_0, total_1 = warpgroup_mma_wait(0, deps=(total_0, total_1))
        mbarrier.arrive(empty.index(t % STAGES), count=1)
        t += 1
        _store(
            total_0, first, end, expert, column, order, biases, weights, out, num_tokens,
            first_quarter, TOP_K, GATE, TO, HAS_BIAS, SIZE, ROWS, product,
        )  # fmt: skip
        _store(
            total_1, first, end, expert, column, order, biases, weights, out, num_tokens,
            second_quarter, TOP_K, GATE, TO, HAS_BIAS, SIZE, ROWS, product,
        )  # fmt: skip
        work += gl.num_programs(0)
        expert = _expert(records, work, SIZE)


@jit
def _products(total_0, total_1, pairs, words_0, words_1, factors_0, factors_1, x_tile, product: gl.constexpr):
    """Multiply a step; the last product may still run."""
    x_0 = x_tile.slice(0, 64, dim=1).permute([1, 0])
    x_1 = x_tile.slice(64, 64, dim=1).permute([1, 0])
    total_0 = warpgroup_mma(_left(pairs, product), x_0, total_0, is_async=True)
    left = _left(_unpacked(words_1[0], factors_1[0]), product)
    total_1 = warpgroup_mma(left, x_0, total_1, is_async=True)
    total_0 = warpgroup_mma_wait(1, deps=(total_0,))
    left = _left(_unpacked(words_0[1], factors_0[1]), product)
    total_0 = warpgroup_mma(left, x_1, total_0, is_async=True)
    total_1 = warpgroup_mma_wait(1, deps=(total_1,))
    left = _left(_unpacked(words_1[1], factors_1[1]), product)
    total_1 = warpgroup_mma(left, x_1, total_1, is_async=True)
    total_0 = warpgroup_mma_wait(1, deps=(total_0,))
    return total_0, total_1


@jit
def _column_of(m, QUARTER: gl.constexpr, GATE: gl.constexpr, SIZE: gl.constexpr):
    """Of row m of a product, from the tile's first column on: eight of gate are followed by those of up."""
    if GATE:
        return m // 8 % 2 * (SIZE // 2) + QUARTER * 32 + m // 16 * 8 + m % 8
    return QUARTER * 64 + m


@jit
def _scales(
    scales, expert, column, scale_words: gl.constexpr, QUARTER: gl.constexpr, GATE: gl.constexpr,
    SIZE: gl.constexpr,
):  # fmt: skip
    """Pointers `[64]` to the first words of rows of scales."""
    m = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, _WORDS)))
    row = gl.minimum(column + _column_of(m, QUARTER, GATE, SIZE), SIZE - 1)
    return scales + (expert * SIZE + row).to(gl.int64) * scale_words


@jit
def _factors(scale):
    """2^(s - 126) in bfloat16, twice, of each s of words of four, for `words` of a step."""
    g = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, _WORDS)))
    factor = (scale[:, None] >> (g * 8)[None, :] & 255) * 0x800080 + 0x800080
    factor, _same = gl.broadcast(factor[:, :, None], gl.zeros([64, 4, 4], gl.int32, _WORDS))
    return _halves(factor)


@jit
def _words(word_ring, stage, QUARTER: gl.constexpr, GATE: gl.constexpr):
    """The words of a quarter's step, halves of int32 `[64, 4, 4]`."""
    if GATE:
        gate = word_ring.index(2 * stage).slice(QUARTER * 32, 32).load(_LOADED_HALF)
        up = word_ring.index(2 * stage + 1).slice(QUARTER * 32, 32).load(_LOADED_HALF)
        both = gl.join(gate, up).reshape([4, 8, 16, 2]).permute([0, 3, 1, 2])
        words = both.reshape([64, 4, 4])
    else:
        rows = word_ring.index(2 * stage + QUARTER // 2).slice(QUARTER % 2 * 64, 64)
        words = rows.load(_LOADED).reshape([64, 4, 4])
    return _halves(gl.convert_layout(words, _WORDS))


@jit
def _store(
    total, first, end, expert, column, order, biases, weights, out, num_tokens, QUARTER: gl.constexpr,
    TOP_K: gl.constexpr, GATE: gl.constexpr, TO: gl.constexpr, HAS_BIAS: gl.constexpr, SIZE: gl.constexpr,
    ROWS: gl.constexpr, product: gl.constexpr,
):  # fmt: skip
    """Write a quarter's `total [64, ROWS]`, or its activation, transposed."""
    if HAS_BIAS:
        m = column + _column_of(gl.arange(0, 64, gl.SliceLayout(1, product)), QUARTER, GATE, SIZE)
        bias = gl.load(biases + expert * SIZE + m, mask=m < SIZE, other=0.0)
        total += bias.to(gl.float32)[:, None]
    width: gl.constexpr = SIZE // 2 if GATE else SIZE
    columns: gl.constexpr = 32 if GATE else 64
    wide: gl.constexpr = 4 if TO == "part" else 8  # elements of 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, wide], [32 * wide // columns, columns // wide], [4, 1], [1, 0])
    n = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if TO == "part":
        own = first + gl.arange(0, ROWS, gl.SliceLayout(0, product))
        place = gl.load(order + own, mask=own < end, other=0)
        total *= gl.load(weights + place, mask=own < end, other=0.0)[None, :]
    result = total.to(out.dtype.element_ty)
    if GATE:
        gate, up = result.reshape([4, 2, 8, ROWS]).permute([0, 2, 3, 1]).reshape([32, ROWS, 2]).split()
        result = _clamped_swiglu(gate, up)
    result = gl.convert_layout(result.permute([1, 0]), layout)
    to = n
    if TO != "row":
        to = gl.load(order + n, mask=n < end, other=0)
    if TO == "part":
        to = to % TOP_K * num_tokens + to // TOP_K
    c = column + QUARTER * columns + gl.arange(0, columns, gl.SliceLayout(0, layout))
    gl.store(
        out + to.to(gl.int64)[:, None] * width + c[None, :], result, mask=(n < end)[:, None] & (c < width)[None, :]
    )


@jit
def _clamped_swiglu(gate, up):
    """As `clamped_swiglu_of`."""
    dtype: gl.constexpr = gate.dtype
    gate, up = gate.to(gl.float32), up.to(gl.float32)
    gate = gl.where(gate > _LIMIT, _LIMIT, gate)
    up = gl.where(up > _LIMIT, _LIMIT, gl.where(up < -_LIMIT, -_LIMIT, up))
    return (gate / (1.0 + gl.exp(gate * -_ALPHA)) * (up + 1.0)).to(dtype)
