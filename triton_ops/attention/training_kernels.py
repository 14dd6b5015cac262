"""Attention for training: the forward kernel and the two of the backward pass (FlashAttention-2, Dao, 2023).

All tensors are `[batch, heads, length, head_dim]` with any strides but that of the last dimension, which is 1.
Query i sees the keys up to `i + len_k - len_q` if CAUSAL, else all. `lse` and `delta` are float32
`[batch, num_heads, len_q]`, contiguous.

Beyond the end of a tensor its last row is read again: a mask unknown to the compiler takes many registers. Scores
are masked in the tiles of the diagonal and of the last keys alone, except those of float32, whose products leave
no registers for a second loop.
"""

from __future__ import annotations

from triton_ops.attention.softmax import LOG2_E, attend_tile, finish_rows, load_heads
from triton_ops.implementation import tl, triton


@triton.jit
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, scale, len_q, len_k,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A program is one head's tile of BLOCK_M queries. `lse` gets the log-sum-exps in base 2, infinity where a
    query sees nothing: subtracted from any score, it leaves a weight of 0.
    """
    row, first = _query_tile(len_q, BLOCK_M)
    batch, head = row // NUM_HEADS, row % NUM_HEADS
    MASK_ALL: tl.constexpr = q.dtype.element_ty == tl.float32
    whole_end, key_end = _key_range(first, len_q, len_k, BLOCK_M, BLOCK_N, CAUSAL, MASK_ALL)
    token = first + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    queries = _load_rows(_head(q, q_strides, batch, head), q_strides, token, len_q, HEAD_DIM, BLOCK_D)
    k_head = _head(k, k_strides, batch, head // GROUP)
    v_head = _head(v, v_strides, batch, head // GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, whole_end, BLOCK_N, num_stages=NUM_STAGES):
        keys = _load_rows(k_head, k_strides, start + n, None, HEAD_DIM, BLOCK_D)
        values = _load_rows(v_head, v_strides, start + n, None, HEAD_DIM, BLOCK_D)
        acc, row_max, row_sum = attend_tile(
            queries, keys, values, acc, row_max, row_sum, n, token, row_sum, token[:, None] < len_q,
            scale * LOG2_E, 1.0, False, False, False,
        )  # fmt: skip
    for start in tl.range(whole_end, key_end, BLOCK_N, num_stages=1):
        keys = _load_rows(k_head, k_strides, start + n, len_k, HEAD_DIM, BLOCK_D)
        values = _load_rows(v_head, v_strides, start + n, len_k, HEAD_DIM, BLOCK_D)
        visible = _visible(token[:, None], (start + n)[None, :], len_q, len_k, CAUSAL)
        acc, row_max, row_sum = attend_tile(
            queries, keys, values, acc, row_max, row_sum, n, token, row_sum, visible,
            scale * LOG2_E, 1.0, True, False, False,
        )  # fmt: skip
    result, result_lse = finish_rows(acc, row_max, row_sum, row_max, False)
    _store_rows(_head(out, out_strides, batch, head), out_strides, result, token, len_q, HEAD_DIM, BLOCK_D)
    result_lse = tl.where(row_sum == 0.0, float("inf"), result_lse)
    tl.store(lse + row.to(tl.int64) * len_q + token, result_lse, mask=token < len_q)


@triton.jit
def dq_kernel(
    q, k, v, out, d_out, dq, lse, delta, q_strides, k_strides, v_strides, out_strides, d_out_strides, dq_strides,
    scale, len_q, len_k,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A program is one head's tile of BLOCK_M queries. It also writes their `delta`, the sums of d_out * out,
    which `dkv_kernel` reads.
    """
    row, first = _query_tile(len_q, BLOCK_M)
    batch, head = row // NUM_HEADS, row % NUM_HEADS
    MASK_ALL: tl.constexpr = q.dtype.element_ty == tl.float32
    whole_end, key_end = _key_range(first, len_q, len_k, BLOCK_M, BLOCK_N, CAUSAL, MASK_ALL)
    token = first + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    queries = _load_rows(_head(q, q_strides, batch, head), q_strides, token, len_q, HEAD_DIM, BLOCK_D)
    grads = _load_rows(_head(d_out, d_out_strides, batch, head), d_out_strides, token, len_q, HEAD_DIM, BLOCK_D)
    outs = _load_rows(_head(out, out_strides, batch, head), out_strides, token, len_q, HEAD_DIM, BLOCK_D)
    at = row.to(tl.int64) * len_q + token
    means = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(delta + at, means, mask=token < len_q)
    base = tl.load(lse + at, mask=token < len_q, other=float("inf"))
    k_head = _head(k, k_strides, batch, head // GROUP)
    v_head = _head(v, v_strides, batch, head // GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, whole_end, BLOCK_N, num_stages=NUM_STAGES):
        keys = _load_rows(k_head, k_strides, start + n, None, HEAD_DIM, BLOCK_D)
        values = _load_rows(v_head, v_strides, start + n, None, HEAD_DIM, BLOCK_D)
        weights = _weigh(queries, keys, base[:, None], scale)
        d_scores = _score_gradients(weights, grads, values, means[:, None])
        acc = tl.dot(d_scores.to(keys.dtype), keys, acc, input_precision="ieee")
    for start in tl.range(whole_end, key_end, BLOCK_N, num_stages=1):
        keys = _load_rows(k_head, k_strides, start + n, len_k, HEAD_DIM, BLOCK_D)
        values = _load_rows(v_head, v_strides, start + n, len_k, HEAD_DIM, BLOCK_D)
        weights = _weigh(queries, keys, base[:, None], scale)
        weights = tl.where(_visible(token[:, None], (start + n)[None, :], len_q, len_k, CAUSAL), weights, 0.0)
        d_scores = _score_gradients(weights, grads, values, means[:, None])
        acc = tl.dot(d_scores.to(keys.dtype), keys, acc, input_precision="ieee")
    _store_rows(_head(dq, dq_strides, batch, head), dq_strides, acc * scale, token, len_q, HEAD_DIM, BLOCK_D)


@triton.jit
def dkv_kernel(
    q, k, v, d_out, dk, dv, lse, delta, q_strides, k_strides, v_strides, d_out_strides, dk_strides, dv_strides,
    scale, len_q, len_k,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A program is one KV head's tile of BLOCK_N keys, and goes through the queries of all heads of the group,
    side by side in its steps: no other adds to its results. Scores are transposed, `[BLOCK_N, BLOCK_M]`, so that
    they stay in registers as left factors of the next products.
    """
    num_tiles = tl.cdiv(len_k, BLOCK_N)
    head, first = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles * BLOCK_N
    batch, kv_head = head // (NUM_HEADS // GROUP), head % (NUM_HEADS // GROUP)
    key = first + tl.arange(0, BLOCK_N)
    keys = _load_rows(_head(k, k_strides, batch, kv_head), k_strides, key, len_k, HEAD_DIM, BLOCK_D)
    values = _load_rows(_head(v, v_strides, batch, kv_head), v_strides, key, len_k, HEAD_DIM, BLOCK_D)
    q_heads = _head(q, q_strides, batch, kv_head * GROUP)
    d_out_heads = _head(d_out, d_out_strides, batch, kv_head * GROUP)
    lse += head.to(tl.int64) * GROUP * len_q
    delta += head.to(tl.int64) * GROUP * len_q
    k_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    v_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    start, whole_start = 0, 0
    if CAUSAL:
        # The first key is seen from token first - offset on, all keys from the last one's on.
        offset = len_k - len_q
        last = tl.minimum(first + BLOCK_N, len_k) - 1
        start = tl.maximum(first - offset, 0) * GROUP // BLOCK_M * BLOCK_M
        whole_start = tl.cdiv(tl.maximum(last - offset, 0) * GROUP, BLOCK_M) * BLOCK_M
        if q.dtype.element_ty == tl.float32:
            whole_start = len_q * GROUP
        for row in tl.range(start, tl.minimum(whole_start, len_q * GROUP), BLOCK_M, num_stages=2):
            k_acc, v_acc = _add_queries(
                keys, values, k_acc, v_acc, key, row, q_heads, d_out_heads, lse, delta, q_strides, d_out_strides,
                scale, len_q, len_k, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, True,
            )  # fmt: skip
    for row in tl.range(whole_start, len_q * GROUP, BLOCK_M, num_stages=NUM_STAGES):
        k_acc, v_acc = _add_queries(
            keys, values, k_acc, v_acc, key, row, q_heads, d_out_heads, lse, delta, q_strides, d_out_strides,
            scale, len_q, len_k, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, False,
        )  # fmt: skip
    _store_rows(_head(dk, dk_strides, batch, kv_head), dk_strides, k_acc * scale, key, len_k, HEAD_DIM, BLOCK_D)
    _store_rows(_head(dv, dv_strides, batch, kv_head), dv_strides, v_acc, key, len_k, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_queries(
    keys, values, k_acc, v_acc, key, row, q_heads, d_out_heads, lse, delta, q_strides, d_out_strides, scale,
    len_q, len_k, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what BLOCK_M rows from `row` on, tokens times heads of the group, give to the gradients of the tile."""
    row += tl.arange(0, BLOCK_M)
    token, head = tl.minimum(row // GROUP, len_q - 1), row % GROUP
    d = tl.arange(0, BLOCK_D)[None, :]
    at = (token.to(tl.int64) * q_strides[2] + head.to(tl.int64) * q_strides[1])[:, None] + d
    queries = load_heads(q_heads + at, d < HEAD_DIM, HEAD_DIM == BLOCK_D)
    at = (token.to(tl.int64) * d_out_strides[2] + head.to(tl.int64) * d_out_strides[1])[:, None] + d
    grads = load_heads(d_out_heads + at, d < HEAD_DIM, HEAD_DIM == BLOCK_D)
    # Rows beyond the end weigh nothing.
    base = tl.load(lse + head * len_q + token, mask=row < len_q * GROUP, other=float("inf"))
    means = tl.load(delta + head * len_q + token)
    weights = _weigh(keys, queries, base[None, :], scale)
    if MASKED:
        weights = tl.where(_visible(token[None, :], key[:, None], len_q, len_k, True), weights, 0.0)
    v_acc = tl.dot(weights.to(grads.dtype), grads, v_acc, input_precision="ieee")
    d_scores = _score_gradients(weights, values, grads, means[None, :])
    k_acc = tl.dot(d_scores.to(queries.dtype), queries, k_acc, input_precision="ieee")
    return k_acc, v_acc


@triton.jit
def _weigh(left, right, base, scale):
    """The probabilities again, of queries and keys or of keys and queries."""
    scores = tl.dot(left, tl.trans(right), input_precision="ieee")
    return tl.exp2(scores * (scale * LOG2_E) - base)


@triton.jit
def _score_gradients(weights, left, right, means):
    """Gradients of the scaled scores, from gradients of results and values or the other way round."""
    return weights * (tl.dot(left, tl.trans(right), input_precision="ieee") - means)


# --- tiles ---


@triton.jit
def _query_tile(len_q, BLOCK_M: tl.constexpr):
    """The program's row of `[batch * num_heads]` and its first query. Programs of a head are next to one another,
    as they read the same keys; those that see most keys come first.
    """
    num_tiles = tl.cdiv(len_q, BLOCK_M)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    return tl.program_id(0) // num_tiles, tile * BLOCK_M


@triton.jit
def _key_range(
    first, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK_ALL: tl.constexpr
):
    """The end of the tiles of keys that all queries of a tile see whole, and the end of all that any sees."""
    seen_by_all, seen = len_k, len_k
    if CAUSAL:
        seen_by_all = tl.minimum(tl.maximum(first + len_k - len_q + 1, 0), len_k)
        seen = tl.minimum(tl.maximum(first + len_k - len_q + BLOCK_M, 0), len_k)
    if MASK_ALL:
        seen_by_all *= 0
    return seen_by_all // BLOCK_N * BLOCK_N, seen


@triton.jit
def _visible(token, key, len_q, len_k, CAUSAL: tl.constexpr):
    """Whether queries `token` see keys `key`."""
    return key <= token + (len_k - len_q) if CAUSAL else key < len_k


@triton.jit
def _head(tensor, strides, batch, head):
    return tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def _load_rows(head, strides, row, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`length` None: all rows are there."""
    if length is not None:
        row = tl.minimum(row, length - 1)
    d = tl.arange(0, BLOCK_D)[None, :]
    return load_heads(head + row.to(tl.int64)[:, None] * strides[2] + d, d < HEAD_DIM, HEAD_DIM == BLOCK_D)


@triton.jit
def _store_rows(head, strides, rows, row, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)[None, :]
    at = head + row.to(tl.int64)[:, None] * strides[2] + d
    tl.store(at, rows.to(head.dtype.element_ty), mask=(row < length)[:, None] & (d < HEAD_DIM))
