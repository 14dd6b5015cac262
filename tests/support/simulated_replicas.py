"""Replicas that share a known list, simulated: each runs its pieces one after the other.

Nine lists of about 100,000 prompts (1,000 equal ones; 3,200 of 32 samples, 4 of 256), with the sizes of Qwen3-0.6B
and an H200's peak.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from radixrt.batch.dispatch import Dispatch
from radixrt.limits import RunLimits
from radixrt.planning.demands import Demands
from radixrt.planning.shards import Pieces, shards
from radixrt.workloads.bound import DeviceSpeed, ModelShape

SHAPE = ModelShape(28, 1024, 3072, 16, 8, 128, 151_936, 114_688)  # Qwen3-0.6B
SPEED = DeviceSpeed(bandwidth=4.2e12, flops=7.9e14)
LIMITS = RunLimits(pool_tokens=1 << 20)


def tree_list(seed: int, levels: list[tuple[int, tuple[int, int]]], new: tuple[int, int], n: int = 1) -> Any:
    """Demands and shared tokens of a run over a tree: `levels` are children of each node, and their tokens."""
    random = np.random.default_rng(seed)
    depth = shared = np.zeros(1, np.int64)
    for children, (least, most) in levels:
        own = random.integers(least, most + 1, len(depth) * children)
        first = np.arange(len(own)) % children == 0
        # The first child shares what its parent shares with the prompt before, the others all of the parent.
        shared = np.where(first, np.repeat(shared, children), np.repeat(depth, children))
        depth = np.repeat(depth, children) + own
    answers = random.integers(new[0], new[1] + 1, len(depth))
    return Demands.of(depth, answers, n), shared.astype(np.int32)


LISTS: dict[str, Callable[[], Any]] = {
    "unshared": lambda: tree_list(0, [(100_000, (100, 1024))], (100, 1024)),
    "fewshot": lambda: tree_list(1, [(1, (40, 40)), (2000, (400, 1400)), (50, (40, 120))], (8, 8)),
    "docqa": lambda: tree_list(2, [(1600, (8192, 8192)), (64, (20, 60))], (128, 128)),
    "system prompt": lambda: tree_list(3, [(1, (2048, 2048)), (100_000, (32, 256))], (64, 256)),
    "samples": lambda: tree_list(4, [(3200, (1024, 1024))], (512, 512), 32),
    "few prompts": lambda: tree_list(8, [(4, (1024, 1024))], (512, 512), 256),
    "judging": lambda: tree_list(5, [(1, (1536, 1536)), (8400, (80, 400)), (4, (50, 300)), (3, (1, 1))], (48, 96)),
    "one giant subtree": lambda: tree_list(
        6, [(1, (30_000, 30_000)), (10, (500, 900)), (10_000, (9, 90))], (4, 60)
    ),
    "equal prompts": lambda: tree_list(7, [(1, (500, 500)), (1000, (1, 1))], (1, 700)),
}


def simulated(pieces: Pieces, num_replicas: int, factors: Any = None) -> tuple[float, list[int], Any]:
    """Run pieces one after the other on each replica. Returns the seconds of all, the pieces at which replicas
    began anew, and what each piece took.
    """
    stolen: list[int] = []
    now = 0.0
    dispatch = Dispatch(shards(pieces, num_replicas), stolen.append, clock=lambda: now)
    taken = pieces.seconds * (1.0 if factors is None else factors)
    events = [(0.0, replica, -1) for replica in range(num_replicas)]
    last, ended, order = [-2] * num_replicas, np.zeros(len(pieces), int), 0.0
    while events:
        now, replica, piece = heapq.heappop(events)
        if piece >= 0:
            assert dispatch.end(replica, piece)
            ended[piece] += 1
            order = now
        for piece in dispatch.take(replica):
            again = 0.0 if piece in (0, last[replica] + 1) else float(pieces.repeated_seconds[piece])
            last[replica] = piece
            heapq.heappush(events, (now + float(taken[piece]) + again, replica, piece))
    assert not dispatch.num_left
    assert (ended == 1).all()
    return order, stolen, taken
