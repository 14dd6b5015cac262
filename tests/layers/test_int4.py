"""What tensors of checkpoints in 4 bits fill, in any order."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from layers.formats import int4
from layers.formats.int4 import Int4Format, Int4Packing
from layers.linear import StackedLinear
from layers.placement import Placement
from layers.weight import Weight
from tests.support.int4_checkpoints import dequantised, packed, quantised
from tests.support.interpreter import require_interpreter
from triton_ops.linear.int4_linear import dequantized_int4, int4_linear

CPU = torch.device("cpu")
IGNORED = {"g_idx", "weight_shape"}  # by the loader


def placement(words: Int4Packing, dtype: torch.dtype = torch.float16, *, holds: bool = True) -> Placement:
    return Placement(dtype, CPU, quantization=Int4Format(words), holds_quantised=holds)


def layer(sizes: tuple[int, ...], depth: int, words: Int4Packing) -> tuple[dict[str, Tensor], Tensor]:
    """Stored tensors of parts a, b, ... of a stack, and the weight that they are."""
    stored: dict[str, Tensor] = {}
    expected = []
    for seed, (part, size) in enumerate(zip("abc", sizes, strict=False)):
        values = torch.randn(size, depth, generator=torch.Generator().manual_seed(seed)) * 2.0**seed
        numbers = quantised(values, symmetric=words is Int4Packing.COMPRESSED)
        expected.append(dequantised(*numbers))
        stored |= {f"x.{part}.{kind}": tensor for kind, tensor in packed(*numbers, words).items()}
    return {name: each for name, each in stored.items() if name.split(".")[2] not in IGNORED}, torch.cat(expected)


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("words", Int4Packing)
def test_parts_of_a_stack(words: Int4Packing, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held in 4 bits, or dequantised when the last of them has come; a few rows at a time."""
    monkeypatch.setattr(int4, "PIECE_ROWS", 16)
    sizes = (40, 8, 72)
    stored, expected = layer(sizes, 256, words)
    for order in list(permutations(stored))[:: 60 if len(stored) > 6 else 7][:8]:
        parts = dict(zip("abc", sizes, strict=True))
        stack = StackedLinear(
            256, parts, packed_as=None, bias=False, placement=placement(words, torch.float16, holds=holds)
        )
        places = dict(stack.checkpoint_tensors("x"))
        assert {name: place.shape for name, place in places.items()} == {
            name: tensor.shape for name, tensor in stored.items()
        }
        for name in order:
            places[name].copy_(stored[name])
        weight = stack.weight
        assert weight.shape == (120, 256)
        assert (weight.zeros is not None) == holds
        if weight.scale is not None and weight.zeros is not None:
            assert (weight.values.dtype, weight.values.shape) == (torch.uint8, (120, 128))
            assert torch.equal(dequantized_int4(weight.values, weight.scale, weight.zeros), expected.half())
        else:
            assert torch.equal(weight.values, expected.half())


@pytest.mark.parametrize("words", Int4Packing)
def test_groups_that_do_not_divide_a_row_are_dequantised(words: Int4Packing) -> None:
    stored, expected = layer((16,), 200, words)
    weight = Weight(16, 200, placement=placement(words))
    for name, place in weight.places("x.a", 0, 16):
        place.copy_(stored[name])
    assert weight.zeros is None
    assert torch.equal(weight.values, expected.half())


def test_scales_are_rounded_to_the_dtype_of_the_model() -> None:
    """Held or not, the weights are the same."""
    stored, expected = layer((16,), 128, Int4Packing.AWQ)
    held, plain = (
        Weight(16, 128, placement=placement(Int4Packing.AWQ, torch.bfloat16, holds=holds))
        for holds in (True, False)
    )
    for weight in (held, plain):
        for name, place in weight.places("x.a", 0, 16):
            place.copy_(stored[name])
    assert held.scale is not None
    assert held.zeros is not None
    assert torch.equal(held.scale, stored["x.a.scales"].T.bfloat16())
    assert torch.equal(dequantized_int4(held.values, held.scale, held.zeros), plain.values)
    torch.testing.assert_close(plain.values.float(), expected, rtol=2.0**-7, atol=0.0)


def test_plain_weights_are_rounded_to_4_bits() -> None:
    """As random ones are."""
    given = Placement(torch.float16, CPU, quantization=Int4Format(None), holds_quantised=True)
    weight = Weight(40, 256, placement=given)
    values = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    ((name, place),) = weight.places("x", 0, 40)
    place.copy_(values)
    assert (name, place.shape) == ("x.weight", (40, 256))
    assert weight.scale is not None
    assert weight.zeros is not None
    off = (dequantized_int4(weight.values, weight.scale, weight.zeros).float() - values).abs()
    assert (off <= weight.scale.float().repeat_interleave(128, 1) * 0.51).all()


def test_a_held_weight_runs_its_kernel() -> None:
    require_interpreter()
    quantization = Int4Format(Int4Packing.GPTQ)
    given = Placement(torch.float16, CPU, "triton", quantization=quantization, holds_quantised=True)
    weight, (stored, expected) = Weight(64, 128, placement=given), layer((64,), 128, Int4Packing.GPTQ)
    for name, place in weight.places("x.a", 0, 64):
        place.copy_(stored[name])
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).half()
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2)).half()
    assert weight.scale is not None
    assert weight.zeros is not None
    found = weight.product(x, bias)
    assert torch.equal(found, int4_linear(x, weight.values, weight.scale, weight.zeros, bias, impl="triton"))
    torch.testing.assert_close(found.float(), x.float() @ expected.T + bias.float(), atol=2e-2, rtol=2e-3)
    assert sum(part.numel() * part.itemsize for part in weight.parameters()) == 64 * (64 + 2 + 1)
