"""Passes cut in two: together the halves compute what the pass does, and the first reads nothing of the second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.input_metadata import InputMetadata
from memory_pool.req_to_token_pool import RowChanges
from radixrt.arrays import Int32Array
from radixrt.execution import halves
from radixrt.execution.halves import cut_of, halves_of
from radixrt.execution.pass_builder import PassBuilder
from radixrt.ranks.leading_runner import LeadingRunner
from radixrt.schedule.passes import Pass
from tests.execution.attention.test_planner import H200, planner
from tests.support.passes import plain_pass

MAX_ROWS, CONTEXT = 12, 400


class World:
    """A pass of random rows, some of which borrow the first new tokens of another one, and the table of slots."""

    def __init__(self, seed: int, *, borrows: bool, states: bool) -> None:
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, MAX_ROWS + 1))
        new = rng.choice([1, 2, 3, 9, 30], count)
        new = np.concatenate([new[new > 1], new[new == 1]])
        prefix = rng.integers(0, 20, count)
        rows = rng.permutation(MAX_ROWS)[:count]
        self.table = 1000 + np.arange(MAX_ROWS * CONTEXT, dtype=np.int32).reshape(MAX_ROWS, CONTEXT)
        is_new = rng.random(count) < 0.5  # admitted to this pass: all its cells have changed
        for borrower in np.flatnonzero(is_new & (rng.random(count) < 0.6)) if borrows else ():
            lender = int(rng.integers(count))
            begin, end = prefix[lender], prefix[lender] + int(rng.integers(1, new[lender] + 1))
            if lender != borrower:
                prefix[borrower] = end
                self.table[rows[borrower], begin:end] = self.table[rows[lender], begin:end]
        seq = prefix + new
        slots = np.concatenate([self.table[row, a:b] for row, a, b in zip(rows, prefix, seq, strict=True)])
        changes: list[tuple[int, int, int]] = []
        for row, a, b, fresh in zip(rows, prefix, seq, is_new, strict=True):
            changes += [(row, position, self.table[row, position]) for position in range(0 if fresh else a, b)]
        ids = rng.integers(3, 100, len(slots)).astype(np.int32)
        self.pass_ = plain_pass(
            rows,
            prefix,
            seq,
            input_ids=ids,
            out_cache_loc=slots,
            row_changes=RowChanges(*np.array(changes, np.int32).T.copy()),
            num_samples=(rng.random(count) < 0.7).astype(np.int32),
        )
        sampling = replace(
            self.pass_.sampling, logits_rows=np.flatnonzero(self.pass_.num_samples).astype(np.int32)
        )
        self.pass_ = replace(self.pass_, sampling=sampling)
        if states:
            writes = 1 + rng.permutation(count).astype(np.int32)
            reads = np.where(rng.random(count) < 0.4, writes, rng.choice([0, 90, 91], count)).astype(np.int32)
            self.pass_ = replace(self.pass_, state_reads=reads, state_writes=writes)

    def tokens(self, pass_: Pass) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
        """Of each new token its row, position, id and slot, and the slots that it sees."""
        begin = 0
        for row, prefix, seq in zip(pass_.req_pool_indices, pass_.prefix_lens, pass_.seq_lens, strict=True):
            for position in range(prefix, seq):
                at = begin + position - prefix
                seen = (*self.table[row, : position + 1].tolist(),)
                yield int(row), position, int(pass_.input_ids[at]), int(pass_.out_cache_loc[at]), seen
            begin += seq - prefix


def left_states(pass_: Pass, states: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """States after a pass, as all tokens that they are of."""
    assert pass_.state_reads is not None
    assert pass_.state_writes is not None
    left, begin = dict(states), 0
    for row, (read, write) in enumerate(zip(pass_.state_reads.tolist(), pass_.state_writes.tolist(), strict=True)):
        end = begin + int(pass_.seq_lens[row] - pass_.prefix_lens[row])
        left[write] = (*((read,) if read >= 90 else states.get(read, ())), *pass_.input_ids[begin:end].tolist())
        begin = end
    return left


def begun_alone(pass_: Pass) -> dict[int, tuple[int, ...]]:
    """What is in the states that rows leave, before."""
    assert pass_.state_writes is not None
    return {write: (-write,) for write in pass_.state_writes.tolist()}


@pytest.fixture(autouse=True)
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "FEWEST_TOKENS", 2)


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**32), borrows=st.booleans(), states=st.booleans())
def test_halves_compute_what_the_pass_does(seed: int, borrows: bool, states: bool) -> None:
    """In order, from the same contexts; rows that may have more than one token come first in each."""
    world = World(seed, borrows=borrows, states=states)
    pass_, cut = world.pass_, cut_of(world.pass_)
    num_tokens, expected = len(pass_.input_ids), [*world.tokens(pass_)]
    half = num_tokens // 2
    later = {slot for *_, slot, _ in expected[half:]}
    may_be_cut = half and half <= num_tokens - (pass_.num_rows - pass_.num_extends)
    may_be_cut = may_be_cut and not any(later & {*seen} for *_, seen in expected[:half])
    assert cut == (half if may_be_cut else 0)
    if not cut:
        return
    first, second = halves_of(replace(pass_, cut=cut))
    assert [*world.tokens(first), *world.tokens(second)] == expected
    for part in (first, second):
        new = part.seq_lens - part.prefix_lens
        assert (new > 0).all()
        assert (new[part.num_extends :] == 1).all()
    if states:
        before = begun_alone(pass_)
        assert left_states(second, left_states(first, before)) == left_states(pass_, before)


def test_a_cut_row_without_a_state_of_its_own_is_not_cut() -> None:
    """Nothing would hand its state on."""
    zeros = np.zeros(1, np.int32)
    pass_ = replace(plain_pass([0], [0], [9]), state_reads=zeros, state_writes=zeros)
    assert not cut_of(pass_)
    assert cut_of(replace(pass_, state_writes=zeros + 1)) == 4


def test_only_long_passes_of_several_ranks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """None whose sums are in the order of ranks."""
    monkeypatch.setattr(halves, "FEWEST_TOKENS", 10)
    assert not cut_of(plain_pass([0], [0], [9]))
    long = plain_pass([0], [0], [10])
    assert cut_of(long) == 5
    own = Mock()
    for turns, ordered, cut in ((None, False, 0), (Mock(), True, 0), (Mock(), False, 5)):
        own.model.placement.ranks.turns, own.model.placement.ranks.ordered = turns, ordered
        own.model.stage.count, own.launched_words = 1, long.input_ids
        LeadingRunner(own, Mock()).launch(long)
        assert own.launch.call_args.args[0].cut == cut


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), states=st.booleans())
def test_a_packed_pass_has_both_halves(seed: int, states: bool) -> None:
    """One array of words; what is drawn from comes from the tokens of both."""
    world = World(seed, borrows=False, states=states)
    if not (cut := cut_of(world.pass_)):
        return
    builder = PassBuilder(planner(H200, None, req_to_token=world.table), [], MAX_ROWS, keeps_states=states)
    whole, made = builder.build(world.pass_), builder.build(replace(world.pass_, cut=cut))
    assert made.num_tokens == whole.num_tokens
    for name in ("last_tokens", "logits_indices"):
        np.testing.assert_array_equal(_array(made, name), _array(whole, name))
    for part, packed in zip(halves_of(replace(world.pass_, cut=cut)), made.halves, strict=True):
        arrays = packed.inputs.parts(made.words)
        host = InputMetadata.host_arrays(
            part.req_pool_indices, part.seq_lens, part.prefix_lens, part.out_cache_loc
        )
        plans = planner(H200, None, req_to_token=world.table).plan(host, part.num_extends)
        expected = {**host, "input_ids": part.input_ids, **plans.numbered()}
        if part.state_reads is not None:
            expected |= {"state_reads": part.state_reads, "state_writes": part.state_writes}
        assert arrays.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(arrays[name], array, err_msg=name)
        assert packed.num_extends == part.num_extends


def _array(packed: object, name: str) -> Int32Array:
    array: Int32Array = packed.inputs.parts(packed.words)[name]  # type: ignore[attr-defined]
    return array
