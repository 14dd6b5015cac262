"""The weight of a linear layer: what it holds, multiplies, and takes from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from layers.formats.e4m3 import PIECE_ROWS, E4M3Format, Scales
from layers.formats.weight_format import PLAIN, WeightFormat
from layers.input_metadata import NO_PASS
from layers.linear import Linear, StackedLinear
from layers.placement import Placement
from layers.weight import Weight
from tests.support.interpreter import require_interpreter
from tests.support.random_tensors import random
from triton_ops.e4m3 import E4M3
from triton_ops.linear.e4m3_linear import dequantised_weight, e4m3_linear, quantised_weight

CPU = torch.device("cpu")
ROWS, BLOCKS = E4M3Format(Scales.ROW, "weight_scale"), E4M3Format(Scales.BLOCK, "weight_scale_inv")
TENSORS = E4M3Format(Scales.TENSOR, "weight_scale")


def placement(quantization: WeightFormat = PLAIN, *, holds: bool = True) -> Placement:
    return Placement(torch.float32, CPU, quantization=quantization, holds_quantised=holds)


def fill(layer: Linear, stored: dict[str, Tensor]) -> None:
    places = dict(layer.checkpoint_tensors("x"))
    assert {name: place.shape for name, place in places.items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    for name in sorted(stored, reverse=True):
        places[name].copy_(stored[name])


def test_a_plain_weight_is_what_it_is_filled_with() -> None:
    layer, values, bias = Linear(40, 24, bias=True, placement=placement()), random(24, 40), random(24, seed=1)
    fill(layer, {"x.weight": values, "x.bias": bias})
    x = random(3, 40, seed=2)
    assert layer.weight.scale is None
    assert torch.equal(layer(x, NO_PASS), nn.functional.linear(x, values, bias))


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("quantization", [ROWS, BLOCKS, TENSORS], ids=lambda q: q.scales.value)
def test_stored_codes_and_scales(quantization: E4M3Format, holds: bool) -> None:
    """Held as they are, or dequantised when the second of them has come."""
    layer = Linear(200, 136, bias=False, placement=placement(quantization, holds=holds))
    scales, blocks = quantization.scales, quantization.scales is Scales.BLOCK
    codes, scale = quantised_weight(random(136, 200), blocks=blocks)
    stored_scale = {Scales.TENSOR: scale[:1], Scales.ROW: scale.unsqueeze(1), Scales.BLOCK: scale}[scales]
    held_scale = scale[:1].expand(136).contiguous() if scales is Scales.TENSOR else scale
    fill(layer, {"x.weight": codes, f"x.{quantization.scale_name}": stored_scale})
    x, expected = random(3, 200, seed=1), dequantised_weight(codes, held_scale)
    if holds:
        assert torch.equal(layer.weight.values.float(), codes.float())
        assert layer.weight.scale is not None
        assert torch.equal(layer.weight.scale, held_scale)
        assert torch.equal(layer(x, NO_PASS), e4m3_linear(x, codes, held_scale))
    else:
        assert layer.weight.scale is None
        assert torch.equal(layer.weight.values, expected)
        assert torch.equal(layer(x, NO_PASS), nn.functional.linear(x, expected))


@pytest.mark.parametrize(("sizes", "held"), [((128, 256, 100), True), ((128, 100, 256), False)])
def test_parts_of_a_stack_have_their_own_blocks(sizes: tuple[int, ...], held: bool) -> None:
    """Where these are blocks of the stack, too; otherwise it is dequantised."""
    parts = dict(zip("abc", sizes, strict=True))
    layer = StackedLinear(256, parts, packed_as=None, bias=False, placement=placement(BLOCKS))
    stored, expected = {}, []
    for seed, (part, size) in enumerate(parts.items()):
        codes, scale = quantised_weight(random(size, 256, seed=seed) * 10**seed, blocks=True)
        stored |= {f"x.{part}.weight": codes, f"x.{part}.weight_scale_inv": scale}
        expected.append(dequantised_weight(codes, scale))
    fill(layer, stored)
    weight = layer.weight
    assert (weight.scale is not None) == held
    found = weight.values if weight.scale is None else dequantised_weight(weight.values, weight.scale)
    assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("scales", [Scales.ROW, Scales.BLOCK])
def test_a_weight_is_quantised_as_it_is_loaded(scales: Scales) -> None:
    """Piece by piece as the whole."""
    layer = Linear(40, PIECE_ROWS + 200, bias=False, placement=placement(E4M3Format(scales)))
    values = random(PIECE_ROWS + 200, 40)
    fill(layer, {"x.weight": values.bfloat16()})
    codes, scale = quantised_weight(values.bfloat16(), blocks=scales is Scales.BLOCK)
    assert torch.equal(layer.weight.values.float(), codes.float())
    assert layer.weight.scale is not None
    assert torch.equal(layer.weight.scale, scale)


def test_layers_that_checkpoints_never_quantise() -> None:
    layer = Linear(8, 8, bias=False, placement=placement(ROWS).unquantised())
    assert dict(layer.checkpoint_tensors("x")).keys() == {"x.weight"}


def test_a_held_weight_runs_its_kernel() -> None:
    require_interpreter()
    weight = Weight(
        64, 128, placement=Placement(torch.float32, CPU, "triton", quantization=ROWS, holds_quantised=True)
    )
    codes, scale = quantised_weight(random(64, 128), blocks=False)
    for name, place in weight.places("x", 0, 64):
        place.copy_(codes if name == "x.weight" else scale.unsqueeze(1))
    x, bias = random(5, 128, seed=1), random(64, seed=2)
    assert weight.shape == (64, 128)
    assert weight.values.dtype == E4M3
    torch.testing.assert_close(weight.product(x, bias), e4m3_linear(x, codes, scale, bias), atol=1e-4, rtol=1e-5)
    assert sum(part.numel() * part.itemsize for part in weight.parameters()) == 64 * 128 + 64 * 4
