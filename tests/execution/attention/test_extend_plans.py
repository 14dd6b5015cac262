"""Plans of passes that extend and decode, of any tree: each token reads each position up to its own once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from radixrt.execution.attention import planner as attention_planner
from radixrt.execution.attention import shared_segments
from radixrt.execution.attention.planner import SHORT_EXTEND, PlanKind
from tests.execution.attention.test_shared_segments import Tree, trees
from tests.support.planned_reads import PlannedReads


@given(trees(), st.data(), st.integers(0, 3), st.sampled_from([0, 9, 2048]), st.sampled_from([4, 100]))
def test_each_token_reads_each_position_once(
    tree: Tree, data: Any, seed: int, most_cut: int, most_waves: int
) -> None:
    """In plans as they come, and in those of captured passes; see `PlannedReads.lines`."""
    tree = replace(tree, own=[own and own + 4 for own in tree.own])
    table, lines, seq_lens = tree.table(seed)
    live = seq_lens > 0
    lines, seq_lens = lines[live], seq_lens[live]
    own = np.array(tree.own)[live]
    new = np.array([data.draw(st.integers(1, min(length, 9))) for length in own.tolist()], np.int32)
    order = np.argsort(new == 1, kind="stable")
    num_extends = int((new > 1).sum())
    if not num_extends:
        return
    world: Any = SimpleNamespace(
        events=Counter(),
        rows=SimpleNamespace(req_to_token=table, max_requests=len(table)),
        sizes=SimpleNamespace(chunk=seed),
    )
    batch: Any = SimpleNamespace(
        num_rows=len(new),
        num_extends=num_extends,
        req_pool_indices=lines[order],
        prefix_lens=(seq_lens - new)[order].astype(np.int32),
        seq_lens=seq_lens[order].astype(np.int32),
        input_ids=np.zeros(new.sum(), np.int32),
        out_cache_loc=np.zeros(new.sum(), np.int32),
        num_samples=np.ones_like(new),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PIECE_TOKENS", "MIN_PIECE"):  # which PlannedReads changes
            patch.setattr(shared_segments, name, 1)
        patch.setattr(shared_segments, "MOST_WAVES", most_waves)
        patch.setattr(attention_planner, "MOST_CUT_TOKENS", most_cut)
        reads = PlannedReads(world)
        for _ in range(2):
            assert len(reads.lines(batch)) == len(new)
    event(f"shared by extends: {world.events['shared read by extends']}")


def test_long_extends_share_nothing() -> None:
    """Beside others that do: they fill their tiles by themselves."""
    table = np.arange(6 * 400, dtype=np.int32).reshape(6, 400)
    table[:, :100] = table[0, :100]
    world: Any = SimpleNamespace(
        events=Counter(),
        rows=SimpleNamespace(req_to_token=table, max_requests=6),
        sizes=SimpleNamespace(chunk=0),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PIECE_TOKENS", "MIN_PIECE"):
            patch.setattr(shared_segments, name, 1)
        planner = PlannedReads(world)._planner
    counts = np.array([SHORT_EXTEND * planner._rows_at_once + 1, 3, 2], np.int32)
    prefix = np.full(3, 100, np.int32)
    host = {
        "req_pool_indices": np.arange(3, dtype=np.int32),
        "prefix_lens": prefix,
        "seq_lens": prefix + counts,
        "extend_start_loc": np.cumsum(counts, dtype=np.int32) - counts,
        "extend_seq_lens": counts,
    }
    plans = planner.plan(host, 3)
    assert plans.kind is PlanKind.WHOLE
    queries = plans.arrays["extend None shared_queries"]
    assert sorted(queries) == list(range(counts[0], counts.sum()))
