"""Cases of attention over the pool: our kernels, torch's on the same inputs, and their shapes.

SDPA and FlexAttention know no pool: for them KV is gathered beforehand, which is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from radixrt.arrays import Int32Array
from scripts.kernel_benchmarks.attention_inputs import (
    AttentionInputs,
    AttentionShape,
    attention_inputs,
    expected_attention,
)
from scripts.kernel_benchmarks.case import Call, Case, Contender
from scripts.kernel_benchmarks.roofline import decode_work, extend_work
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.extend import extend_attention
from triton_ops.attention.ordered import SUPERBLOCK, ordered_decode, ordered_extend
from triton_ops.attention.plan import NOTHING_SHARED, AttentionPlan, ExtendPlan, SharedItems
from triton_ops.e4m3 import E4M3, quantise
from triton_ops.kv.view import KVView

E4M3_SCALE = 2.0**-6  # normal numbers are up to 6 in magnitude


# --- our kernels ---


def planned_decode(
    inputs: AttentionInputs, plan: AttentionPlan[Int32Array], *, deterministic: bool = False
) -> Call:
    """Our decode attention by this plan."""
    q, kv, scoring, on_device = inputs.q, inputs.kv, inputs.scoring, plan.to(inputs.q.device)
    if deterministic:
        rows = inputs.extends().req_pool_indices
        return Call(lambda: ordered_decode(q, kv, rows, on_device, scoring, impl="triton"))
    return Call(lambda: decode_attention(q, kv, on_device, scoring, impl="triton"))


def our_decode(inputs: AttentionInputs, *, deterministic: bool = False) -> Call:
    """The plan is made once, as for a steady batch."""
    shape = inputs.shape
    plan = AttentionPlan.flat(
        shape.rows,
        shape.each(shape.length),
        max_item_len=inputs.kernel.decode_item_len(shape.each(shape.length)),
        sliding_window=inputs.scoring.window,
        superblock=SUPERBLOCK if deterministic else None,
    )
    return planned_decode(inputs, plan, deterministic=deterministic)


def planned_extend(
    inputs: AttentionInputs, plan: ExtendPlan[Int32Array] | None, *, deterministic: bool = False
) -> Call:
    """Our extends by this plan; deterministic ones need none."""
    q, k, v, kv, scoring, extends = inputs.q, inputs.k, inputs.v, inputs.kv, inputs.scoring, inputs.extends()
    on_device = None if plan is None else plan.to(q.device)
    if deterministic:
        return Call(lambda: ordered_extend(q, kv, extends, on_device, scoring, impl="triton"))
    assert on_device is not None
    return Call(lambda: extend_attention(q, k, v, kv, extends, on_device, scoring, impl="triton"))


def our_extend(
    inputs: AttentionInputs, *, shared: SharedItems = NOTHING_SHARED, deterministic: bool = False
) -> Call:
    """The plan is made once, as for all layers of a pass. `shared`: the items that read the prefixes, for all."""
    shape, kernel, window = inputs.shape, inputs.kernel, inputs.scoring.window
    prefix, counts = shape.each(shape.prefix), shape.each(shape.extend)
    tails = shape.each(0) if shared is NOTHING_SHARED else prefix
    tile = kernel.tile_tokens(counts)
    plan = ExtendPlan.of_extends(
        prefix,
        shape.rows * shape.extend,
        counts,
        tile_tokens=tile,
        max_item_len=None if deterministic else kernel.extend_item_len(prefix - tails, counts, tile, window),
        sliding_window=window,
        tail_starts=tails,
        shared=shared,
        superblock=SUPERBLOCK if deterministic else None,
    )
    return planned_extend(inputs, plan, deterministic=deterministic)


def e4m3_inputs(shape: AttentionShape, device: torch.device, copies: int) -> Sequence[AttentionInputs]:
    """Keys and values that e4m3 holds exactly: over it and over bf16 the results are the same."""
    sets = attention_inputs(shape, device, copies)
    for buffer in (sets[0].kv.k, sets[0].kv.v):  # shared by the sets
        for part in torch.split(buffer, 2**20):
            part.copy_(quantise(part, _e4m3_scale(part)).float() * E4M3_SCALE)
    return sets


def _e4m3_scale(buffer: Tensor) -> Tensor:
    return torch.full((buffer.shape[1],), E4M3_SCALE, device=buffer.device)


def our_decode_over_e4m3(inputs: AttentionInputs) -> Call:
    """The same KV in e4m3, and queries in float16: as `qk_norm_rope_store` leaves them."""
    k, v, scale = inputs.kv.k, inputs.kv.v, _e4m3_scale(inputs.kv.k)
    kv = KVView(quantise(k, scale), quantise(v, scale), inputs.kv.req_to_token, scale, scale)
    return our_decode(replace(inputs, q=inputs.q.half(), kv=kv))


# --- torch's ---


def sdpa_flash(inputs: AttentionInputs) -> Call:
    """torch's own FlashAttention-2."""
    return _sdpa(inputs, SDPBackend.FLASH_ATTENTION)


def sdpa_cudnn(inputs: AttentionInputs) -> Call:
    """cuDNN's attention through torch, which can mask only prompts without a prefix."""
    shape = inputs.shape
    if shape.prefix and shape.extend > 1:
        raise NotImplementedError("torch gives cuDNN no causal mask that ends at the last key")
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION)


def _sdpa(inputs: AttentionInputs, backend: SDPBackend) -> Call:
    from torch.nn.attention.bias import causal_lower_right

    shape = inputs.shape
    q, keys, values = _batched(inputs)
    mask: Any = None
    if shape.prefix and shape.extend > 1:
        mask = causal_lower_right(shape.extend, shape.length)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q,
                keys,
                values,
                attn_mask=mask,
                is_causal=shape.prefix == 0 and shape.extend > 1,
                scale=shape.scale,
                enable_gqa=shape.num_heads != shape.num_kv_heads,
            )

    return Call(run, _token_rows)


def flex_attention(inputs: AttentionInputs) -> Call:
    """FlexAttention compiled for this shape; its block mask is not timed."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    shape = inputs.shape
    q, keys, values = _batched(inputs)
    mask = None
    if shape.extend > 1:

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query + shape.prefix >= key

        mask = create_block_mask(visible, None, None, shape.extend, shape.length, device=str(q.device))
    compiled = torch.compile(attend, dynamic=False)

    def run() -> object:
        return compiled(q, keys, values, block_mask=mask, scale=shape.scale, enable_gqa=True)

    return Call(run, _token_rows)


def _batched(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, keys and values as `[batch, heads, tokens, head_dim]`."""
    q = inputs.q.view(inputs.shape.batch, inputs.shape.extend, *inputs.q.shape[1:])
    dense = (inputs.dense(buffer) for buffer in (inputs.kv.k, inputs.kv.v))
    keys, values = (x.transpose(1, 2).contiguous() for x in dense)
    return q.transpose(1, 2).contiguous(), keys, values


def _token_rows(out: Any) -> Sequence[Tensor]:
    return (out.transpose(1, 2).flatten(0, 1),)


_DENSE = (
    Contender("SDPA FlashAttention-2", sdpa_flash),
    Contender("SDPA cuDNN", sdpa_cudnn),
    Contender("FlexAttention", flex_attention, compiles=True),
)


# --- cases ---


def decode_case(shape: AttentionShape) -> Case[AttentionInputs]:
    return Case(
        "decode",
        f"B={shape.batch} L={shape.length} {shape.words}".strip(),
        "scattered" if shape.scattered else "consecutive",
        decode_work([shape.length] * shape.batch, *shape.heads),
        partial(attention_inputs, shape),
        expected_attention,
        (Contender("radixrt", our_decode), *(() if shape.scattered else _DENSE)),
    )


def e4m3_decode_case(shape: AttentionShape) -> Case[AttentionInputs]:
    """Beside the same kernel over bf16: "vs" is the speed-up."""
    return replace(
        decode_case(shape),
        group="decode-fp8",
        variant="",
        work=decode_work([shape.length] * shape.batch, *shape.heads, kv_itemsize=E4M3.itemsize),
        inputs=partial(e4m3_inputs, shape),
        contenders=(Contender("radixrt", our_decode_over_e4m3), Contender("radixrt, bf16 KV", our_decode)),
    )


def extend_case(shape: AttentionShape, group: str = "extend") -> Case[AttentionInputs]:
    return Case(
        group,
        f"B={shape.batch} {shape.prefix}+{shape.extend} {shape.words}".strip(),
        "",
        extend_work([(shape.prefix, shape.extend)] * shape.batch, *shape.heads),
        partial(attention_inputs, shape),
        expected_attention,
        (Contender("radixrt", our_extend), *_DENSE),
    )


def ordered_case(shape: AttentionShape) -> Case[AttentionInputs]:
    """Beside the other kernels on the same inputs: "vs" is the speed-up, below 1 what equal bits cost."""
    case, ours = (decode_case(shape), our_decode) if shape.extend == 1 else (extend_case(shape), our_extend)
    contenders = (
        Contender("radixrt, deterministic", partial(ours, deterministic=True)),
        Contender("radixrt", ours),
    )
    return replace(case, group="same-bits", variant="", contenders=contenders)


def attention_cases() -> Iterator[Case[AttentionInputs]]:
    """The shapes of docs/benchmarks.md, and some more."""
    for batch, length in ((1, 8192), (64, 2048), (256, 1024), (256, 8192)):
        shape = AttentionShape(batch, length - 1, 1)
        yield decode_case(shape)
        yield decode_case(replace(shape, scattered=False))
    for batch, length in ((1, 8192), (8, 32_768), (64, 2048), (64, 4096), (256, 2048), (256, 8192)):
        yield e4m3_decode_case(AttentionShape(batch, length - 1, 1))
    for batch, length in ((1, 8192), (8, 2048), (32, 2048), (64, 2048), (256, 1024), (256, 8192)):
        yield ordered_case(AttentionShape(batch, length - 1, 1))
    for prefix in (0, 1024, 4096, 16_384):
        yield ordered_case(AttentionShape(1, prefix, 8192))
    for batch, prefix, extend in ((32, 1024, 128), (8, 4096, 16)):
        yield ordered_case(AttentionShape(batch, prefix, extend))
    for batch, prefix, extend in ((1, 0, 8192), (8, 0, 2048), (32, 1024, 128), (8, 4096, 512)):
        yield extend_case(AttentionShape(batch, prefix, extend))
    for batch, heads, length, head_dim in (
        (4, 48, 4096, 32),
        (4, 48, 4096, 64),
        (4, 32, 4096, 128),
        (1, 32, 16384, 128),
    ):
        yield extend_case(AttentionShape(batch, 0, length, heads, heads, head_dim))
    for batch in (1, 2, 4, 8):
        yield extend_case(AttentionShape(batch, 32_768, 16), "short-extend")


def attention_sweep() -> Iterator[Case[AttentionInputs]]:
    """Batches, lengths, head dimensions and groups around them."""
    for length in (128, 1024, 8192, 32_768):
        for batch in (1, 4, 16, 64, 256):
            if batch * length <= 2**21:
                yield decode_case(AttentionShape(batch, length - 1, 1))
    for extend in (64, 512, 4096, 32_768):
        for prefix in (0, 1024, 16_384):
            yield extend_case(AttentionShape(max(1, 8192 // extend), prefix, extend))
    for head_dim in (16, 32, 64, 80, 96, 112, 192, 256):
        yield decode_case(AttentionShape(64, 2047, 1, head_dim=head_dim))
        yield extend_case(AttentionShape(8, 0, 2048, head_dim=head_dim))
    for num_heads in (8, 16, 56, 64, 128):
        yield decode_case(AttentionShape(64, 2047, 1, num_heads))
        yield extend_case(AttentionShape(8, 0, 2048, num_heads))
