"""The short causal convolution before a recurrent layer, with what it keeps of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.implementation import (
    Impl,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    overlapped,
    runs_triton,
    tl,
    triton,
)
from triton_ops.recurrent.rows import StateRows, begun_states, find_chunk, leave_states
from triton_ops.tuning import CONV_CHUNK, CONV_EXTEND, CONV_STEP

Gates = tuple[Tensor, Tensor]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    rows: StateRows,
    *,
    gates: Gates | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`silu(sum_j weight[c, j] * x[t - W + 1 + j, c] + bias[c])` for each token t of its row's sequence.

    With gates (before, after) there is no silu: `after[t, c] * (sum_j ... + bias[c])`, of inputs that are
    `before * x`.

    Args:
        x: `[T, C]`, any float dtype, elements of a token side by side: columns of a packed projection will do.
        weight: `[C, W]` in x's dtype, contiguous, W from 2 on.
        bias: `[C]` in x's dtype, or None.
        states: `[num_states, C, W - 1]` in x's dtype, a state contiguous: the last inputs of sequences, the oldest
            first, as they are convolved: gated, rounded to that dtype. Those that `rows` leave are written.
        gates: each as x.

    Returns `[T, C]` in x's dtype, contiguous: computed in float32 and rounded once. What it holds at tokens of no
    row is undefined.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, weight, bias, states, gates)
    if runs_triton(impl, x.device):
        return _launch(x, weight, bias, states, rows, gates)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    after = None
    if gates is not None:
        x, after = gates[0] * x, gates[1]
    tokens, read_from, write_to = rows.single()
    if len(tokens):
        window = torch.cat([begun_states(states, read_from), x[tokens, :, None]], 2)  # [n, C, W]
        gate = None if after is None else after[tokens, :, None]
        out[tokens] = _convolved(window, weight, bias, gate)[..., 0]
        leave_states(states, write_to, window[:, :, 1:])
    for start, length, begins, ends in rows.long():
        begun = begun_states(states, torch.tensor([begins], device=x.device))
        inputs = torch.cat([begun, x[start : start + length].T[None]], 2)
        gate = None if after is None else after[start : start + length].T[None]
        out[start : start + length] = _convolved(inputs, weight, bias, gate)[0].T
        leave_states(states, torch.tensor([ends], device=x.device), inputs[:, :, length:])
    return out


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None) -> Tensor:
    """From `inputs [n, C, W - 1 + L]` to `[n, C, L]`, as the gate is; None: by silu."""
    compute = torch.promote_types(inputs.dtype, torch.float32)
    inputs, width = inputs.to(compute), weight.shape[1]
    length = inputs.shape[2] - width + 1
    # Term by term: the bits of an element depend on its inputs alone, as they would not in torch's convolution.
    total = torch.zeros_like(inputs[:, :, :length])
    for j in range(width):
        total += weight[:, j, None].to(compute) * inputs[:, :, j : j + length]
    if bias is not None:
        total += bias[:, None].to(compute)
    total = total / (-total).exp().add_(1.0) if gate is None else total * gate.to(compute)
    return total.to(weight.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, gates: Gates | None) -> None:
    names = dict(zip(("x", "before", "after"), (x, *(gates or ())), strict=False))
    for name, tensor in names.items():
        if tensor.dim() != 2 or (tensor.numel() and tensor.stride(1) != 1):
            strides = [*tensor.stride()]
            raise ValueError(
                f"{name} must be [T, C], rows contiguous, but is {[*tensor.shape]} with strides {strides}"
            )
    size = x.shape[1]
    if weight.dim() != 2 or len(weight) != size or weight.shape[1] < 2 or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [{size}, W] with W from 2 on, but is {[*weight.shape]}")
    wanted = {"weight": (weight, [*weight.shape]), "states": (states, [len(states), size, weight.shape[1] - 1])}
    if bias is not None:
        wanted["bias"] = (bias, [size])
    if gates is not None:
        wanted |= {"before": (gates[0], [*x.shape]), "after": (gates[1], [*x.shape])}
    for name, (tensor, shape) in wanted.items():
        if [*tensor.shape] != shape or tensor.dtype != x.dtype:
            raise ValueError(f"{name} must be {shape} in {x.dtype}, but is {[*tensor.shape]} in {tensor.dtype}")
    if len(states) == 0 or not states[0].is_contiguous():
        raise ValueError("states must be at least one, each contiguous")


# --- the kernel ---


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StateRows, gates: Gates | None
) -> Tensor:
    """Extends and rows of one token have a launch each."""
    before, after = (None, None) if gates is None else gates
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (num_tokens, size), width = x.shape, weight.shape[1]
    num_extends, num_steps = rows.num_extends, len(rows.lens) - rows.num_extends
    if out.numel() == 0:
        return out
    for some, chunk, num_chunks, config in (
        # As many chunks as the extends may have, however their tokens are shared out.
        (slice(num_extends), CONV_CHUNK, num_tokens // CONV_CHUNK + num_extends, CONV_EXTEND),
        (slice(num_extends, None), 1, num_steps, CONV_STEP),
    ):
        if len(rows.lens[some]) == 0:
            continue
        block = min(config.size, max(16, next_power_of_2(size)))
        _causal_conv_kernel[(num_chunks * cdiv(size, block),)](
            x,
            weight,
            bias,
            states,
            before,
            after,
            out,
            rows.start_loc[some],
            rows.lens[some],
            rows.read_from[some],
            rows.write_to[some],
            len(rows.lens[some]),
            x.stride(0),
            0 if before is None else before.stride(0),
            0 if after is None else after.stride(0),
            states.stride(0),
            SIZE=size,
            WIDTH=width,
            KEPT=next_power_of_2(width - 1),
            CHUNK=chunk,
            BLOCK=block,
            num_warps=config.num_warps,
            **overlapped(x.device, num_chunks),
        )
    return out


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["start_loc", "lens", "read_from", "write_to"],
)
def _causal_conv_kernel(
    x, weight, bias, states, before, after, out, start_loc, lens, read_from, write_to, num_rows,
    x_stride, before_stride, after_stride, state_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program is some tokens of a row and some channels. That of a row's first tokens, which alone reads the
    state, also leaves it, since the states may be the same one.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    c = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    nth = tl.program_id(0) // num_blocks
    if CHUNK == 1:
        row, first = nth, 0
    else:
        row, chunk = find_chunk(lens, num_rows, nth, CHUNK)
        first = chunk * CHUNK
        if row >= num_rows:
            return
    length = tl.load(lens + row)
    if length == 0:
        return
    start = tl.load(start_loc + row).to(tl.int64)
    begins = tl.load(read_from + row).to(tl.int64)
    t = first + tl.arange(0, CHUNK)[:, None]
    in_chunk = (t < length) & (c < SIZE)[None, :]
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        at = t - (WIDTH - 1) + j
        value = _load_gated(x, before, start + at, c[None, :], x_stride, before_stride, in_chunk & (at >= 0))
        if first == 0:  # not only masked: what is loaded in another order is sorted in shared memory
            kept = states + begins * state_stride + c[None, :] * (WIDTH - 1) + t + j
            old = tl.load(kept, mask=in_chunk & (at < 0) & (begins != 0), other=0.0)
            value = tl.where(at < 0, old, value)
        factor = tl.load(weight + c * WIDTH + j, mask=c < SIZE, other=0.0)
        total += factor.to(tl.float32)[None, :] * value.to(tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=c < SIZE, other=0.0).to(tl.float32)[None, :]
    if after is not None:
        gate = tl.load(after + (start + t) * after_stride + c[None, :], mask=in_chunk, other=0.0)
        total *= gate.to(tl.float32)
    else:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + (start + t) * SIZE + c[None, :], total, mask=in_chunk)
    ends = tl.load(write_to + row).to(tl.int64)
    if (first == 0) & (ends != 0):
        n = tl.arange(0, KEPT)[None, :]
        mask = (c < SIZE)[:, None] & (n < WIDTH - 1)
        place = length - (WIDTH - 1) + n
        from_kept = begins * state_stride + c[:, None] * (WIDTH - 1) + length + n
        old = tl.load(states + from_kept, mask=mask & (place < 0) & (begins != 0), other=0.0)
        is_new = mask & (place >= 0)
        new = _load_gated(x, before, start + place, c[:, None], x_stride, before_stride, is_new)
        tl.debug_barrier()  # no thread writes what another one has still to read
        left = states + ends * state_stride + c[:, None] * (WIDTH - 1) + n
        tl.store(left, tl.where(place < 0, old, new), mask=mask)


@triton.jit
def _load_gated(x, gate, token, c, x_stride, gate_stride, mask):
    """Elements of x, times those of the gate unless it is None, rounded to x's dtype."""
    value = tl.load(x + token * x_stride + c, mask=mask, other=0.0)
    if gate is not None:
        factor = tl.load(gate + token * gate_stride + c, mask=mask, other=0.0)
        value = (factor.to(tl.float32) * value.to(tl.float32)).to(value.dtype)
    return value
