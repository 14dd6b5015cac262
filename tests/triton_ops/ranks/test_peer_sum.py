"""Sums over ranks by one kernel: the ranks are streams of one GPU here, which is all that the kernel can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from triton_ops.norms.rms_norm import add_rms_norm
from triton_ops.ranks.peer_sum import PATIENCE, PeerMemory, PeerSum

gpu = pytest.mark.gpu

WIDTHS = 64, 1024, 5120  # of rows that are normed: the first has several in a program


def sums_of(size: int, num_bytes: int, dtype: torch.dtype, patience: int = PATIENCE) -> list[PeerSum]:
    """One of each rank, all of whose kernels are loaded: to load one waits for those that run."""
    device = torch.device("cuda", torch.cuda.current_device())
    made = [PeerMemory.own(size, num_bytes, device) for _ in range(size)]
    data, signals = [each[0] for each in made], [each[1] for each in made]
    memory = [PeerMemory(rank, data, signals, made[rank][2]) for rank in range(size)]
    for each in memory:
        for length in (1, 2**10):  # of both kinds that are compiled
            PeerSum(each, patience=1)(torch.zeros(length, dtype=dtype, device=device))
        for width in WIDTHS:
            rows = torch.zeros(3, width, dtype=dtype, device=device)
            PeerSum(each, patience=1).add_rms_norm(rows, rows, rows[0], 1e-6)
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
        [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes] for _ in range(size)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_that_are_normed(size: int, dtype: torch.dtype) -> None:
    """To the bit as a sum, rounded, and `add_rms_norm`; between sums alone, whose places they share."""
    sums = sums_of(size, 2**18, dtype)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    cases = [(rows, width) for width in WIDTHS for rows in (1, 3, 17, 200) if rows * width * 4 <= 2**18] * 8
    parts = [[random(*shape) for shape in cases] for _ in range(size)]
    plain = [[random(1000) for _ in cases] for _ in range(size)]
    residuals, weights = [random(*shape) for shape in cases], [random(shape[1]) for shape in cases]
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(size)]
    expected = []
    for of_ranks, residual, weight in zip(zip(*parts, strict=True), residuals, weights, strict=True):
        total = torch.zeros(residual.shape, device="cuda")
        for part in of_ranks:
            total += part.float()
        expected.append(add_rms_norm(total.to(dtype), residual, weight, 1e-6))
    torch.cuda.synchronize()
    for rank, stream in enumerate([torch.cuda.Stream() for _ in sums]):
        with torch.cuda.stream(stream):
            for place, part in enumerate(parts[rank]):
                found[rank].append(sums[rank].add_rms_norm(part, residuals[place], weights[place], 1e-6))
                sums[rank](plain[rank][place])
    torch.cuda.synchronize()
    for rank in range(size):
        for (normed, total), (right_normed, right_total) in zip(found[rank], expected, strict=True):
            assert torch.equal(total, right_total)
            assert torch.equal(normed, right_normed)
        for place in range(len(cases)):
            assert torch.equal(plain[rank][place], plain[0][place])


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
    assert first.takes_rows(torch.empty(4, 512, dtype=torch.bfloat16, device="cuda"))
    assert not first.takes_rows(torch.empty(5, 16, dtype=torch.bfloat16, device="cuda"))
