"""How much faster several cards answer a list than one: `ReplicaGroup.generate` beside `Runtime.generate`.

python scripts/bench_replicas.py --config qwen3-0.6b --replicas 1 2 4 --kill

Lists of 10,000 prompts (`--part 0.1`: a tenth of them) and random weights. Nothing of a list is cached when it
begins, after a warm-up with other prompts of its kind. With 1 it is a Runtime in this process. `--kill` runs the
first list once more on the most replicas, and kills one in its middle. `--read` puts files together that runs
side by side, on cards of their own, have written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from radixrt.bench.catalogue import SHAPES
from radixrt.bench.report import figure_table
from radixrt.bench.subject import model_of
from radixrt.output import RequestOutput
from radixrt.planning.batch_plan import plan_batch
from radixrt.planning.demands import Demands
from radixrt.planning.shards import shards
from radixrt.planning.token_store import TokenStore
from radixrt.replicas import ReplicaGroup
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.workers.process import Process
from radixrt.workloads.lists import WorkloadPrompt, docqa, fewshot, samples

TEXT = "#767c84"  # legible on white and on GitHub's dark page
QUESTIONS = {"fewshot": 20, "docqa": 250, "samples": 32}  # of a subject or document; answers of a prompt
WARM_UP = 20  # times as short as the list
Subject = Runtime | ReplicaGroup


def prompts_of(name: str, seed: int, part: float) -> list[WorkloadPrompt]:
    """So much of a list's 10,000 prompts. Samples of 512 tokens, few-shot answers of 32, others of 128."""
    shared = math.ceil(10_000 * part / QUESTIONS[name])
    if name == "fewshot":
        return fewshot(seed, subjects=shared, questions=QUESTIONS[name], new_tokens=32)
    if name == "docqa":
        return docqa(seed, documents=shared, questions=QUESTIONS[name])
    return samples(seed, prompts=shared, samples=QUESTIONS[name])


def timed(subject: Subject, prompts: Sequence[WorkloadPrompt]) -> tuple[float, list[RequestOutput]]:
    """Seconds of a call, and its outputs."""
    params = [
        SamplingParams(max_new_tokens=prompt.max_new_tokens, temperature=0.6, ignore_eos=True)
        for prompt in prompts
    ]
    given = [prompt.prompt_ids for prompt in prompts]
    began = time.perf_counter()
    outputs = subject.generate(given, params)
    seconds = time.perf_counter() - began
    assert isinstance(outputs, list)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == prompt.max_new_tokens, output.error
    return seconds, outputs


def planned_twice(group: ReplicaGroup, prompts: Sequence[WorkloadPrompt]) -> int:
    """Tokens that the plan has two replicas compute."""
    lengths = np.array([len(prompt.prompt_ids) for prompt in prompts])
    asked = Demands.of(lengths, np.array([prompt.max_new_tokens for prompt in prompts]), 1)
    plan = plan_batch(TokenStore.of(np.asarray(prompt.prompt_ids, np.int32) for prompt in prompts), asked)
    return int(shards(group.pieces(plan), len(group.lanes)).repeated_tokens.sum())


def measure(subject: Subject, name: str, part: float, seed: int) -> dict[str, Any]:
    """What a list takes from an empty cache."""
    timed(subject, prompts_of(name, seed + 1000, part / WARM_UP))
    if isinstance(subject, Runtime):
        subject.flush_cache()
    return record_of(subject, name, prompts_of(name, seed, part))


def record_of(subject: Subject, name: str, prompts: Sequence[WorkloadPrompt]) -> dict[str, Any]:
    seconds, outputs = timed(subject, prompts)
    computed = sum(output.usage.prompt_tokens - output.usage.cached_tokens for output in outputs)
    found: dict[str, Any] = {
        "list": name,
        "prompts": len(prompts),
        "seconds": seconds,
        "computed": computed,
        "hit_rate": 1 - computed / sum(output.usage.prompt_tokens for output in outputs),
    }
    if isinstance(subject, ReplicaGroup):
        figures = subject.replica_figures
        found["ended"] = [figure.seconds for figure in figures]
        found["ends"] = sum(found["ended"]) / max(found["ended"]) / len(figures)
        found["busy"] = [figure.busy_seconds for figure in figures]
        found["requests"] = [figure.requests for figure in figures]
        found["restarts"] = [figure.restarts for figure in figures]
        found["planned_twice"] = planned_twice(subject, prompts)
    return found


def killed_in_the_middle(group: ReplicaGroup, name: str, part: float, seed: int, after: float) -> dict[str, Any]:
    """The same list with other prompts, one of whose replicas is killed so many seconds after its beginning."""
    link = group.lanes[-1].link
    assert isinstance(link, Process)
    timer = threading.Timer(after, os.kill, (link.pid, signal.SIGKILL))
    prompts = prompts_of(name, seed + 2000, part)
    timer.start()
    try:
        return record_of(group, name, prompts)
    finally:
        timer.cancel()


def opened(model: str, count: int, tp: int) -> Subject:
    options: dict[str, Any] = {"load_format": "dummy", "tensor_parallel_size": tp}
    return Runtime(model, **options) if count == 1 else ReplicaGroup(model, num_replicas=count, **options)


def run(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Records, list after list, for each number of replicas."""
    with model_of(None, given.config) as (folder, _):
        for count in given.replicas:
            began = time.perf_counter()
            with opened(str(folder), count, given.tp) as subject:
                about = {"config": given.config, "tp": given.tp, "replicas": count}
                about |= {"start": time.perf_counter() - began, "killed": False}
                lists = list(zip(given.lists, given.part * len(given.lists), strict=False))
                records: list[dict[str, Any]] = []
                for name, part in lists:
                    records.append(about | measure(subject, name, part, given.seed))
                    yield records[-1]
                if given.kill and count == max(given.replicas):  # at last: the process that comes after it starts
                    assert isinstance(subject, ReplicaGroup)
                    name, part = lists[0]
                    record = killed_in_the_middle(subject, name, part, given.seed, records[0]["seconds"] / 2)
                    yield about | record | {"killed": True}


def comparison(records: Sequence[dict[str, Any]]) -> Table:
    """A row for each list and number of replicas, beside one."""
    columns = "shape", "list", "prompts", "cards", "s", "times as fast", "hit rate", "twice", "planned", "ends"
    table = figure_table(None, *columns, "killed")
    alone = {(each["config"], each["tp"], each["list"]): each for each in records if each["replicas"] == 1}
    for each in sorted(records, key=lambda each: (each["config"], each["tp"], each["list"], each["replicas"])):
        one = None if each["killed"] else alone.get((each["config"], each["tp"], each["list"]))
        table.add_row(
            each["config"],
            each["list"],
            f"{each['prompts']:,}",
            str(each["replicas"] * each["tp"]),
            f"{each['seconds']:.2f}",
            f"{one['seconds'] / each['seconds']:.2f}" if one else "",
            f"{each['hit_rate']:.2%}",
            f"{each['computed'] - one['computed']:,}" if one else "",
            f"{each['planned_twice']:,}" if "planned_twice" in each else "",
            f"{each['ends']:.1%}" if "ends" in each else "",
            "yes" if each["killed"] else "",
        )
    return table


def draw(records: Sequence[dict[str, Any]], output: Path) -> None:
    """Write a transparent PNG: how many times as fast each list is on so many cards, beside the ideal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    cards = sorted({each["replicas"] for each in records})
    shapes = sorted({each["config"] for each in records})
    axes.plot(cards, cards, ":", color=TEXT, linewidth=1.0, label="ideal")
    for config in shapes:
        for number, name in enumerate(QUESTIONS):
            found = {
                each["replicas"]: each["seconds"]
                for each in records
                if (each["config"], each["list"], each["killed"]) == (config, name, False)
            }
            if 1 in found:
                at = sorted(found)
                speed_ups = [found[1] / found[count] for count in at]
                style = "-o" if config == shapes[0] else "--s"
                axes.plot(at, speed_ups, style, color=f"C{number}", linewidth=1.4, label=f"{config}, {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(cards, list(map(str, cards)))
    axes.set_yticks(cards, list(map(str, cards)))
    axes.set_xlabel("cards", color=TEXT)
    axes.set_ylabel("times as fast as one", color=TEXT)
    axes.tick_params(colors=TEXT)
    axes.spines[:].set_color(TEXT)
    axes.legend(loc="upper left", frameon=False, labelcolor=TEXT, fontsize=8)
    figure.savefig(output, format="png", dpi=110, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=tuple(SHAPES), default="qwen3-0.6b", help="shape (qwen3-0.6b)")
    parser.add_argument("--list", dest="lists", action="append", choices=tuple(QUESTIONS), help="only this one")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], metavar="N", help="how many (1 2)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="cards of a replica (1)")
    parser.add_argument(
        "--part",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="P",
        help="of 10,000 prompts; or of each list (1.0)",
    )
    parser.add_argument("--kill", action="store_true", help="again with a replica that is killed (of several)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="run nothing; figures of other runs")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture (needs matplotlib)")
    given = parser.parse_args()
    given.lists = given.lists or list(QUESTIONS)
    if len(given.part) not in (1, len(given.lists)):
        parser.error(f"--part takes one number, or one for each of {', '.join(given.lists)}")
    if given.kill and max(given.replicas) == 1:
        parser.error("--kill wants several replicas")
    records: list[dict[str, Any]] = []
    if given.read is not None:
        records = [record for file in given.read for record in json.loads(file.read_text("utf-8"))]
    else:
        for record in run(given):
            records.append(record)
            print(json.dumps(record), flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    Console(width=130).print(comparison(records))
    if given.plot is not None:
        draw(records, given.plot)


if __name__ == "__main__":
    main()
