"""The canonical sum of deterministic attention: every kernel and the form for CPUs add in this one order.

For a query, keys form superblocks at absolute multiples of a number, and groups of 16 at absolute multiples of 16:

- a score becomes a multiple of 2^-14 in base 2 (of 2^-16 for products in float32), by adding a large number, and
  its weight is `exp2(score - base)` with an integer base, rounded to bfloat16: to rescale by another base is
  exact, so it does not matter which tile found which maximum, or whether the base is one;
- within a superblock the groups are added one after the other, in one chain of products of weights and values, and
  to 16 sums of weights, one for each place in a group;
- the results of superblocks, (sum of values, sums of weights, base), are added in ascending order.

Keys that a query does not see have a weight of 0, which changes no sum, so tiles may reach beyond what it sees.
The bits of the result depend on nothing else where a product's bits do not depend on its tile (on Hopper in
bfloat16, and where `tl.dot` adds in order): docs/same-bits.md.
"""

from __future__ import annotations

from triton_ops.attention.softmax import LOG2_E
from triton_ops.implementation import INTERPRETED, tl, triton

# Floats from 512 to 1024 are multiples of 2^-14, those from 128 to 256 of 2^-16. Scores further from 0 are on
# other grids; rescaling is as exact, but for rows whose greatest score is below about -500, or -100 in float32.
OFFSET: tl.constexpr = 768.0 if tl is None else tl.constexpr(768.0)
FLOAT32_OFFSET: tl.constexpr = 192.0 if tl is None else tl.constexpr(192.0)
# Results below this, in units of the sum of weights, are zero: rescaling is exact as far as floats are normal.
TINY: tl.constexpr = 2.0**-80 if tl is None else tl.constexpr(2.0**-80)


@triton.jit
def ordered_tile(
    q, k, v, acc, row_sum, base, key_positions, positions, slopes, visible, scale, softcap,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, FIXED_BASE: tl.constexpr = False,
):  # fmt: skip
    """Add the keys `k [BLOCK_N, BLOCK_D]` and their values to the superblock of the rows `q [BLOCK_M, BLOCK_D]`.

    `acc [BLOCK_M, BLOCK_D]` is the sum of weighted values, `row_sum [BLOCK_M, 16]` those of weights, both in units
    of `exp2(base [BLOCK_M])`; -inf: nothing was seen. `scale` and `softcap` are as in
    `attend_tile`. FIXED_BASE: `base` is finite, and stays; weights that are far above it are infinite.
    """
    v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    fixed: tl.constexpr = FLOAT32_OFFSET if q.dtype == tl.float32 else OFFSET
    offset = tl.zeros_like(scores) + fixed
    # Multiply-adds are written out: left to the compiler, they might differ from kernel to kernel.
    if HAS_ALIBI:
        distance = key_positions.to(tl.float32)[None, :] - positions.to(tl.float32)[:, None]
        offset = tl.fma((slopes * LOG2_E)[:, None], distance, offset)
    if HAS_SOFTCAP:
        bent = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / softcap * LOG2_E)) + 1.0)
        scores = tl.fma(bent, tl.zeros_like(scores) + softcap * LOG2_E, offset)
    else:
        scores = tl.fma(scores, tl.zeros_like(scores) + scale, offset)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    finite = base
    if not FIXED_BASE:
        greatest = tl.maximum(base, tl.ceil(tl.max(scores, 1)) - fixed)
        finite = tl.where(greatest == float("-inf"), 0.0, greatest)
        keep = tl.exp2(base - finite)
        acc *= keep[:, None]
        row_sum *= keep[:, None]
        base = greatest
    weights = tl.exp2(scores - (finite + fixed)[:, None])
    narrow = weights
    if q.dtype != tl.float32:
        narrow, weights = _rounded(weights)
    acc = tl.dot(narrow.to(q.dtype), v, acc, input_precision="ieee")
    return acc, _add_weights(row_sum, weights), base


@triton.jit
def _rounded(weights):
    """Weights, none negative or NaN, rounded to bfloat16, and the same as float32."""
    if INTERPRETED:
        bits = weights.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        wide = bits.to(tl.float32, bitcast=True)
        narrow = wide.to(tl.bfloat16)
    else:
        # Two at a time, and back without converting: as many instructions as cutting takes.
        narrow, wide = tl.inline_asm_elementwise(
            """{
            .reg .b32 first;
            cvt.rn.bf16x2.f32 $0, $4, $3;
            shl.b32 first, $0, 16;
            mov.b32 $1, first;
            and.b32 first, $0, 0xffff0000;
            mov.b32 $2, first;
            }""",
            "=r,=f,=f,f,f",
            [weights],
            dtype=(tl.bfloat16, tl.float32),
            is_pure=True,
            pack=2,
        )
    return narrow, wide


@triton.jit
def _add_weights(sums, weights):
    """`sums [BLOCK_M, 16]` and the `weights [BLOCK_M, BLOCK_N]` of 1, 2 or 4 groups. What is added to what is
    written out, as the order of tl.sum depends on the layout; no number leaves its thread for it.
    """
    ROWS: tl.constexpr = weights.shape[0]
    GROUPS: tl.constexpr = weights.shape[1] // 16
    tl.static_assert(GROUPS == 1 or GROUPS == 2 or GROUPS == 4, "BLOCK_N must be 16, 32 or 64")
    if GROUPS == 1:
        sums += weights
    elif GROUPS == 2:
        first, second = tl.split(tl.permute(tl.reshape(weights, [ROWS, 2, 16]), [0, 2, 1]))
        sums = (sums + first) + second
    else:
        evens, odds = tl.split(tl.permute(tl.reshape(weights, [ROWS, 2, 2, 16]), [0, 3, 1, 2]))
        first, third = tl.split(evens)
        second, fourth = tl.split(odds)
        sums = (((sums + first) + second) + third) + fourth
    return sums


@triton.jit
def sum_places(sums):
    """`[BLOCK_M, 16]` to `[BLOCK_M]`."""
    ROWS: tl.constexpr = sums.shape[0]
    even, odd = tl.split(tl.reshape(sums, [ROWS, 8, 2]))
    even, odd = tl.split(tl.reshape(even + odd, [ROWS, 4, 2]))
    even, odd = tl.split(tl.reshape(even + odd, [ROWS, 2, 2]))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def superblock_factors(total_base, base):
    """What to multiply the superblocks before by, and the next one, and the base of their sum; exact where one of
    them is empty.
    """
    greatest = tl.maximum(total_base, base)
    finite = tl.where(greatest == float("-inf"), 0.0, greatest)
    # Products with powers of two are exact, so it does not matter which of them is fused with the addition.
    return tl.exp2(total_base - finite), tl.exp2(base - finite), greatest


@triton.jit
def add_superblock(total, total_sum, total_base, acc, row_sum, base):
    """The superblocks before, and the next one, with sums of weights `[BLOCK_M]`."""
    left, right, greatest = superblock_factors(total_base, base)
    return total * left[:, None] + acc * right[:, None], total_sum * left + row_sum * right, greatest


@triton.jit
def quarters(x):
    """`[BLOCK_M, BLOCK_D]` to four `[BLOCK_M, BLOCK_D // 4]`, the first of them with the first columns."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    left, right = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))
    first, second = tl.split(tl.permute(tl.reshape(left, [ROWS, 2, COLUMNS // 4]), [0, 2, 1]))
    third, fourth = tl.split(tl.permute(tl.reshape(right, [ROWS, 2, COLUMNS // 4]), [0, 2, 1]))
    return first, second, third, fourth


@triton.jit
def power_of_two(sums):
    """The exponents of the greatest powers of two in `sums`, not negative, and the powers' inverses."""
    biased = sums.to(tl.int32, bitcast=True) >> 23
    return (biased - 127).to(tl.float32), ((254 - biased) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rebase(acc, row_sum, base):
    """The state of a superblock in units of its greatest sum of weights: in those of a base far below that, it
    could be multiplied by factors too small for float32.
    """
    exponent, factor = power_of_two(tl.max(row_sum, 1))
    return acc * factor[:, None], row_sum * factor[:, None], base + exponent


@triton.jit
def finish_sums(total_sum, total_base, sinks, HAS_SINKS: tl.constexpr):
    """What `finish_values` needs, and the log-sum-exp in base 2, as `finish_rows` has it."""
    of_sink = tl.full(total_sum.shape, 1.0, tl.float32)
    if HAS_SINKS:
        sink = sinks * LOG2_E
        base = tl.ceil(sink)
        of_sink, right, total_base = superblock_factors(total_base, base)
        total_sum = total_sum * of_sink + tl.exp2(sink - base) * right
    # In these units nothing depends on bases.
    exponent, factor = power_of_two(total_sum)
    total_sum, total_base = total_sum * factor, total_base + exponent
    empty = total_sum == 0.0
    divisor = tl.where(empty, 1.0, total_sum)
    return of_sink, factor, divisor, tl.where(empty, float("-inf"), total_base + tl.log2(divisor))


@triton.jit
def finish_values(total, of_sink, factor, divisor):
    """The softmax's result `[BLOCK_M, any]`."""
    total = total * of_sink[:, None] * factor[:, None]
    return tl.where(tl.abs(total) < TINY, 0.0, total) / divisor[:, None]
