"""Passes that ranks compute in two halves: where they are cut, and what each half is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from radixrt.schedule.passes import NO_ROWS, Pass

# Of a pass that is cut: products of half as many take half as long, and sums longer than it takes two threads to
# take turns. The first rank alone reads it.
FEWEST_TOKENS = 8192


def cut_of(pass_: Pass) -> int:
    """The `cut` of a pass that ranks compute in halves: half of its tokens; 0 where it cannot be cut there, since
    the first half reads what the second one computes, or has tokens of decodes.
    """
    cut = len(pass_.input_ids) // 2
    num_decodes = pass_.num_rows - pass_.num_extends
    if len(pass_.input_ids) < FEWEST_TOKENS or not 0 < cut <= len(pass_.input_ids) - num_decodes:
        return 0
    first, second = halves_of(replace(pass_, cut=cut))
    return 0 if _reads(first, second, pass_) or _loses_state(first, second) else cut


def halves_of(pass_: Pass) -> tuple[Pass, Pass]:
    """The rows of a pass that has a `cut`, with their tokens before it, and those with tokens after it: what they
    compute, without draws, scored tokens and changes of rows. A row that goes on after the cut is an extend in
    both.
    """
    cut, new = pass_.cut, pass_.seq_lens - pass_.prefix_lens
    ends = np.cumsum(new)
    row = int(np.searchsorted(ends, cut, side="right"))  # of the first token after the cut
    begun = cut - int(ends[row] - new[row])  # its tokens before
    end = row + (begun > 0)
    seq_lens, prefix_lens = pass_.seq_lens[:end].copy(), pass_.prefix_lens[row:].copy()
    prefix_lens[0] += begun
    reads, writes = pass_.state_reads, pass_.state_writes
    if begun:
        seq_lens[row] = prefix_lens[0]
    if begun and reads is not None and writes is not None:
        reads = reads.copy()
        reads[row] = writes[row]
    first = replace(
        NO_ROWS,
        num_extends=end,
        req_pool_indices=pass_.req_pool_indices[:end],
        prefix_lens=pass_.prefix_lens[:end],
        seq_lens=seq_lens,
        input_ids=pass_.input_ids[:cut],
        out_cache_loc=pass_.out_cache_loc[:cut],
        state_reads=None if pass_.state_reads is None else pass_.state_reads[:end],
        state_writes=None if writes is None else writes[:end],
    )
    second = replace(
        NO_ROWS,
        num_extends=pass_.num_extends - row,
        req_pool_indices=pass_.req_pool_indices[row:],
        prefix_lens=prefix_lens,
        seq_lens=pass_.seq_lens[row:],
        input_ids=pass_.input_ids[cut:],
        out_cache_loc=pass_.out_cache_loc[cut:],
        state_reads=None if reads is None else reads[row:],
        state_writes=None if writes is None else writes[row:],
    )
    return first, second


def _reads(first: Pass, second: Pass, whole: Pass) -> bool:
    """Whether a row of the first half has borrowed a slot that the second one writes. Rows borrow of their own
    pass alone, as they are admitted to it: so the changes of rows name all that they have.
    """
    changes = whole.row_changes
    prefix_lens = np.zeros(max(changes.rows.max(initial=-1), first.req_pool_indices.max()) + 1, np.int32)
    prefix_lens[first.req_pool_indices] = first.prefix_lens  # all others begin with nothing
    read = changes.slots[changes.positions < prefix_lens[changes.rows]]
    return bool(np.isin(read, second.out_cache_loc).any())


def _loses_state(first: Pass, second: Pass) -> bool:
    """Whether the first half leaves no state of the row that the second one goes on with."""
    goes_on = first.req_pool_indices[-1] == second.req_pool_indices[0]
    return bool(goes_on and first.state_writes is not None and not first.state_writes[-1])
