"""The comparisons of a deterministic model at start-up: where torch's products have the same bits at every size of
a pass, and whether attention and recurrent layers have the same bits however a sequence is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

import torch
from torch import Tensor

from layers.input_metadata import NO_PASS
from layers.linear import Linear
from layers.moe import SparseMoE
from layers.placement import Placement
from layers.products import ProductTable, compare_products, same_bits
from layers.radix_attention import RadixAttention
from layers.ranks import whole
from layers.recurrent import RecurrentLayer
from layers.vocabulary import LogitsHead
from memory_pool.state_pool import StatePool
from radixrt.errors import ModelError
from radixrt.execution.graphs import MAX_CAPTURED_BATCH, ladder
from radixrt.limits import PassLimits
from radixrt.models.decoder import Decoder
from triton_ops.attention.extend import Extends
from triton_ops.attention.ordered import SUPERBLOCK, ordered_decode, ordered_extend
from triton_ops.attention.plan import AttentionPlan
from triton_ops.kv.view import KVView
from triton_ops.recurrent.rows import StateRows
from triton_ops.tuning import CONV_CHUNK

ROWS_STEP = 128  # between numbers of rows beyond those of captured batches
MAX_ROWS_ON_CPU = 64  # of a call: more are hardly faster there, and take long to compare
EXPERT_ROWS = tuple(2**n for n in range(13))  # for experts of any number: each tile that `expert_rows` knows


def product_rows(max_rows: int, *, on_gpu: bool) -> list[int]:
    """Numbers of rows, ascending, that products of up to `max_rows` rows are compared at, and padded to; on a CPU
    products of more than the last one are cut.
    """
    if not on_gpu:
        return ladder(MAX_ROWS_ON_CPU)
    return [*ladder(MAX_CAPTURED_BATCH), *range(MAX_CAPTURED_BATCH + ROWS_STEP, max_rows + ROWS_STEP, ROWS_STEP)]


def compare_all(decoder: Decoder, limits: PassLimits, max_scored_at_once: int) -> tuple[ProductTable, ...]:
    """Compare the products of each shape in a deterministic model, and tell its layers where they may use torch's.
    Of other models nothing is compared.

    Callers make the model's device the current one, in inference mode. Passes are up to `limits`; logits of
    prompts are computed for `max_scored_at_once` tokens at a time. The tables hold for other weights, too.

    Raises ModelError where a row's bits depend on the rows beside it even so.
    """
    placement, tables = decoder.placement, dict[tuple[object, ...], ProductTable]()
    if not placement.deterministic:
        return ()
    on_gpu = placement.device.type == "cuda"
    tokens = limits.max_running_requests + limits.chunked_prefill_size
    drawn = max(limits.max_samples, max_scored_at_once)
    try:
        for layer in decoder.modules():
            if not isinstance(layer, Linear | LogitsHead):
                continue
            is_linear = isinstance(layer, Linear)
            (columns, depth), has_bias = layer.weight.shape, is_linear and layer.added_bias is not None
            key = columns, depth, has_bias, is_linear
            if key not in tables:
                tables[key] = compare_products(
                    columns,
                    depth,
                    has_bias=has_bias,
                    counts=product_rows(tokens if is_linear else drawn, on_gpu=on_gpu),
                    dtype=placement.dtype,
                    device=placement.device,
                    impl=placement.impl,
                )
            assert layer.product is not None
            layer.product.table = tables[key]
        for attention in {layer.scoring.window is None: layer for layer in _attention_layers(decoder)}.values():
            _check_attention(decoder, attention)
        for layer in _recurrent_layers(decoder)[:1]:  # all are alike
            _check_states(decoder, layer)
        experts = {layer.shape: layer for layer in decoder.modules() if isinstance(layer, SparseMoE)}
        for layer in experts.values():
            _check_experts(layer, placement, tokens if on_gpu else MAX_ROWS_ON_CPU)
    except ValueError as error:
        raise ModelError(
            f"deterministic is True, but {error}: choose another device or dtype, or leave deterministic out"
        ) from error
    return tuple(tables.values())


def _check_experts(layer: SparseMoE, placement: Placement, max_rows: int) -> None:
    """Raise ValueError unless the bits of a row are the same beside any number of rows."""
    dtype, device, (_, hidden_size, inner_size) = placement.dtype, placement.device, layer.shape
    counts = [*takewhile(lambda count: count <= max_rows, EXPERT_ROWS)]
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(counts[-1], hidden_size, generator=generator, device=device).to(dtype)

    def computed(rows: Tensor) -> Tensor:
        return whole(layer(rows, NO_PASS))

    expected = computed(x)
    moved = computed(x.roll(1, 0)).roll(-1, 0)
    if not same_bits(moved, expected) or not all(
        same_bits(computed(x[:count]), expected[:count]) for count in counts
    ):
        raise ValueError(
            f"in experts of {dtype} with weights {[hidden_size, inner_size]} on {device}, the bits of a row "
            "depend on the rows beside it"
        )


def _attention_layers(decoder: Decoder) -> list[RadixAttention]:
    return [layer for layer in decoder.modules() if isinstance(layer, RadixAttention)]


def _check_attention(decoder: Decoder, layer: RadixAttention) -> None:
    """Raise ValueError unless the last of some tokens has the same bits in an extend, a short one, and in decodes
    of a whole and of a cut context: whether a device's products add in one order in tiles of all sizes.
    """
    placement, config, window = decoder.placement, decoder.config, layer.scoring.window
    device = placement.device
    superblock = SUPERBLOCK if device.type == "cuda" else 64  # on a CPU it is known, or interpreted
    length = superblock * 2 + 50
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(placement.dtype)

    k, v = (random(length, config.num_kv_heads, config.head_dim) for _ in range(2))
    q = random(length, config.num_heads, config.head_dim)
    table = torch.arange(length, dtype=torch.int32, device=device).view(1, -1)
    kv, row = KVView(k, v, table), torch.zeros(1, dtype=torch.int32, device=device)
    impl = placement.impl

    def extended(start: int) -> Tensor:
        counts = (torch.tensor([n], dtype=torch.int32, device=device) for n in (start, 0, length - start))
        extends = Extends(row, *counts)
        return ordered_extend(q[start:], kv, extends, None, layer.scoring, superblock=superblock, impl=impl)[-1]

    def decoded(max_item_len: int | None) -> Tensor:
        plan = AttentionPlan.flat(
            [0], [length], max_item_len=max_item_len, sliding_window=window, superblock=superblock
        ).to(device)
        return ordered_decode(q[-1:], kv, row, plan, layer.scoring, impl=impl)[0]

    expected = extended(0)
    if not all(same_bits(other, expected) for other in (extended(length - 3), decoded(None), decoded(1))):
        raise ValueError(f"the bits of attention in {placement.dtype} on {device} depend on how it is cut")


def _recurrent_layers(decoder: Decoder) -> list[RecurrentLayer]:
    return [layer for layer in decoder.modules() if isinstance(layer, RecurrentLayer)]


def _check_states(decoder: Decoder, layer: RecurrentLayer) -> None:
    """Raise ValueError unless a sequence has the same bits, and leaves the same state, in one extend, and in two
    and a step, alone and beside another one.
    """
    placement, config = decoder.placement, decoder.config
    device, length = placement.device, 2 * CONV_CHUNK + 3
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(2, length, config.hidden_size, generator=generator, device=device).to(placement.dtype)

    def mixed(ends: Sequence[int], sequences: int) -> list[Tensor]:
        """Of the first one the outputs, and the parts of the state that it leaves; passes end at `ends`."""
        pool = StatePool(1 + sequences, config.state_parts(1, placement.dtype), device=device)
        states, parts = pool.view(0), []
        numbers = torch.arange(sequences, dtype=torch.int32, device=device)
        for start, end in pairwise([0, *ends]):
            tokens, lens = end - start, torch.full_like(numbers, end - start)
            begun = numbers + 1 if start else torch.zeros_like(numbers)
            rows = StateRows(numbers * tokens, lens, begun, numbers + 1, sequences if tokens > 1 else 0)
            metadata = replace(NO_PASS, states=rows, state_pool=pool)
            out = whole(layer(hidden[:sequences, start:end].flatten(0, 1), metadata))
            parts.append(out[:tokens])
        return [torch.cat(parts), states.conv[1], states.recurrent[1]]

    expected = mixed([length], 1)
    found = [mixed([CONV_CHUNK + 1, CONV_CHUNK + 2, length], sequences) for sequences in (1, 2)]
    if not all(all(map(same_bits, parts, expected)) for parts in found):
        raise ValueError(
            f"the bits of {type(layer).__name__} in {placement.dtype} on {device} depend on how a sequence is cut"
        )
