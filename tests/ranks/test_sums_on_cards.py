"""Sums over ranks by a kernel, each in a process with a card of its own."""

from __future__ import annotations

import random

import pytest
import torch

from radixrt.ranks.group import Shape, joined, store_at, waiting_store
from tests.triton_ops.ranks.test_peer_sum import total_of
from triton_ops.activations.quantised_rows import QuantisedRows
from triton_ops.norms.rms_norm import add_rms_norm, quantised_rms_norm
from triton_ops.ranks.peer_sum import PeerSum

NUM_CARDS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.skipif(NUM_CARDS < 2, reason="there are no two cards"),
]


KINDS = ("alone", "joined", "normed", "by row", "in groups")


def told(rows: QuantisedRows, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.codes.view(torch.uint8), rows.scale, total


def check_sums(rank: int, port: int, size: int) -> None:
    """Of shapes at random, launched one after the other, in one shot and in two, without the norm, with it and
    quantised, and parts side by side: all to the bit.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = joined(store_at(port, size), rank, Shape(size), device)
    own = group.ranks.peers
    assert own is not None, "the trial found sums to be wrong"
    ways = [own, PeerSum(own._memory, two_shots_above=0), PeerSum(own._memory, two_shots_above=2**40)]
    choices, generator = random.Random(0), torch.Generator(device).manual_seed(0)  # the same on each rank

    def parts_of(shape: tuple[int, int]) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(size)]

    sizes = [(rows, width) for rows in (1, 2, 3, 17, 64, 257) for width in (128, 1000, 4096, 5120, 8192)]
    sizes += [(512, 8192), (1024, 8192)]
    for _ in range(4):
        shapes = choices.choices(sizes, k=30)
        parts = [parts_of(shape) for shape in shapes]
        torch.cuda.synchronize()
        found = []
        for of_ranks in parts:
            way, part = choices.choice(ways), of_ranks[rank]
            ones, kind = (part.new_ones(part.shape), part.new_ones(part.shape[1]), 1e-6), choices.choice(KINDS)
            if kind == "alone":
                result = (way(part.clone()),)
            elif kind == "joined":
                result = (group.ranks.joined(part),)
            elif kind == "normed":
                result = way.add_rms_norm(part, *ones)
            else:
                result = told(*way.quantised_rms_norm(part, *ones, groups=kind == "in groups"))
            found.append((kind, result))
        for of_ranks, (kind, got) in zip(parts, found, strict=True):
            total = total_of(of_ranks)
            ones, expected = (torch.ones_like(total), torch.ones_like(total[0]), 1e-6), (total,)
            if kind == "joined":
                expected = (torch.cat(of_ranks, dim=1),)
            elif kind == "normed":
                expected = add_rms_norm(total, *ones)
            elif kind != "alone":
                expected = told(*quantised_rms_norm(total, *ones, groups=kind == "in groups"))
            assert all(map(torch.equal, got, expected)), (kind, total.shape)
            assert len(got) == len(expected)
    assert not own.has_given_up
    group.least(1)  # none ends before the others have read what it holds


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_sums(size: int) -> None:
    if size > NUM_CARDS:
        pytest.skip(f"there are {NUM_CARDS} cards")
    store = waiting_store(size)
    torch.multiprocessing.spawn(check_sums, (store.port, size), nprocs=size)  # type: ignore[attr-defined]
