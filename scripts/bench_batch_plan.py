"""Time and memory of planning a batch; its predictions beside the real scheduler's hits. No GPU, some minutes.

python scripts/bench_batch_plan.py --prompts 100000
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.bench.report import figure_table, wide_console
from radixrt.limits import RunLimits
from radixrt.planning.batch_plan import BatchPlan, plan_batch
from radixrt.planning.cache_model import model_run
from radixrt.planning.demands import Demands
from radixrt.planning.rehearsal import rehearse
from radixrt.planning.token_store import TokenStore, TokenWriter
from radixrt.workloads.lists import TokenSource, WorkloadPrompt, docqa, fewshot, samples, system_prompt, unshared

VOCAB_SIZE = 30_000
NEW_TOKENS = 128
BUDGETS = (2048, 8192, 16384)

CASES = {
    "groups of 100": (1_000, 900, 100),
    "nothing shared": (1_000, 0, 1),
    "all identical": (1_000, 1_000, 0),
    "one long prefix": (8_242, 8_192, 0),
}
"""By name: tokens of a prompt, how many of them a group shares, and prompts in a group; 0 is all of them."""


@dataclass(frozen=True)
class Speed:
    """Seconds of one CPU core, and bytes.

    Attributes:
        plan: for all of `plan_batch`.
        hints: to look for what ruins sharing.
        model: for a model of the run in one order.
        memory: maximum of the process, including mapped pages of the file.
    """

    prompts: int
    tokens: int
    plan: float
    hints: float
    model: float
    memory: int


def measure_speed(case: str, prompts: int) -> Speed:
    """Plan so many prompts of a case, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
        store = Path(folder) / "tokens"
        tokens = _write(store, case, prompts)
        return pool.apply(_measure, (store, prompts, tokens))


def _write(folder: Path, case: str, prompts: int) -> int:
    length, shared, group = CASES[case]
    rng = np.random.default_rng(0)
    groups = rng.permutation(prompts) // (group or prompts)
    with TokenWriter(folder) as writer:
        for first in range(0, prompts, 1000):
            heads = (_head(int(number), shared) for number in groups[first : first + 1000])
            writer.append([np.append(head, _random(rng, length - shared)) for head in heads])
        writer.finish()
    return writer.num_tokens


def _head(group: int, length: int) -> Int32Array:
    return _random(np.random.default_rng(group), length)


def _random(rng: np.random.Generator, count: int) -> Int32Array:
    return rng.integers(0, VOCAB_SIZE, count, dtype=np.int32)


def _measure(folder: Path, prompts: int, tokens: int) -> Speed:
    store = TokenStore.open(folder)
    demands = Demands.of(store.lengths, NEW_TOKENS)
    began = time.process_time()
    plan = plan_batch(store, demands)
    planned = time.process_time()
    _ = plan.hints
    hinted = time.process_time()
    limits = RunLimits(max(500_000, 2 * plan.longest_request))
    model_run(plan.order, plan.tree, demands, plan.run.order, limits, plan.keep)
    modelled = time.process_time()
    return Speed(prompts, tokens, planned - began, hinted - planned, modelled - hinted, _max_memory())


def _max_memory() -> int:
    """Bytes that this process has had resident at most."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss, in which what made this process counts too.
    return 1024 * next(
        int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
    )


def random_tree(
    seed: int, fan_out: Sequence[int], sizes: Sequence[tuple[int, int]], new: tuple[int, int]
) -> list[WorkloadPrompt]:
    """Prompts at the leaves of a random tree, shuffled: half to all of each level's fan-out below each node."""
    source = TokenSource(seed)

    def below(prefix: Int32Array, level: int) -> Iterator[Int32Array]:
        if level == len(fan_out):
            yield prefix
            return
        for _ in range(source.length((max(1, fan_out[level] // 2), fan_out[level]))):
            yield from below(np.append(prefix, source.some_tokens(sizes[level])), level + 1)

    prompts = list(below(np.zeros(0, dtype=np.int32), 0))
    source.random.shuffle(prompts)
    return [WorkloadPrompt(prompt, source.length(new)) for prompt in prompts]


LISTS: dict[str, Callable[[], list[WorkloadPrompt]]] = {
    "unshared": unshared,
    "fewshot": fewshot,
    "docqa": docqa,
    "system_prompt": system_prompt,
    "samples": samples,
    "fewshot, 400 subjects": lambda: fewshot(subjects=400, new_tokens=32),
    "docqa, 60 documents": lambda: docqa(documents=60, document_len=4000, questions=100),
    "three levels": lambda: random_tree(7, (30, 20, 30), ((200, 600), (100, 500), (10, 300)), (1, 100)),
}


def plan_of(prompts: Sequence[WorkloadPrompt]) -> BatchPlan:
    """The plan of a list."""
    new_tokens = np.array([prompt.max_new_tokens for prompt in prompts], dtype=np.int64)
    store = TokenStore.of([prompt.prompt_ids for prompt in prompts])
    return plan_batch(store, Demands.of(store.lengths, new_tokens))


@dataclass(frozen=True)
class Comparison:
    """Hit rates of one list within some limits, 0 to 1: by the real scheduler, and by the model."""

    limits: RunLimits
    best: float
    planned: float
    planned_model: float
    file_order: float
    file_order_model: float


def compare(name: str) -> Iterator[Comparison]:
    """A list in both orders, with a pool of twice the longest request at all budgets, and with larger pools."""
    prompts = LISTS[name]()
    plan = plan_of(prompts)
    smallest, distinct = 2 * plan.longest_request, plan.statistics.distinct_tokens
    limits = [RunLimits(smallest, chunked_prefill_size=budget) for budget in BUDGETS]
    limits += [RunLimits(distinct // part) for part in (8, 4, 2) if distinct // part > smallest]
    for limit in limits:
        rates = []
        for order, keep in ((plan.run.order, plan.keep), (np.arange(len(prompts)), None)):
            rates.append(rehearse(plan.store, order, plan.demands, limit, keep).hit_rate)
            rates.append(model_run(plan.order, plan.tree, plan.demands, order, limit, keep).hit_rate)
        yield Comparison(limit, plan.statistics.best_hit_rate, *rates)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Time planning, and compare its predictions.")
    parser.add_argument("--prompts", type=int, default=100_000, metavar="N", help="of each case (100000)")
    parser.add_argument("--no-predictions", dest="predictions", action="store_false", help="speed alone")
    arguments = parser.parse_args()
    console = wide_console(110)
    table = figure_table(None, "case", "prompts", "tokens", "plan, s", "hints, s", "model, s", "memory, MB")
    for case, (length, _, _) in CASES.items():
        prompts = arguments.prompts if length <= 1_000 else arguments.prompts // 5
        speed = measure_speed(case, prompts)
        seconds = (f"{value:.1f}" for value in (speed.plan, speed.hints, speed.model))
        table.add_row(case, f"{prompts:,}", f"{speed.tokens:,}", *seconds, f"{speed.memory / 1e6:,.0f}")
    console.print(table)
    if not arguments.predictions:
        return
    table = figure_table(None, "list", "pool", "budget", "best", "planned", "model", "file order", "model")
    for name in LISTS:
        for found in compare(name):
            rates = (found.best, found.planned, found.planned_model, found.file_order, found.file_order_model)
            limits = found.limits
            table.add_row(
                name,
                f"{limits.pool_tokens:,}",
                f"{limits.chunked_prefill_size:,}",
                *(f"{rate:.2%}" for rate in rates),
            )
    console.print(table)


if __name__ == "__main__":
    main()
