"""Passes made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from memory_pool.req_to_token_pool import RowChanges
from radixrt.schedule.passes import Features, Pass, SamplingInputs


def plain_pass(rows: Any, prefix_lens: Any, seq_lens: Any, **changes: Any) -> Pass:
    """A pass of rows of which each draws a token greedily. Tokens are 1, 2, ... in slots 1, 2, ..., unless
    `changes` say otherwise; those with more than one new token come first.
    """
    rows, prefix_lens, seq_lens = (np.asarray(array, np.int32) for array in (rows, prefix_lens, seq_lens))
    new, none = seq_lens - prefix_lens, np.zeros(0, np.int32)
    tokens = np.arange(1, new.sum() + 1, dtype=np.int32)
    slots = changes.get("out_cache_loc", tokens)
    firsts = np.cumsum(new, dtype=np.int32) - new
    positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(prefix_lens - firsts, new)
    pass_ = Pass(
        num_extends=int((new > 1).sum()),
        req_pool_indices=rows,
        prefix_lens=prefix_lens,
        seq_lens=seq_lens,
        input_ids=tokens,
        out_cache_loc=tokens,
        num_samples=np.ones_like(rows),
        scored=none,
        scored_targets=none,
        num_scored=np.zeros_like(rows),
        row_changes=RowChanges(np.repeat(rows, new), positions, slots),
        sampling=SamplingInputs(np.arange(len(rows), dtype=np.int32), Features(), None, None, {}),
    )
    return replace(pass_, **changes)
