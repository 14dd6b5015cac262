"""Sums over ranks by one kernel: the ranks are streams of one GPU here, which is all that the kernel can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from triton_ops.ranks.peer_sum import PATIENCE, PeerMemory, PeerSum

gpu = pytest.mark.gpu


def sums_of(size: int, num_bytes: int, dtype: torch.dtype, patience: int = PATIENCE) -> list[PeerSum]:
    """One of each rank, all of whose kernels are loaded: to load one waits for those that run."""
    device = torch.device("cuda", torch.cuda.current_device())
    made = [PeerMemory.own(size, num_bytes, device) for _ in range(size)]
    data, signals = [each[0] for each in made], [each[1] for each in made]
    memory = [PeerMemory(rank, data, signals, made[rank][2]) for rank in range(size)]
    for each in memory:
        for length in (1, 2**10):  # of both kinds that are compiled
            PeerSum(each, patience=1)(torch.zeros(length, dtype=dtype, device=device))
    for _, own_signals, counters in made:
        own_signals.zero_()
        counters.zero_()
    return [PeerSum(each, patience) for each in memory]


def run(sums: list[PeerSum], parts: list[list[torch.Tensor]]) -> None:
    """All sums of each rank on a stream of its own."""
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sums]
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            for part in parts[rank]:
                sums[rank](part)
    torch.cuda.synchronize()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [2, 4])
def test_sums(size: int, dtype: torch.dtype) -> None:
    """In the order of ranks, in float32; many of them, of sizes that change, one after the other."""
    sums = sums_of(size, 2**16, dtype)
    shapes = [(3, 64), (1, 2048), (7, 1000), (1, 1)] * 25
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [
        [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
        for _ in range(size)
    ]
    expected = []
    for of_ranks in zip(*parts, strict=True):
        total = torch.zeros(of_ranks[0].shape, device="cuda")
        for part in of_ranks:
            total += part.float()
        expected.append(total.to(dtype))
    run(sums, parts)
    for rank in range(size):
        for found, right in zip(parts[rank], expected, strict=True):
            assert torch.equal(found, right)


@gpu
def test_a_rank_that_does_not_come_is_given_up() -> None:
    """After some patience; later sums do not wait for it again."""
    first, _ = sums_of(2, 2**12, torch.float32, patience=100_000)

    def seconds(work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    part = torch.ones(100, device="cuda")
    first(part.clone())
    torch.cuda.synchronize()
    assert int(first._memory.counters[2]) == 1
    assert seconds(lambda: [first(part.clone()) for _ in range(50)]) < 1.0


@gpu
def test_what_fits() -> None:
    first, _ = sums_of(2, 4096, torch.bfloat16)
    assert first.takes(torch.empty(2048, dtype=torch.bfloat16, device="cuda"))
    assert not first.takes(torch.empty(2049, dtype=torch.bfloat16, device="cuda"))
    assert not first.takes(torch.empty(8, dtype=torch.int32, device="cuda"))
