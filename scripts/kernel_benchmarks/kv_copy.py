"""Moving KV between a pool and pinned host memory, and within the pool: our kernel and torch's own operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from scripts.kernel_benchmarks.case import Call, Case, Contender, Expected, Source, seeded
from scripts.kernel_benchmarks.roofline import Work
from triton_ops.kv.kv_copy import kv_copy

DTYPE = torch.bfloat16

Way = Literal["to host", "to device", "in the pool"]


@dataclass(frozen=True)
class Shape:
    """`num_tokens` tokens of a model."""

    num_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def bytes(self) -> int:
        return 2 * self.num_tokens * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE.itemsize

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.num_layers}x{self.num_kv_heads}x{self.head_dim}"


USUAL = Shape(2048, 28, 8, 128)  # 235 MB


@dataclass(frozen=True)
class Copying:
    """A pool of twice the tokens, and memory that has a token's KV together, pinned if the pool is on a GPU.

    `pool_slots` are scattered; `host_slots` scattered or 0, 1, 2, ...; `other_slots` are the rest of the
    pool.
    """

    pool: Tensor
    memory: Tensor
    pool_slots: Tensor
    host_slots: Tensor
    other_slots: Tensor

    @property
    def host(self) -> Tensor:
        return self.memory.permute(1, 2, 0, 3, 4)


def _inputs(shape: Shape, scattered: bool, source: Source) -> Copying:
    n, layers, heads = shape.num_tokens, shape.num_layers, (shape.num_kv_heads, shape.head_dim)
    pool, values = source.normal(layers, 2, 2 * n, *heads), source.normal(n, layers, 2, *heads)
    memory = torch.empty(values.shape, dtype=DTYPE, device="cpu", pin_memory=source.device.type == "cuda")
    memory.copy_(values)
    slots = source.permutation(2 * n)
    order = source.permutation(n) if scattered else torch.arange(n, dtype=torch.int32, device=source.device)
    return Copying(pool, memory, slots[:n], order, slots[n:])


def _run(way: Way, c: Copying, impl: Any) -> None:
    if way == "to host":
        kv_copy(c.pool, c.pool_slots, c.host, c.host_slots, impl=impl)
    elif way == "to device":
        kv_copy(c.host, c.host_slots, c.pool, c.pool_slots, impl=impl)
    else:
        kv_copy(c.pool, c.pool_slots, c.pool, c.other_slots, impl=impl)


def _arrived(way: Way, c: Copying) -> list[Tensor]:
    """Rows of the slots that were written, on the pool's device."""
    if way == "to host":
        # Contiguous, so that the device reads it after the write.
        return [c.memory.to(c.pool.device).index_select(0, c.host_slots).flatten(1)]
    slots = c.pool_slots if way == "to device" else c.other_slots
    return [c.pool.index_select(2, slots).permute(2, 0, 1, 3, 4).flatten(1)]


def _sent(way: Way, c: Copying) -> Expected:
    if way == "to device":
        return Expected([c.memory.to(c.pool.device).index_select(0, c.host_slots).flatten(1)])
    return Expected([c.pool.index_select(2, c.pool_slots).permute(2, 0, 1, 3, 4).flatten(1)])


def _ours(way: Way, c: Copying) -> Call:
    return Call(lambda: _run(way, c, "triton"), lambda _: _arrived(way, c))


def _staged(way: Way, c: Copying) -> Call:
    """A run of host memory through a buffer on the device: one copy by the copy engine."""
    buffer = torch.empty_like(c.memory, device=c.pool.device)
    by_layer = buffer.permute(1, 2, 0, 3, 4)

    def run() -> None:
        if way == "to host":
            kv_copy(c.pool, c.pool_slots, by_layer, None)
            c.memory.copy_(buffer, non_blocking=True)
        else:
            buffer.copy_(c.memory, non_blocking=True)
            kv_copy(by_layer, None, c.pool, c.pool_slots)

    return Call(run, lambda _: _arrived(way, c))


def _by_torch(way: Way, c: Copying) -> Call:
    return Call(lambda: _run(way, c, "torch"), lambda _: _arrived(way, c))


def kv_copy_case(shape: Shape, way: Way, scattered: bool = True) -> Case[Copying]:
    """`scattered`: whether the host memory is."""
    work = {
        "to host": Work(shape.bytes, device_to_host=shape.bytes),
        "to device": Work(shape.bytes, host_to_device=shape.bytes),
        "in the pool": Work(2 * shape.bytes),
    }
    contenders = [Contender("radixrt", partial(_ours, way))]
    if way == "in the pool":
        contenders.append(Contender("torch", partial(_by_torch, way)))
    elif not scattered:
        contenders.append(Contender("through a buffer", partial(_staged, way)))
    return Case(
        "kv_copy",
        f"{way} {shape}",
        "" if way == "in the pool" else "scattered" if scattered else "a run",
        work[way],
        seeded(partial(_inputs, shape, scattered)),
        partial(_sent, way),
        tuple(contenders),
    )


def kv_copy_cases(shape: Shape = USUAL) -> Iterator[Case[Copying]]:
    """All directions, with scattered and with consecutive host memory."""
    for scattered in (True, False):
        yield kv_copy_case(shape, "to host", scattered)
        yield kv_copy_case(shape, "to device", scattered)
    yield kv_copy_case(shape, "in the pool")
