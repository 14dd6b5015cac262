"""Calls of every operation that has a Triton kernel, with CPU tensors whose contents nobody reads: what the
kernels are compiled for ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from scripts.kernel_benchmarks.attention import our_decode, our_extend, planned_decode, planned_extend
from scripts.kernel_benchmarks.attention_inputs import AttentionInputs, AttentionShape
from scripts.kernel_benchmarks.case import Source
from scripts.kernel_benchmarks.elementwise import ACTIVATIONS, NORMS, SOFT_CAP, RowOperation
from scripts.kernel_benchmarks.experts import ExpertShape, mix
from triton_ops.activations.quantised_rows import quantise_rows
from triton_ops.activations.silu_and_mul import quantised_silu_and_mul
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.extend import extend_attention, extend_tile_tokens
from triton_ops.attention.ordered import SUPERBLOCK, ordered_decode, ordered_extend
from triton_ops.attention.plan import NOTHING_SHARED, AttentionPlan, ExtendPlan, SharedItems
from triton_ops.attention.shared import shared_rows
from triton_ops.attention.training import attention_with_grad
from triton_ops.e4m3 import E4M3, FIRST_CAPABILITY
from triton_ops.implementation import GPU, cdiv, gpu_of, has_gluon
from triton_ops.kv.kv_copy import kv_copy
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store
from triton_ops.kv.view import KVView
from triton_ops.linear.e4m3_linear import e4m3_linear
from triton_ops.linear.few_rows_linear import few_rows_linear
from triton_ops.linear.gated_linear import gated_linear
from triton_ops.linear.int4_linear import dequantized_int4, int4_linear
from triton_ops.linear.ordered_linear import ordered_linear
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.moe.expert_tiles import expert_tiles
from triton_ops.moe.moe import moe
from triton_ops.moe.topk_sigmoid import topk_sigmoid
from triton_ops.moe.topk_softmax import topk_softmax
from triton_ops.norms.rms_norm import add_rms_norm, quantised_rms_norm
from triton_ops.ranks.peer_sum import PeerMemory, PeerSum
from triton_ops.recurrent.causal_conv import causal_conv
from triton_ops.recurrent.gated_delta import gated_delta
from triton_ops.recurrent.gated_rms_norm import gated_rms_norm, gated_squares
from triton_ops.recurrent.rows import StateRows
from triton_ops.recurrent.state_space import state_space
from triton_ops.row_tables import known_tokens, write_cells
from triton_ops.sampling.filtered_logits import filtered_logits
from triton_ops.sampling.logit_masks import add_bias, apply_bitmask, ban_tokens, keep_only, mask_rows
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.penalties import apply_penalties
from triton_ops.sampling.sample import finite_rows, greedy, sample
from triton_ops.tuning import (
    MAX_PART_TOKENS,
    MAX_ROW_BYTES,
    NARROW_GATED,
    SHORT_ROWS,
    WIDE_GATED,
    few_rows_config,
    split_k_config,
)

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256)
SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class KernelCase:
    """A call of `op`; `call` passes it impl="triton".

    `few`: one of those that `make test` compiles. `wgmma`: on Hopper one of its kernels must use the tensor cores'
    warpgroup instructions. `min_capability`: it is for GPUs from this compute capability on.
    """

    op: Callable[..., object]
    name: str
    call: Callable[[], object]
    few: bool = False
    wgmma: bool = False
    min_capability: int = 80

    def __str__(self) -> str:
        return f"{self.op.__name__}: {self.name}"


def kernel_cases() -> Iterator[KernelCase]:
    """All cases of the operations that have a kernel."""
    yield from _extend_cases()
    yield from _decode_cases()
    yield from _tree_cases()
    yield from _ordered_attention_cases()
    yield from _training_cases()
    yield from _elementwise_cases()
    yield from _linear_cases()
    yield from _few_rows_cases()
    yield from _gated_cases()
    yield from _ordered_cases()
    yield from _int4_cases()
    yield from _e4m3_cases()
    yield from _expert_cases()
    yield from _e4m3_expert_cases()
    yield from _sampling_cases()
    yield from _kv_copy_cases()
    yield from _row_table_cases()
    yield from _peer_cases()
    yield from _recurrent_cases()


# --- attention ---


@dataclass(frozen=True)
class UnreadShape(AttentionShape):
    """Requests of one length each, on 8 KV heads.

    `options` of `Scoring` by their names; `e4m3`: the pool is in it.
    """

    options: tuple[str, ...] = ()
    e4m3: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        words = [f"{self.batch} x ({self.prefix} + {self.extend})", SHORT_NAMES[self.dtype], f"d {self.head_dim}"]
        return ", ".join([*words, f"group {self.group}", *self.options, *(["e4m3"] if self.e4m3 else [])])

    @property
    def min_capability(self) -> int:
        return FIRST_CAPABILITY if self.e4m3 else 80

    def inputs(self) -> AttentionInputs:
        """q, k and v are views of one packed projection, as a model has them."""
        num_slots, heads = self.batch * self.length + 1, self.num_kv_heads
        pool = torch.empty(2, num_slots, heads, self.head_dim, dtype=E4M3 if self.e4m3 else self.dtype)
        scales = (torch.empty(heads), torch.empty(heads)) if self.e4m3 else ()
        kv = KVView(*pool, torch.arange(1, num_slots, dtype=torch.int32).view(self.batch, -1), *scales)
        sizes = [self.num_heads, heads, heads]
        packed = torch.empty(self.batch * self.extend, sum(sizes), self.head_dim, dtype=self.dtype)
        values: dict[str, Any] = {
            "softcap": 30.0,
            "window": 1000,
            "sinks": torch.empty(self.num_heads),
            "alibi_slopes": torch.empty(self.num_heads),
        }
        scoring = Scoring(0.1, **{name: values[name] for name in self.options})
        return AttentionInputs(self, *packed.split(sizes, dim=1), kv, scoring)


def _shapes(batch: int, prefix: int, extend: int) -> Iterator[tuple[UnreadShape, bool]]:
    """What one kernel is compiled for, and whether it is one of the few."""
    for shape, few in _plain_shapes(batch, prefix, extend):
        yield shape, few
        # As models have them: qk_norm_rope_store leaves float16 over e4m3 in place of bfloat16.
        if shape.dtype == torch.bfloat16:
            yield replace(shape, e4m3=True, dtype=torch.float16), few
        elif shape.dtype == torch.float32:
            yield replace(shape, e4m3=True), False


def _plain_shapes(batch: int, prefix: int, extend: int) -> Iterator[tuple[UnreadShape, bool]]:
    shape = partial(UnreadShape, batch, prefix, extend)
    for head_dim in HEAD_DIMS:
        for dtype in SHORT_NAMES:
            yield shape(dtype=dtype, head_dim=head_dim), dtype == torch.bfloat16 and head_dim in (80, 128, 256)
        softcap, window, sinks, alibi = (("softcap",), ("window",), ("sinks",), ("alibi_slopes",))
        for options in (softcap, softcap + window, sinks + window, alibi):
            yield shape(head_dim=head_dim, options=options), False
    for group in (1, 2, 7, 8, 16):
        yield shape(num_heads=8 * group), False
    yield shape(num_heads=16, options=("softcap",)), False  # Gemma 2 27B, its layers without a window
    yield shape(head_dim=128, options=("softcap", "window", "sinks", "alibi_slopes")), True


def _is_typical(shape: UnreadShape, *, or_dims: tuple[int, ...] = (), or_options: bool = False) -> bool:
    """Heads of 128 without options; over the model's own dtype heads of `or_dims` and, if so, options are, too."""
    if shape.head_dim == 128 and not shape.options:
        return True
    return not shape.e4m3 and (shape.head_dim in or_dims or (or_options and bool(shape.options)))


def _extend_cases() -> Iterator[KernelCase]:
    for batch, prefix, extend in ((4, 1024, 512), (2, 8192, 16), (4, 0, 512)):
        for shape, few in _shapes(batch, prefix, extend):
            wgmma = extend * shape.group >= 64 and shape.dtype != torch.float32
            few = few and _is_typical(shape, or_dims=(80, 256), or_options=True)
            few = few and (extend == 512 or (_is_typical(shape) and not shape.e4m3)) and prefix > 0
            yield KernelCase(
                extend_attention, str(shape), partial(_extend, shape), few, wgmma, shape.min_capability
            )
            if shape.head_dim == 128 and shape.dtype == torch.bfloat16:
                name, call = f"{shape}, without Gluon", partial(_extend_without_gluon, shape)
                yield KernelCase(extend_attention, name, call, few, wgmma, shape.min_capability)


def _extend_without_gluon(shape: UnreadShape) -> None:
    with patch("triton_ops.attention.extend_hopper.has_gluon", return_value=False):
        _extend(shape)


def _extend(shape: UnreadShape, shares: bool = False) -> None:
    """`shares`: all have the same prefix."""
    inputs = shape.inputs()
    shared = _all_share(shape, len(inputs.q)) if shares else NOTHING_SHARED
    our_extend(inputs, shared=shared).run()


def _decode_cases() -> Iterator[KernelCase]:
    for batch, length in ((64, 1024), (1, 8192)):
        for shape, few in _shapes(batch, length - 1, 1):
            few = few and _is_typical(shape, or_dims=(80, 256), or_options=True)
            few = few and (batch > 1 or _is_typical(shape))
            yield KernelCase(
                decode_attention, str(shape), partial(_decode, shape), few, False, shape.min_capability
            )


def _decode(shape: UnreadShape) -> None:
    our_decode(shape.inputs()).run()


def _tree_cases() -> Iterator[KernelCase]:
    """Requests that share a prefix."""
    seen: set[UnreadShape] = set()
    for windowed, few in _shapes(64, 1024, 128):
        # There are no shared items in layers with windows.
        options = tuple(name for name in windowed.options if name != "window")
        shape = replace(windowed, options=options)
        if shape not in seen:
            seen.add(shape)
            wgmma, least = shape.dtype != torch.float32, shape.min_capability
            shown = few and _is_typical(shape, or_options=True)
            yield KernelCase(decode_attention, f"tree {shape}", partial(_tree, shape), shown, wgmma, least)
            if few:  # the same kernel, told of tokens in place of decodes
                extends = replace(shape, extend=16)
                call = partial(_extend, extends, shares=True)
                yield KernelCase(extend_attention, f"tree {extends}", call, False, wgmma, least)


def _tree(shape: UnreadShape) -> None:
    decodes, tails = replace(shape, prefix=shape.length - 1, extend=1), shape.each(shape.prefix)
    plan = AttentionPlan.tree(shape.rows, shape.each(shape.length), tails, _all_share(shape, shape.batch))
    planned_decode(decodes.inputs(), plan).run()


def _ordered_attention_cases() -> Iterator[KernelCase]:
    """Deterministic attention, which is not over e4m3: decodes whole, cut, and with shared prefixes."""
    for batch, prefix, extend in ((4, 1024, 512), (4, 1024, 16), (4, 4000, 1), (64, 1000, 1)):
        shape = partial(UnreadShape, batch, prefix, extend)
        for head_dim in HEAD_DIMS:
            for dtype in (torch.bfloat16, torch.float32):
                few = dtype == torch.bfloat16 and head_dim == 128 and (extend, batch) in ((512, 4), (1, 64))
                yield _ordered_case(shape(dtype=dtype, head_dim=head_dim), few=few)
        for options in (("softcap", "window"), ("sinks",), ("alibi_slopes",)):
            yield _ordered_case(shape(options=options), few=False)
        for group in (1, 2, 7, 8, 16):
            yield _ordered_case(shape(num_heads=8 * group), few=False)


def _ordered_case(shape: UnreadShape, *, few: bool) -> KernelCase:
    wgmma = shape.extend * shape.group >= 64 and shape.dtype != torch.float32
    if shape.extend > 1:
        return KernelCase(ordered_extend, str(shape), partial(_ordered_extend, shape), few, wgmma)
    return KernelCase(ordered_decode, str(shape), partial(_ordered_decode, shape), few, False)


def _ordered_extend(shape: UnreadShape) -> None:
    inputs, plan, prefix = shape.inputs(), None, shape.each(shape.prefix)
    if shape.extend * shape.group <= SHORT_ROWS and inputs.scoring.window is None:
        gpu = gpu_of(torch.get_default_device())
        plan = ExtendPlan.of_extends(
            prefix,
            shape.rows * shape.extend,
            shape.each(shape.extend),
            tile_tokens=extend_tile_tokens(gpu, shape.head_dim, shape.group, shape.dtype, short=True),
            tail_starts=prefix // 16 * 16,
            shared=_all_share(shape, len(inputs.q)),
            superblock=SUPERBLOCK,
        )
    planned_extend(inputs, plan, deterministic=True).run()


def _ordered_decode(shape: UnreadShape) -> None:
    """Many requests share what they can, few are cut."""
    inputs, rows, lens = shape.inputs(), shape.rows, shape.each(shape.length)
    window = inputs.scoring.window
    if shape.batch > 4 and window is None:
        shared = _all_share(shape, shape.batch)
        plan = AttentionPlan.tree(rows, lens, lens // 16 * 16, shared, superblock=SUPERBLOCK)
    else:
        plan = AttentionPlan.flat(rows, lens, max_item_len=1, sliding_window=window, superblock=SUPERBLOCK)
    planned_decode(inputs, plan, deterministic=True).run()


def _all_share(shape: UnreadShape, num_rows: int) -> SharedItems:
    """A prefix that all query rows read."""
    rows = np.arange(num_rows, dtype=np.int32)
    most = shared_rows(gpu_of(torch.get_default_device()), shape.head_dim, shape.group, shape.dtype)
    first = rows[::most]
    lens = np.minimum(num_rows - first, most)
    return SharedItems(0 * first, 0 * first, np.full_like(first, shape.prefix), first, lens, rows)


def _training_cases() -> Iterator[KernelCase]:
    """Forward and backward, causal and full."""
    for head_dim in (16, 20, 32, 48, 64, 80, 128):
        for dtype, group, causal in product(SHORT_NAMES, (1, 4), (True, False)):
            few = dtype == torch.bfloat16 and (head_dim, group, causal) in ((32, 1, False), (64, 4, True))
            name = f"d {head_dim}, {SHORT_NAMES[dtype]}, group {group}, {'causal' if causal else 'full'}"
            call = partial(_train, head_dim, dtype, group, causal)
            yield KernelCase(attention_with_grad, name, call, few, wgmma=dtype != torch.float32)


def _train(head_dim: int, dtype: torch.dtype, group: int, causal: bool) -> None:
    """Heads in the order of a model's projections."""
    packed = torch.empty(2, 512, 8 * (group + 2), head_dim, dtype=dtype, requires_grad=True)
    q, k, v = packed.transpose(1, 2).split([8 * group, 8, 8], dim=1)
    attention_with_grad(q, k, v, scale=0.1, causal=causal, impl="triton").sum().backward()


# --- elementwise ---


def _elementwise_cases() -> Iterator[KernelCase]:
    for dtype in SHORT_NAMES:
        # Hidden sizes of models: powers of two and not; one that is no multiple of 16; the largest that may be.
        largest = MAX_ROW_BYTES // dtype.itemsize
        sizes = {128, 2048, 4096, 5120, 7168, 100, 16384, min(18432, largest), largest}
        for size in [4096] if dtype == torch.float16 else sorted(sizes):
            for num_tokens in (64, 4096):
                few = dtype == torch.bfloat16 and (num_tokens, size) == (4096, 4096)
                yield from _row_cases((num_tokens, size), dtype, few)
        for head_dim in HEAD_DIMS:
            yield from _head_cases((4096, 8, head_dim), dtype)


def _row_cases(shape: tuple[int, int], dtype: torch.dtype, few: bool) -> Iterator[KernelCase]:
    sizes = f"{shape[0]} x {shape[1]}, {SHORT_NAMES[dtype]}"
    for operation in (*NORMS, *ACTIVATIONS, SOFT_CAP):

        def call(operation: RowOperation = operation) -> None:
            operation.op(*operation.arguments(*shape, dtype, Source()), **operation.options, impl="triton")

        words = [sizes, *(f"{name} {value}" for name, value in operation.options.items())]
        yield KernelCase(operation.op, ", ".join(words), call, few)
    empty = partial(torch.empty, dtype=dtype)
    before = partial(add_rms_norm, before=empty(shape[1]), offset=1.0, impl="triton")
    call = partial(before, empty(shape), empty(shape), empty(shape[1]), 1e-5)
    yield KernelCase(add_rms_norm, f"{sizes}, a norm before, offset 1.0", call, few)


def _head_cases(shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[KernelCase]:
    """`shape` is k's and v's; q has 4 times their heads. All three are views of one packed projection."""
    num_tokens, num_kv_heads, head_dim = shape
    empty = partial(torch.empty, dtype=dtype)
    norms = {
        "no norm": None,
        "norm": HeadNorm(empty(head_dim), empty(head_dim), 1e-6),
        "wide norm": HeadNorm(empty(head_dim), empty(head_dim), 1e-6, offset=1.0),
        "norm after": HeadNorm(empty(head_dim), empty(head_dim), 1e-6, after_rotation=True),
    }
    positions = torch.arange(num_tokens, dtype=torch.int32)
    rotations = {
        "no rotation": None,
        f"rotary {head_dim}, factors": Rotation(
            torch.empty(num_tokens, head_dim), positions, q_factors=torch.empty(num_tokens)
        ),
        **{
            f"rotary {size}{', interleaved' * interleaved}": Rotation(
                torch.empty(num_tokens, size), positions, interleaved
            )
            for size in (head_dim, head_dim // 2)
            for interleaved in (False, True)
        },
    }

    def call(norm: HeadNorm | None, rotation: Rotation | None, e4m3: bool) -> None:
        packed = empty(num_tokens, 6 * num_kv_heads, head_dim)
        q, k, v = packed.split([4 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        pool = torch.empty(2, num_tokens + 1, num_kv_heads, head_dim, dtype=E4M3 if e4m3 else dtype)
        scale = torch.empty(num_kv_heads) if e4m3 else None
        kv = KVView(*pool, positions[None], scale, scale)
        qk_norm_rope_store(q, k, v, kv, positions, norm=norm, rotation=rotation, impl="triton")

    # The other dtypes take the same ways.
    names = product(norms, rotations) if dtype == torch.bfloat16 else [("norm", f"rotary {head_dim}")]
    for norm_words, rotation_words in names:
        usual = (norm_words, rotation_words) in {
            ("no norm", "rotary 128"),
            ("norm", "rotary 128"),
            ("wide norm", "rotary 128, interleaved"),
            ("no norm", "rotary 40"),
            ("no norm", "rotary 128, factors"),
            ("norm after", "rotary 128"),
        }
        name = f"{num_tokens} tokens, d {head_dim}, {SHORT_NAMES[dtype]}, {norm_words}, {rotation_words}"
        few = usual and dtype == torch.bfloat16 and (head_dim < 256 or norm_words == "norm")
        for e4m3 in (False, True):
            few = few and not (e4m3 and (head_dim != 128 or norm_words == "norm"))
            yield KernelCase(
                qk_norm_rope_store,
                f"{name}{', e4m3' * e4m3}",
                partial(call, norms[norm_words], rotations[rotation_words], e4m3),
                few,
                min_capability=FIRST_CAPABILITY if e4m3 else 80,
            )


# --- projections in parts ---


def _linear_cases() -> Iterator[KernelCase]:
    """Every configuration, and the norm that adds up its parts; shapes of Qwen3 0.6B and 1.7B, Llama 3.1 8B."""
    for num_columns, depth in ((1024, 2048), (1024, 3072), (2048, 6144), (4096, 4096), (4096, 14_336)):
        for num_rows, dtype in product((16, 32, 64, 128, 256), (torch.bfloat16, torch.float16)):
            config = split_k_config(GPU(90, 132), num_rows, num_columns, depth, dtype)
            if config is None:
                continue
            name = f"{num_rows} x {num_columns} x {depth}, {SHORT_NAMES[dtype]}"
            few = dtype == torch.bfloat16 and (num_columns, depth) == (1024, 2048)
            x, weight = torch.empty(num_rows, depth, dtype=dtype), torch.empty(num_columns, depth, dtype=dtype)
            call = partial(split_k_linear, x, weight, config, impl="triton")
            yield KernelCase(split_k_linear, name, call, few, wgmma=True, min_capability=90)
            parts = torch.empty(-(-depth // config.part_depth), num_rows, num_columns)
            residual, norm_weight = (
                torch.empty(num_rows, num_columns, dtype=dtype),
                torch.empty(num_columns, dtype=dtype),
            )
            call = partial(add_rms_norm, parts, residual, norm_weight, 1e-5, impl="triton")
            yield KernelCase(add_rms_norm, f"{name}, {len(parts)} parts", call, few)


# --- projections of few rows ---


def _few_rows_cases() -> Iterator[KernelCase]:
    """Every configuration, at the shape of Qwen3 0.6B."""
    for num_rows, dtype, gated in product((8, 32, 64), (torch.bfloat16, torch.float16), (False, True)):
        num_columns = 3072 if gated else 4096
        config = few_rows_config(GPU(90, 132), num_rows, num_columns, 1024, dtype, gated=gated)
        assert config is not None
        x, weight = (
            torch.empty(num_rows, 1024, dtype=dtype),
            torch.empty((1 + gated) * num_columns, 1024, dtype=dtype),
        )
        call = partial(few_rows_linear, x, weight, config, gated=gated, impl="triton")
        name = f"{num_rows} x {num_columns} x 1024, {SHORT_NAMES[dtype]}{', gated' * gated}"
        few = dtype == torch.bfloat16 and num_rows == 8
        yield KernelCase(few_rows_linear, name, call, few, wgmma=True, min_capability=90)


# --- gated projections ---


def _gated_cases() -> Iterator[KernelCase]:
    """The tiles for Hopper."""
    tiles = {"wide": WIDE_GATED, "narrow": NARROW_GATED}
    for (num_columns, depth), dtype in product(((14_336, 4096), (1000, 1032)), (torch.bfloat16, torch.float16)):
        x, weight = torch.empty(1000, depth, dtype=dtype), torch.empty(2 * num_columns, depth, dtype=dtype)
        for tile, config in tiles.items():
            name = f"1000 x {num_columns} x {depth}, {SHORT_NAMES[dtype]}, {tile}"
            few = dtype == torch.bfloat16 and num_columns == 14_336
            call = partial(gated_linear, x, weight, config, impl="triton")
            yield KernelCase(gated_linear, name, call, few, wgmma=has_gluon(), min_capability=90)


# --- ordered projections ---


def _ordered_cases() -> Iterator[KernelCase]:
    """Every tile, whole steps and not, with a bias and without."""
    for num_columns, depth in ((1024, 3072), (4096, 14_336), (28_672, 4096), (100, 80)):
        for num_rows, dtype, has_bias in product((1, 32, 64, 4096), SHORT_NAMES, (False, True)):
            name = f"{num_rows} x {num_columns} x {depth}, {SHORT_NAMES[dtype]}{', bias' * has_bias}"
            few = dtype == torch.bfloat16 and (num_columns, has_bias, num_rows) in (
                (1024, False, 1),
                (4096, False, 64),
                (28_672, False, 1),
                (28_672, False, 4096),
                (100, True, 32),
            )
            wgmma = dtype != torch.float32 and (
                num_rows > 64 or num_columns == 28_672 or (num_columns, num_rows) == (4096, 64)
            )
            empty = partial(torch.empty, dtype=dtype)
            bias = empty(num_columns) if has_bias else None
            call = partial(ordered_linear, empty(num_rows, depth), empty(num_columns, depth), bias, impl="triton")
            yield KernelCase(ordered_linear, name, call, few, wgmma)


# --- projections of 4 bits ---


def _int4_cases() -> Iterator[KernelCase]:
    """Every tile, with a bias and without."""
    for num_columns, depth in ((6144, 4096), (4096, 14_336), (100, 128)):
        for num_rows, dtype, has_bias in product((1, 32, 64, 512), (torch.bfloat16, torch.float16), (False, True)):
            name = f"{num_rows} x {num_columns} x {depth}, {SHORT_NAMES[dtype]}{', bias' * has_bias}"
            few = dtype == torch.bfloat16 and num_columns == 6144 and has_bias == (num_rows == 32)
            empty = partial(torch.empty, dtype=dtype)
            held = (
                torch.empty(num_columns, depth // 2, dtype=torch.uint8),
                empty(num_columns, depth // 128),
                torch.empty(num_columns, depth // 128, dtype=torch.uint8),
                empty(num_columns) if has_bias else None,
            )
            call = partial(int4_linear, empty(num_rows, depth), *held, impl="triton")
            yield KernelCase(int4_linear, name, call, few, wgmma=True)
            if num_rows == 1 and not has_bias:
                call = partial(dequantized_int4, *held[:3], impl="triton")
                yield KernelCase(dequantized_int4, f"{num_columns} x {depth}, {SHORT_NAMES[dtype]}", call, few)


# --- projections of e4m3 ---


def _e4m3_cases() -> Iterator[KernelCase]:
    """Every tile, scales of rows and of blocks, whole steps and not, rows that fit a program and longer ones."""
    for num_columns, depth in ((1024, 3072), (4096, 14_336), (28_672, 4096), (100, 80)):
        for num_rows, blocks, dtype in product((1, 32, 64, 4096), (False, True), SHORT_NAMES):
            name = f"{num_rows} x {num_columns} x {depth}, {SHORT_NAMES[dtype]}{', blocks' * blocks}"
            few = dtype == torch.bfloat16 and (num_columns, num_rows, blocks) in (
                (4096, 1, True),
                (4096, 64, True),
                (28_672, 1, True),
                (28_672, 4096, True),
                (28_672, 4096, False),
                (100, 32, False),
            )
            scale = torch.empty(-(-num_columns // 128), -(-depth // 128)) if blocks else torch.empty(num_columns)
            bias = torch.empty(num_columns, dtype=dtype) if num_columns == 100 else None
            x, weight = torch.empty(num_rows, depth, dtype=dtype), torch.empty(num_columns, depth, dtype=E4M3)
            call = partial(e4m3_linear, x, weight, scale, bias, impl="triton")
            wgmma = num_rows > 32 or num_columns == 28_672
            yield KernelCase(e4m3_linear, name, call, few, wgmma, FIRST_CAPABILITY)
            call = partial(quantise_rows, x, groups=blocks, impl="triton")
            yield KernelCase(quantise_rows, name, call, few, min_capability=FIRST_CAPABILITY)
            wide = torch.empty(num_rows, 2 * depth, dtype=dtype)
            call = partial(quantised_silu_and_mul, wide, groups=blocks, impl="triton")
            yield KernelCase(quantised_silu_and_mul, name, call, few, min_capability=FIRST_CAPABILITY)
            norm_weight = torch.empty(depth, dtype=dtype)
            call = partial(quantised_rms_norm, x, x, norm_weight, 1e-5, groups=blocks, impl="triton")
            yield KernelCase(quantised_rms_norm, name, call, few, min_capability=FIRST_CAPABILITY)


# --- experts ---


def expert_words(shape: ExpertShape) -> str:
    sizes = f"{shape.top_k} of {shape.num_experts} experts, {shape.hidden_size} x {shape.inner_size}"
    own = ", bias" * shape.has_bias + f", {shape.stored}" * (shape.stored != "dense")
    return f"{shape.num_tokens} tokens, {sizes}, {SHORT_NAMES[shape.dtype]}{own}"


def run_experts(shape: ExpertShape, parts_ok: bool = False) -> None:
    mix(shape.inputs(Source()), parts_ok=parts_ok, impl="triton")


def _tile_experts(shape: ExpertShape) -> None:
    experts = torch.arange(shape.top_k).repeat(shape.num_tokens, 1)
    expert_tiles(experts, shape.num_experts, 16, impl="triton")


def route(shape: ExpertShape, op: Callable[..., object], renormalize: bool) -> None:
    """Choose experts by `topk_softmax`, or by `topk_sigmoid`, whose logits are float32 in any model."""
    logits = torch.empty(shape.num_tokens, shape.num_experts, dtype=shape.dtype)
    if op is topk_softmax:
        topk_softmax(logits, shape.top_k, renormalize=renormalize, impl="triton")
    else:
        correction, options = torch.empty(shape.num_experts), {"renormalize": renormalize, "factor": 2.5}
        topk_sigmoid(logits.float(), correction, shape.top_k, **options, impl="triton")


def _e4m3_expert_cases() -> Iterator[KernelCase]:
    """Qwen3-MoE's, and of sizes that are multiples of nothing."""
    for stored in ("e4m3", "e4m3 in blocks"):
        for sizes in ((128, 8, 2048, 768), (5, 3, 264, 136)):
            for num_tokens in (1, 64, 512, 1024, 4096):
                shape = ExpertShape(num_tokens, *sizes, stored=stored)
                few = sizes[0] == 128 and num_tokens in (64, 4096)
                wgmma = num_tokens * shape.top_k >= 64 * shape.num_experts
                name, call = expert_words(shape), partial(run_experts, shape)
                yield KernelCase(moe, name, call, few, wgmma, min_capability=FIRST_CAPABILITY)


def _expert_cases() -> Iterator[KernelCase]:
    """Mixtral's experts, Qwen3-MoE's, gpt-oss', and some whose sizes are multiples of nothing."""
    for dtype in SHORT_NAMES:
        for *sizes, stored in (
            (8, 2, 4096, 14_336, "dense"),
            (128, 8, 2048, 768, "dense"),
            (32, 4, 2880, 2880, "dense"),
            (32, 4, 2880, 2880, "mxfp4"),
            (5, 3, 40, 24, "dense"),
        ):
            for num_tokens in (1, 64, 256, 512, 4096):
                shape = ExpertShape(num_tokens, *sizes, dtype, has_bias=sizes[0] in (32, 5), stored=stored)
                name = expert_words(shape)
                shown = (64, 512) if stored == "mxfp4" else {8: (4096,), 128: (64,)}.get(sizes[0], ())
                few = dtype == torch.bfloat16 and num_tokens in shown
                # A tile takes about as many rows as an expert has.
                many_rows = stored == "mxfp4" or num_tokens * shape.top_k >= 64 * shape.num_experts
                wgmma = many_rows and dtype != torch.float32 and shape.hidden_size >= 64
                yield KernelCase(moe, name, partial(run_experts, shape), few, wgmma)
                if num_tokens <= MAX_PART_TOKENS:
                    yield KernelCase(moe, f"{name}, parts", partial(run_experts, shape, True), few, wgmma)
                if dtype == torch.bfloat16:  # of integers
                    yield KernelCase(expert_tiles, name, partial(_tile_experts, shape), few)
                for op, renormalize in product((topk_softmax, topk_sigmoid), (False, True)):
                    if op is topk_softmax or dtype == torch.bfloat16:
                        call = partial(route, shape, op, renormalize)
                        yield KernelCase(op, f"{name}, renormalize {renormalize}", call, few and renormalize)


# --- sampling ---


ALL_FILTERS = ("top_ks", "top_ps", "min_ps")


@dataclass(frozen=True)
class LogitsShape:
    """Logits of `num_rows` draws."""

    num_rows: int
    vocab_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.vocab_size}, {SHORT_NAMES[self.dtype]}"

    def cases(self, few: bool = False) -> Iterator[KernelCase]:
        """Each operation on them, some with several options."""
        each = partial(torch.empty, self.num_rows)
        ints, floats, flags = each(dtype=torch.int32), each(dtype=torch.float32), each(dtype=torch.bool)
        bitmasks = torch.empty(self.num_rows, cdiv(self.vocab_size, 32), dtype=torch.int32)

        def case(
            op: Callable[..., object], *given: Any, words: Any = (), few: bool = few, **named: Any
        ) -> KernelCase:
            def call() -> None:
                op(torch.empty(self.num_rows, self.vocab_size, dtype=self.dtype), *given, **named, impl="triton")

            return KernelCase(op, ", ".join([str(self), *words]), call, few)

        drawn = {"seeds": each(dtype=torch.int64), "sample_indices": ints, "positions": ints, "finite": flags}
        for filters in ((), ("top_ks",), ("top_ps",), ("top_ks", "top_ps"), ALL_FILTERS):
            named = {"temperatures": floats} | {name: ints if name == "top_ks" else floats for name in filters}
            is_few = few and len(filters) in (0, 3)
            yield case(sample, words=filters, few=is_few, **named, **drawn)
            if len(filters) in (0, 3):
                yield case(filtered_logits, words=filters, **named)
        yield case(greedy, finite=flags)
        yield case(finite_rows)
        for num_top in (0, 5, 20):
            yield case(token_logprobs, ints, num_top, words=[f"top {num_top}"], few=few and num_top == 5)
        penalties = dict.fromkeys(("repetition", "presence", "frequency"), floats)
        yield case(apply_penalties, ints, ints, ints, **penalties)
        yield case(add_bias, ints, ints, floats)
        yield case(ban_tokens, ints, ints, flags)
        yield case(keep_only, ints, ints, flags)
        yield case(apply_bitmask, bitmasks)
        yield case(mask_rows, ints, bitmasks)


def _sampling_cases() -> Iterator[KernelCase]:
    """Vocabularies of Qwen, Llama 3 and Llama 2, and one that is a multiple of nothing."""
    for dtype, vocab_size in product(SHORT_NAMES, (151_936, 128_256, 32_000, 50_257)):
        few = vocab_size == 151_936 and dtype == torch.bfloat16
        yield from LogitsShape(512, vocab_size, dtype).cases(few)


# --- KV movement ---


def _kv_copy_cases() -> Iterator[KernelCase]:
    """Between a pool and memory that has a token's KV together; rows of a power of two, of 5 * 256 bytes, and of
    what no access is wide enough for.
    """
    for dtype, num_heads, head_dim in (
        (torch.bfloat16, 8, 128),
        (torch.float8_e4m3fn, 8, 128),
        (torch.bfloat16, 8, 80),
        (torch.float32, 1, 16),
        (torch.float32, 16, 256),
        (torch.float8_e4m3fn, 1, 4),
        (torch.float8_e4m3fn, 3, 7),
    ):
        shape = (4, 2, 100, num_heads, head_dim)
        slots = torch.arange(1, 21, dtype=torch.int32)
        for name, given in (
            ("slots to slots", (slots, slots)),
            ("gather", (slots, None)),
            ("scatter", (None, slots)),
        ):
            yield KernelCase(
                kv_copy,
                f"{name}, {num_heads} heads, d {head_dim}, {str(dtype).removeprefix('torch.')}",
                partial(_kv_copy, shape, dtype, *given),
                few=dtype == torch.bfloat16,
            )


def _kv_copy(
    shape: tuple[int, ...], dtype: torch.dtype, source_slots: Tensor | None, target_slots: Tensor | None
) -> None:
    num_layers, _, num_slots, *head = shape
    pool = torch.empty(shape, dtype=dtype)
    tokens = torch.empty(num_slots, num_layers, 2, *head, dtype=dtype).permute(1, 2, 0, 3, 4)
    kv_copy(pool, source_slots, tokens, target_slots, impl="triton")


# --- tables with a line a request ---


def _row_table_cases() -> Iterator[KernelCase]:
    """Of 512 requests."""
    ids = torch.empty(512, dtype=torch.int32)
    table, last_token = torch.empty(769, 4096, dtype=torch.int32), torch.empty(769, dtype=torch.int32)
    write, know = partial(write_cells, impl="triton"), partial(known_tokens, impl="triton")
    yield KernelCase(write_cells, "cells", partial(write, table, ids, ids, ids), few=True)
    yield KernelCase(write_cells, "one column", partial(write, last_token[:, None], ids, None, ids), few=True)
    yield KernelCase(known_tokens, "512 ids", partial(know, ids, last_token), few=True)


# --- sums over cards ---


def _peer_cases() -> Iterator[KernelCase]:
    """Of a decode's hidden states, for the last of the ranks."""
    for dtype, num_ranks in ((torch.bfloat16, 2), (torch.float16, 4), (torch.float32, 8)):
        data, signals = [torch.empty(2**20, dtype=torch.uint8)] * num_ranks, [torch.empty(4096)] * num_ranks
        memory = PeerMemory(num_ranks - 1, data, signals, torch.empty(3, dtype=torch.int64))
        for shots, above in ((1, 2**30), (2, 0))[: 1 if num_ranks == 2 else 2]:
            peers, name = PeerSum(memory, two_shots_above=above), f"{num_ranks} ranks, shots {shots}"
            few = num_ranks == 2 or (num_ranks == 4 and shots == 2)
            for size in (1024, 5120, 8192):
                part = torch.empty(64, size, dtype=dtype)
                is_few = few and size == 1024
                normed = partial(peers.add_rms_norm, part, part, part[0], 1e-6)
                yield KernelCase(PeerSum, f"{name}, {size} normed", normed, is_few)
                for groups in (False, True) if dtype != torch.float32 else ():
                    call = partial(peers.quantised_rms_norm, part, part, part[0], 1e-6, groups=groups)
                    told = f"{name}, {size} quantised {'in groups' if groups else 'by row'}"
                    yield KernelCase(PeerSum, told, call, is_few, min_capability=FIRST_CAPABILITY)
            yield KernelCase(PeerSum, name, partial(peers, part), few)
        part, out = torch.empty(3, 128256 // num_ranks, dtype=dtype), torch.empty(3, 128256, dtype=dtype)
        yield KernelCase(PeerSum, f"{num_ranks} ranks, joined", partial(peers.join, part, out), few)


# --- recurrent layers ---


def _recurrent_cases() -> Iterator[KernelCase]:
    """Gated delta nets with heads of one size, or keys and values of two: all extends, and a mixed batch. State
    spaces of Granite 4 and of Nemotron-H, one with more state, one of odd sizes.
    """
    for dims, dtype in product(((128, 128), (64, 64), (128, 256), (80, 48)), SHORT_NAMES):
        few = dims == (128, 128) and dtype == torch.bfloat16
        for num_extends, batch in ((1, 1), (2, 64)):
            call = partial(_gated_delta, dims, dtype, num_extends, batch)
            name = f"{num_extends} of {batch}, d {dims[0]} and {dims[1]}, {SHORT_NAMES[dtype]}"
            yield KernelCase(gated_delta, name, call, few)
            yield KernelCase(gated_delta, f"{name}, deterministic", partial(call, deterministic=True), few)
    for (groups, *dims), dtype in product(((1, 128, 64), (8, 128, 80), (1, 256, 64), (2, 48, 40)), SHORT_NAMES):
        few = dims == [128, 64] and dtype == torch.bfloat16
        for num_extends, batch in ((1, 1), (2, 64)):
            call = partial(_state_space, groups, (dims[0], dims[1]), dtype, num_extends, batch)
            name = f"{num_extends} of {batch}, d {dims[0]} and {dims[1]}, {SHORT_NAMES[dtype]}"
            yield KernelCase(state_space, name, call, few)
            yield KernelCase(state_space, f"{name}, deterministic", partial(call, deterministic=True), few)
    for (size, width), dtype, has_bias in product(((8192, 4), (1000, 3)), SHORT_NAMES, (False, True)):
        few = size == 8192 and dtype == torch.bfloat16
        name = f"{size} x {width}, {SHORT_NAMES[dtype]}, {'with' if has_bias else 'no'} bias"
        yield KernelCase(causal_conv, name, partial(_causal_conv, size, width, dtype, has_bias), few)
    for size, dtype in product((2048, 1000), SHORT_NAMES):
        few = size == 2048 and dtype == torch.bfloat16
        call = partial(_causal_conv, size, 3, dtype, size == 1000, gated=True)
        yield KernelCase(causal_conv, f"{size} x 3, {SHORT_NAMES[dtype]}, gated", call, few)
    for size, dtype in product((128, 64, 80), SHORT_NAMES):
        heads = torch.empty(4096, 32, size, dtype=dtype)
        gate = torch.empty(4096, 32 * size + 64, dtype=dtype)[:, : 32 * size].unflatten(1, (32, size))
        call = partial(gated_rms_norm, heads, gate, heads[0, 0], 1e-6, impl="triton")
        few = size == 128 and dtype == torch.bfloat16
        yield KernelCase(gated_rms_norm, f"4096 x 32 x {size}, {SHORT_NAMES[dtype]}", call, few)
    for (groups, size), dtype in product(((1, 3072), (1, 8192), (8, 1280)), SHORT_NAMES):
        heads = torch.empty(4096, groups, size, dtype=dtype)
        weight = torch.empty(groups * size, dtype=dtype)
        call = partial(gated_rms_norm, heads, heads, weight, 1e-6, gate_first=True, impl="triton")
        few = size == 3072 and dtype == torch.bfloat16
        name = f"4096 x {groups} x {size}, gate first, {SHORT_NAMES[dtype]}"
        yield KernelCase(gated_rms_norm, name, call, few)
        if groups == 1:  # ranks have parts of it
            call = partial(gated_squares, heads, heads, 2 * size, impl="triton")
            yield KernelCase(gated_squares, f"4096 x {size}, {SHORT_NAMES[dtype]}", call, few)
            mean = torch.empty(4096, 1)
            call = partial(gated_rms_norm, heads, heads, weight, 1e-6, gate_first=True, mean=mean, impl="triton")
            yield KernelCase(gated_rms_norm, f"{name}, with a mean", call, few)


def _state_rows(num_extends: int, batch: int) -> StateRows:
    ints = torch.empty(batch, dtype=torch.int32)
    return StateRows(ints, ints, ints, ints, num_extends)


def _gated_delta(
    dims: tuple[int, int], dtype: torch.dtype, num_extends: int, batch: int, *, deterministic: bool = False
) -> None:
    """16 key heads and 32 value heads, of one projection."""
    (k_dim, v_dim), num_tokens = dims, 4096
    sizes = [16 * k_dim, 16 * k_dim, 32 * v_dim]
    q, k, v = torch.empty(num_tokens, sum(sizes), dtype=dtype).split(sizes, 1)
    q, k, v = q.unflatten(1, (16, k_dim)), k.unflatten(1, (16, k_dim)), v.unflatten(1, (32, v_dim))
    b, a = torch.empty(num_tokens, 64, dtype=dtype).split(32, 1)
    states, vector = torch.empty(3, 32, k_dim, v_dim), torch.empty(32, dtype=dtype)
    rows = _state_rows(num_extends, batch)
    inputs = q, k, v, a, b, vector.float(), vector, states, rows
    gated_delta(*inputs, deterministic=deterministic, impl="triton")


def _state_space(
    num_groups: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    num_extends: int,
    batch: int,
    *,
    deterministic: bool = False,
) -> None:
    """48 heads, of one projection."""
    (k_dim, v_dim), num_tokens = dims, 4096
    sizes = [48 * v_dim, num_groups * k_dim, num_groups * k_dim]
    x, b, c = torch.empty(num_tokens, sum(sizes), dtype=dtype).split(sizes, 1)
    x, b, c = x.unflatten(1, (48, v_dim)), b.unflatten(1, (num_groups, k_dim)), c.unflatten(1, (num_groups, k_dim))
    dt = torch.empty(num_tokens, sum(sizes), dtype=dtype)[:, -48:]
    states, vector = torch.empty(3, 48, k_dim, v_dim), torch.empty(48)
    rows = _state_rows(num_extends, batch)
    inputs = x, dt, b, c, vector, vector, vector, states, rows
    state_space(*inputs, deterministic=deterministic, impl="triton")


def _causal_conv(size: int, width: int, dtype: torch.dtype, has_bias: bool, *, gated: bool = False) -> None:
    """Of columns of a projection."""
    x, *gates, _ = torch.empty(4096, 3 * size + 4096, dtype=dtype).split([size, size, size, 4096], 1)
    weight = torch.empty(size, width, dtype=dtype)
    states = torch.empty(3, size, width - 1, dtype=dtype)
    bias = torch.empty(size, dtype=dtype) if has_bias else None
    given = (gates[0], gates[1]) if gated else None
    causal_conv(x, weight, bias, states, _state_rows(2, 64), gates=given, impl="triton")
