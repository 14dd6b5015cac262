"""Transfers between the pools: in order, beside what the GPU computes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from memory_pool.kv_transfers import KVTransfer
from memory_pool.layout import Layout, Part
from memory_pool.pool import HostPool
from memory_pool.state_pool import state_parts
from memory_pool.token_to_kv_pool import TokenToKVPool, kv_part
from radixrt.execution import kv_mover
from radixrt.execution.kv_mover import KVMover


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


LAYOUT = Layout((kv_part(2, 2, 8, torch.float32),))


def pools(device: torch.device) -> tuple[TokenToKVPool, HostPool]:
    pool = TokenToKVPool(12, LAYOUT, device=device)
    host = HostPool(9, pool)
    pool.memory["kv"].copy_(torch.randn(pool.memory["kv"].shape, device="cpu"))
    host.memory["kv"].copy_(torch.randn(host.memory["kv"].shape, device="cpu"))
    if device.type == "cuda":
        torch.cuda.synchronize()  # transfers wait for nothing
    return pool, host


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_transfers_are_made_in_order(kernel_device: torch.device, impl: Any) -> None:
    pool, host = pools(kernel_device)
    kv, host_kv = pool.memory["kv"].cpu().clone(), host.memory["kv"].clone()
    transfers = [
        KVTransfer(True, ids(5, 2), ids(1, 8)),
        KVTransfer(False, ids(3, 1), ids(5, 11)),  # over what has just been stored
        KVTransfer(True, ids(5), ids(4)),
    ]
    for transfer in transfers:
        if transfer.to_host:
            host_kv[:, :, transfer.targets] = kv[:, :, transfer.sources]
        else:
            kv[:, :, transfer.targets] = host_kv[:, :, transfer.sources]
    mover = KVMover(pool, host, kernel_device, impl)
    left = deque(transfers)
    mover.run(left)
    assert not left
    assert torch.equal(pool.memory["kv"].cpu(), kv)  # on the passes' stream, which has waited
    assert torch.equal(host.memory["kv"], host_kv)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    "parts",
    [
        state_parts(3, (3,), 4, (2, 8, 5), torch.bfloat16),
        state_parts(1, (6,), 3, (0, 4, 4), torch.float32),
        state_parts(0, (6,), 3, (2, 4, 4), torch.float32),
    ],
    ids=["conv of an odd number of elements", "conv alone", "no layers"],
)
def test_transfers_of_states(kernel_device: torch.device, impl: Any, parts: tuple[Part, ...]) -> None:
    """All parts of a state in all layers, and nothing else."""
    pool = TokenToKVPool(4, replace(LAYOUT, sequences=parts), num_states=7, device=kernel_device)
    host = HostPool(4, pool, num_states=5)
    assert pool.states is not None
    assert host.states is not None
    for part in (*pool.memory_of_all.values(), *host.memory_of_all.values()):
        part.copy_(torch.randn(part.shape, device="cpu"))
    kv, host_kv = pool.memory["kv"].cpu().clone(), host.memory["kv"].clone()
    memory = [(pool.states.memory[part.name][:, 0], host.states.memory[part.name][:, 0]) for part in parts]
    expected = [(own.cpu().clone(), other.clone()) for own, other in memory]
    transfers = [
        KVTransfer(True, ids(5, 2), ids(1, 4), of_states=True),
        KVTransfer(False, ids(3, 1), ids(5, 6), of_states=True),
        KVTransfer(True, ids(5), ids(2), of_states=True),
    ]
    for transfer in transfers:
        for own, other in expected:
            source, target = (own, other) if transfer.to_host else (other, own)
            target[:, transfer.targets] = source[:, transfer.sources]
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    KVMover(pool, host, kernel_device, impl).run(deque(transfers))
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    for (own, other), (found, kept) in zip(expected, memory, strict=True):
        assert torch.equal(found.cpu(), own)
        assert torch.equal(kept, other)
    assert torch.equal(pool.memory["kv"].cpu(), kv)
    assert torch.equal(host.memory["kv"], host_kv)


def test_what_cannot_be_started_is_left(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, host = pools(device)
    mover = KVMover(pool, host, device, "auto")
    left = deque([KVTransfer(True, ids(slot), ids(slot)) for slot in (1, 2, 3)])
    copy, calls = kv_mover.kv_copy, []

    def failing(*arguments: Any, **options: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        copy(*arguments, **options)

    monkeypatch.setattr(kv_mover, "kv_copy", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        mover.run(left)
    assert [t.sources.tolist() for t in left] == [[2], [3]]
    mover.run(left)
    assert not left
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host.memory["kv"][:, :, 1:4], pool.memory["kv"][:, :, 1:4].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_transfers_run_beside_what_the_gpu_computes(device: torch.device) -> None:
    pool, host = pools(device)
    mover = KVMover(pool, host, device, "auto")
    mover.run(deque([KVTransfer(True, ids(1), ids(1)), KVTransfer(False, ids(2), ids(2))]))  # kernels are compiled
    torch.cuda.synchronize()
    expected, loaded = pool.memory["kv"][:, :, 5].cpu(), host.memory["kv"][:, :, 4].clone()
    looking = torch.cuda.Stream(device)  # which waits for neither passes nor transfers

    def arrived() -> bool:
        with torch.cuda.stream(looking):
            here = pool.memory["kv"][:, :, 6].cpu()
        return torch.equal(host.memory["kv"][:, :, 3], expected) and torch.equal(here, loaded)

    assert not arrived()  # and it has its memory
    torch.cuda._sleep(2 * 10**9)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    mover.run(deque([KVTransfer(True, ids(5), ids(3)), KVTransfer(False, ids(4), ids(6))]))
    while not arrived():
        assert not busy.query()
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_what_is_launched_later_waits_for_transfers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = kv_mover.kv_copy

    def slow(*arguments: Any, **options: Any) -> None:
        torch.cuda._sleep(10**9)
        copy(*arguments, **options)

    pool, host = pools(device)
    mover = KVMover(pool, host, device, "auto")
    mover.run(deque([KVTransfer(False, ids(1), ids(1))]))
    torch.cuda.synchronize()
    monkeypatch.setattr(kv_mover, "kv_copy", slow)
    mover.run(deque([KVTransfer(False, ids(4), ids(6))]))
    seen = pool.memory["kv"][:, :, 6].clone()
    assert torch.equal(seen.cpu(), host.memory["kv"][:, :, 4])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_transfers_wait_for_a_pass_of_which_a_part_was_launched(device: torch.device) -> None:
    pool, host = pools(device)
    mover = KVMover(pool, host, device, "auto")
    mover.run(deque([KVTransfer(False, ids(1), ids(1))]))
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    pool.memory["kv"][:, :, 6] = 0  # what the failed pass still does
    mover.wait_for_passes()
    mover.run(deque([KVTransfer(False, ids(4), ids(6))]))
    torch.cuda.synchronize()
    assert torch.equal(pool.memory["kv"][:, :, 6].cpu(), host.memory["kv"][:, :, 4])
