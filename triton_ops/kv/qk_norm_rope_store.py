"""The steps before attention in one launch: norm and rotation of query and key heads, and the KV store."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.activations.elementwise import check_vector
from triton_ops.e4m3 import E4M3, check_scales, in_float16, quantise, to_e4m3, to_float16
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
from triton_ops.kv.kv_store import kv_store
from triton_ops.kv.rope import apply_rotary
from triton_ops.kv.view import KVView
from triton_ops.norms.rms_norm import rms_norm, weighted
from triton_ops.tuning import QK_NORM_ROPE


@dataclass(frozen=True)
class HeadNorm:
    """The norm of each query head and each key head by itself.

    `q_weight` and `k_weight` are `[head_dim]` in the heads' dtype. `offset` is that of `rms_norm`. It comes before
    the rotation, or after it.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float | None = None
    after_rotation: bool = False


@dataclass(frozen=True)
class Rotation:
    """The arguments of `apply_rotary`."""

    cos_sin_cache: Tensor
    positions: Tensor
    interleaved: bool = False
    q_factors: Tensor | None = None


def qk_norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVView,
    out_cache_loc: Tensor,
    *,
    norm: HeadNorm | None = None,
    rotation: Rotation | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm q and k head by head, rotate them (or the other way round, see `HeadNorm`), and write k and v into the
    pool (`kv_store`). All in place.

    A pool of e4m3 receives k and v divided by their heads' scales (`quantise`). Then k and v become the numbers
    that the pool holds, not multiplied by the scales: new tokens attend to what later ones will.

    Over such a pool attention multiplies in float16, to which a GPU converts e4m3 in a third of the instructions
    that bfloat16 takes. So there bfloat16 q, k and v become float16 (`in_float16`) in the same memory.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, float16, bfloat16 or float32: becomes what attention reads.
        k, v: `[num_tokens, num_kv_heads, head_dim]` in q's dtype; likewise. All three may be views of one packed
            projection: a token's heads, and a head's elements, lie one after the other.
        kv: the pool, whose heads lie likewise; a pool of e4m3 has scales, no other has.
        out_cache_loc: int32 `[num_tokens]`, the slots; distinct except for slot 0, which padding writes to.
        norm: None: there is none.
        rotation: None: the layer has no positions.

    Returns q, k and v as attention reads them: the given tensors, or views of them as float16.

    Each step rounds to q's dtype, as the operations do that this one consists of. Raises ValueError where the
    kernel cannot read the tensors, or a scale is missing or meaningless.
    """
    check_scales(kv.k_scale, kv.v_scale, k.shape[1])
    for name, scale, buffer in (("k", kv.k_scale, kv.k), ("v", kv.v_scale, kv.v)):
        if (scale is None) == (buffer.dtype == E4M3):
            raise ValueError(f"{name}_scale is {scale}, but the pool's {name} holds {buffer.dtype}")
    if runs_triton(impl, q.device):
        return _launch(q, k, v, kv, out_cache_loc, norm, rotation)
    new_q, new_k = q, k
    if norm is not None and not norm.after_rotation:
        new_q, new_k = _normed(norm, new_q, new_k)
    if rotation is not None:
        new_q, new_k = apply_rotary(
            new_q,
            new_k,
            rotation.cos_sin_cache,
            rotation.positions,
            interleaved=rotation.interleaved,
            q_factors=rotation.q_factors,
        )
    if norm is not None and norm.after_rotation:
        new_q, new_k = _normed(norm, new_q, new_k)
    if new_q is not q:
        q.copy_(new_q)
        k.copy_(new_k)
    if kv.k_scale is not None and kv.v_scale is not None:
        k.copy_(quantise(k, kv.k_scale))
        v.copy_(quantise(v, kv.v_scale))
    kv_store(k, v, kv.k, kv.v, out_cache_loc)
    if kv.k_scale is None or q.dtype != torch.bfloat16:
        return q, k, v
    return _become_float16(q), _become_float16(k), _become_float16(v)


def _normed(norm: HeadNorm, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return (
        rms_norm(q, norm.q_weight, norm.eps, offset=norm.offset, impl="torch"),
        rms_norm(k, norm.k_weight, norm.eps, offset=norm.offset, impl="torch"),
    )


def _become_float16(x: Tensor) -> Tensor:
    return x.view(torch.float16).copy_(in_float16(x))


def _check(q: Tensor, k: Tensor, v: Tensor, kv: KVView, norm: HeadNorm | None, rotation: Rotation | None) -> None:
    """Raise ValueError where the kernel would read or write something else than its arguments mean."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    for name, heads in (("q", q), ("k", k), ("v", v), ("the pool's k", kv.k), ("the pool's v", kv.v)):
        side_by_side = heads.shape[1] == 1 or heads.stride(1) == head_dim
        if heads.shape[2] != head_dim or heads.stride(2) != 1 or not side_by_side:
            raise ValueError(
                f"{name} must have contiguous heads of {head_dim} elements, but has shape {[*heads.shape]} and "
                f"strides {[*heads.stride()]}"
            )
    if not k.shape == v.shape == (num_tokens, num_kv_heads, head_dim) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v disagree: {[*q.shape]} {q.dtype}, {[*k.shape]} {k.dtype}, {[*v.shape]} {v.dtype}"
        )
    if kv.k.shape[1] != num_kv_heads or kv.v.shape[1] != num_kv_heads:
        raise ValueError(f"the pool has {kv.k.shape[1]} and {kv.v.shape[1]} heads, k has {num_kv_heads}")
    if num_tokens * num_heads >= 2**31:
        raise ValueError(f"{num_tokens} tokens of {num_heads} heads exceed the kernel's limit")
    if norm is not None:
        for name, weight in (("q_weight", norm.q_weight), ("k_weight", norm.k_weight)):
            check_vector(name, weight, q)
    if rotation is not None:
        rotary_dim = rotation.cos_sin_cache.shape[1]
        if rotary_dim % 2 or rotary_dim > head_dim or not rotation.cos_sin_cache.is_contiguous():
            raise ValueError(
                f"cos_sin_cache must be contiguous with an even number of at most {head_dim} columns, but has "
                f"{rotary_dim}"
            )


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVView,
    out_cache_loc: Tensor,
    norm: HeadNorm | None,
    rotation: Rotation | None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    _check(q, k, v, kv, norm, rotation)
    rotary_dim = 0 if rotation is None else rotation.cos_sin_cache.shape[1]
    dtype = torch.float16 if kv.k_scale is not None and q.dtype == torch.bfloat16 else q.dtype
    read = q.view(dtype), k.view(dtype), v.view(dtype)
    if num_tokens == 0:
        return read
    half = next_power_of_2(rotary_dim // 2) if rotary_dim else 0
    rest = next_power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else 0
    rows = max(1, QK_NORM_ROPE.size // next_power_of_2(head_dim))
    kv_programs = cdiv(num_tokens * num_kv_heads, rows)
    # Without norm, rotation and a change of dtype, q stays as it is.
    unchanged = norm is None and rotation is None and dtype == q.dtype
    q_programs = 0 if unchanged else cdiv(num_tokens * num_heads, rows)
    _qk_norm_rope_store_kernel[(q_programs + 2 * kv_programs,)](
        q,
        k,
        v,
        kv.k,
        kv.v,
        out_cache_loc,
        None if norm is None else norm.q_weight,
        None if norm is None else norm.k_weight,
        None if rotation is None else rotation.cos_sin_cache,
        None if rotation is None else rotation.positions,
        None if rotation is None else rotation.q_factors,
        kv.k_scale,
        kv.v_scale,
        num_tokens,
        q_programs,
        kv_programs,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        kv.k.stride(0),
        kv.v.stride(0),
        0.0 if norm is None else norm.eps,
        OFFSET=None if norm is None else norm.offset,
        INTERLEAVED=rotation is not None and rotation.interleaved,
        NORM_LAST=norm is not None and norm.after_rotation,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HALF=half,
        REST=rest,
        WHOLE=next_power_of_2(head_dim),
        ROWS=rows,
        TO_FLOAT16=dtype != q.dtype,
        num_warps=QK_NORM_ROPE.num_warps,
        **overlapped(q.device, num_tokens),
    )
    return read


# Numbers that differ from pass to pass must not require another variant.
@triton.jit(
    do_not_specialize=["num_tokens", "q_programs", "kv_programs"],
    do_not_specialize_on_alignment=["slot_ptr", "position_ptr"],
)
def _qk_norm_rope_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_buffer_ptr,
    v_buffer_ptr,
    slot_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    position_ptr,
    q_factor_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    q_programs,
    kv_programs,
    q_stride,
    k_stride,
    v_stride,
    k_buffer_stride,
    v_buffer_stride,
    eps,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_LAST: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    TO_FLOAT16: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program computes ROWS heads of q, of k or of v, in the order of tokens."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    if program < q_programs:
        row = program * ROWS + tl.arange(0, ROWS)
        token, head = row // NUM_HEADS, row % NUM_HEADS
        _norm_and_rotate(
            q_ptr + (token.to(tl.int64) * q_stride + head * HEAD_DIM)[:, None],
            None,
            None,
            q_weight_ptr,
            cos_sin_ptr,
            position_ptr,
            q_factor_ptr,
            token,
            token < num_tokens,
            eps,
            OFFSET,
            INTERLEAVED,
            NORM_LAST,
            HEAD_DIM,
            ROTARY_DIM,
            HALF,
            REST,
            TO_FLOAT16,
        )
    else:
        is_v = program >= q_programs + kv_programs
        row = (program - q_programs - tl.where(is_v, kv_programs, 0)) * ROWS + tl.arange(0, ROWS)
        token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
        is_live = token < num_tokens
        slot = tl.load(slot_ptr + token, mask=is_live, other=0).to(tl.int64)
        if is_v:
            col = tl.arange(0, WHOLE)[None, :]
            mask = is_live[:, None] & (col < HEAD_DIM)
            heads = v_ptr + (token.to(tl.int64) * v_stride + head * HEAD_DIM)[:, None] + col
            to = v_buffer_ptr + (slot * v_buffer_stride + head * HEAD_DIM)[:, None] + col
            v_scale = None if v_scale_ptr is None else tl.load(v_scale_ptr + head)[:, None]
            _store(tl.load(heads, mask=mask), heads, to, v_scale, mask, False, TO_FLOAT16)
        else:
            _norm_and_rotate(
                k_ptr + (token.to(tl.int64) * k_stride + head * HEAD_DIM)[:, None],
                k_buffer_ptr + (slot * k_buffer_stride + head * HEAD_DIM)[:, None],
                None if k_scale_ptr is None else tl.load(k_scale_ptr + head)[:, None],
                k_weight_ptr,
                cos_sin_ptr,
                position_ptr,
                None,
                token,
                is_live,
                eps,
                OFFSET,
                INTERLEAVED,
                NORM_LAST,
                HEAD_DIM,
                ROTARY_DIM,
                HALF,
                REST,
                TO_FLOAT16,
            )


@triton.jit
def _norm_and_rotate(
    heads,
    pool_heads,
    pool_scale,
    weight_ptr,
    cos_sin_ptr,
    position_ptr,
    factor_ptr,
    token,
    is_live,
    eps,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_LAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    TO_FLOAT16: tl.constexpr,
):
    """Norm and rotate the heads that begin at `heads [ROWS, 1]`; what is rotated is multiplied by the factors of
    positions, unless they are None. The result goes there and, divided by
    `pool_scale` `[ROWS, 1]` if there is one, to `pool_heads` unless that is None.

    A head is held in up to three parts: the first elements of its pairs, the second ones, and the unrotated rest.
    """
    live = is_live[:, None]
    dtype: tl.constexpr = heads.dtype.element_ty
    square = 0.0
    if ROTARY_DIM > 0:
        pair = tl.arange(0, HALF)[None, :]
        is_pair = live & (pair < ROTARY_DIM // 2)
        both = tl.arange(0, 2 * HALF)[None, :]
        is_both = live & (both < ROTARY_DIM)
        if INTERLEAVED:
            first, second = _split(tl.load(heads + both, mask=is_both, other=0.0))
        else:
            first = tl.load(heads + pair, mask=is_pair, other=0.0)
            second = tl.load(heads + ROTARY_DIM // 2 + pair, mask=is_pair, other=0.0)
        first, second = first.to(tl.float32), second.to(tl.float32)
        position = tl.load(position_ptr + token, mask=is_live, other=0).to(tl.int64)
        angles = cos_sin_ptr + (position * ROTARY_DIM)[:, None] + pair
        cos = tl.load(angles, mask=is_pair, other=0.0)
        sin = tl.load(angles + ROTARY_DIM // 2, mask=is_pair, other=0.0)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr + position, mask=is_live, other=0.0)[:, None]
            cos *= factor
            sin *= factor
        if NORM_LAST:
            first, second = _turn(first, second, cos, sin, dtype)
            first, second = first.to(tl.float32), second.to(tl.float32)
        if weight_ptr is not None:
            square += tl.sum(first * first + second * second, axis=1, keep_dims=True)
    if REST > 0:
        unrotated = ROTARY_DIM + tl.arange(0, REST)[None, :]
        is_unrotated = live & (unrotated < HEAD_DIM)
        rest = tl.load(heads + unrotated, mask=is_unrotated, other=0.0)
        if weight_ptr is not None:
            square += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), axis=1, keep_dims=True)
    if weight_ptr is not None:
        # A pointer for each head: weights are loaded in the heads' layout, and nothing moves between threads.
        weights = weight_ptr + tl.zeros_like(token)[:, None]
        scale = tl.rsqrt(square / HEAD_DIM + eps)
        if ROTARY_DIM > 0:
            if INTERLEAVED:
                first_weight, second_weight = _split(tl.load(weights + both, mask=is_both, other=0.0))
            else:
                first_weight = tl.load(weights + pair, mask=is_pair, other=0.0)
                second_weight = tl.load(weights + ROTARY_DIM // 2 + pair, mask=is_pair, other=0.0)
            first = weighted(first * scale, first_weight, dtype, OFFSET).to(tl.float32)
            second = weighted(second * scale, second_weight, dtype, OFFSET).to(tl.float32)
        if REST > 0:
            rest_weight = tl.load(weights + unrotated, mask=is_unrotated, other=0.0)
            rest = weighted(rest.to(tl.float32) * scale, rest_weight, dtype, OFFSET)
    if REST > 0:
        pool_rest = None if pool_heads is None else pool_heads + unrotated
        _store(rest, heads + unrotated, pool_rest, pool_scale, is_unrotated, weight_ptr is not None, TO_FLOAT16)
    if ROTARY_DIM > 0:
        if NORM_LAST:
            turned, turned_second = first.to(dtype), second.to(dtype)
        else:
            turned, turned_second = _turn(first, second, cos, sin, dtype)
        if INTERLEAVED:
            joined = tl.reshape(tl.join(turned, turned_second), [turned.shape[0], 2 * HALF])
            pool_both = None if pool_heads is None else pool_heads + both
            _store(joined, heads + both, pool_both, pool_scale, is_both, True, TO_FLOAT16)
        else:
            second_pair = ROTARY_DIM // 2 + pair
            pool_pair = None if pool_heads is None else pool_heads + pair
            pool_second = None if pool_heads is None else pool_heads + second_pair
            _store(turned, heads + pair, pool_pair, pool_scale, is_pair, True, TO_FLOAT16)
            _store(turned_second, heads + second_pair, pool_second, pool_scale, is_pair, True, TO_FLOAT16)


@triton.jit
def _turn(first, second, cos, sin, dtype: tl.constexpr):
    """Pairs of float32 turned by their angles, in `dtype`."""
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _store(x, heads, pool_heads, pool_scale, mask, CHANGED: tl.constexpr, TO_FLOAT16: tl.constexpr):
    """Write x to `pool_heads`, divided by `pool_scale`, unless they are None, and back to `heads` what attention
    reads in place of x, unless it is there already: CHANGED says that x itself is not.
    """
    if pool_scale is not None:
        x = to_e4m3(x, pool_scale)
    if pool_heads is not None:
        tl.store(pool_heads, x.to(pool_heads.dtype.element_ty), mask=mask)
    if TO_FLOAT16:
        tl.store(heads.to(tl.pointer_type(tl.float16), bitcast=True), to_float16(x), mask=mask)
    elif CHANGED or pool_scale is not None:
        tl.store(heads, x.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def _split(x):
    """The even and the odd columns of `x [rows, columns]`."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return even, odd
