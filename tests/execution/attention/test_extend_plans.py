"""Plans of passes that extend and decode, of any tree: each token reads each position up to its own once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from radixrt.execution.attention.pass_plans import WHOLE
from tests.execution.attention.test_shared_segments import Tree, trees
from tests.support.passes import plain_pass
from tests.support.planned_reads import ROWS_AT_ONCE, TUNING, PlannedReads, tiny_planner


@given(trees(), st.data(), st.integers(0, 3), st.sampled_from([0, 9, 2048]), st.sampled_from([4, 100]))
def test_each_token_reads_each_position_once(
    tree: Tree, data: Any, seed: int, max_cut: int, max_waves: int
) -> None:
    """In plans as they come, and in those of captured passes; see `PlannedReads.lines`."""
    tree = replace(tree, own=[own and own + 4 for own in tree.own])
    table, lines, seq_lens = tree.table(seed)
    live = seq_lens > 0
    lines, seq_lens = lines[live], seq_lens[live]
    own = np.array(tree.own)[live]
    new = np.array([data.draw(st.integers(1, min(length, 9))) for length in own.tolist()], np.int32)
    order = np.argsort(new == 1, kind="stable")
    if new.max(initial=0) < 2:
        return
    world: Any = SimpleNamespace(
        events=Counter(),
        rows=SimpleNamespace(req_to_token=table, max_requests=len(table)),
        sizes=SimpleNamespace(chunk=seed),
    )
    batch = plain_pass(lines[order], (seq_lens - new)[order], seq_lens[order])
    reads = PlannedReads(world, replace(TUNING, max_waves=max_waves, max_cut_tokens=max_cut))
    for _ in range(2):
        assert len(reads.lines(batch)) == len(new)
    event(f"shared by extends: {world.events['shared read by extends']}")


def test_long_extends_share_nothing() -> None:
    """Beside others that do: they fill their tiles by themselves."""
    table = np.arange(6 * 400, dtype=np.int32).reshape(6, 400)
    table[:, :100] = table[0, :100]
    counts = np.array([TUNING.short_extend * ROWS_AT_ONCE + 1, 3, 2], np.int32)
    prefix = np.full(3, 100, np.int32)
    host = {
        "req_pool_indices": np.arange(3, dtype=np.int32),
        "prefix_lens": prefix,
        "seq_lens": prefix + counts,
        "extend_start_loc": np.cumsum(counts, dtype=np.int32) - counts,
        "extend_seq_lens": counts,
    }
    plans = tiny_planner(table).plan(host, 3)
    assert plans.shape == WHOLE
    queries = plans.extend[None].shared_queries
    assert sorted(queries) == list(range(counts[0], counts.sum()))
