"""Plans for deterministic attention: every position is read once, in the order of the canonical sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from layers.input_metadata import InputMetadata
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.attention.tuning import PlanTuning, TreeCosts
from tests.execution.attention.test_shared_segments import Tree, trees
from tests.support.ordered_reads import check_ordered_reads
from triton_ops.attention.ordered import MAX_CHAIN
from triton_ops.attention.plan import AttentionPlan, ExtendPlan
from triton_ops.implementation import GPU

WINDOW = 100
CHEAP = PlanTuning(TreeCosts(item=0.0, launches=-1.0, partial_crossings=0.0), cuts_below=6, max_cut_tokens=60)
SUPERBLOCKS = st.sampled_from([16, 64, 256])


def planner(table: Any, superblock: int, tuning: PlanTuning = CHEAP, num_sms: int = 4) -> AttentionPlanner:
    shape = KernelShape(GPU(90, num_sms), 4, 2, 16, torch.bfloat16)
    return AttentionPlanner(
        shape, (None, WINDOW), table, torch.bfloat16, tree=True, tuning=tuning, superblock=superblock
    )


@given(trees(), st.integers(0, 3), SUPERBLOCKS, st.sampled_from([1, 4, 132]))
def test_decodes_read_each_position_once(tree: Tree, seed: int, superblock: int, num_sms: int) -> None:
    table, lines, seq_lens = tree.table(seed)
    plans = planner(table, superblock, num_sms=num_sms).plan_padded_decodes(lines, seq_lens)
    plan, windowed = plans.decode[None], plans.decode[WINDOW]
    check_ordered_reads(plan, seq_lens.tolist(), superblock=superblock)
    check_ordered_reads(windowed, seq_lens.tolist(), superblock=superblock, window=WINDOW)
    event(f"levels: {plan.shared_levels.max(initial=0)}")
    event(f"shares: {bool(plan.shared_query_lens.any())}, cuts: {bool((plan.item_partials >= 0).any())}")


@given(trees(), st.data(), st.integers(0, 3), SUPERBLOCKS, st.sampled_from([60, 2048]))
def test_extends_read_each_position_once(
    tree: Tree, data: Any, seed: int, superblock: int, max_cut_tokens: int
) -> None:
    """In plans as they come, and in padded ones, whose sizes depend on the pass's alone."""
    table, lines, seq_lens = replace(tree, own=[own and own + 4 for own in tree.own]).table(seed)
    lines, seq_lens = lines[seq_lens > 0], seq_lens[seq_lens > 0]
    new = np.array([data.draw(st.integers(1, min(int(n), 40))) for n in seq_lens], np.int32)
    if not new.size:
        return
    here = planner(table, superblock, replace(CHEAP, max_cut_tokens=max_cut_tokens))
    host = InputMetadata.host_arrays(lines, seq_lens, seq_lens - new, np.zeros(int(new.sum()), np.int32))
    own = [int(n) - int(k) + 1 + j for n, k in zip(seq_lens, new, strict=True) for j in range(k)]
    plans = here.plan(host, len(new)).extend
    plan = plans[None]
    check_ordered_reads(plan, own, host, superblock=superblock)
    check_ordered_reads(plans[WINDOW], own, host, superblock=superblock, window=WINDOW)
    event(f"levels: {plan.shared_levels.max(initial=0)}, shares: {bool(plan.shared_query_lens.any())}")

    # Two more extends: one without tokens, one of those that pad the pass.
    padded = InputMetadata.host_arrays(
        np.append(lines, [0, 0]),
        np.append(seq_lens, [0, 9]).astype(np.int32),
        np.append(seq_lens - new, [0, 0]).astype(np.int32),
        np.zeros(int(new.sum()) + 9, np.int32),
    )
    none = np.zeros(0, np.int32)
    whole = here.plan_padded_extends(padded, len(new) + 2, len(new), none)
    assert whole is not None
    check_ordered_reads(whole.extend[None], own, padded, superblock=superblock)
    check_ordered_reads(whole.extend[WINDOW], own, padded, superblock=superblock, window=WINDOW)
    idle = here.plan_padded_extends(padded, len(new) + 2, 0, none, [whole.shape])
    assert idle is not None
    assert [len(array) for array in idle.arrays()] == [len(array) for array in whole.arrays()]


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=6),
    st.integers(1, 200),
    st.sampled_from([1, 40, 100]),
    SUPERBLOCKS,
)
def test_cut_windows_begin_within_superblocks(
    sizes: list[tuple[int, int]], window: int, max_item_len: int, superblock: int
) -> None:
    """A row's first item goes on from nothing then, least of all from what the row before left."""
    prefix, new = np.array(sizes, np.int32).reshape(-1, 2).T
    lens, lines = prefix + new, np.arange(len(sizes))
    options: dict[str, Any] = {"max_item_len": max_item_len, "sliding_window": window, "superblock": superblock}
    decodes = AttentionPlan.flat(lines, lens, **options)
    check_ordered_reads(decodes, lens.tolist(), superblock=superblock, window=window)
    host = InputMetadata.host_arrays(lines, lens, prefix, np.zeros(int(new.sum()), np.int32))
    extends = ExtendPlan.of_extends(prefix, host["extend_start_loc"], new, tile_tokens=8, **options)
    own = [int(n) + 1 + j for n, k in zip(prefix, new, strict=True) for j in range(k)]
    check_ordered_reads(extends, own, host, superblock=superblock, window=window)
    begins_within = (decodes.item_starts % superblock > 0) & (decodes.item_partials >= 0)
    event(f"a cut one begins within a superblock: {bool(begins_within.any())}")


@pytest.mark.parametrize("num_levels", range(1, 6))
def test_no_more_levels_than_are_launched(num_levels: int) -> None:
    """Of prefixes that end in one superblock, the first ones are shared."""
    table = np.arange(12 * 900, dtype=np.int32).reshape(12, 900)
    for level in range(num_levels):
        table[: 12 - 2 * level, : 40 + 32 * level] = table[0, : 40 + 32 * level]
    lens = np.full(12, 600, np.int32)
    plan = planner(table, 512).plan_padded_decodes(np.arange(12, dtype=np.int32), lens).decode[None]
    check_ordered_reads(plan, lens.tolist(), superblock=512)
    assert plan.shared_levels.max() + 1 == min(num_levels, MAX_CHAIN)
