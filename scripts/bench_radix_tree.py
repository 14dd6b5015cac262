"""Times of the radix tree: matching, inserting, evicting at 100,000 leaves. No options, no GPU, half a minute.

python scripts/bench_radix_tree.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from radixrt.bench.report import figure_table
from radixrt.cache.radix_tree import DEFAULT_NAMESPACE, RadixTree, Tokens
from radixrt.workloads import token_statistics

LEAVES = 100_000
REPEATS = 2_000


@dataclass(frozen=True)
class Figure:
    """A median and its goal, both in microseconds."""

    name: str
    microseconds: float
    goal: float | None = None


def measure() -> list[Figure]:
    """Matching, inserting and evicting at the sizes of the goals; random tokens from a fixed seed."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 30_000, 8192).astype(np.int32)
    figures = []
    for edges in (1, 8, 64):
        tree = _tree_with_edges(prompt, edges)
        figures.append(
            Figure(
                f"match 8,192 tokens over {edges} nodes",
                _median(lambda tree=tree: tree.match(DEFAULT_NAMESPACE, prompt)),  # type: ignore[misc]
                20.0,
            )
        )

    head = prompt[:512]
    prompts = (np.append(head, [30_000 + i] + [5] * 63).astype(np.int32) for i in range(LEAVES + REPEATS))
    tree = RadixTree()
    for _ in range(LEAVES):
        _insert(tree, next(prompts))
    figures.append(Figure(f"insert a leaf among {LEAVES:,}", _median(lambda: _insert(tree, next(prompts))), 50.0))
    figures.append(Figure(f"evict a leaf of {LEAVES:,}", _median(lambda: tree.evict(64)), 50.0))
    return figures


def measure_statistics(prompts: int = 100_000, tokens: int = 1_000) -> float:
    """Seconds to find the best possible hit rate of many prompts that share prefixes in groups of a hundred."""
    rng = np.random.default_rng(0)

    def make() -> Iterator[Tokens]:
        for _ in range(prompts // 100):
            head = rng.integers(0, 30_000, tokens - 100).astype(np.int32)
            for _ in range(100):
                yield np.concatenate([head, rng.integers(0, 30_000, 100).astype(np.int32)])

    listed = list(make())
    began = time.perf_counter()
    token_statistics(listed)
    return time.perf_counter() - began


def main() -> None:
    """Print the figures."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    table = figure_table("radix tree", "operation", "median, us", "goal, us")
    for figure in measure():
        goal = "" if figure.goal is None else f"{figure.goal:g}"
        table.add_row(figure.name, f"{figure.microseconds:.1f}", goal)
    console = Console()
    console.print(table)
    console.print(f"best possible hit rate of 100,000 prompts of 1,000 tokens: {measure_statistics():.1f} s")


def _median(operation: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        operation()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _insert(tree: RadixTree, tokens: Tokens) -> None:
    """The cache's work for a request: match, lock, publish, release."""
    match = tree.match(DEFAULT_NAMESPACE, tokens)
    node = tree.node_at(DEFAULT_NAMESPACE, match)
    rest = tokens[match.length :]
    tree.lock(node)
    tree.insert(node, rest, np.zeros(len(rest), dtype=np.int32))
    tree.unlock(node)


def _tree_with_edges(prompt: Tokens, edges: int) -> RadixTree:
    """A tree that holds `prompt` as a chain of nodes of one length, each with a branch to the side."""
    tree = RadixTree()
    _insert(tree, prompt)
    for i in range(1, edges):
        _insert(tree, np.append(prompt[: i * len(prompt) // edges], [40_000]).astype(np.int32))
    return tree


if __name__ == "__main__":
    main()
