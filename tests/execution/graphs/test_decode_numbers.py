"""Numbers of decode passes, updated from pass to pass: the same words as if each pass were made from scratch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.input_metadata import InputMetadata
from radixrt.execution.attention.pass_plans import PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.attention.tuning import PlanTuning
from radixrt.execution.graphs.decode_numbers import DRAW_DTYPES, PLAN_STEPS, DecodeForm, DecodeNumbers
from radixrt.execution.staging import packed
from radixrt.schedule.sampling_table import Features
from tests.execution.attention.test_planner import H200, int32, planner
from triton_ops.implementation import GPU

MAX_REQUESTS = 90
SIZES = (1, 4, 24, PlanTuning.cuts_below, 96)
FEATURES = [Features(), Features(True), Features(True, has_top=True), Features(True, True, True)]


class World:
    """Requests that decode, and the numbers of their passes; `rows` is the same array until they change. With
    `tree` they are of three families with a prefix each, which may be read once for all.
    """

    def __init__(self, seed: int, gpu: GPU, windows: tuple[int | None, ...], *, tree: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        table = np.arange(MAX_REQUESTS * 6000, dtype=np.int32).reshape(MAX_REQUESTS, 6000)
        self.head = int(self.rng.choice([40, 900, 4000])) if tree else 0
        for row in range(MAX_REQUESTS):  # families behind a prefix each
            table[row, : self.head] = table[row % 3, : self.head]
        self.windows = windows
        self.planner = planner(gpu, *windows, num_kv_heads=4, req_to_token=table, tree=tree)
        self.numbers = DecodeNumbers(self.planner, MAX_REQUESTS)
        self.forms = {
            (size, shape): self.numbers.idle(size, shape)
            for size in SIZES
            for shape in self.planner.decode_shapes(size)
        }
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

    def step(self, features: Features) -> tuple[DecodeForm, dict[str, Any]]:
        """The form of the next pass, and what its arrays are to be."""
        rng, count = self.rng, len(self.rows)
        size = next(size for size in SIZES if size >= count)
        self.seq_lens = self.seq_lens + 1
        slots = rng.integers(1, 1 << 20, count).astype(np.int32)
        ids = np.where(rng.random(count) < 0.1, 7, -(self.rows + 1)).astype(np.int32)
        draws = {name: (rng.random(count) * 99).astype(DRAW_DTYPES[name]) for name in features.array_names}
        others: dict[str, Any] = {"special_rows": int32([0])}  # are not sent here
        batch: Any = SimpleNamespace(
            req_pool_indices=self.rows,
            seq_lens=self.seq_lens,
            prefix_lens=self.seq_lens - 1,
            out_cache_loc=slots,
            input_ids=ids,
        )
        form = self.numbers.of(batch, size, features, draws | others)
        if self.planned is None or self.age == PLAN_STEPS:
            self.planned, self.age = self.seq_lens, 0
        self.age += 1

        def padded(array: Any, filler: int) -> Any:
            return np.append(array, np.full(size - count, filler, array.dtype))

        plans = self.planner.plan_padded_decodes(padded(self.rows, 0), padded(self.planned, 0))
        assert form is self.forms[size, plans.shape]
        self.plan_shapes.add(form.plan_shape)
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
                name: padded(draws[name], 0) if name in draws else form.arrays[name].copy()
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
        return form, expected


def assert_equal(form: DecodeForm, expected: dict[str, Any]) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(form.arrays[name], array, err_msg=name)
        assert form.arrays[name].dtype == array.dtype
    np.testing.assert_array_equal(form.words, packed(expected)[0])
    assert list(form.arrays) == list(expected)


@given(
    st.integers(0, 1 << 30),
    st.sampled_from([H200, GPU(capability=90, num_sms=7)]),
    st.sampled_from([(None,), (None, 300), (64,), (1, 40, 5000)]),
    st.booleans(),
)
@settings(max_examples=40)
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
    """Items of a request lie one behind the other, from where its window may begin to its last position."""
    world = World(0, H200, (window,))
    for _ in range(6):
        world.change()
        for _ in range(PLAN_STEPS):
            form, _ = world.step(Features())
        plan = form.plans.decode[window]
        starts, lens, queries, counts = (
            plan.item_starts,
            plan.item_lens,
            plan.item_query_starts,
            plan.item_query_lens,
        )
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
    """And PLAN_STEPS at most; the same rows of other requests are another array."""
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

    assert steps(PLAN_STEPS) == 1
    assert steps(1) == 1
    assert steps(PLAN_STEPS - 1) == 0
    assert steps(2 * PLAN_STEPS + 1) == 3
    world.rows, world.seq_lens = world.rows.copy(), world.seq_lens // 9
    world.planned = None
    form, expected = world.step(Features())
    assert_equal(form, expected)


def test_idle_numbers_touch_nothing_that_is_owned() -> None:
    """Graphs are captured with them, also after others have been filled in."""
    world = World(2, H200, (None, 300), tree=True)
    world.change()
    world.step(Features())
    for size, shape in world.forms:
        form = world.numbers.idle(size, shape)
        assert form.plan_shape == shape
        assert (form.arrays["req_pool_indices"] == MAX_REQUESTS).all()
        assert not form.arrays["out_cache_loc"].any()
        assert not form.arrays["input_ids"].any()
        for window in (None, 300):
            assert not form.plans.decode[window].item_lens.any()
