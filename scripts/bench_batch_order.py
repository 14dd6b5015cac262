"""Hits and time of a batch in the planned order and in file order, with a small pool.

python scripts/bench_batch_order.py --config qwen3-0.6b --subjects 57
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from tqdm import tqdm

import radixrt
from radixrt.bench.catalogue import SHAPES, write_shape
from radixrt.bench.report import figure_table
from radixrt.report.batch_report import BatchReport
from radixrt.workloads.lists import WorkloadPrompt, fewshot

BUDGETS = (2048, 8192, 16384)
ORDERS: tuple[Literal["planned", "file"], ...] = ("planned", "file")


@dataclass(frozen=True)
class OrderedRun:
    """One run of the file: its prefill budget in tokens, its pool in tokens, its order, and its figures."""

    budget: int
    pool: int
    order: str
    report: BatchReport


def measure(
    prompts: list[WorkloadPrompt], shape: str, device: str | None, pool: int | None
) -> Iterator[OrderedRun]:
    """Run the prompts as a batch in both orders at each budget, in a Runtime of its own.

    `pool`: slots of the KV pool; None: twice the longest request.
    """
    pool = pool or 2 * max(len(prompt.prompt_ids) + prompt.max_new_tokens - 1 for prompt in prompts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = folder / "in.jsonl"
        with lines.open("w") as file:
            for prompt in prompts:
                line = {
                    "token_ids": prompt.prompt_ids.tolist(),
                    "max_new_tokens": prompt.max_new_tokens,
                    "ignore_eos": True,
                }
                file.write(json.dumps(line) + "\n")
        write_shape(shape, folder)
        for budget in BUDGETS:
            for order in ORDERS:
                with radixrt.Runtime(
                    folder,
                    load_format="dummy",
                    device=device,
                    max_total_tokens=pool,
                    chunked_prefill_size=budget,
                ) as runtime:
                    report = runtime.run_batch(lines, folder / "out.jsonl", order=order, overwrite=True)
                yield OrderedRun(budget, pool, order, report)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Hits and time of a few-shot batch in two orders.")
    option = parser.add_argument
    option("--config", default="tiny", choices=SHAPES, help="the model's shape; weights are random (tiny)")
    option("--subjects", type=int, default=57, metavar="N", help="prefixes of 400 to 1400 tokens (57)")
    option("--questions", type=int, default=20, metavar="N", help="prompts of each (20)")
    option("--pool", type=int, metavar="N", help="tokens that the KV pool holds (twice the longest request)")
    option("--device", help="such as cpu or cuda (the GPU, if there is one)")
    arguments = parser.parse_args()
    prompts = fewshot(subjects=arguments.subjects, questions=arguments.questions)
    table = figure_table(None, "budget", "pool", "order", "hit rate", "of the best", "predicted", "s")
    runs = measure(prompts, arguments.config, arguments.device, arguments.pool)
    for run in tqdm(runs, total=len(BUDGETS) * len(ORDERS), unit=" runs"):
        report = run.report
        predicted = report.predicted_hit_rate
        table.add_row(
            f"{run.budget:,}",
            f"{run.pool:,}",
            run.order,
            f"{report.hit_rate:.2%}",
            f"{report.hit_rate / (report.best_hit_rate or 1):.2%}",
            "-" if predicted is None else f"{predicted:.2%}",
            f"{report.seconds:.1f}",
        )
    console = Console()
    console.print(f"{len(prompts):,} few-shot prompts, {arguments.config} (random weights)")
    console.print(table)


if __name__ == "__main__":
    main()
