"""Hit rates of hybrid models where states are kept: the real scheduler beside the rules of other engines. No GPU.

python scripts/compare_state_rules.py --csv states.csv
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from radixrt.limits import RunLimits
from radixrt.planning.batch_plan import BatchPlan
from radixrt.planning.rehearsal import rehearse
from radixrt.schedule.policy import SchedulePolicy
from radixrt.workloads import lists
from radixrt.workloads.lists import WorkloadPrompt
from scripts.bench_batch_plan import plan_of, random_tree
from scripts.state_rules import Blocks, Branches, EveryBlock, RequestEnds, Rule, most_found, simulate

LISTS: dict[str, Callable[[], list[WorkloadPrompt]]] = {
    "fewshot": lists.fewshot,
    "docqa": lists.docqa,
    "system_prompt": lists.system_prompt,
    "samples": lists.samples,
    "judging": lists.judging,
    "documents": lists.documents,
    "rollouts": lists.rollouts,
    "classification": lists.classification,
    # Prompts part at 37, 101, 333 and 1,021 tokens; and wherever it falls.
    "odd depths": lambda: random_tree(
        11, (3, 4, 4, 4, 6), ((37, 37), (64, 64), (232, 232), (688, 688), (5, 90)), (1, 40)
    ),
    "random depths": lambda: random_tree(12, (3, 4, 4, 4, 6), ((11, 301),) * 4 + ((5, 90),), (1, 40)),
}
RULES: dict[str, Rule] = {
    "SGLang extra_buffer": Branches(),
    "SGLang no_buffer": RequestEnds(),
    "vLLM align": Blocks(),
    "vLLM align, unit 64": Blocks(match_unit=64),
    "vLLM all": EveryBlock(),
}
OURS, WITHOUT_STATES, BY_MATCH = "radixrt", "radixrt, KV alone", "radixrt, longest match"
AT_MOST = "any rule, in this order"


@dataclass(frozen=True)
class Setting:
    """An order, what the pool holds, and the states beside those of rows."""

    order: str  # "planned" or "file"
    pool: str  # "all", or "running": the paths of as many requests as run at once
    states: int


@dataclass(frozen=True)
class HitRates:
    """Of one list in one setting, 0 to 1: the best possible in any order and with memory for all; by rule."""

    name: str
    setting: Setting
    best: float
    rates: dict[str, float]


def limits_of(plan: BatchPlan, setting: Setting, running: int, chunk: int) -> RunLimits:
    """Memory for all of a list, or for the paths of so many requests at once in the planned order."""
    pool = plan.pool_for_all + plan.longest_request if setting.pool == "all" else plan.pool_for(running)
    limits = RunLimits(pool, running, chunk)
    return replace(limits, num_states=limits.of_pass.num_rows + setting.states)


def compare(
    list_name: str,
    plan: BatchPlan,
    setting: Setting,
    running: int,
    chunk: int,
    rules: Mapping[str, Rule] = RULES,
) -> HitRates:
    """Run a list by each rule; those of others with that many requests at once, and with one after the other.

    `radixrt, KV alone`: as a model without states. `radixrt, longest match`: each request has come by itself, and
    what waits is ranked by its match; all others serve them in this order. `any rule, in this order`: the most
    that can be found by who knows all of it, and chooses what is kept beside so many that run.
    """
    limits = limits_of(plan, setting, running, chunk)
    in_file = np.arange(len(plan))
    order, keep = (plan.run.order, plan.keep) if setting.order == "planned" else (in_file, None)
    rates = {
        name: rehearse(plan.store, order, plan.demands, within, keep).hit_rate
        for name, within in ((OURS, limits), (WITHOUT_STATES, replace(limits, num_states=0)))
    }
    rates[BY_MATCH] = rehearse(plan.store, order, plan.demands, limits, policy=SchedulePolicy.LPM).hit_rate
    rates[AT_MOST] = most_found(plan, order, limits.num_states - running) / plan.statistics.prompt_tokens
    alone = replace(limits, max_running_requests=1)
    for rule_name, rule in rules.items():
        for kind, within in (("", limits), (", one by one", alone)):
            rates[rule_name + kind] = simulate(plan, order, within, rule) / plan.statistics.prompt_tokens
    return HitRates(list_name, setting, plan.statistics.best_hit_rate, rates)


def all_settings(states: Sequence[int]) -> Iterator[Setting]:
    """Each order with each pool and number of states."""
    for order in ("planned", "file"):
        for pool in ("all", "running"):
            yield from (Setting(order, pool, count) for count in states)


def print_table(found: Sequence[HitRates], console: Console) -> None:
    """A row for each list and setting, in % of the best possible rate."""
    names = list(found[0].rates)
    table = Table("list", "order", "pool", "states", "best", *names, caption="% of the best possible hit rate")
    for one in found:
        setting = one.setting
        shares = (f"{100 * one.rates[name] / one.best:.1f}" for name in names)
        table.add_row(one.name, setting.order, setting.pool, str(setting.states), f"{one.best:.1%}", *shares)
    console.print(table)


def write_csv(found: Sequence[HitRates], file: Path) -> None:
    """Hit rates, 0 to 1."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["list", "order", "pool", "states", "best", *found[0].rates])
        for one in found:
            setting, rates = one.setting, (f"{rate:.4f}" for rate in one.rates.values())
            writer.writerow([one.name, setting.order, setting.pool, setting.states, f"{one.best:.4f}", *rates])


def main() -> None:
    """Compare, print the table, and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--lists", nargs="+", choices=LISTS, default=list(LISTS), metavar="NAME", help="of: " + ", ".join(LISTS)
    )
    parser.add_argument(
        "--states",
        nargs="+",
        type=int,
        default=[12, 64, 256],
        metavar="N",
        help="beside those of rows (12 64 256)",
    )
    parser.add_argument("--running", type=int, default=64, metavar="N", help="requests at once (64)")
    parser.add_argument(
        "--chunk", type=int, default=8192, metavar="N", help="prompt tokens that a pass computes (8192)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write hit rates here")
    arguments = parser.parse_args()
    found = []
    settings = list(all_settings(arguments.states))
    with tqdm(total=len(arguments.lists) * len(settings)) as progress:
        for name in arguments.lists:
            plan = plan_of(LISTS[name]())
            for setting in settings:
                found.append(compare(name, plan, setting, arguments.running, arguments.chunk))
                progress.update()
    print_table(found, Console(width=200))
    if arguments.csv is not None:
        write_csv(found, arguments.csv)


if __name__ == "__main__":
    main()
