"""The attention kernels' common steps: scores of a tile, and the running softmax over tiles, in base 2 (Milakov
and Gimelshein, 2018).
"""

from __future__ import annotations

from triton_ops.e4m3 import from_pairs
from triton_ops.implementation import tl, triton

LOG2_E: tl.constexpr = 1.4426950408889634 if tl is None else tl.constexpr(1.4426950408889634)


@triton.jit
def load_heads(pointers, in_head, WHOLE: tl.constexpr):
    """Load `pointers [BLOCK_N, BLOCK_D]`, with zeros beyond a head's end. WHOLE: heads fill their blocks."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=in_head, other=0.0)


@triton.jit
def attend_tile(
    q, k, v, acc, row_max, row_sum, key_positions, positions, slopes, visible,
    scale, softcap, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    ALL_SEE: tl.constexpr = False,
):  # fmt: skip
    """Add the keys `k [BLOCK_N, BLOCK_D]` and their values to the softmax of the rows `q [BLOCK_M, BLOCK_D]`.

    `acc [BLOCK_M, BLOCK_D]` holds the weighted sum of values, `row_max` the greatest score so far in base 2, and
    `row_sum` the sum of the exponentials of scores less `row_max`. `scale` includes log2(e) unless there is a
    softcap. If MASKED, only `visible [BLOCK_M, BLOCK_N]` scores count. ALL_SEE: each row sees a key of the first
    tile.
    """
    v = v.to(q.dtype)  # before the products: between them it would take more registers
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    weights, keep, row_max, row_sum = _weigh(
        scores, row_max, row_sum, key_positions, positions, slopes, visible,
        scale, softcap, MASKED, HAS_SOFTCAP, HAS_ALIBI, ALL_SEE,
    )  # fmt: skip
    acc = acc * keep[:, None]
    acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def attend_pairs(
    q, q_odd, k, v, acc, acc_odd, row_max, row_sum, key_positions, positions, slopes, visible,
    scale, softcap, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    ALL_SEE: tl.constexpr = False,
):  # fmt: skip
    """`attend_tile` for k and v that are pairs of e4m3 elements of a head, int16 `[BLOCK_N, BLOCK_D // 2]` (see
    `from_pairs`). q (float16) and `acc`, `[BLOCK_M, BLOCK_D // 2]`, hold the even elements, `q_odd` and `acc_odd`
    the odd ones.
    """
    k, k_odd = from_pairs(k)
    scores = tl.dot(q, tl.trans(k))
    scores = tl.dot(q_odd, tl.trans(k_odd), scores)
    weights, keep, row_max, row_sum = _weigh(
        scores, row_max, row_sum, key_positions, positions, slopes, visible,
        scale, softcap, MASKED, HAS_SOFTCAP, HAS_ALIBI, ALL_SEE,
    )  # fmt: skip
    weights = weights.to(q.dtype)
    v, v_odd = from_pairs(v)
    acc = tl.dot(weights, v, acc * keep[:, None])
    acc_odd = tl.dot(weights, v_odd, acc_odd * keep[:, None])
    return acc, acc_odd, row_max, row_sum


@triton.jit
def attend_first_tile(
    q, k, v, seen, counted, scale, softcap, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`acc`, `row_max` and `row_sum` of `attend_tile` after a first tile, without ALiBi.

    The sums have the keys that are `counted` `[BLOCK_N]`, `row_max` is that of all that are `seen` `[BLOCK_N]`:
    keys that are only seen are counted with later tiles.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    scores = _capped(scores, scale, softcap) if HAS_SOFTCAP else scores * scale
    row_max = tl.max(tl.where(seen[None, :], scores, float("-inf")), 1)
    weights = tl.exp2(tl.where(counted[None, :], scores, float("-inf")) - row_max[:, None])
    return tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee"), row_max, tl.sum(weights, 1)


@triton.jit
def attend_tile_fixed_max(
    q, k, v, acc, base, row_sum, scale, softcap, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`attend_tile`, without ALiBi, of a tile that all rows see, with `base`, the greatest score of earlier tiles,
    as the fixed maximum: no search for greater scores, and no factor on `acc`.

    Correct unless a score is so far above `base` that its exponential overflows; `overflows` tells afterwards.
    """
    v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if HAS_SOFTCAP:
        weights = tl.exp2(_capped(scores, scale, softcap) - base[:, None])
    else:
        weights = tl.exp2(scores * scale - base[:, None])
    row_sum += tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
    return acc, row_sum


@triton.jit
def overflows(row_sum, DTYPE: tl.constexpr):
    """Whether a weight of `attend_tile_fixed_max` may have been too great for `DTYPE`, in which it is multiplied,
    or its product too great for float32.
    """
    most: tl.constexpr = 2.0**15 if tl.float16 == DTYPE else 2.0**96
    return tl.max((row_sum > most).to(tl.int32), 0) > 0


@triton.jit
def _capped(scores, scale, softcap):
    """Scores with a softcap, in base 2. This form of tanh is correct even if its exponential is infinite."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / softcap) * LOG2_E) + 1.0)) * LOG2_E


@triton.jit
def _weigh(
    scores, row_max, row_sum, key_positions, positions, slopes, visible,
    scale, softcap, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    ALL_SEE: tl.constexpr,
):  # fmt: skip
    """The exponentials of a tile's scores, the factor on earlier sums, and the new `row_max` and `row_sum`."""
    if HAS_SOFTCAP:
        scores = _capped(scores, scale, softcap)
    elif HAS_ALIBI:
        scores = scores * scale
    if HAS_ALIBI:
        # Exact, as positions are below 2^24, and subtracting floats takes fewer registers than converting each.
        distance = key_positions.to(tl.float32)[None, :] - positions.to(tl.float32)[:, None]
        scores += (slopes * LOG2_E)[:, None] * distance
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    greatest = tl.max(scores, 1)
    if not (HAS_SOFTCAP or HAS_ALIBI):
        greatest *= scale
    greatest = tl.maximum(row_max, greatest)
    # A row that has seen nothing yet subtracts 0, as -inf less -inf would be NaN.
    base = tl.where(greatest == float("-inf"), 0.0, greatest) if MASKED and not ALL_SEE else greatest
    if HAS_SOFTCAP or HAS_ALIBI:
        weights = tl.exp2(scores - base[:, None])
    else:
        weights = tl.exp2(scores * scale - base[:, None])  # one multiply-add an element
    keep = tl.exp2(row_max - base)
    row_sum = row_sum * keep + tl.sum(weights, 1)
    return weights, keep, greatest, row_sum


@triton.jit
def finish_rows(acc, row_max, row_sum, sinks, HAS_SINKS: tl.constexpr):
    """The softmax's result and its log-sum-exp in base 2, with `sinks` (a natural logit for each row) as one more
    key without a value; 0 and -inf for a row that saw nothing.
    """
    if HAS_SINKS:
        sink = sinks * LOG2_E
        greatest = tl.maximum(row_max, sink)
        base = tl.where(greatest == float("-inf"), 0.0, greatest)
        keep = tl.exp2(row_max - base)
        acc = acc * keep[:, None]
        row_sum = row_sum * keep + tl.exp2(sink - base)
        row_max = greatest
    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse = tl.where(empty, float("-inf"), row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
    return out, lse


@triton.jit
def write_rows(
    acc, row_max, row_sum, row, partial, is_alone, head, in_tile, sinks, out, lse, partial_out, partial_lse,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Write a tile's rows: to `row` of the result if no other item covers them (`is_alone`), else to `partial` of
    the partial results, to which the merge adds the sinks.
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = in_tile[:, None] & (d < HEAD_DIM)
    if is_alone:
        sink = row_max
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=in_tile, other=0.0)
        result, result_lse = finish_rows(acc, row_max, row_sum, sink, HAS_SINKS)
        at = row.to(tl.int64) * NUM_HEADS + head
        tl.store(out + at[:, None] * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=mask)
        if HAS_LSE:
            tl.store(lse + at, result_lse / LOG2_E, mask=in_tile)
    else:
        result, result_lse = finish_rows(acc, row_max, row_sum, row_max, False)
        at = partial.to(tl.int64) * NUM_HEADS + head
        tl.store(partial_out + at[:, None] * HEAD_DIM + d, result, mask=mask)
        tl.store(partial_lse + at, result_lse, mask=in_tile)
