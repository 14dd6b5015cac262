"""Ranks, and layers of which each rank holds a part: beside one that holds all of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.input_metadata import NO_PASS
from layers.linear import Linear, StackedLinear, SummedLinear
from layers.moe import SparseMoE
from layers.norm import GatedRMSNorm, JointRMSNorm, RMSNorm
from layers.placement import Placement
from layers.products import Product, same_bits
from layers.ranks import ALONE, Ranks, RankSum
from layers.vocabulary import Embedding, LogitsHead
from layers.weight import Weight
from tests.support.interpreter import require_interpreter
from tests.support.random_tensors import random
from tests.support.ranks import on_ranks
from tests.triton_ops.ranks.test_peer_sum import memory_of
from triton_ops.activations.quantised_rows import QuantisedRows
from triton_ops.norms.rms_norm import add_rms_norm, quantised_rms_norm
from triton_ops.ranks.peer_sum import PeerSum

PLACEMENT = Placement(torch.float32, torch.device("cpu"))
SIZES = pytest.mark.parametrize("size", [2, 4])


def assert_same_on_all(found: list[Tensor], expected: Tensor) -> None:
    assert all(same_bits(other, found[0]) for other in found)
    torch.testing.assert_close(found[0], expected)


# --- sums and joined parts ---


@SIZES
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(size: int, ordered: bool, dtype: torch.dtype) -> None:
    """In place, whatever the dtype."""
    parts = [random(5, 24, seed=rank).to(dtype) for rank in range(size)]

    def work(ranks: Ranks) -> Tensor:
        part = parts[ranks.rank].clone()
        assert replace(ranks, ordered=ordered).summed(part) is part
        return part

    found = on_ranks(size, work)
    assert all(same_bits(other, found[0]) for other in found)
    torch.testing.assert_close(found[0].float(), sum(part.float() for part in parts), atol=0.05, rtol=0.02)


def test_bits_of_an_ordered_sum_do_not_depend_on_the_place() -> None:
    """One row, alone and at each place among others. A ring begins to add each of its chunks at another rank."""
    rows = [random(1, 24, seed=rank) * 10.0**rank for rank in range(4)]

    def sums(ranks: Ranks) -> Tensor:
        row = rows[ranks.rank]
        return torch.cat([ranks.summed(row.repeat(count, 1)) for count in (1, 3, 64)])

    for found in on_ranks(4, lambda ranks: sums(replace(ranks, ordered=True))):
        assert all(same_bits(row, found[0]) for row in found)
    found, *_ = on_ranks(4, sums)
    assert not all(same_bits(row, found[0]) for row in found), "else there would be no need of an order"


@SIZES
def test_joined_parts(size: int) -> None:
    parts = [random(3, 5, seed=rank) for rank in range(size)]
    expected = torch.cat(parts, 1)

    def work(ranks: Ranks) -> Tensor:
        out = torch.empty(3, 5 * size)
        assert ranks.joined(parts[ranks.rank], out) is out
        assert same_bits(out, ranks.joined(parts[ranks.rank]))
        return out

    assert all(same_bits(found, expected) for found in on_ranks(size, work))


def test_one_rank_exchanges_nothing() -> None:
    part, out = random(2, 3), torch.empty(2, 3)
    assert ALONE.summed(part) is part
    assert ALONE.joined(part) is part
    assert ALONE.joined(part, out) is out
    assert same_bits(out, part)


def test_what_does_not_divide_is_held_by_each() -> None:
    ranks = Ranks(1, 4)
    assert ranks.dividing(104) is ranks
    assert ranks.dividing(102) is ALONE


# --- layers ---


@SIZES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_summed_layer(size: int, bias: bool, deterministic: bool) -> None:
    """Its bias is added once."""
    weight, added, x = random(12, 32), random(12, seed=1), random(5, 32, seed=2)

    def work(ranks: Ranks) -> Tensor:
        own = slice(ranks.rank * 32 // size, (ranks.rank + 1) * 32 // size)
        placement = replace(PLACEMENT, deterministic=deterministic, ranks=ranks)
        layer = SummedLinear(32 // size, 12, bias=bias, placement=placement)
        layer.weight.values.copy_(weight[:, own])
        if layer.bias is not None:
            layer.bias.copy_(added)
        return layer(x[:, own], NO_PASS)

    assert_same_on_all(on_ranks(size, work), x @ weight.T + (added if bias else 0))


def test_only_one_rank_makes_parts_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(self: Weight, x: Tensor, bias: Tensor | None, *, split_k_ok: bool, **_: object) -> Tensor:
        return torch.tensor([float(split_k_ok)])

    monkeypatch.setattr(Weight, "product", told)

    def work(ranks: Ranks) -> Tensor:
        layer = SummedLinear(32, 12, bias=False, placement=replace(PLACEMENT, ranks=ranks))
        layer.emits_parts = True
        return layer(random(5, 32), NO_PASS)

    assert [found.item() for found in on_ranks(2, work)] == [0.0, 0.0]
    assert work(ALONE).item() == 1.0


@dataclass
class Peers:
    """Sum rows of up to three tokens, by the group."""

    ranks: Ranks
    calls: list[str] = field(default_factory=list)

    def takes(self, part: Tensor) -> bool:
        return len(part) <= 3

    takes_rows = takes

    def __call__(self, part: Tensor) -> Tensor:
        self.calls.append("sum")
        return self.ranks.summed(part)

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.calls.append("norm")
        return add_rms_norm(self.ranks.summed(part), residual, weight, eps)

    def quantised_rms_norm(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, *, groups: bool
    ) -> tuple[QuantisedRows, Tensor]:
        self.calls.append("quantised")
        return quantised_rms_norm(self.ranks.summed(part), residual, weight, eps, groups=groups)


def reader(*, groups: bool) -> Any:
    """A weight that takes its input quantised."""
    return SimpleNamespace(input_groups=groups)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_norm_sums_parts(mixed: bool) -> None:
    """If the layer emits them, if they fit, and if nothing else comes before."""
    weight, x, residual = random(32, 32), random(3, 32, seed=2), random(5, 32, seed=3)

    def work(ranks: Ranks) -> tuple[list[tuple[Tensor, ...]], list[str]]:
        peers = Peers(ranks)
        placement = replace(PLACEMENT, ranks=replace(ranks, peers=peers))
        layer: SummedLinear | SparseMoE
        if mixed:
            layer = SparseMoE(32, 12, 4, 2, renormalize=True, placement=placement)
            for seed, parameter in enumerate(layer.parameters()):
                parameter.copy_(random(*parameter.shape, seed=seed))
            layer.down.mul_(1 + ranks.rank)
        else:
            layer = SummedLinear(32, 32, bias=False, placement=placement)
            layer.weight.values.copy_(weight * (1 + ranks.rank))
        norm = RMSNorm(32, 1e-6, placement=placement)
        quantising = RMSNorm(32, 1e-6, placement=placement)
        quantising.reader = (reader(groups=False),)
        for one in (norm, quantising):
            one.weight.copy_(random(32, seed=4))
        centred, after = (RMSNorm(32, 1e-6, offset=offset, placement=placement) for offset in (1.0, None))
        for one in (centred, after):
            one.weight.fill_(0.5)
        after.before = (norm,)
        found = []
        for rows in (x, torch.cat([x, x])[:5]):
            own = residual[: len(rows)]
            layer.emits_parts = False
            summed = layer(rows, NO_PASS)
            assert isinstance(summed, Tensor)
            layer.emits_parts = True
            for add in (norm.add, quantising.add, centred.add, after.add):
                for addend in (layer(rows, NO_PASS), summed):
                    normed, total = add(addend, own)
                    found.append((normed if isinstance(normed, Tensor) else normed.scale, total))
        return found, peers.calls

    first, second = on_ranks(2, work)
    assert first[1] == second[1] == ["sum", "norm", "quantised", "sum", "sum"]
    for found, expected in zip(first[0][::2], first[0][1::2], strict=True):
        assert all(map(torch.equal, found, expected))
    for own, other in zip(first[0], second[0], strict=True):
        assert all(map(torch.equal, own, other))


def test_only_one_rank_makes_parts_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layers.moe.moe", lambda *_, parts_ok, **__: torch.tensor([float(parts_ok)]))

    def work(ranks: Ranks) -> Tensor:
        mixture = SparseMoE(32, 12, 4, 2, renormalize=True, placement=replace(PLACEMENT, ranks=ranks))
        for parameter in mixture.parameters():
            parameter.zero_()
        mixture.emits_parts = True
        return mixture(random(5, 32), NO_PASS)

    assert [found.item() for found in on_ranks(2, work)] == [0.0, 0.0]
    assert work(ALONE).item() == 1.0


def test_other_linear_layers_sum_nothing() -> None:
    """Ranks without a group cannot."""
    placement = replace(PLACEMENT, ranks=Ranks(1, 2))
    linear = Linear(32, 12, bias=True, placement=placement)
    stacked = StackedLinear(32, {"a": 8, "b": 4}, packed_as=None, bias=True, placement=placement)
    for layer in (linear, stacked):
        for parameter in layer.parameters():
            parameter.fill_(1.0)
        assert torch.equal(layer(torch.ones(2, 32), NO_PASS), torch.full((2, 12), 33.0))


@SIZES
@pytest.mark.parametrize("vocab_size", [104, 102])
def test_an_embedding_and_its_head(size: int, vocab_size: int) -> None:
    """102 rows are divided by two ranks, and held by each of four."""
    weight, ids = random(vocab_size, 16), torch.arange(vocab_size, dtype=torch.int32).flip(0)
    own_rows = vocab_size // size if vocab_size % size == 0 else vocab_size

    def work(ranks: Ranks) -> tuple[Tensor, Tensor]:
        placement = replace(PLACEMENT, ranks=ranks)
        embedding = Embedding(vocab_size, 16, scale=3.0, placement=placement)
        assert embedding.weight.shape == (own_rows, 16)
        first = ranks.rank * own_rows % vocab_size
        embedding.weight.copy_(weight[first : first + own_rows])
        head = LogitsHead(embedding.weight, vocab_size, softcap=2.0, placement=placement)
        out = torch.empty(2, vocab_size)
        assert head(weight, torch.tensor([3, 5], dtype=torch.int32), out=out) is out
        return embedding(ids, NO_PASS), out

    logits = torch.tanh(weight[[3, 5]] @ weight.T / 2.0) * 2.0
    for embedded, capped in on_ranks(size, work):
        assert torch.equal(embedded, weight.flip(0) * 3.0)
        torch.testing.assert_close(capped, logits)


@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_norm_of_what_ranks_hold_together(copies: int, deterministic: bool, offset: float | None) -> None:
    """On four ranks, of which `copies` hold the same elements."""
    num_parts, eps = 4 // copies, 0.1
    width = 8 * num_parts
    alone = RMSNorm(width, eps, offset=offset, placement=PLACEMENT)
    alone.weight.copy_(random(width))
    x = random(5, width, seed=1) * torch.arange(1, width + 1)

    def work(ranks: Ranks) -> Tensor:
        placement = replace(PLACEMENT, deterministic=deterministic, ranks=ranks)
        norm = JointRMSNorm(8, eps, offset=offset, placement=placement)
        own = slice(8 * (ranks.rank // copies), 8 * (ranks.rank // copies) + 8)
        norm.weight.copy_(alone.weight[own])
        return norm(x[:, own])

    found = on_ranks(4, work)
    assert all(torch.equal(found[n], found[n // copies * copies]) for n in range(4))
    torch.testing.assert_close(torch.cat(found[::copies], 1), alone(x))


def test_a_joint_norm_of_one_rank_is_an_ordinary_one() -> None:
    norm = JointRMSNorm(8, 0.1, offset=0.0, placement=PLACEMENT)
    norm.weight.copy_(random(8))
    x = random(5, 8, seed=1)
    assert same_bits(norm(x), RMSNorm.forward(norm, x))


def test_a_sum_of_squares_is_a_product_with_ones() -> None:
    """Of a kernel's tile one column counts; a row's bits are its own."""
    require_interpreter()
    x = random(5, 8)
    product = Product("triton")
    found = product(x.square(), torch.ones(1, 8))
    torch.testing.assert_close(found, x.square().sum(-1, keepdim=True))
    assert same_bits(found[3:4], product(x[3:4].square(), torch.ones(1, 8)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_norm_sums_by_a_product(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sum on a GPU may take another order at another number of rows."""
    monkeypatch.setattr(Product, "__call__", lambda self, x, weight: x @ weight.T + 1000.0)

    def work(ranks: Ranks) -> Tensor:
        norm = JointRMSNorm(8, 0.1, placement=replace(PLACEMENT, deterministic=deterministic, ranks=ranks))
        norm.weight.fill_(1.0)
        return norm(random(5, 8))

    assert all((found.abs().max() < 0.5) == deterministic for found in on_ranks(2, work))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_a_gated_norm_of_groups_that_ranks_have_whole_or_in_parts(num_groups: int, ordered: bool) -> None:
    """On four ranks. Groups are of other sizes of numbers; nothing is summed where each is on one rank."""
    alone = GatedRMSNorm(32, num_groups, 0.1, placement=PLACEMENT)
    alone.weight.copy_(random(32))
    x, gate = random(5, 32, seed=1) * torch.arange(1, 33), random(5, 32, seed=2)

    def work(ranks: Ranks) -> Tensor:
        norm = GatedRMSNorm(
            8, num_groups, 0.1, placement=replace(PLACEMENT, ranks=replace(ranks, ordered=ordered))
        )
        own = slice(8 * ranks.rank, 8 * ranks.rank + 8)
        norm.weight.copy_(alone.weight[own])
        return norm.gated(x[:, own], gate[:, own])

    expected = alone.gated(x, gate)
    torch.testing.assert_close(torch.cat(on_ranks(4, work), 1), expected)
    squares = (x * torch.nn.functional.silu(gate)).unflatten(1, (num_groups, -1)).square().mean(-1, keepdim=True)
    factors = torch.rsqrt(squares + 0.1).expand(-1, -1, 32 // num_groups).flatten(1)
    torch.testing.assert_close(expected, x * torch.nn.functional.silu(gate) * factors * alone.weight)


@pytest.mark.parametrize(("size", "groups"), [(256, False), (256, True), (64, False), (64, True)])
def test_a_norm_that_quantises_sums_in_its_kernel(
    size: int, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for groups of shorter rows than a group."""
    require_interpreter()
    (memory,) = memory_of(1, 2**14, torch.device("cpu"))
    norm = RMSNorm(size, 1e-6, placement=replace(PLACEMENT, impl="triton"))
    norm.weight.data.copy_(random(size))
    norm.reader = (reader(groups=groups),)
    part, residual, sums = random(5, size, seed=1), random(5, size, seed=2), list[Tensor]()
    expected, total = norm.add(part.clone(), residual)
    summed = PeerSum.__call__
    monkeypatch.setattr(PeerSum, "__call__", lambda peers, own: sums.append(own) or summed(peers, own))
    rank_part = RankSum(part, PeerSum(memory, patience=1, traps=False))
    rows, also_total = norm.add(rank_part, residual)
    assert torch.equal(also_total, total)
    assert torch.equal(rows.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(rows.scale, expected.scale)
    assert len(sums) == (size == 64 and groups)
