"""The kernels of the gated delta rule: token by token, or chunks of tokens."""

from __future__ import annotations

from triton_ops.implementation import gdc_launch_dependents, gdc_wait, tl, triton
from triton_ops.recurrent.rows import chunks_before, find_chunk
from triton_ops.recurrent.softplus import softplus_of

NORM_EPS = 1e-6  # beside the squares of a key or query

_NORM_EPS: tl.constexpr = NORM_EPS if tl is None else tl.constexpr(NORM_EPS)

# Slices of a batch's numbers begin anywhere.
UNALIGNED = ["start_loc", "lens", "read_from", "write_to"]


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def delta_step_kernel(
    q, k, v, a, b, a_log, dt_bias, states, out, start_loc, lens, read_from, write_to,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    a_stride, a_head_stride, b_stride, b_head_stride, state_stride,
    NUM_V_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LONG: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program is a row of one token, a value head and some columns of its state, which is read and written once:
    what the token reads, `S^T q` after the state has learnt it, is computed from the state before. With `LONG`
    rows have any number of tokens, one after the other, each loaded while the one before is computed; a token has
    the same code in all rows.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    num_blocks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % NUM_V_HEADS
    row = tl.program_id(0) // (num_blocks * NUM_V_HEADS)
    begins = tl.load(read_from + row).to(tl.int64)
    ends = tl.load(write_to + row).to(tl.int64)
    first = tl.load(start_loc + row).to(tl.int64)
    length = tl.load(lens + row)
    if length == 0:
        return
    d = tl.arange(0, BLOCK_K)
    c = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (d < K_DIM)[:, None] & (c < V_DIM)[None, :]
    element = head * K_DIM * V_DIM + d[:, None] * V_DIM + c[None, :]
    state = tl.load(states + begins * state_stride + element, mask=in_state & (begins != 0), other=0.0)
    state = state.to(tl.float32)
    q_at = q + first * q_stride + head // GROUP * q_head_stride + d
    k_at = k + first * k_stride + head // GROUP * k_head_stride + d
    v_at = v + first * v_stride + head * v_head_stride + c
    a_at = a + first * a_stride + head * a_head_stride
    b_at = b + first * b_stride + head * b_head_stride
    out_at = out + (first * NUM_V_HEADS + head) * V_DIM + c
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    next_query = tl.load(q_at, mask=d < K_DIM, other=0.0)
    next_key = tl.load(k_at, mask=d < K_DIM, other=0.0)
    next_value = tl.load(v_at, mask=c < V_DIM, other=0.0)
    next_a = tl.load(a_at)
    next_b = tl.load(b_at)
    for nth in range(length if LONG else 1):
        query = next_query.to(tl.float32)
        key = next_key.to(tl.float32)
        value = next_value.to(tl.float32)
        log_decay, beta = _gates(next_a, next_b, rate, bias)
        if LONG:
            q_at += q_stride
            k_at += k_stride
            v_at += v_stride
            a_at += a_stride
            b_at += b_stride
            more = nth + 1 < length
            next_query = tl.load(q_at, mask=(d < K_DIM) & more, other=0.0)
            next_key = tl.load(k_at, mask=(d < K_DIM) & more, other=0.0)
            next_value = tl.load(v_at, mask=(c < V_DIM) & more, other=0.0)
            next_a = tl.load(a_at, mask=more, other=0.0)
            next_b = tl.load(b_at, mask=more, other=0.0)
        query *= tl.rsqrt(tl.sum(query * query) + _NORM_EPS) * K_DIM**-0.5
        key *= tl.rsqrt(tl.sum(key * key) + _NORM_EPS)
        state *= tl.exp(log_decay)
        added = beta * (value - tl.sum(state * key[:, None], 0))
        read = tl.sum(state * query[:, None], 0) + tl.sum(key * query) * added
        # Which of the two products is rounded must not be left to the compiler.
        state = tl.fma(key[:, None], added[None, :], state)
        tl.store(out_at, read, mask=c < V_DIM)
        out_at += NUM_V_HEADS * V_DIM
    tl.store(states + ends * state_stride + element, state, mask=in_state & (ends != 0))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=UNALIGNED)
def delta_within_kernel(
    q, k, a, b, a_log, dt_bias, solved, inside, factors, start_loc, lens, num_rows,
    q_stride, q_head_stride, k_stride, k_head_stride, a_stride, a_head_stride, b_stride, b_head_stride,
    NUM_V_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """What can be computed of a chunk without the state that it begins with. A program is a chunk and value head.

    With G the sums of log decays in the chunk, and keys and queries that are normalised, it writes
        `solved` `[chunks, num_v_heads, CHUNK, CHUNK]`: the inverse of 1 + A, times beta from the right, where
            `A[t, i] = beta_t exp(G_t - G_i) (k_t . k_i)` for i < t
        `inside`, of the same shape: `exp(G_t - G_i) (q_t . k_i)` for i <= t
        `factors` float32 `[chunks, num_v_heads, 4, CHUNK]`: `exp(G_t)` times what normalises a key; the same of a
            query; `exp(G_last - G_t)` times what normalises a key; `exp(G_last)`
    so that keys and queries are multiplied as they are, not rounded once more.
    """
    nth, head = tl.program_id(0) // NUM_V_HEADS, tl.program_id(0) % NUM_V_HEADS
    row, chunk = find_chunk(lens, num_rows, nth, CHUNK)
    if row >= num_rows:
        return
    t = tl.arange(0, CHUNK)
    live = chunk * CHUNK + t < tl.load(lens + row)
    token = (tl.load(start_loc + row) + chunk * CHUNK + t).to(tl.int64)
    log_decay, beta = _gates(
        tl.load(a + token * a_stride + head * a_head_stride, mask=live, other=0.0),
        tl.load(b + token * b_stride + head * b_head_stride, mask=live, other=0.0),
        tl.load(a_log + head),
        tl.load(dt_bias + head),
    )
    # Beyond the end nothing decays, and of keys and values of zeros nothing is learnt.
    log_decay = tl.where(live, log_decay, 0.0)
    sums = tl.cumsum(log_decay, 0)
    # Of the same sums, whose roundings a difference would else show.
    whole = tl.sum(tl.where(t == CHUNK - 1, sums, 0.0), 0)

    d = tl.arange(0, BLOCK_K)
    k_head = head // GROUP
    mask = live[:, None] & (d < K_DIM)[None, :]
    key = tl.load(k + token[:, None] * k_stride + k_head * k_head_stride + d[None, :], mask=mask, other=0.0)
    query = tl.load(q + token[:, None] * q_stride + k_head * q_head_stride + d[None, :], mask=mask, other=0.0)
    k_norm = _norming(key)
    q_norm = _norming(query) * K_DIM**-0.5
    r = t[:, None]
    c = t[None, :]
    # Of later tokens the exponents would be positive, and might overflow.
    between = tl.exp(tl.where(c <= r, sums[:, None] - sums[None, :], float("-inf"))) * k_norm[None, :]
    place = (nth.to(tl.int64) * NUM_V_HEADS + head) * CHUNK
    tile = place * CHUNK + r * CHUNK + c
    reads = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between * q_norm[:, None]
    tl.store(inside + tile, reads)
    grown = tl.exp(sums)
    factor = factors + place * 4 + t
    tl.store(factor, grown * k_norm)
    tl.store(factor + CHUNK, grown * q_norm)
    tl.store(factor + 2 * CHUNK, tl.exp(whole - sums) * k_norm)
    tl.store(factor + 3 * CHUNK, tl.exp(whole) + tl.zeros_like(sums))
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * between * (beta * k_norm)[:, None]
    inverse = _inverse(tl.where(c < r, system, 0.0), CHUNK, SOLVE_PRECISION)
    tl.store(solved + tile, inverse * beta[None, :])


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def delta_across_kernel(
    q, k, v, solved, inside, factors, states, out, start_loc, lens, read_from, write_to,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, state_stride,
    NUM_V_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Chunk after chunk of a row. A program is a row, a value head and some columns of its state, which stays in
    registers in float32; products read it rounded to q's dtype.
    """
    num_blocks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % NUM_V_HEADS
    row = tl.program_id(0) // (num_blocks * NUM_V_HEADS)
    length = tl.load(lens + row)
    if length == 0:
        return
    start = tl.load(start_loc + row)
    begins = tl.load(read_from + row).to(tl.int64)
    ends = tl.load(write_to + row).to(tl.int64)
    t = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    c = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (d < K_DIM)[:, None] & (c < V_DIM)[None, :]
    element = head * K_DIM * V_DIM + d[:, None] * V_DIM + c[None, :]
    state = tl.load(states + begins * state_stride + element, mask=in_state & (begins != 0), other=0.0)
    state = state.to(tl.float32)
    dtype: tl.constexpr = v.dtype.element_ty
    place = (chunks_before(lens, row, CHUNK).to(tl.int64) * NUM_V_HEADS + head) * CHUNK
    q_head = q + head // GROUP * q_head_stride + d[None, :]
    k_head = k + head // GROUP * k_head_stride + d[None, :]
    v_head = v + head * v_head_stride + c[None, :]
    for first in tl.range(0, length, CHUNK, num_stages=NUM_STAGES):
        live = (first + t < length)[:, None]
        tile = place * CHUNK + t[:, None] * CHUNK + t[None, :]
        factor = factors + place * 4
        token = (start + first + t).to(tl.int64)[:, None]
        key = tl.load(k_head + token * k_stride, mask=live & (d < K_DIM)[None, :], other=0.0)
        query = tl.load(q_head + token * q_stride, mask=live & (d < K_DIM)[None, :], other=0.0)
        value = tl.load(v_head + token * v_stride, mask=live & (c < V_DIM)[None, :], other=0.0)
        rounded = state.to(dtype)
        predicted = tl.dot(key, rounded, input_precision=PRECISION) * tl.load(factor + t)[:, None]
        new = (value.to(tl.float32) - predicted).to(dtype)
        added = tl.dot(tl.load(solved + tile), new, input_precision=PRECISION)
        read = tl.dot(query, rounded, input_precision=PRECISION) * tl.load(factor + CHUNK + t)[:, None]
        read = tl.dot(tl.load(inside + tile), added.to(dtype), read, input_precision=PRECISION)
        tl.store(out + (token * NUM_V_HEADS + head) * V_DIM + c[None, :], read, mask=live & (c < V_DIM)[None, :])
        added *= tl.load(factor + 2 * CHUNK + t)[:, None]
        if dtype == tl.float16:
            # A key of zeros is normalised by a thousand; times infinity it would be NaN.
            added = tl.minimum(tl.maximum(added, -65504.0), 65504.0)
        state *= tl.load(factor + 3 * CHUNK)
        state = tl.dot(tl.trans(key), added.to(dtype), state, input_precision=PRECISION)
        place += NUM_V_HEADS * CHUNK
    tl.store(states + ends * state_stride + element, state, mask=in_state & (ends != 0))


@triton.jit
def _gates(a, b, a_log, dt_bias):
    """Log decay and beta, in float32."""
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype)
    softplus = softplus_of(a.to(tl.float32) + dt_bias.to(tl.float32))
    return -tl.exp(a_log.to(tl.float32)) * softplus, beta.to(tl.float32)


@triton.jit
def _norming(heads):
    """What normalises each row."""
    wide = heads.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + _NORM_EPS)


@triton.jit
def _inverse(below, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of 1 + `below [CHUNK, CHUNK]`, which is strictly lower triangular.

    Blocks on the diagonal are inverted, twice as large each time: that of `[[X, 0], [L, Y]]` is
    `[[X', 0], [-Y' L X', Y']]`. Unlike powers of `below`, nothing in it grows to cancel later.
    """
    r = tl.arange(0, CHUNK)[:, None]
    c = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(r == c, 1.0, 0.0) - tl.where(r // 2 == c // 2, below, 0.0)
    level = 1
    while 1 << level < CHUNK:
        between = tl.where((r >> level != c >> level) & (r >> (level + 1) == c >> (level + 1)), below, 0.0)
        between = tl.dot(inverse, between, input_precision=PRECISION)
        inverse -= tl.dot(between, inverse, input_precision=PRECISION)
        level += 1
    return inverse
