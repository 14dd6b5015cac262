"""Sums over ranks by one kernel: the ranks are streams of one GPU here, which is all that the kernel can tell, or
processes in Triton's interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from layers.ranks import Ranks
from tests.support.interpreter import require_interpreter
from triton_ops.norms.rms_norm import add_rms_norm, quantised_rms_norm
from triton_ops.ranks import peer_sum
from triton_ops.ranks.peer_sum import PATIENCE, PeerMemory, PeerSum

T = TypeVar("T")

gpu = pytest.mark.gpu
ONE_SHOT, TWO_SHOTS, MIXED = 2**30, 0, 5000  # bytes above which sums of more than two ranks take two shots
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def memory_of(size: int, num_bytes: int, device: torch.device) -> list[PeerMemory]:
    """That of each rank."""
    made = [PeerMemory.own(size, num_bytes, device) for _ in range(size)]
    data, signals = [each[0] for each in made], [each[1] for each in made]
    return [PeerMemory(rank, data, signals, made[rank][2]) for rank in range(size)]


def on_streams(size: int, num_bytes: int, above: int, work: Callable[[PeerSum, int], T]) -> list[T]:
    """What the work of each rank returns, on a stream of its own. Without patience first: to load a kernel, or
    to ask for memory, may wait for kernels that run, and here these wait for others of this process.
    """
    memory = memory_of(size, num_bytes, torch.device("cuda", torch.cuda.current_device()))
    streams = [torch.cuda.Stream() for _ in range(size)]
    for patience in (1, PATIENCE):
        found = []
        for each in memory:
            each.signals[each.rank].zero_()
            each.counters.zero_()
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append(work(PeerSum(memory[rank], patience, traps=False, two_shots_above=above), rank))
        torch.cuda.synchronize()
    assert not any(int(each.counters[2]) for each in memory)  # nobody was given up
    return found


def total_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, in float32, rounded."""
    total = torch.zeros(parts[0].shape, device=parts[0].device)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


@gpu
@pytest.mark.parametrize(
    ("size", "dtype", "above"),
    [
        *((2, dtype, ONE_SHOT) for dtype in (BF16, FP16, FP32)),
        *((3, BF16, above) for above in (TWO_SHOTS, MIXED)),
        *((4, BF16, above) for above in (ONE_SHOT, TWO_SHOTS, MIXED)),
        (4, FP32, MIXED),
    ],
)
def test_sums(size: int, dtype: torch.dtype, above: int) -> None:
    """Many of them, of sizes that change, one after the other; of fewer programs than ranks, and of more."""
    shapes = [(3, 64), (1, 2048), (7, 1000), (1, 1), (9, 2048), (11, 2001)] * 25
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [
        [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes] for _ in range(size)
    ]
    found = on_streams(size, 2**17, above, lambda peers, rank: [peers(part.clone()) for part in parts[rank]])
    for place, of_ranks in enumerate(zip(*parts, strict=True)):
        expected = total_of([*of_ranks])
        for rank in range(size):
            assert torch.equal(found[rank][place], expected)


@gpu
@pytest.mark.parametrize(
    ("size", "dtype", "tiles", "above"),
    [
        *((2, dtype, 1, ONE_SHOT) for dtype in (BF16, FP32)),
        *((3, dtype, 2, MIXED) for dtype in (BF16, FP32)),
        *((4, BF16, 1, above) for above in (ONE_SHOT, TWO_SHOTS, MIXED)),
        (4, FP32, 1, TWO_SHOTS),
    ],
)
def test_sums_that_are_normed(
    size: int, dtype: torch.dtype, tiles: int, above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as a sum, rounded, and `add_rms_norm`; between sums alone, whose places they share."""
    monkeypatch.setattr(peer_sum, "TWO_SHOTS_TILES", tiles)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    shapes = [(1, 64), (3, 64), (17, 64), (200, 64), (3, 1024), (17, 1024), (7, 5120)] * 10
    parts = [[random(*shape) for shape in shapes] for _ in range(size)]
    plain = [[random(1000) for _ in shapes] for _ in range(size)]
    residuals, weights = [random(*shape) for shape in shapes], [random(shape[1]) for shape in shapes]

    def work(peers: PeerSum, rank: int) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for place, part in enumerate(parts[rank]):
            args, results = (part, residuals[place], weights[place], 1e-6), list[torch.Tensor]()
            for groups in (False, True) if part.shape[1] >= 128 else (False,):
                rows, total = peers.quantised_rms_norm(*args, groups=groups)
                results += [rows.codes.view(torch.uint8), rows.scale, total]
            found.append((*peers.add_rms_norm(*args), peers(plain[rank][place].clone()), *results))
        return found

    found = on_streams(size, 2**18, above, work)
    for place in range(len(shapes)):
        summed = total_of([of_rank[place] for of_rank in parts])
        normed, total = add_rms_norm(summed, residuals[place], weights[place], 1e-6)
        alone = total_of([of_rank[place] for of_rank in plain])
        expected = [normed, total, alone]
        for groups in (False, True) if summed.shape[1] >= 128 else (False,):
            rows, _ = quantised_rms_norm(summed, residuals[place], weights[place], 1e-6, groups=groups)
            expected += [rows.codes.view(torch.uint8), rows.scale, total]
        for rank in range(size):
            assert all(map(torch.equal, found[rank][place], expected))
            assert len(found[rank][place]) == len(expected)


@gpu
@pytest.mark.parametrize(("size", "dtype"), [(2, BF16), (3, FP32), (4, FP16), (4, BF16)])
def test_parts_side_by_side(size: int, dtype: torch.dtype) -> None:
    """By one launch and by several, between sums, whose places they share, in one shot and in two."""
    shapes = [(3, 64), (1, 2001), (40, 750), (1, 1), (9, 5000), (2, 16000), (300, 64)] * 15
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [
        [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes] for _ in range(size)
    ]

    def work(peers: PeerSum, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for part in parts[rank]:
            out = part.new_empty(len(part), size * part.shape[1])
            found.append((peers.join(part, out), peers(part[:1, :1000].clone())))
        return found

    found = on_streams(size, 2**16, MIXED, work)
    for place, of_ranks in enumerate(zip(*parts, strict=True)):
        expected = torch.cat(of_ranks, dim=1), total_of([part[:1, :1000] for part in of_ranks])
        for rank in range(size):
            assert all(map(torch.equal, found[rank][place], expected))


@pytest.mark.each_once
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("shape", [(1, 64), (8, 750), (2, 5000), (5, 1)])
def test_the_last_rank_joins_all_parts(size: int, shape: tuple[int, int], kernel_device: torch.device) -> None:
    """As layers do it: with little patience, ranks one after the other."""
    memory = memory_of(size, 10_000, kernel_device)
    generator = torch.Generator(kernel_device).manual_seed(0)
    parts = [torch.randn(*shape, generator=generator, device=kernel_device).half() for _ in range(size)]
    expected = torch.cat(parts, dim=1)
    rows = min(shape[0], 10_000 // (2 * shape[1]))  # that fit at once
    for last in (0, size - 1):
        for start in range(0, shape[0], rows):
            for rank in [*(rank for rank in range(size) if rank != last), last]:
                memory[rank].counters[2] = 0
                ranks = Ranks(rank, size, None, PeerSum(memory[rank], patience=1, traps=False))
                found = ranks.joined(parts[rank][start : start + rows])
            assert torch.equal(found, expected[start : start + rows])
            assert int(memory[last].counters[2]) == 0
    assert [each.counters[:2].tolist() for each in memory] == [[2 * -(-shape[0] // rows), 0]] * size


@pytest.mark.each_once
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 64), (17, 64), (3, 1024), (2, 5000)])
def test_the_last_rank_finds_all_parts(
    size: int, dtype: torch.dtype, shape: tuple[int, int], kernel_device: torch.device
) -> None:
    """With little patience, ranks one after the other: the others' signals are there once it looks."""
    memory = memory_of(size, 2**18, kernel_device)
    generator = torch.Generator(kernel_device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=kernel_device).to(dtype)

    parts = [random(*shape) for _ in range(size)]
    residual, weight = random(*shape), random(shape[1])
    for nth, last in enumerate((0, size - 1)):
        order = [*(rank for rank in range(size) if rank != last), last]
        for rank in order:
            memory[rank].counters[2] = 0
            normed, total = PeerSum(memory[rank], patience=1, traps=False).add_rms_norm(
                parts[rank], residual, weight, 1e-6
            )
        expected = add_rms_norm(total_of(parts), residual, weight, 1e-6, impl="torch")
        assert torch.equal(total, expected[1])
        torch.testing.assert_close(normed, expected[0])
        assert [int(memory[rank].counters[2]) for rank in order] == [1] * (size - 1) + [0]
        plain = [part.clone() for part in parts]
        for rank in order:
            PeerSum(memory[rank], patience=1, traps=False)(plain[rank])
        assert torch.equal(plain[last], total_of(parts))
        assert [each.counters[:2].tolist() for each in memory] == [[2 * nth + 2, 0]] * size


@pytest.mark.each_once
@pytest.mark.parametrize(("size", "tiles"), [(3, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("shape", [(101, 64), (5, 1024), (1, 64), (5, 3000)])
def test_two_shots_of_ranks_one_after_the_other(
    size: int, shape: tuple[int, int], tiles: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sum three times, each by all ranks without patience: then owners have found parts, and all sums."""
    monkeypatch.setattr(peer_sum, "TWO_SHOTS_TILES", tiles)
    monkeypatch.setattr(peer_sum, "TWO_SHOTS_BLOCK", 1024)
    memory = memory_of(size, 2**18, kernel_device)
    generator = torch.Generator(kernel_device).manual_seed(0)
    parts = [torch.randn(*shape, generator=generator, device=kernel_device).half() for _ in range(size)]
    residual, weight = parts[0] + 1, parts[1][0] + 1
    total = total_of(parts)
    normed, summed = add_rms_norm(total, residual, weight, 1e-6, impl="triton")
    groups = len(weight) >= 128
    rows, _ = quantised_rms_norm(total, residual, weight, 1e-6, groups=groups, impl="triton")
    for nth, way in enumerate(("alone", "normed", "quantised", "alone")):
        for _ in range(3):
            found = []
            for each, part in zip(memory, parts, strict=True):
                each.counters.copy_(torch.tensor([nth, 0, 0]))
                peers = PeerSum(each, patience=1, traps=False, two_shots_above=0)
                if way == "normed":
                    found.append(peers.add_rms_norm(part, residual, weight, 1e-6))
                elif way == "quantised":
                    quantised, of_all = peers.quantised_rms_norm(part, residual, weight, 1e-6, groups=groups)
                    found.append((quantised.codes.view(torch.uint8), quantised.scale, of_all))
                else:
                    found.append((peers(part.clone()),))
        for each, got in zip(memory, found, strict=True):
            assert each.counters.tolist() == [nth + 1, 0, 0]
            assert torch.equal(got[-1], total if way == "alone" else summed)
            if way == "normed":
                assert torch.equal(got[0], normed)
            if way == "quantised":
                assert torch.equal(got[0], rows.codes.view(torch.uint8))
                assert torch.equal(got[1], rows.scale)


def test_in_two_shots_a_rank_writes_nothing_else(kernel_device: torch.device) -> None:
    """Rank 1 of three: rows that others own into the owner's memory alone, its own rows into all."""
    memory = memory_of(3, 2**16, kernel_device)
    written = [data.view(torch.float16).view(2, 3, -1).fill_(7.0) for data in memory[0].data]
    part = torch.rand(8, 3000, device=kernel_device).half()
    PeerSum(memory[1], patience=1, traps=False, two_shots_above=0).add_rms_norm(part, part, part[0], 1e-6)
    for rank, data in enumerate(written):
        assert bool((data[0] == 7).all())  # the place of the second sum
        assert bool((data[1, [0, 2]] == 7).all())
        rows, rest = data[1, 1, : part.numel()].view(part.shape), data[1, 1, part.numel() :]
        assert bool((rest == 7).all())
        for row in range(len(part)):
            if row % 3 != 1:
                assert bool((rows[row] == (part[row] if row % 3 == rank else 7)).all())
            else:
                assert bool((rows[row] != 7).any())


def summed_by_process(memory: PeerMemory, parts: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Sums in one shot and in two, and parts side by side, of ranks that run at a time; then the process ends with
    0.
    """
    peers = PeerSum(memory, traps=False, two_shots_above=5000)
    for place, (part, own) in enumerate(zip(parts, found, strict=True)):
        if place % 4 == 0:
            several = part.repeat(3, 1)  # more than fits at once
            side_by_side = peers.join(several, part.new_empty(len(several), 3 * part.shape[1]))
            own.copy_(side_by_side.view(3, len(part), 3, -1).sum(2)[place % 3])
        elif place % 3:
            own.copy_(peers(part))
        else:
            own.copy_(peers.add_rms_norm(part, torch.zeros_like(part), part[0], 1e-6)[1])
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_processes_sum() -> None:
    """At speeds of their own: each waits for the others in the interpreter, with the kernel's own signals."""
    require_interpreter()
    size, shapes = 3, [(40, 64), (3, 2048), (9, 1000), (2, 30), (150, 64), (2, 5000)] * 2
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randn(shape, generator=generator).half() for shape in shapes] for _ in range(size)]
    memory = memory_of(size, 2**15, torch.device("cpu"))
    found = [[torch.zeros_like(part).share_memory_() for part in parts[0]] for _ in range(size)]
    for each in memory:
        each.data[each.rank].share_memory_()
        each.signals[each.rank].share_memory_()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=summed_by_process, args=(memory[rank], parts[rank], found[rank]))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    exits = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert exits == [0] * size
    for place, of_ranks in enumerate(zip(*parts, strict=True)):
        for own in found:
            assert torch.equal(own[place], total_of([*of_ranks]))


def test_a_sum_leaves_what_was_read_for_the_one_before(kernel_device: torch.device) -> None:
    """Its rank may be late."""
    memory = memory_of(2, 64, kernel_device)
    written = memory[1].data[1].view(torch.float32).view(2, 2, 16)[:, 0]  # by rank 0, at both places
    written.zero_()
    for value, expected in ((1.0, [0.0, 1.0]), (2.0, [2.0, 1.0]), (3.0, [2.0, 3.0])):
        PeerSum(memory[0], patience=1, traps=False)(torch.full((16,), value, device=kernel_device))
        assert written[:, 0].tolist() == expected


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 0), (3, 1)])
def test_who_waits_is_released(size: int, rank: int, kernel_device: torch.device) -> None:
    """Also with sums that come later. In two shots the owner, and who waits for it."""
    peers = PeerSum(memory_of(size, 2**12, kernel_device)[rank], patience=10, traps=False, two_shots_above=0)
    peers.release()
    for _ in range(3):
        peers(torch.ones(100, device=kernel_device))
    assert not peers.has_given_up
    peers._memory.signals[rank].zero_()
    peers(torch.ones(100, device=kernel_device))
    assert peers.has_given_up


@gpu
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 0), (3, 1)])
def test_who_waits_already_is_released(size: int, rank: int) -> None:
    """By a copy beside the kernel."""
    first = PeerSum(memory_of(size, 2**12, torch.device("cuda", 0))[rank], traps=False, two_shots_above=0)
    part = torch.ones(100, device="cuda")
    PeerSum(first._memory, patience=1, traps=False, two_shots_above=0)(part.clone())  # loads the kernel
    first._memory.counters.zero_()
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    first(part)
    ended.record()
    time.sleep(0.2)
    assert not ended.query()
    first.release()
    ended.synchronize()
    assert not first.has_given_up


@gpu
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 0), (3, 1)])
def test_a_rank_that_does_not_come_is_given_up(size: int, rank: int) -> None:
    """After some patience; later sums do not wait for it again."""
    memory = memory_of(size, 2**12, torch.device("cuda", 0))[rank]
    first = PeerSum(memory, patience=100_000, traps=False, two_shots_above=0)

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
    assert first.has_given_up
    assert seconds(lambda: [first(part.clone()) for _ in range(50)]) < 1.0


@gpu
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 0), (3, 1)])
def test_a_rank_that_does_not_come_costs_the_device(size: int, rank: int) -> None:
    """Rather than that a sum is wrong. In a process of its own, which has lost its device then."""
    code = f"""
import torch
from tests.triton_ops.ranks.test_peer_sum import memory_of
from triton_ops.ranks.peer_sum import PeerSum
memory = memory_of({size}, 2**12, torch.device("cuda", 0))
torch.cuda.synchronize()
print("begun", flush=True)
PeerSum(memory[{rank}], patience=1000, two_shots_above=0)(torch.ones(100, device="cuda"))
torch.cuda.synchronize()
print("ended")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "begun\n"
    assert "CUDA error" in ended.stderr


@pytest.mark.parametrize(
    ("residual", "weight", "message"),
    [
        (torch.empty(2, 64), torch.empty(64), "residual must be"),
        (torch.empty(3, 64, dtype=torch.float16), torch.empty(64), "residual must be"),
        (torch.empty(64, 3).T, torch.empty(64), "residual must be contiguous"),
        (torch.empty(3, 64), torch.empty(32), "weight must be contiguous"),
    ],
)
def test_what_does_not_go_together(residual: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    first = PeerSum(memory_of(2, 4096, torch.device("cpu"))[0])
    with pytest.raises(ValueError, match=message):
        first.add_rms_norm(torch.empty(3, 64), residual, weight, 1e-6)


def test_what_fits() -> None:
    first = PeerSum(memory_of(2, 4096, torch.device("cpu"))[0])
    assert first.takes(torch.empty(2048, dtype=torch.bfloat16))
    assert not first.takes(torch.empty(2049, dtype=torch.bfloat16))
    assert not first.takes(torch.empty(8, dtype=torch.int32))
    assert not first.takes(torch.empty(32, 64, dtype=torch.bfloat16).T)
    assert first.takes_rows(torch.empty(4, 512, dtype=torch.bfloat16))
    assert not first.takes_rows(torch.empty(5, 16, dtype=torch.bfloat16))
    assert first.joins(torch.empty(100, 2048, dtype=torch.bfloat16))
    assert first.joins(torch.empty(0, 2048, dtype=torch.bfloat16))
    assert not first.joins(torch.empty(100, 2049, dtype=torch.bfloat16))
    assert not first.joins(torch.empty(100, dtype=torch.bfloat16))
    assert not first.joins(torch.empty(32, 64, dtype=torch.bfloat16).T)


@pytest.mark.parametrize("out", [torch.empty(3, 64), torch.empty(3, 128).half(), torch.empty(128, 3).T])
def test_what_parts_are_not_joined_in(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="out must be contiguous"):
        PeerSum(memory_of(2, 4096, torch.device("cpu"))[0]).join(torch.empty(3, 64), out)
