"""The kernels of Mamba-2's state space: token by token, or chunks of tokens."""

# Tests: tests/triton_ops/recurrent/test_state_space.py

from __future__ import annotations

from triton_ops.implementation import gdc_launch_dependents, gdc_wait, tl, triton
from triton_ops.recurrent.gated_delta_kernels import UNALIGNED
from triton_ops.recurrent.rows import chunks_before, find_chunk
from triton_ops.recurrent.softplus import softplus_of


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def state_space_step_kernel(
    x, dt, b, c, a_log, d, dt_bias, states, out, start_loc, lens, read_from, write_to, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    state_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LONG: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program is a row of one token, a head and some columns of its state, which is read and written once. With
    `LONG` rows have any number of tokens, as in `delta_step_kernel`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    num_blocks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % NUM_HEADS
    row = tl.program_id(0) // (num_blocks * NUM_HEADS)
    begins = tl.load(read_from + row).to(tl.int64)
    ends = tl.load(write_to + row).to(tl.int64)
    first = tl.load(start_loc + row).to(tl.int64)
    length = tl.load(lens + row)
    if length == 0:
        return
    k = tl.arange(0, BLOCK_K)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (k < K_DIM)[:, None] & (v < V_DIM)[None, :]
    element = head * K_DIM * V_DIM + k[:, None] * V_DIM + v[None, :]
    state = tl.load(states + begins * state_stride + element, mask=in_state & (begins != 0), other=0.0)
    state = state.to(tl.float32)
    b_at = b + first * b_stride + head // GROUP * b_group_stride + k
    c_at = c + first * c_stride + head // GROUP * c_group_stride + k
    x_at = x + first * x_stride + head * x_head_stride + v
    dt_at = dt + first * dt_stride + head * dt_head_stride
    out_at = out + (first * NUM_HEADS + head) * V_DIM + v
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skipped = tl.load(d + head).to(tl.float32)
    bias = tl.load(dt_bias + head)
    next_written = tl.load(b_at, mask=k < K_DIM, other=0.0)
    next_read = tl.load(c_at, mask=k < K_DIM, other=0.0)
    next_value = tl.load(x_at, mask=v < V_DIM, other=0.0)
    next_dt = tl.load(dt_at)
    for nth in range(length if LONG else 1):
        written = next_written.to(tl.float32)
        read = next_read.to(tl.float32)
        value = next_value.to(tl.float32)
        step = _step_size(next_dt, bias, dt_min, dt_max)
        if LONG:
            b_at += b_stride
            c_at += c_stride
            x_at += x_stride
            dt_at += dt_stride
            more = nth + 1 < length
            next_written = tl.load(b_at, mask=(k < K_DIM) & more, other=0.0)
            next_read = tl.load(c_at, mask=(k < K_DIM) & more, other=0.0)
            next_value = tl.load(x_at, mask=(v < V_DIM) & more, other=0.0)
            next_dt = tl.load(dt_at, mask=more, other=0.0)
        # Which of the two products is rounded must not be left to the compiler.
        state = tl.fma(written[:, None], (step * value)[None, :], state * tl.exp(step * rate))
        result = tl.sum(state * read[:, None], 0) + skipped * value
        tl.store(out_at, result, mask=v < V_DIM)
        out_at += NUM_HEADS * V_DIM
    tl.store(states + ends * state_stride + element, state, mask=in_state & (ends != 0))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=UNALIGNED)
def state_space_within_kernel(
    b, c, products, start_loc, lens, num_rows, b_stride, b_group_stride, c_stride, c_group_stride,
    NUM_GROUPS: tl.constexpr, K_DIM: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`products` float32 `[chunks, num_groups, CHUNK, CHUNK]`: what all heads of a group read, `b_i . c_t`, t in
    columns. A program is a chunk and a group.
    """
    nth, group = tl.program_id(0) // NUM_GROUPS, tl.program_id(0) % NUM_GROUPS
    row, chunk = find_chunk(lens, num_rows, nth, CHUNK)
    if row >= num_rows:
        return
    t = tl.arange(0, CHUNK)
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (chunk * CHUNK + t < tl.load(lens + row))[:, None] & (k < K_DIM)
    token = (tl.load(start_loc + row) + chunk * CHUNK + t).to(tl.int64)[:, None]
    written = tl.load(b + token * b_stride + group * b_group_stride + k, mask=mask, other=0.0)
    read = tl.load(c + token * c_stride + group * c_group_stride + k, mask=mask, other=0.0)
    product = tl.dot(written, tl.trans(read), input_precision=PRECISION)
    place = (nth.to(tl.int64) * NUM_GROUPS + group) * CHUNK * CHUNK
    tl.store(products + place + t[:, None] * CHUNK + t[None, :], product)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def state_space_across_kernel(
    x, dt, b, c, a_log, d, dt_bias, products, states, out, start_loc, lens, read_from, write_to, dt_min, dt_max,
    x_stride, x_head_stride, dt_stride, dt_head_stride, b_stride, b_group_stride, c_stride, c_group_stride,
    state_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Chunk after chunk of a row. A program is a row, a head and some columns of its state, which stays in
    registers in float32; products read it rounded to x's dtype.

    All is transposed, so that products have as many rows as there are columns: too few for wgmma, of which Triton
    3.6 has made wrong products of transposed keys.
    """
    num_blocks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % NUM_HEADS
    row = tl.program_id(0) // (num_blocks * NUM_HEADS)
    length = tl.load(lens + row)
    if length == 0:
        return
    start = tl.load(start_loc + row)
    begins = tl.load(read_from + row).to(tl.int64)
    ends = tl.load(write_to + row).to(tl.int64)
    t = tl.arange(0, CHUNK)
    k = tl.arange(0, BLOCK_K)[None, :]
    v = (block * BLOCK_V + tl.arange(0, BLOCK_V))[:, None]
    in_state = (v < V_DIM) & (k < K_DIM)
    element = head * K_DIM * V_DIM + k * V_DIM + v
    state = tl.load(states + begins * state_stride + element, mask=in_state & (begins != 0), other=0.0)
    state = state.to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    group = head // GROUP
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skipped = tl.load(d + head).to(tl.float32)
    bias = tl.load(dt_bias + head)
    x_head = x + head * x_head_stride + v
    b_head = b + group * b_group_stride + k
    c_head = c + group * c_group_stride + k
    num_groups: tl.constexpr = NUM_HEADS // GROUP
    place = (chunks_before(lens, row, CHUNK).to(tl.int64) * num_groups + group) * CHUNK * CHUNK
    earlier = t[:, None]
    later = t[None, :]
    for first in tl.range(0, length, CHUNK, num_stages=NUM_STAGES):
        live = first + t < length
        token = (start + first + t).to(tl.int64)
        step = tl.load(dt + token * dt_stride + head * dt_head_stride, mask=live, other=0.0)
        # Beyond the end nothing decays, and nothing is added.
        step = tl.where(live, _step_size(step, bias, dt_min, dt_max), 0.0)
        sums = tl.cumsum(step * rate, 0)
        # Of the same sums, whose roundings a difference would else show.
        whole = tl.sum(tl.where(t == CHUNK - 1, sums, 0.0), 0)
        in_key = live[:, None] & (k < K_DIM)
        in_value = live[None, :] & (v < V_DIM)
        read = tl.load(c_head + token[:, None] * c_stride, mask=in_key, other=0.0)
        written = tl.load(b_head + token[:, None] * b_stride, mask=in_key, other=0.0)
        value = tl.load(x_head + token[None, :] * x_stride, mask=in_value, other=0.0)
        # Of later tokens the exponents would be positive, and might overflow.
        between = tl.exp(tl.where(earlier <= later, sums[None, :] - sums[:, None], float("-inf")))
        inside = tl.load(products + place + earlier * CHUNK + later) * between * step[:, None]
        result = tl.dot(state.to(dtype), tl.trans(read), input_precision=PRECISION) * tl.exp(sums)[None, :]
        result = tl.dot(value, inside.to(dtype), result, input_precision=PRECISION)
        result += skipped * value.to(tl.float32)
        tl.store(out + (token[None, :] * NUM_HEADS + head) * V_DIM + v, result, mask=in_value)
        added = (value.to(tl.float32) * (tl.exp(whole - sums) * step)[None, :]).to(dtype)
        state = tl.dot(added, written, state * tl.exp(whole), input_precision=PRECISION)
        place += num_groups * CHUNK * CHUNK
    tl.store(states + ends * state_stride + element, state, mask=in_state & (ends != 0))


@triton.jit
def _step_size(dt, bias, dt_min, dt_max):
    """How far a token moves the state, in float32. What is no number stays so."""
    step = softplus_of(dt.to(tl.float32) + bias.to(tl.float32))
    step = tl.where(step < dt_min, dt_min, step)
    return tl.where(step > dt_max, dt_max, step)
