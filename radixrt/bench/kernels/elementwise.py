"""Operations that read and write every element once: our kernels and torch.compile's, and their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from radixrt.bench.kernels.case import Call, Case, Contender, Expected, seeded, tensors
from radixrt.bench.kernels.roofline import Work
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.gelu_fast import gelu_fast
from triton_ops.activations.gelu_new import gelu_new
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.implementation import Impl
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store
from triton_ops.kv.view import KVView
from triton_ops.norms.layer_norm import add_layer_norm
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm

DTYPE = torch.bfloat16
EPS = 1e-5

Arguments = tuple[Tensor, ...]


def _case(
    name: str,
    shape: str,
    num_bytes: int,
    operation: Callable[..., Any],
    arguments: Callable[..., Arguments],
    **options: Any,
) -> Case[Arguments]:
    """`operation` on the tensors that `arguments(generator=...)` makes; it takes `impl`."""

    def expected(given: Arguments) -> Expected:
        # In float32, so that the kernel's rounding shows as error, and on copies, as some are written in place.
        wide = [x.float() if x.dtype == DTYPE else x for x in given]
        return Expected(tensors(operation(*wide, impl="torch", **options)))

    def ours(given: Arguments) -> Call:
        return Call(lambda: operation(*given, impl="triton", **options))

    def compiled(given: Arguments) -> Call:
        def reference(*given: Tensor) -> Any:
            return operation(*given, impl="torch", **options)

        made = torch.compile(reference, dynamic=False)
        return Call(lambda: made(*given))

    return Case(
        "elementwise",
        f"{name} {shape}",
        "",
        Work(num_bytes),
        seeded(lambda generator: arguments(generator=generator)),
        expected,
        (Contender("radixrt", ours), Contender("torch.compile", compiled, compiles=True)),
    )


def _random(*shapes: tuple[int, ...], generator: torch.Generator) -> Arguments:
    make = partial(torch.randn, dtype=DTYPE, device=generator.device, generator=generator)
    return tuple(make(shape) for shape in shapes)


def row_cases(num_tokens: int, size: int) -> Iterator[Case[Arguments]]:
    """The norms of `num_tokens` hidden states."""
    shape, rows = f"{num_tokens}x{size}", (num_tokens, size)
    row_bytes = num_tokens * size * DTYPE.itemsize
    added = partial(_random, rows, rows, (size,))
    yield _case("rms_norm", shape, 2 * row_bytes, rms_norm, partial(_random, rows, (size,)), eps=EPS)
    yield _case("add_rms_norm", shape, 4 * row_bytes, add_rms_norm, added, eps=EPS)
    yield _case("add_rms_norm_fp32_weight", shape, 4 * row_bytes, add_rms_norm, added, eps=EPS, offset=1.0)
    biased = partial(_random, rows, rows, (size,), (size,))
    yield _case("add_layer_norm", shape, 4 * row_bytes, add_layer_norm, biased, eps=EPS)


def activation_cases(num_tokens: int, size: int) -> Iterator[Case[Arguments]]:
    """The activations of an MLP whose intermediate size is `size`."""
    shape = f"{num_tokens}x{size}"
    row_bytes = num_tokens * size * DTYPE.itemsize
    gate_up, alone = partial(_random, (num_tokens, 2 * size)), partial(_random, (num_tokens, size))
    yield _case("silu_and_mul", shape, 3 * row_bytes, silu_and_mul, gate_up)
    yield _case("gelu_and_mul", shape, 3 * row_bytes, gelu_and_mul, gate_up, approximate="none")
    yield _case("gelu_and_mul tanh", shape, 3 * row_bytes, gelu_and_mul, gate_up, approximate="tanh")
    yield _case("gelu_new", shape, 2 * row_bytes, gelu_new, alone)
    yield _case("gelu_fast", shape, 2 * row_bytes, gelu_fast, alone)


def logits_case(num_tokens: int, vocab_size: int) -> Case[Arguments]:
    """The soft cap of logits."""
    num_bytes = 2 * num_tokens * vocab_size * DTYPE.itemsize
    logits = partial(_random, (num_tokens, vocab_size))
    return _case("soft_cap", f"{num_tokens}x{vocab_size}", num_bytes, soft_cap, logits, cap=30.0)


def head_cases(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Iterator[Case[Arguments]]:
    """The operation on q, k and v between projection and attention, without and with norms."""
    # q is read and written, k also stored, v read and stored; cosines and sines in float32; positions and slots.
    num_bytes = num_tokens * (
        head_dim * DTYPE.itemsize * (2 * num_heads + 5 * num_kv_heads) + 4 * head_dim + 2 * 4
    )

    def arguments(generator: torch.Generator) -> Arguments:
        """q, k and v as views of one packed projection; the pool's slots scattered."""
        device, packed_shape = generator.device, (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        packed, q_weight, k_weight = _random(packed_shape, (head_dim,), (head_dim,), generator=generator)
        q, k, v = packed.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
        pool = torch.zeros(2, num_tokens + 1, num_kv_heads, head_dim, dtype=DTYPE, device=device)
        cache = torch.randn(num_tokens, head_dim, device=device, generator=generator)
        positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
        slots = 1 + torch.randperm(num_tokens, device=device, generator=generator).int()
        return (q, k, v, *pool, slots, cache, positions, q_weight, k_weight)

    shape = f"{num_tokens}x{num_heads}/{num_kv_heads}x{head_dim}"
    yield _case("rotary_store", shape, num_bytes, _qk_norm_rope_store, arguments, normed=False)
    yield _case("qk_norm_rope_store", shape, num_bytes, _qk_norm_rope_store, arguments, normed=True)


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
    yield from row_cases(16_384, 4096)
    yield from activation_cases(16_384, 14_336)
    yield logits_case(1024, 128_256)
    yield from head_cases(16_384, 32, 8, 128)


def elementwise_sweep() -> Iterator[Case[Arguments]]:
    """Fewer and more tokens, other hidden sizes."""
    for num_tokens in (1, 64, 1024, 65_536):
        yield from row_cases(num_tokens, 4096)
        yield from activation_cases(num_tokens, 14_336)
        yield from head_cases(num_tokens, 32, 8, 128)
    for size in (1024, 5120, 8192):
        yield from row_cases(16_384, size)
    for head_dim in (64, 80, 256):
        yield from head_cases(16_384, 32, 8, head_dim)
