"""Cases of attention over the pool: our kernels and their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from radixrt.bench.kernels.attention_inputs import (
    AttentionInputs,
    AttentionShape,
    attention_inputs,
    expected_attention,
)
from radixrt.bench.kernels.attention_peers import (
    flash_infer_decode,
    flash_infer_extend,
    flex_attention,
    sdpa_cudnn,
    sdpa_flash,
)
from radixrt.bench.kernels.case import Call, Case, Contender
from radixrt.bench.kernels.roofline import decode_work, extend_work
from radixrt.execution.attention.flat import KernelShape
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.extend import Extends, extend_attention
from triton_ops.attention.ordered import SUPERBLOCK, ordered_decode, ordered_extend
from triton_ops.attention.plan import AttentionPlan, ExtendPlan
from triton_ops.e4m3 import E4M3, quantise
from triton_ops.implementation import gpu_of

E4M3_SCALE = 2.0**-6  # normal numbers are up to 6 in magnitude


def our_decode(inputs: AttentionInputs, kv_scale: Tensor | None = None, *, deterministic: bool = False) -> Call:
    """The plan is made once, as for a steady batch."""
    shape = inputs.shape
    seq_lens = [shape.length] * shape.batch
    item_len = _kernel_shape(inputs).decode_item_len(np.array(seq_lens, np.int32))
    superblock = SUPERBLOCK if deterministic else None
    plan = AttentionPlan.flat(range(shape.batch), seq_lens, max_item_len=item_len, superblock=superblock)
    return planned_decode(inputs, plan.to(inputs.q.device), kv_scale, deterministic=deterministic)


def _kernel_shape(inputs: AttentionInputs) -> KernelShape:
    shape = inputs.shape
    return KernelShape(gpu_of(inputs.q.device), shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype)


def planned_decode(
    inputs: AttentionInputs, plan: AttentionPlan, kv_scale: Tensor | None = None, *, deterministic: bool = False
) -> Call:
    """Our decode attention by this plan; `kv_scale` is that of keys and of values."""
    kv, scoring = inputs.kv(kv_scale), Scoring(inputs.shape.scale)
    if deterministic:
        return Call(lambda: ordered_decode(inputs.q, kv, inputs.rows, plan, scoring, impl="triton"))
    return Call(lambda: decode_attention(inputs.q, kv, plan, scoring, impl="triton"))


def e4m3_inputs(shape: AttentionShape, device: torch.device, copies: int) -> Sequence[AttentionInputs]:
    """Keys and values that e4m3 holds exactly: over it and over bf16 the results are the same."""
    sets = attention_inputs(shape, device, copies)
    for buffer in (sets[0].k_buffer, sets[0].v_buffer):  # shared by the sets
        for part in torch.split(buffer, 2**20):
            part.copy_(quantise(part, _e4m3_scale(shape, device)).float() * E4M3_SCALE)
    return sets


def _e4m3_scale(shape: AttentionShape, device: torch.device) -> Tensor:
    return torch.full((shape.num_kv_heads,), E4M3_SCALE, device=device)


def our_decode_over_e4m3(inputs: AttentionInputs) -> Call:
    """The same KV in e4m3, and queries in float16: as `qk_norm_rope_store` leaves them."""
    scale = _e4m3_scale(inputs.shape, inputs.q.device)
    quantised = replace(
        inputs,
        q=inputs.q.half(),
        k_buffer=quantise(inputs.k_buffer, scale),
        v_buffer=quantise(inputs.v_buffer, scale),
    )
    return our_decode(quantised, kv_scale=scale)


def our_extend(inputs: AttentionInputs, *, deterministic: bool = False) -> Call:
    """The plan is made once, as for all layers of a pass."""
    kernel, kv, scoring = _kernel_shape(inputs), inputs.kv(), Scoring(inputs.shape.scale)
    lens = inputs.prefix_lens, inputs.extend_start_loc, inputs.extend_seq_lens
    prefix, starts, counts = (x.cpu().numpy() for x in lens)
    tile, extends = kernel.tile_tokens(counts), Extends(inputs.rows, *lens)
    most = None if deterministic else kernel.extend_item_len(prefix, counts, tile, None)
    superblock = SUPERBLOCK if deterministic else None
    plan = ExtendPlan.of_extends(
        prefix, starts, counts, tile_tokens=tile, max_item_len=most, superblock=superblock
    ).to(inputs.q.device)
    if deterministic:
        return Call(lambda: ordered_extend(inputs.q, kv, extends, plan, scoring, impl="triton"))
    return Call(lambda: extend_attention(inputs.q, inputs.k, inputs.v, kv, extends, plan, scoring, impl="triton"))


# Peers that read KV by slots, and peers that need it gathered beforehand.
_PAGED_DECODE = (Contender("FlashInfer", flash_infer_decode),)
_PAGED_EXTEND = (
    Contender("FlashInfer FA2", partial(flash_infer_extend, backend="fa2")),
    Contender("FlashInfer FA3", partial(flash_infer_extend, backend="fa3")),
)
_DENSE = (
    Contender("SDPA FlashAttention-2", sdpa_flash),
    Contender("SDPA cuDNN", sdpa_cudnn),
    Contender("FlexAttention", flex_attention, compiles=True),
)


def decode_case(shape: AttentionShape) -> Case[AttentionInputs]:
    ours = Contender("radixrt", our_decode)
    return Case(
        "decode",
        f"B={shape.batch} L={shape.length} {shape.words}".strip(),
        "scattered" if shape.scattered else "consecutive",
        decode_work([shape.length] * shape.batch, *shape.heads),
        partial(attention_inputs, shape),
        expected_attention,
        (ours, *_PAGED_DECODE, *(() if shape.scattered else _DENSE)),
    )


def e4m3_decode_case(shape: AttentionShape) -> Case[AttentionInputs]:
    """Beside the same kernel over bf16: "vs" is the speed-up."""
    return Case(
        "decode-fp8",
        f"B={shape.batch} L={shape.length} {shape.words}".strip(),
        "",
        decode_work([shape.length] * shape.batch, *shape.heads, kv_itemsize=E4M3.itemsize),
        partial(e4m3_inputs, shape),
        expected_attention,
        (Contender("radixrt", our_decode_over_e4m3), Contender("radixrt, bf16 KV", our_decode)),
    )


def extend_case(shape: AttentionShape, group: str = "extend") -> Case[AttentionInputs]:
    return Case(
        group,
        f"B={shape.batch} {shape.prefix}+{shape.extend} {shape.words}".strip(),
        "",
        extend_work([(shape.prefix, shape.extend)] * shape.batch, *shape.heads),
        partial(attention_inputs, shape),
        expected_attention,
        (Contender("radixrt", our_extend), *_PAGED_EXTEND, *_DENSE),
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
    """The shapes of the goals, and of the published times."""
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
