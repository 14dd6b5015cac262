"""Attention for training: forward and backward pass together, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from scripts.kernel_benchmarks.case import Call, Case, Contender, Expected, Source, seeded
from scripts.kernel_benchmarks.roofline import training_work
from triton_ops.attention.training import attention_with_grad, training_reference

ROW_TOKENS = 64
"""Tokens of a head that are compared as one row: the gradient of one token may vanish, as the first query's."""


@dataclass(frozen=True)
class TrainingShape:
    """`batch` sequences of `length` tokens, a multiple of ROW_TOKENS."""

    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class TrainingInputs:
    """q and the result's gradient `[batch, num_heads, length, head_dim]`, k and v with num_kv_heads."""

    shape: TrainingShape
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor


def _inputs(shape: TrainingShape, source: Source) -> TrainingInputs:
    def random(num_heads: int) -> Tensor:
        return source.normal(shape.batch, num_heads, shape.length, shape.head_dim, dtype=shape.dtype)

    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    return TrainingInputs(shape, *map(random, heads))


def _expected(inputs: TrainingInputs) -> Expected:
    """In float64, a KV head at a time."""
    shape = inputs.shape
    group = shape.num_heads // shape.num_kv_heads
    every = [torch.empty_like(x, dtype=torch.float32) for x in (inputs.q, inputs.q, inputs.k, inputs.v)]
    for batch in range(shape.batch):
        for kv_head in range(shape.num_kv_heads):
            kv, heads = slice(kv_head, kv_head + 1), slice(kv_head * group, (kv_head + 1) * group)
            q, k, v = (
                x[batch : batch + 1, of].double().requires_grad_()
                for x, of in ((inputs.q, heads), (inputs.k, kv), (inputs.v, kv))
            )
            out = training_reference(q, k, v, scale=shape.scale, causal=shape.causal)
            grads = torch.autograd.grad(out, (q, k, v), inputs.d_out[batch : batch + 1, heads].double())
            for result, part, of in zip(every, (out.detach(), *grads), (heads, heads, kv, kv), strict=True):
                result[batch, of] = part[0].float()
    return Expected(_rows(every))


def _rows(results: Any) -> Sequence[Tensor]:
    return tuple(x.unflatten(2, (-1, ROW_TOKENS)).flatten(3) for x in results)


def _call(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: TrainingInputs) -> Call:
    """The result and the gradients of q, k and v."""
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def run() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, inputs.d_out))

    return Call(run, _rows)


def _ours(inputs: TrainingInputs) -> Call:
    shape = inputs.shape
    return _call(partial(attention_with_grad, scale=shape.scale, causal=shape.causal, impl="triton"), inputs)


def _sdpa(inputs: TrainingInputs, backend: SDPBackend) -> Call:
    shape = inputs.shape
    gqa = shape.num_heads != shape.num_kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, scale=shape.scale, enable_gqa=gqa)

    return _call(attend, inputs)


def backward_case(shape: TrainingShape) -> Case[TrainingInputs]:
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
    return Case(
        "backward",
        f"B={shape.batch} {shape.length} H={shape.num_heads}/{shape.num_kv_heads} D={shape.head_dim}",
        "causal" if shape.causal else "full",
        training_work(shape.batch, shape.length, *heads, shape.dtype.itemsize, causal=shape.causal),
        seeded(partial(_inputs, shape)),
        _expected,
        (
            Contender("radixrt", _ours),
            Contender("SDPA FlashAttention-2", partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION)),
            Contender("SDPA cuDNN", partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)),
        ),
    )


def backward_cases() -> Iterator[Case[TrainingInputs]]:
    """Small heads, causal and full."""
    for head_dim in (32, 64):
        for causal in (True, False):
            yield backward_case(TrainingShape(4, 4096, 48, 48, head_dim, causal))
