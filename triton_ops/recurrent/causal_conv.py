"""The short causal convolution before a recurrent layer, with what it keeps of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ops.recurrent.rows import StateRows, begun_states, leave_states


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StateRows) -> Tensor:
    """`silu(sum_j weight[c, j] * x[t - W + 1 + j, c] + bias[c])` for each token t of its row's sequence.

    Args:
        x: `[T, C]`, any float dtype, elements of a token side by side: columns of a packed projection will do.
        weight: `[C, W]` in x's dtype, contiguous, W from 2 on.
        bias: `[C]` in x's dtype, or None.
        states: `[num_states, C, W - 1]` in x's dtype, a state contiguous: the last inputs of sequences, the oldest
            first. Those that `rows` leave are written.

    Returns `[T, C]` in x's dtype, contiguous: computed in float32 and rounded once. What it holds at tokens of no
    row is undefined.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, weight, bias, states)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    tokens, read_from, write_to = rows.single()
    if len(tokens):
        window = torch.cat([begun_states(states, read_from), x[tokens, :, None]], 2)  # [n, C, W]
        out[tokens] = _convolved(window, weight, bias)[..., 0]
        leave_states(states, write_to, window[:, :, 1:])
    for start, length, begins, ends in rows.long():
        begun = begun_states(states, torch.tensor([begins], device=x.device))
        inputs = torch.cat([begun, x[start : start + length].T[None]], 2)
        out[start : start + length] = _convolved(inputs, weight, bias)[0].T
        leave_states(states, torch.tensor([ends], device=x.device), inputs[:, :, length:])
    return out


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """From `inputs [n, C, W - 1 + L]` to `[n, C, L]`."""
    compute = torch.promote_types(inputs.dtype, torch.float32)
    inputs, width = inputs.to(compute), weight.shape[1]
    length = inputs.shape[2] - width + 1
    # Term by term: the bits of an element depend on its inputs alone, as they would not in torch's convolution.
    total = torch.zeros_like(inputs[:, :, :length])
    for j in range(width):
        total += weight[:, j, None].to(compute) * inputs[:, :, j : j + length]
    if bias is not None:
        total += bias[:, None].to(compute)
    return (total / (-total).exp().add_(1.0)).to(weight.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor) -> None:
    if x.dim() != 2 or (x.numel() and x.stride(1) != 1):
        raise ValueError(f"x must be [T, C], rows contiguous, but is {[*x.shape]} with strides {[*x.stride()]}")
    size = x.shape[1]
    if weight.dim() != 2 or len(weight) != size or weight.shape[1] < 2 or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous [{size}, W] with W from 2 on, but is {[*weight.shape]}")
    wanted = {"weight": (weight, [*weight.shape]), "states": (states, [len(states), size, weight.shape[1] - 1])}
    if bias is not None:
        wanted["bias"] = (bias, [size])
    for name, (tensor, shape) in wanted.items():
        if [*tensor.shape] != shape or tensor.dtype != x.dtype:
            raise ValueError(f"{name} must be {shape} in {x.dtype}, but is {[*tensor.shape]} in {tensor.dtype}")
    if len(states) == 0 or not states[0].is_contiguous():
        raise ValueError("states must be at least one, each contiguous")
