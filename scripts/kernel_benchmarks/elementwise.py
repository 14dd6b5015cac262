"""Operations that read and write every element once: our kernels and torch.compile's, and their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.kernel_benchmarks.case import Call, Case, Contender, Expected, Source, seeded, tensors
from scripts.kernel_benchmarks.roofline import Work
from triton_ops.activations.clamped_swiglu import clamped_swiglu
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.gelu_fast import gelu_fast
from triton_ops.activations.gelu_new import gelu_new
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.activations.squared_relu import squared_relu
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.implementation import Impl
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store
from triton_ops.kv.view import KVView
from triton_ops.norms.layer_norm import add_layer_norm, layer_norm
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm, rms_norm_add

EPS = 1e-5

Arguments = tuple[Tensor, ...]


@dataclass(frozen=True)
class RowOperation:
    """An operation on the rows of a pass.

    Attributes:
        op: takes the tensors of `inputs`, the options and `impl`.
        inputs: a letter each: x is `[num_tokens, size]`, g (gates, and what they gate) `[num_tokens, 2 * size]`,
            w `[size]`.
        moved: rows of `size` that are read or written.
    """

    op: Callable[..., Any]
    inputs: str
    moved: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """With the options that are not the usual ones."""
        words = (f" {name} {value}" for name, value in self.options.items() if name != "eps")
        return self.op.__name__ + "".join(words)

    def arguments(self, num_tokens: int, size: int, dtype: torch.dtype, source: Source) -> Arguments:
        shapes = {"x": (num_tokens, size), "g": (num_tokens, 2 * size), "w": (size,)}
        return tuple(source.normal(*shapes[letter], dtype=dtype) for letter in self.inputs)


NORMS = (
    RowOperation(rms_norm, "xw", 2, {"eps": EPS}),
    RowOperation(rms_norm, "xw", 2, {"eps": EPS, "offset": 1.0}),
    RowOperation(add_rms_norm, "xxw", 4, {"eps": EPS}),
    RowOperation(add_rms_norm, "xxw", 4, {"eps": EPS, "offset": 0.0}),
    RowOperation(rms_norm_add, "xxw", 3, {"eps": EPS, "offset": 0.0}),
    RowOperation(layer_norm, "xw", 2, {"bias": None, "eps": EPS}),
    RowOperation(layer_norm, "xww", 2, {"eps": EPS}),
    RowOperation(add_layer_norm, "xxww", 4, {"eps": EPS}),
)
ACTIVATIONS = (
    RowOperation(silu_and_mul, "g", 3),
    RowOperation(clamped_swiglu, "g", 3),
    RowOperation(gelu_and_mul, "g", 3, {"approximate": "none"}),
    RowOperation(gelu_and_mul, "g", 3, {"approximate": "tanh"}),
    RowOperation(gelu_new, "x", 2),
    RowOperation(gelu_fast, "x", 2),
    RowOperation(squared_relu, "x", 2),
)
SOFT_CAP = RowOperation(soft_cap, "x", 2, {"cap": 30.0})


def _case(
    name: str, num_bytes: int, operation: Callable[..., Any], arguments: Callable[[Source], Arguments]
) -> Case[Arguments]:
    """`operation` on these tensors; it takes `impl`."""

    def expected(given: Arguments) -> Expected:
        # In float32, so that the kernel's rounding shows as error, and on copies, as some are written in place.
        wide = [x.float() if x.is_floating_point() else x for x in given]
        return Expected(tensors(operation(*wide, impl="torch")))

    def ours(given: Arguments) -> Call:
        return Call(lambda: operation(*given, impl="triton"))

    def compiled(given: Arguments) -> Call:
        made = torch.compile(partial(operation, impl="torch"), dynamic=False)
        return Call(lambda: made(*given))

    contenders = Contender("radixrt", ours), Contender("torch.compile", compiled, compiles=True)
    return Case("elementwise", name, "", Work(num_bytes), seeded(arguments), expected, contenders)


def row_case(
    operation: RowOperation, num_tokens: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> Case[Arguments]:
    num_bytes = operation.moved * num_tokens * size * dtype.itemsize
    op = partial(operation.op, **operation.options)
    arguments = partial(operation.arguments, num_tokens, size, dtype)
    return _case(f"{operation.name} {num_tokens}x{size}", num_bytes, op, arguments)


def head_cases(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Case[Arguments]]:
    """The operation on q, k and v between projection and attention, without and with norms."""
    # q is read and written, k also stored, v read and stored; cosines and sines in float32; positions and slots.
    num_bytes = num_tokens * (
        head_dim * dtype.itemsize * (2 * num_heads + 5 * num_kv_heads) + 4 * head_dim + 2 * 4
    )

    def arguments(source: Source) -> Arguments:
        """q, k and v as views of one packed projection; the pool's slots scattered."""
        packed = source.normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        q, k, v = packed.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
        pool = torch.zeros(2, num_tokens + 1, num_kv_heads, head_dim, dtype=dtype, device=source.device)
        cache = source.normal(num_tokens, head_dim, dtype=torch.float32)
        positions = torch.arange(num_tokens, dtype=torch.int32, device=source.device)
        weights = source.normal(2, head_dim, dtype=dtype)
        return (q, k, v, *pool, 1 + source.permutation(num_tokens), cache, positions, *weights)

    shape = f"{num_tokens}x{num_heads}/{num_kv_heads}x{head_dim}"
    for name, normed in (("rotary_store", False), ("qk_norm_rope_store", True)):
        yield _case(f"{name} {shape}", num_bytes, partial(_qk_norm_rope_store, normed=normed), arguments)


def _qk_norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    normed: bool,
    impl: Impl,
) -> Arguments:
    """Its outputs: q, k and the pool."""
    norm = HeadNorm(q_weight, k_weight, EPS) if normed else None
    rotation = Rotation(cos_sin_cache, positions)
    kv = KVView(k_buffer, v_buffer, slots[None])
    qk_norm_rope_store(q, k, v, kv, slots, norm=norm, rotation=rotation, impl=impl)
    return q, k, k_buffer, v_buffer


def elementwise_cases() -> Iterator[Case[Arguments]]:
    """Llama 3.1 8B's sizes at 16,384 tokens, and its logits at 1,024: more than 64 MB each."""
    yield from _cases(16_384, 4096)
    yield row_case(SOFT_CAP, 1024, 128_256)


def _cases(num_tokens: int, size: int, inner: int = 14_336, head_dim: int = 128) -> Iterator[Case[Arguments]]:
    for operation in NORMS:
        yield row_case(operation, num_tokens, size)
    for operation in ACTIVATIONS:
        yield row_case(operation, num_tokens, inner)
    yield from head_cases(num_tokens, 32, 8, head_dim)


def elementwise_sweep() -> Iterator[Case[Arguments]]:
    """Fewer and more tokens, other sizes."""
    for num_tokens in (1, 64, 1024, 65_536):
        yield from _cases(num_tokens, 4096)
    for size, head_dim in ((1024, 64), (5120, 80), (8192, 256)):
        yield from _cases(16_384, size, head_dim=head_dim)
