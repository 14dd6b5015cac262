"""How much faster several cards answer a list than one: `ReplicaGroup.generate` beside `Runtime.generate`.

python scripts/bench_replicas.py --config qwen3-0.6b --replicas 2

Lists of 10,000 prompts (`--part 0.1`: a tenth of them) and random weights. Nothing of a list is cached when it
begins, after a warm-up with other prompts of its kind.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from radixrt.bench.catalogue import SHAPES
from radixrt.bench.subject import model_of
from radixrt.output import RequestOutput
from radixrt.replicas import ReplicaGroup
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.workloads.lists import WorkloadPrompt, docqa, fewshot, samples

QUESTIONS = {"fewshot": 20, "docqa": 250, "samples": 32}  # of a subject or document; answers of a prompt
WARM_UP = 20  # times as short as the list


def prompts_of(name: str, seed: int, part: float) -> list[WorkloadPrompt]:
    """So much of a list's 10,000 prompts. Samples of 512 tokens, few-shot answers of 32, others of 128."""
    shared = math.ceil(10_000 * part / QUESTIONS[name])
    if name == "fewshot":
        return fewshot(seed, subjects=shared, questions=QUESTIONS[name], new_tokens=32)
    if name == "docqa":
        return docqa(seed, documents=shared, questions=QUESTIONS[name])
    return samples(seed, prompts=shared, samples=QUESTIONS[name])


def timed(subject: Runtime | ReplicaGroup, prompts: Sequence[WorkloadPrompt]) -> tuple[float, list[RequestOutput]]:
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


def measure(subject: Runtime | ReplicaGroup, name: str, part: float, seed: int) -> dict[str, Any]:
    timed(subject, prompts_of(name, seed + 1000, part / WARM_UP))
    if isinstance(subject, Runtime):
        subject.flush_cache()
    prompts = prompts_of(name, seed, part)
    seconds, outputs = timed(subject, prompts)
    cached = sum(output.usage.cached_tokens for output in outputs)
    found: dict[str, Any] = {
        "list": name,
        "prompts": len(prompts),
        "seconds": seconds,
        "hit_rate": cached / sum(output.usage.prompt_tokens for output in outputs),
    }
    if isinstance(subject, ReplicaGroup):
        figures = subject.replica_figures
        last = max(figure.seconds for figure in figures)
        found["ends"] = sum(figure.seconds for figure in figures) / last / len(figures)
        found["busy"] = [figure.busy_seconds for figure in figures]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=tuple(SHAPES), default="qwen3-0.6b", help="shape (qwen3-0.6b)")
    parser.add_argument("--list", dest="lists", action="append", choices=tuple(QUESTIONS), help="only this one")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="cards (2)")
    parser.add_argument("--part", type=float, default=1.0, metavar="P", help="of 10,000 prompts (1.0)")
    parser.add_argument("--only", choices=("replicas", "one"), help="measure one side alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    given = parser.parse_args()
    sides: dict[str, Callable[[str], Runtime | ReplicaGroup]] = {
        "replicas": lambda model: ReplicaGroup(model, load_format="dummy", num_replicas=given.replicas),
        "one": lambda model: Runtime(model, load_format="dummy"),
    }
    records = []
    with model_of(None, given.config) as (model, _):
        for side in (given.only,) if given.only else tuple(sides):
            began = time.perf_counter()
            with sides[side](str(model)) as subject:
                started = time.perf_counter() - began
                for name in given.lists or QUESTIONS:
                    found = measure(subject, name, given.part, given.seed)
                    records.append({"side": side, "start": started, **found})
                    print(json.dumps(records[-1]), flush=True)
    if given.json is not None:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"config": given.config, "replicas": given.replicas, "records": records}, file, indent=1)
    if given.only is None:
        Console(width=110).print(comparison(records, given.config, given.replicas))


def comparison(records: Sequence[dict[str, Any]], config: str, num_replicas: int) -> Table:
    """A row a list: both sides, and how many times as fast the replicas are."""
    title = f"{config}, {num_replicas} replicas"
    table = Table(
        "list", "prompts", "one card, s", "replicas, s", "times as fast", "hit rates", "ends", title=title
    )
    by_side = {(record["side"], record["list"]): record for record in records}
    for (side, name), many in by_side.items():
        if side == "replicas":
            one = by_side["one", name]
            table.add_row(
                name,
                f"{many['prompts']:,}",
                f"{one['seconds']:.2f}",
                f"{many['seconds']:.2f}",
                f"{one['seconds'] / many['seconds']:.2f}",
                f"{one['hit_rate']:.2%}, {many['hit_rate']:.2%}",
                f"{many['ends']:.1%}",
            )
    return table


if __name__ == "__main__":
    main()
