"""Hits of hybrid models: other engines' rules in cases counted by hand, and the real scheduler beside them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from radixrt.bench.catalogue import SCALES
from radixrt.limits import RunLimits
from radixrt.workloads import lists
from radixrt.workloads.lists import WorkloadPrompt
from scripts.bench_batch_plan import random_tree
from scripts.compare_state_rules import (
    AT_MOST,
    BY_MATCH,
    LISTS,
    OURS,
    WITHOUT_STATES,
    Setting,
    all_settings,
    compare,
    plan_of,
    print_table,
    write_csv,
)
from scripts.state_rules import Blocks, Branches, EveryBlock, RequestEnds, Rule, most_found, simulate

SHARED = list(range(10))
# Three that share 10 tokens of 15, and the last of them again.
PROMPTS = [[*SHARED, *range(first, first + 5)] for first in (100, 200, 300, 300)]
ALONE = RunLimits(1000, 1, 100, num_states=50)


def hits(prompts: list[list[int]], rule: Rule, limits: RunLimits = ALONE, new_tokens: int = 1) -> int:
    plan = plan_of([WorkloadPrompt(np.array(prompt, np.int32), new_tokens) for prompt in prompts])
    return simulate(plan, np.arange(len(prompts)), limits, rule)


# -- by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "chunk", "found"),
    [
        # 15 alone has a state; the last prompt may find 14 of its tokens.
        pytest.param(RequestEnds(), 100, (0, 0, 0, 0), id="ends"),
        pytest.param(RequestEnds(), 10, (0, 10, 10, 10), id="ends of chunks"),
        pytest.param(RequestEnds(), 7, (0, 7, 7, 14), id="ends of chunks after a match"),  # 0 7 14 15, 7 14 15
        # The first leaves 12; the second finds KV up to 10, leaves 8 instead of 12; the third leaves 12.
        pytest.param(Branches(4), 100, (0, 0, 8, 12), id="branches"),
        # The first leaves 4 and 12, the second 8 in (4, 10], the third 12.
        pytest.param(Branches(4), 6, (0, 4, 8, 12), id="branches and chunks"),
        pytest.param(Blocks(4), 100, (0, 0, 0, 12), id="last block"),
        pytest.param(Blocks(4), 9, (0, 8, 8, 12), id="blocks of chunks"),  # 8 12 15
        pytest.param(Blocks(16), 100, (0, 0, 0, 0), id="a block that no prompt fills"),
        pytest.param(Blocks(8, match_unit=4), 100, (0, 0, 8, 12), id="last unit, and where they part"),
        pytest.param(Blocks(8, match_unit=2), 100, (0, 0, 10, 14), id="smaller units"),
        pytest.param(EveryBlock(4), 100, (0, 8, 8, 12), id="every block"),
        pytest.param(EveryBlock(3), 100, (0, 9, 9, 12), id="every block, of three"),
    ],
)
def test_one_by_one(rule: Rule, chunk: int, found: tuple[int, ...]) -> None:
    for count in range(1, len(PROMPTS) + 1):
        assert hits(PROMPTS[:count], rule, replace(ALONE, chunked_prefill_size=chunk)) == sum(found[:count])


@pytest.mark.parametrize(
    ("rule", "running", "found"),
    [
        (EveryBlock(4), 2, 16),  # the third and the fourth find 8
        (EveryBlock(4), 3, 12),  # the fourth finds what the third has left
        (EveryBlock(4), 4, 0),
        (Branches(4), 2, 0),  # the third and the fourth leave 8, where both part from KV of the first
        (Branches(4), 3, 12),
    ],
)
def test_what_a_pass_leaves_is_found_from_the_next_on(rule: Rule, running: int, found: int) -> None:
    assert hits(PROMPTS, rule, replace(ALONE, max_running_requests=running)) == found


def test_the_least_recently_used_state_goes_first() -> None:
    """Each prompt leaves 4, 8 and 12; a running one has a state of its own."""
    other = [[first, *range(50, 64)] for first in (1000, 2000)]
    prompts = [PROMPTS[0], other[0], PROMPTS[1], other[1], PROMPTS[2]]
    for num_states, found in ((50, 16), (4, 0), (7, 16), (6, 16), (5, 0)):
        assert hits(prompts, EveryBlock(4), replace(ALONE, num_states=num_states)) == found


def test_answers_leave_states() -> None:
    """20 tokens more: 16, 20, 24, 28 and 32 in blocks, one at the end, and that at 32 of an interval of 16."""
    for rule, own in ((EveryBlock(4), 5), (Blocks(4), 5), (RequestEnds(), 1), (Branches(4, 16), 1)):
        assert rule.answer_states(15, 20) == own
    assert [Branches(4, 16).answer_states(*lengths) for lengths in ((10, 5), (10, 6), (16, 15))] == [0, 1, 0]
    assert RequestEnds().answer_states(15, 0) == 0
    # The first prompt's 4, 8 and 12 are pushed out by the five of its answer.
    assert hits(PROMPTS[:2], EveryBlock(4), replace(ALONE, num_states=9), 21) == 8
    assert hits(PROMPTS[:2], EveryBlock(4), replace(ALONE, num_states=6), 21) == 0


def test_memory() -> None:
    """Tails of what was used longest ago go first, and with them their states; answers need memory, too."""
    first, other = list(range(15)), list(range(100, 115))
    prompts = [first, other, [*first, 15]]
    for pool, found in ((31, 12), (30, 12), (29, 12), (27, 12), (26, 8), (22, 4), (18, 0)):
        assert hits(prompts, EveryBlock(4), replace(ALONE, pool_tokens=pool)) == found
    assert hits(prompts, EveryBlock(4), replace(ALONE, pool_tokens=36), 11) == 8
    prompts = [first, other, [*first, 15], list(range(200, 225)), [*first, 16]]
    assert hits(prompts, EveryBlock(4), replace(ALONE, pool_tokens=45)) == 24  # the fourth one takes 11 of `other`
    with pytest.raises(ValueError, match="does not fit"):
        hits(prompts, EveryBlock(4), replace(ALONE, pool_tokens=25), 11)
    with pytest.raises(ValueError, match="a block not in the budget"):
        hits(prompts, Blocks(8), replace(ALONE, chunked_prefill_size=7))


def test_requests_wait_for_memory() -> None:
    """Two that share nothing do not fit together, so that the third finds what the first has left."""
    prompts = [PROMPTS[0], PROMPTS[1]]
    together = replace(ALONE, max_running_requests=2)
    assert hits(prompts, EveryBlock(4), together, 11) == 0
    assert hits(prompts, EveryBlock(4), replace(together, pool_tokens=39), 11) == 8  # they need 20 and 2 x 10


# -- any rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "num_kept", "found"),
    [
        ("abcabc", 3, 3 * 9),
        ("abcabc", 2, 2 * 9),  # while the second a begins, b and c are kept, too
        ("abcabc", 1, 9),
        ("aabbcc", 1, 3 * 9),
        ("abba", 1, 9),  # either of them: while the second b begins, a is kept
        ("abbba", 1, 2 * 9),
        ("abxba", 1, 9),
        ("aAbaA", 1, 3 * 5),  # they share 5 tokens
        ("aAbaA", 2, 5 + 9 + 9),
        ("aAxxA", 1, 5 + 9),
        ("xyz", 1, 0),
    ],
)
def test_no_rule_finds_more(order: str, num_kept: int, found: int) -> None:
    tokens = {name: [100 * ord(name) + i for i in range(10)] for name in "abcxyz"}
    tokens["A"] = [*tokens["a"][:5], *tokens["x"][5:]]
    unlike = iter(range(50_000, 60_000))
    prompts = [[next(unlike) for _ in range(10)] if name in "xyz" else tokens[name] for name in order]
    plan = plan_of([WorkloadPrompt(np.array(prompt, np.int32), 1) for prompt in prompts])
    assert most_found(plan, np.arange(len(plan)), num_kept) == pytest.approx(found, rel=0.02)


# -- the real scheduler beside them ------------------------------------------------------------------------

SMALL: dict[str, Callable[[], list[WorkloadPrompt]]] = {
    name: partial(getattr(lists, name), **SCALES["cpu"].sizes[name]) for name in LISTS if hasattr(lists, name)
} | {
    "odd depths": lambda: random_tree(11, (2, 3, 4, 4), ((37, 37), (64, 64), (232, 232), (5, 60)), (1, 20)),
    "random depths": lambda: random_tree(12, (2, 3, 4, 4), ((11, 151),) * 3 + ((5, 60),), (1, 20)),
}
FEW = ("fewshot", "samples", "rollouts", "odd depths", "random depths")
RULES = {"branches": Branches(), "ends": RequestEnds(), "every 64": EveryBlock(64)} | {
    f"blocks of {rule.block}, {rule.unit}": rule for rule in (Blocks(64), Blocks(64, 16), Blocks(128, 64))
}


@pytest.mark.long_unless(kept=lambda given: given["name"] in FEW)
@pytest.mark.parametrize("name", SMALL)
def test_hits_are_the_best_possible(name: str) -> None:
    """In the planned order with any pool that holds what runs, and nearly so without one; never below others."""
    plan = plan_of(SMALL[name]())
    for setting in all_settings([64]):
        found = compare(name, plan, setting, 16, 128, RULES)
        ours, best = found.rates[OURS], found.best
        if setting.order == "planned":
            assert ours >= 0.99 * best, setting
            assert ours >= max(found.rates.values()) - 0.01 * best, setting
        elif setting.pool == "all":
            assert ours >= 0.95 * best, setting
        at_once = {rule: found.rates[rule] for rule in (*RULES, WITHOUT_STATES)}
        assert ours >= max(rate for rule, rate in at_once.items() if rule != WITHOUT_STATES), (setting, at_once)
        assert found.rates[BY_MATCH] >= 0.9 * best, setting


def test_the_lists_part_at_odd_depths() -> None:
    plan = plan_of(LISTS["odd depths"]())
    parted = plan.tree.depth[(plan.tree.fan_out > 1) & (plan.tree.num_sequences > 2)]
    assert {37, 101, 333, 1021} <= set(parted.tolist())


def test_table_and_file(tmp_path: Path) -> None:
    plan = plan_of([WorkloadPrompt(np.array(prompt, np.int32), 2) for prompt in PROMPTS])
    found = [compare("four", plan, Setting("file", "all", 8), 4, 100, {"every 4": EveryBlock(4)})]
    write_csv(found, tmp_path / "rates.csv")
    with (tmp_path / "rates.csv").open(newline="") as lines:
        header, row = csv.reader(lines)
    # 24 of 60 tokens are found at best: 10 twice, and 14 of the last one.
    best, ours = f"{34 / 60:.4f}", f"{found[0].rates[OURS]:.4f}"
    assert header[:5] == ["list", "order", "pool", "states", "best"]
    assert dict(zip(header, row, strict=True)) == {
        "list": "four",
        "order": "file",
        "pool": "all",
        "states": "8",
        "best": best,
        OURS: ours,
        WITHOUT_STATES: best,
        BY_MATCH: ours,
        AT_MOST: best,
        "every 4": "0.0000",
        "every 4, one by one": f"{28 / 60:.4f}",
    }
    console = Console(width=200, record=True)
    print_table(found, console)
    assert f"{100 * 28 / 34:.1f}" in console.export_text()
