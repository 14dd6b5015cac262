"""Which way a pass goes, and what it is sent as: words updated in place are those made from scratch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.input_metadata import InputMetadata
from memory_pool.req_to_token_pool import RowChanges
from radixrt.execution.attention.pass_plans import PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.attention.tuning import PlanTuning
from radixrt.execution.graphs import PassShape
from radixrt.execution.pass_builder import DRAW_DTYPES, MAX_PLAN_PASSES, PackedPass, PassBuilder, PassKey
from radixrt.execution.staging import packed
from radixrt.schedule.passes import Features, Pass, SamplingInputs
from tests.execution.attention.test_planner import H200, int32, planner
from tests.support.passes import plain_pass
from triton_ops.implementation import GPU

MAX_REQUESTS = 90
SIZES = (1, 4, 24, PlanTuning.cuts_below, 96)
FEATURES = [Features(), Features(True), Features(True, has_top=True), Features(True, True, True)]
DECODES = [PassShape(0, size, 0) for size in SIZES]


def decode_pass(
    rows: Any, seq_lens: Any, slots: Any, ids: Any, features: Features = FEATURES[0], **draws: Any
) -> Pass:
    sampling = SamplingInputs(np.arange(len(rows), dtype=np.int32), features, None, None, draws)
    pass_ = plain_pass(rows, seq_lens - 1, seq_lens, out_cache_loc=slots, input_ids=ids, sampling=sampling)
    return replace(pass_, req_pool_indices=rows)  # the very array


class World:
    """Requests that decode, and their passes; `rows` is the same array until they change. With `tree` they are of
    three families with a prefix each, which may be read once for all.
    """

    def __init__(self, seed: int, gpu: GPU, windows: tuple[int | None, ...], *, tree: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        table = np.arange(MAX_REQUESTS * 6000, dtype=np.int32).reshape(MAX_REQUESTS, 6000)
        self.head = int(self.rng.choice([40, 900, 4000])) if tree else 0
        for row in range(MAX_REQUESTS):  # families after a prefix each
            table[row, : self.head] = table[row % 3, : self.head]
        self.windows = windows
        self.planner = planner(gpu, *windows, num_kv_heads=4, req_to_token=table, tree=tree)
        self.builder = PassBuilder(self.planner, DECODES, MAX_REQUESTS)
        for key in self.builder.keys(DECODES):  # which makes plans
            self.builder.idle(key)
        self.rows, self.seq_lens = int32([]), int32([])
        self.planned: Any = None  # lengths that the plan in use was made of
        self.plan_shapes: set[PlanShape] = set()  # of the passes so far
        self.age = 0

    def change(self) -> None:
        """Other requests, in any order; now and then a long one."""
        count = int(self.rng.integers(1, self.rng.choice([3, 30, MAX_REQUESTS + 1])))
        self.rows = self.rng.permutation(MAX_REQUESTS).astype(np.int32)[:count]
        longest = self.rng.choice([300, 5000])
        self.seq_lens = self.head + self.rng.integers(1, longest, count).astype(np.int32)
        self.seq_lens = self.seq_lens.clip(max=5500).astype(np.int32)
        self.planned = None

    def step(self, features: Features) -> tuple[PackedPass, dict[str, Any]]:
        """The next pass, and what its inputs are to be."""
        rng, count = self.rng, len(self.rows)
        size = next(size for size in SIZES if size >= count)
        self.seq_lens = self.seq_lens + 1
        slots = rng.integers(1, 1 << 20, count).astype(np.int32)
        ids = np.where(rng.random(count) < 0.1, 7, -(self.rows + 1)).astype(np.int32)
        draws = {name: (rng.random(count) * 99).astype(DRAW_DTYPES[name]) for name in features.array_names}
        made = self.builder.build(decode_pass(self.rows, self.seq_lens, slots, ids, features, **draws))
        if self.planned is None or self.age == MAX_PLAN_PASSES:
            self.planned, self.age = self.seq_lens, 0
        self.age += 1

        def padded(array: Any, filler: int) -> Any:
            return np.append(array, np.full(size - count, filler, array.dtype))

        plans = self.planner.plan_padded_decodes(padded(self.rows, 0), padded(self.planned, 0))
        assert made.key == PassKey(PassShape(0, size, 0), plans.shape)
        self.plan_shapes.add(plans.shape)
        parts = made.inputs.parts(made.words)
        expected = {
            "input_ids": padded(ids, 0),
            **InputMetadata.host_arrays(
                padded(self.rows, MAX_REQUESTS),
                padded(self.seq_lens, 1),
                padded(self.seq_lens - 1, 0),
                padded(slots, 0),
            ),
            **{
                # Nobody reads those that the features do not name.
                name: padded(draws[name], 0) if name in draws else parts[name].copy()
                for name in DRAW_DTYPES
            },
            **plans.numbered(),
        }
        for plan in plans.decode.values():
            rest = dict(enumerate((self.seq_lens - self.planned).tolist()))
            lens = plan.item_lens
            for item, row in enumerate(plan.item_query_starts.tolist()):
                end = plan.item_starts[item] + lens[item]
                if lens[item] and end == self.planned[row]:
                    lens[item] += rest.pop(row)
            assert not rest, "one item of each request grows"
            plan.seq_lens[:] = padded(self.seq_lens, 0)
        return made, expected


def assert_equal(made: PackedPass, expected: dict[str, Any]) -> None:
    """Nothing else is sent, in this order."""
    parts = made.inputs.parts(made.words)
    for name, array in expected.items():
        np.testing.assert_array_equal(parts[name], array, err_msg=name)
        assert parts[name].dtype == array.dtype
    np.testing.assert_array_equal(made.words, packed(expected)[0])
    assert list(parts) == list(expected)
    for name, array in made.plans.numbered().items():
        np.testing.assert_array_equal(parts[name], array, err_msg=name)


@given(
    st.integers(0, 1 << 30),
    st.sampled_from([H200, GPU(capability=90, num_sms=7)]),
    st.sampled_from([(None,), (None, 300), (64,), (1, 40, 5000)]),
    st.booleans(),
)
@settings(max_examples=15)
def test_updated_words_are_those_made_from_scratch(
    seed: int, gpu: GPU, windows: tuple[int | None, ...], tree: bool
) -> None:
    """Requests change, features do; some passes are computed elsewhere, of all requests or of some."""
    world = World(seed, gpu, windows, tree=tree)
    rng = world.rng
    world.change()
    features = FEATURES[0]
    for _ in range(int(rng.integers(5, 100))):
        what = rng.choice(["change", "features", "elsewhere", "some elsewhere", "step"], p=[0.05] * 4 + [0.8])
        if what == "change":
            world.change()
        elif what == "features":
            features = FEATURES[rng.integers(len(FEATURES))]
        elif what == "elsewhere":
            world.seq_lens = world.seq_lens + 1
        elif what == "some elsewhere":
            world.seq_lens = world.seq_lens + (rng.random(len(world.rows)) < 0.5)
            world.seq_lens = world.seq_lens.astype(np.int32)
        assert_equal(*world.step(features))


@pytest.mark.parametrize("window", [None, 1, 40, 2000])
def test_an_old_plan_reads_all_that_is_seen_and_no_more(window: int | None) -> None:
    """Items of a request lie one after the other, from where its window may begin to its last position."""
    world = World(0, H200, (window,))
    for _ in range(6):
        world.change()
        for _ in range(MAX_PLAN_PASSES):
            made, _ = world.step(Features())
        plan = made.plans.decode[window]
        starts, lens, queries = plan.item_starts, plan.item_lens, plan.item_query_starts
        counts = plan.item_query_lens
        for row, seq_len in enumerate(world.seq_lens.tolist()):
            own = (queries == row) & (counts == 1) & (lens > 0)
            pieces = sorted(zip(starts[own].tolist(), lens[own].tolist(), strict=True))
            at = pieces[0][0]
            assert at <= (0 if window is None else max(0, seq_len - window))
            for start, length in pieces:
                assert start == at
                at += length
            assert at == seq_len


def test_a_plan_serves_as_long_as_its_requests_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """And MAX_PLAN_PASSES at most; the same rows of other requests are another array."""
    plans, plan_padded = [0], AttentionPlanner.plan_padded_decodes
    world = World(1, H200, (None,))
    world.change()

    def counted(*arguments: Any, **options: Any) -> Any:
        plans[0] += 1
        return plan_padded(*arguments, **options)

    monkeypatch.setattr(AttentionPlanner, "plan_padded_decodes", counted)

    def steps(count: int) -> int:
        plans[0] = 0
        for _ in range(count):
            world.step(FEATURES[count % 2])
        return plans[0] - count  # `step` makes one, too

    assert steps(MAX_PLAN_PASSES) == 1
    assert steps(1) == 1
    assert steps(MAX_PLAN_PASSES - 1) == 0
    assert steps(2 * MAX_PLAN_PASSES + 1) == 3
    world.rows, world.seq_lens = world.rows.copy(), world.seq_lens // 9
    world.planned = None
    assert_equal(*world.step(Features()))


@pytest.mark.parametrize("tree", [False, True])
def test_idle_passes_touch_nothing_that_is_owned(tree: bool) -> None:
    """Graphs are captured with them, the largest first, also after others have been filled in."""
    world = World(2, H200, (None, 300), tree=tree)
    builder = PassBuilder(world.planner, [*DECODES, *EXTENDS], MAX_REQUESTS)
    shapes = [*reversed(EXTENDS), *reversed(DECODES)]
    keys = list(builder.keys(shapes))
    assert list(dict.fromkeys(key.shape for key in keys)) == shapes
    idle = [builder.idle(key) for key in keys]
    assert [made.key for made in idle] == keys
    builder.build(decode_pass(int32([3]), int32([9]), int32([4]), int32([-4])))
    for made in idle:
        assert made.key is not None
        assert made.plans.shape == made.key.plans
        parts = made.inputs.parts(made.words)
        assert (parts["req_pool_indices"] == MAX_REQUESTS).all()
        assert not parts["out_cache_loc"].any()
        assert not parts["input_ids"].any()
        for plan in made.plans.decode.values():
            assert not plan.item_lens.any()
        assert not made.extras.places
    assert len(set(keys)) == len(keys)
    for key, made in zip(keys, idle, strict=True):  # and once more, in the middle of others
        assert builder.idle(key).words.tolist() == made.words.tolist()


# --- what is sent besides ---


def test_what_is_not_drawn_in_the_graph_comes_after_its_inputs() -> None:
    world = World(3, H200, (None,))
    world.change()
    plain, _ = world.step(Features(True))
    rows, lens = world.rows, world.seq_lens + 1
    count = len(rows)
    own = {"temperatures": np.full(count, 0.5, np.float32), "logprob_rows": int32([0])}
    own |= {name: np.zeros(count, DRAW_DTYPES[name]) for name in ("seeds", "sample_indices", "draw_positions")}
    made = world.builder.build(decode_pass(rows, lens, rows + 1, -(rows + 1), Features(True), **own))
    assert made.key == plain.key
    assert list(made.extras.places) == ["logprob_rows"]
    assert made.extras.parts(made.words)["logprob_rows"].tolist() == [0]
    assert (made.inputs.parts(made.words)["temperatures"][:count] == 0.5).all()
    assert made.inputs is plain.inputs
    assert len(made.words) > made.inputs.num_words == len(plain.words)


def test_rows_change_before_the_pass_unless_the_graph_writes_all_that_is_new() -> None:
    world = World(4, H200, (None,))
    rows, lens, slots = int32([3, 4]), int32([9, 5]), int32([40, 41])
    pass_ = decode_pass(rows, lens, slots, -(rows + 1))
    assert not world.builder.build(pass_).extras.places
    changes = RowChanges(int32([3, 3, 4]), int32([7, 8, 4]), int32([39, 40, 41]))
    made = world.builder.build(replace(pass_, row_changes=changes))
    assert made.extras.parts(made.words)["changed_slots"].tolist() == [39, 40, 41]


# --- passes with extends, and those that fit no shape ---

EXTENDS = [PassShape(16, 4, 5), PassShape(16, 8, 9), PassShape(64, 8, 9)]


def mixed_pass(new: list[int], **changes: Any) -> Pass:
    """Extends of so many tokens each, 1 for a decode, after prefixes of 10; all sample."""
    tokens = np.arange(101, sum(new) + 101, dtype=np.int32)
    return plain_pass(range(len(new)), [10] * len(new), int32(new) + 10, out_cache_loc=tokens, **changes)


def builder_with(shapes: list[PassShape]) -> PassBuilder:
    table = np.arange(MAX_REQUESTS * 200, dtype=np.int32).reshape(MAX_REQUESTS, 200)
    return PassBuilder(planner(H200, None, req_to_token=table), shapes, MAX_REQUESTS)


@pytest.mark.parametrize("new", [[5, 2, 1, 1], [16], [2] * 8, [3, 1, 1, 1, 1, 1], [60, 1], [17]], ids=str)
def test_a_padded_pass_computes_what_the_pass_does(new: list[int]) -> None:
    """Its own numbers are in their order: extends, padding, decodes, padding."""
    pass_ = mixed_pass(new)
    made, plain = builder_with(EXTENDS).build(pass_), builder_with([]).build(pass_)
    assert made.key is not None
    assert plain.key is None
    shape = made.key.shape
    num_tokens, num_decodes = sum(n for n in new if n > 1), new.count(1)
    fitting = [s for s in EXTENDS if s.num_tokens >= num_tokens and s.num_rows >= len(new)]
    assert shape == next(s for s in fitting if s.num_extends > len(new) - num_decodes)
    parts, own = (packed.inputs.parts(packed.words) for packed in (made, plain))
    live = [*range(pass_.num_extends), *range(shape.num_extends, shape.num_extends + num_decodes)]
    tokens = [*range(num_tokens), *range(shape.num_tokens, shape.num_tokens + num_decodes)]
    for name in ("req_pool_indices", "seq_lens", "prefix_lens", "extend_seq_lens"):
        np.testing.assert_array_equal(parts[name][live], own[name], err_msg=name)
        others = np.delete(parts[name], live)
        if name == "req_pool_indices":
            assert (others == MAX_REQUESTS).all()
    for name in ("input_ids", "positions", "out_cache_loc"):
        np.testing.assert_array_equal(parts[name][tokens], own[name], err_msg=name)
        assert not np.delete(parts[name], tokens).any()
    for name in ("last_tokens", "logits_indices"):
        count = len(own[name])
        np.testing.assert_array_equal(int32(tokens)[own[name]], parts[name][:count], err_msg=name)
    assert len(parts["last_tokens"]) == shape.num_extends + shape.num_rows
    assert len(parts["logits_indices"]) == shape.num_rows
    own, theirs = (packed.extras.parts(packed.words) for packed in (plain, made))
    assert own.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(array, own[name], err_msg=name)


@pytest.mark.parametrize(
    "pass_",
    [
        mixed_pass([65]),
        mixed_pass([2] * 9),
        mixed_pass([2, *[1] * 9]),
        mixed_pass([5], scored=int32([1]), scored_targets=int32([7]), num_scored=int32([1])),
        mixed_pass(
            [5], num_samples=int32([3]), sampling=SamplingInputs(int32([0, 0, 0]), Features(), None, None, {})
        ),
    ],
    ids=["tokens", "extends", "decodes", "scores", "answers"],
)
def test_passes_that_are_launched_kernel_by_kernel(pass_: Pass) -> None:
    made = builder_with(EXTENDS).build(pass_)
    assert made.key is None
    extras = made.extras.parts(made.words)
    assert len(extras["logits_rows"]) == len(pass_.sampling.logits_rows)
    assert extras.get("scored", int32([])).tolist() == pass_.scored.tolist()


def test_decodes_that_are_not_captured_keep_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that are; they are what the same plan is with other lengths."""
    world, plan, made = World(2, H200, (None, 300), tree=True), AttentionPlanner.plan, [0]
    world.builder = PassBuilder(world.planner, [], MAX_REQUESTS)

    def counted(*arguments: Any) -> Any:
        made[0] += 1
        return plan(*arguments)

    monkeypatch.setattr(AttentionPlanner, "plan", counted)
    for _ in range(3):
        world.change()
        first, made[0] = world.seq_lens + 1, 0
        for step in range(MAX_PLAN_PASSES):
            lens = first + np.int32(step)
            pass_ = decode_pass(world.rows, lens, np.ones_like(lens), np.zeros_like(lens))
            found = world.builder.build(pass_)
            assert found.key is None
            assert pass_.seq_lens is lens or np.array_equal(pass_.seq_lens, lens)
            expected = plan(world.planner, found.host_arrays() | {"seq_lens": first}, 0)
            expected = expected.with_arrays([array.copy() for array in expected.arrays()])
            expected.grow(lens)
            for ours, theirs in zip(found.plans.arrays(), expected.arrays(), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            parts = found.inputs.parts(found.words)
            for name, array in expected.numbered().items():
                np.testing.assert_array_equal(parts[name], array)
        assert made[0] == 1
        world.builder.build(decode_pass(world.rows, lens + 1, np.ones_like(lens), np.zeros_like(lens)))
        assert made[0] == 2  # MAX_PLAN_PASSES is the most
