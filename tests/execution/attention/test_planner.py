"""Plans of decodes: the order of their items, how many there can be, and plans padded for captured graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from layers.input_metadata import InputMetadata
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.pass_plans import CUT, WHOLE, PassPlans, PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.attention.tuning import H200 as TUNING
from radixrt.execution.attention.tuning import PlanTuning, TreeCosts
from tests.support.attention_cases import Case, make_case, share
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.extend import Extends, extend_attention
from triton_ops.attention.plan import EMPTY_ROWS, LENGTH_CLASSES, AttentionPlan, ExtendPlan, Int32Array
from triton_ops.implementation import GPU
from triton_ops.kv.view import KVView

H200 = GPU(capability=90, num_sms=132)
TREE, CUT_TREE = (PlanShape(cuts=cuts, shares=True) for cuts in (False, True))


def planner(
    gpu: GPU,
    *windows: int | None,
    num_kv_heads: int = 2,
    req_to_token: Any = None,
    num_requests: int = 700,
    tree: bool = False,
    dtype: torch.dtype = torch.float32,
    tuning: PlanTuning = TUNING,
) -> AttentionPlanner:
    """A planner for a model whose layers have these windows, on a GPU that is not here."""
    if req_to_token is None:
        req_to_token = np.zeros((num_requests, 8), np.int32)
    shape = kernel_shape(gpu, num_kv_heads, dtype)
    return AttentionPlanner(shape, windows, req_to_token, dtype, tree=tree, tuning=tuning)


def kernel_shape(gpu: GPU, num_kv_heads: int, dtype: torch.dtype = torch.float32) -> KernelShape:
    return KernelShape(gpu, 4 * num_kv_heads, num_kv_heads, head_dim=16, dtype=dtype)


def int32(values: Any) -> Any:
    return np.array(values, np.int32)


@st.composite
def lengths(draw: st.DrawFn) -> Any:
    """Of a batch: some are alike, some are padded decodes, which stand last."""
    groups = draw(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40_000)), min_size=1, max_size=5))
    own = [length for count, length in groups for _ in range(count)]
    return int32(own + [0] * draw(st.integers(0, 40)))


GPUS = st.builds(GPU, capability=st.just(90), num_sms=st.integers(1, 200))


def lengths_of(plans: PassPlans[Int32Array]) -> list[int]:
    """Of all arrays, in the order in which they lie in one buffer."""
    return [len(array) for array in plans.arrays()]


def shapes_of(here: AttentionPlanner, count: int, shape: PlanShape) -> tuple[PlanShape, ...]:
    """What padded plans of decodes may be, from one shape on."""
    shapes = here.shapes(count)
    return shapes[shapes.index(shape) :]


@given(lengths(), GPUS, st.integers(1, 40), st.sampled_from([None, 1, 300, 5000]))
@example(int32([3514] * 49 + [0] * 7), H200, 8, None)  # all waves are full but for less than pads the batch
def test_no_batch_has_more_items_than_there_is_room_for(
    lens: Any, gpu: GPU, num_kv_heads: int, window: int | None
) -> None:
    read = lens if window is None else lens.clip(max=window)
    plan = AttentionPlan.flat(
        np.zeros_like(lens),
        lens,
        max_item_len=kernel_shape(gpu, num_kv_heads).decode_item_len(read),
        sliding_window=window,
    )
    most = kernel_shape(gpu, num_kv_heads).max_decode_items(len(lens))
    reads = int((lens > 0).sum())
    padded = -(-(len(lens) - reads) // EMPTY_ROWS)
    assert reads <= len(plan.item_lens) - padded <= most
    assert plan.item_query_lens[plan.item_lens == 0].sum() == len(lens) - reads
    assert len(plan.row_partials) <= most
    assert plan.item_lens.sum() == read.sum()


def families(num_rows: int, longest: int, head: int) -> Any:
    """A table whose rows have, but for three of them, the first `head` slots of one of these."""
    table = np.arange(num_rows * longest, dtype=np.int32).reshape(num_rows, longest)
    for row in range(num_rows):
        table[row, :head] = table[row % 3, :head]
    return table


@given(
    lengths(),
    GPUS,
    st.integers(1, 40),
    st.integers(0, 2),
    st.sampled_from([(None,), (None, 300), (64,)]),
    st.sampled_from([None, 0, 50, 2000]),
)
def test_sizes_depend_on_the_batch_and_on_the_shape_alone(
    lens: Any, gpu: GPU, num_kv_heads: int, least: int, windows: tuple[int | None, ...], head: int | None
) -> None:
    """With `head`, as many tokens may be shared."""
    table = None if head is None else families(len(lens), int(lens.max(initial=head)), head)
    here = planner(gpu, *windows, num_kv_heads=num_kv_heads, req_to_token=table, tree=head is not None)
    allowed = here.shapes(len(lens))[least:] or here.shapes(len(lens))[-1:]
    rows = np.arange(len(lens), dtype=np.int32)
    plans = here.plan_padded_decodes(rows, lens, allowed)
    assert plans.shape in allowed
    idle = here.plan_padded_decodes(np.zeros_like(rows), np.zeros_like(lens), [plans.shape])
    assert idle.shape == plans.shape
    assert list(idle.decode) == list(plans.decode)
    assert lengths_of(idle) == lengths_of(plans), "they lie in one buffer, one after another"
    for window in windows:  # padding after the plan of the batch adds nothing
        read, plan = lens if window is None else lens.clip(max=window), plans.decode[window]
        covered = plan.item_lens @ plan.item_query_lens + plan.shared_lens @ plan.shared_query_lens
        assert covered == read.sum()
        for starts in (plan.row_partial_starts, plan.tail_partial_starts):
            assert starts.max(initial=0) <= len(plan.row_partials)
        np.testing.assert_array_equal(plan.seq_lens, lens)


@given(lengths(), GPUS, st.integers(1, 40), st.sampled_from([None, 50, 2000]))
@example(int32([9000] * 64), H200, 8, 8900)
def test_partial_results_take_no_more_memory_than_is_told(
    lens: Any, gpu: GPU, num_kv_heads: int, head: int | None
) -> None:
    table = None if head is None else families(len(lens), int(lens.max(initial=head)), head)
    here = planner(gpu, None, num_kv_heads=num_kv_heads, req_to_token=table, tree=head is not None)
    rows = np.arange(len(lens), dtype=np.int32)
    plans = here.plan({"req_pool_indices": rows, "seq_lens": lens}, 0)
    partials = len(plans.decode[None].row_partials)
    assert partials * 4 * num_kv_heads * (16 + 1) * 4 <= here.max_partial_bytes(len(lens), 0)


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_partial_results_of_extends_are_told(num_kv_heads: int, tree: bool) -> None:
    """Of long prefixes, which are cut whether they are shared or not."""
    table = families(40, 33_000, 32_000)
    here = planner(H200, None, num_kv_heads=num_kv_heads, req_to_token=table, tree=tree)
    for count in (1, 2, 5, 40):
        one = PaddedExtends((32_000,) * count, (16,) * count, (), 16 * count, num_extends=count + 1, num_rows=0)
        partials = len(here.plan(one.host(), count).extend[None].row_partials)
        assert partials or count == 40
        assert partials * 4 * num_kv_heads * (16 + 1) * 4 <= here.max_partial_bytes(0, 16 * count)


def test_padded_decodes_have_room_where_all_waves_are_full() -> None:
    lens = int32([15_407] * 18)
    assert kernel_shape(H200, 8).decode_item_len(lens) == 1472
    assert 18 * -(-15_407 // 1472) == kernel_shape(H200, 8).max_decode_items(24) == 198
    rows, here = np.arange(60, dtype=np.int32), planner(H200, None, num_kv_heads=8)
    plans = here.plan_padded_decodes(rows, np.append(lens, int32([0] * 42)))
    assert plans.decode[None].item_query_lens.sum() == 198 + 42


def test_a_short_batch_does_not_merge_and_a_long_one_does() -> None:
    rows = np.arange(64, dtype=np.int32)
    here = planner(H200, None, num_kv_heads=8)
    short, long = int32([100] * 64), int32([100] * 63 + [30_000])
    assert here.shapes(64) == (WHOLE, CUT)
    assert here.plan_padded_decodes(rows, short).shape == WHOLE
    assert here.plan_padded_decodes(rows, short, [CUT]).shape == CUT
    assert here.plan_padded_decodes(rows, long).shape == CUT
    assert here.shapes(63) == (CUT,)
    assert here.plan_padded_decodes(rows[1:], short[1:]).shape == CUT, "few contexts mostly are"
    shared = planner(H200, None, num_kv_heads=8, req_to_token=families(64, 3001, 3000), tree=True)
    assert shared.plan_padded_decodes(rows, int32([3001] * 64)).shape == TREE
    assert shared.plan_padded_decodes(rows, int32([40] * 64)).shape == WHOLE, "not worth its launches"
    assert shared.plan_padded_decodes(rows[1:], int32([3001] * 63)).shape == CUT_TREE


def test_plans_of_references_are_whole_and_share_nothing() -> None:
    """Extends have none."""
    shape, table = kernel_shape(H200, 8), families(3, 30_001, 30_000)
    here = AttentionPlanner(shape, (None, 300), table, torch.float32, tree=True, kernels=False)
    host = InputMetadata.host_arrays(range(3), [40, 30_001, 30_001], [35, 30_000, 30_000], np.zeros(7))
    plans = here.plan(host, 1)
    assert plans.shape == WHOLE
    assert not plans.extend
    assert plans.decode[None].item_lens.tolist() == [30_001] * 2
    assert plans.decode[300].item_lens.tolist() == [300] * 2


@pytest.mark.parametrize("count", [4, 16, 64])
def test_a_long_prefix_of_a_few_decodes_is_cut_to_fill_a_wave(count: int) -> None:
    here = planner(H200, None, num_kv_heads=8, req_to_token=families(3 * count, 32_769, 32_768)[::3], tree=True)
    plans = here.plan_padded_decodes(np.arange(count, dtype=np.int32), int32([32_769] * count))
    assert plans.shape == here.shapes(count)[-1]
    plan = plans.decode[None]
    tiles = -(-count // plan.shared_query_lens.max())
    assert plan.shared_lens.max() <= 1024 * tiles


@pytest.mark.parametrize("count", [64, 256])
def test_one_long_tail_among_many_is_read_as_if_it_were_shared(count: int) -> None:
    """By itself, it would make all others wait. Few tails are cut instead."""
    rows = np.arange(count, dtype=np.int32)
    table = families(2 * count, 50_000, 32_000)[:count]  # all but the last are of one family
    table[-1] += 10_000_000
    here = planner(H200, None, num_kv_heads=8, req_to_token=table, tree=True)
    lens = int32([32_100] * (count - 1) + [TUNING.long_tail + TUNING.min_head - 1])
    plans = here.plan_padded_decodes(rows, lens)
    assert plans.shape == TREE
    assert plans.decode[None].item_lens.max() == lens[-1], "hardly longer than it may be"
    lens[-1] = 4000
    plans = here.plan_padded_decodes(rows, lens)
    assert plans.shape == TREE
    plan = plans.decode[None]
    longest = plan.item_lens.max()
    assert longest == TUNING.long_tail
    own = plan.shared_lens[plan.shared_query_lens == 1]
    assert own.sum() == 4000 - longest
    assert own.max() <= TUNING.head_piece
    assert plan.item_lens.sum() + plan.shared_lens.sum() < lens.sum() / 5
    plans = here.plan_padded_decodes(rows, lens, [CUT, CUT_TREE])
    assert plans.shape == CUT_TREE
    assert plans.decode[None].item_lens.max() < 8000


def test_tails_that_are_alike_are_left_whole() -> None:
    """However long they are, nobody waits for one of them. Without trees they are cut to fill waves."""
    rows, lens = np.arange(256, dtype=np.int32), int32([1500] * 256)
    here = planner(H200, None, num_kv_heads=8, req_to_token=families(300, 2000, 0), tree=True)
    plan = here.plan_padded_decodes(rows, lens, [TREE]).decode[None]
    assert (plan.item_lens == 1500).all()
    assert not plan.shared_lens.any()


# --- what they compute ---


def copied(plans: PassPlans[Int32Array], device: torch.device) -> PassPlans:
    """The plans, their arrays copied to the device one by one."""
    return plans.with_arrays(torch.from_numpy(array).to(device) for array in plans.arrays())


def on(case: Case, device: torch.device) -> Case:
    """The same case there."""
    tensors = {name: value for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    return replace(case, **{name: tensor.to(device) for name, tensor in tensors.items()})


@pytest.mark.each_once
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    "seq_lens",
    [
        [1],
        [900, 0, 0],  # one request, cut; two that pad
        [3, 400, 1, 70, 0, 0, 0, 0],
        [11, 12, 10, 300, 299, 64, 65, 500, 0],
    ],
    ids=str,
)
def test_padded_plans_compute_the_same(kernel_device: torch.device, impl: Any, seq_lens: list[int]) -> None:
    windows = (None, 11, 200)
    case = make_case(seq_lens)
    q = torch.randn(len(seq_lens), 4, 16, generator=torch.Generator("cpu").manual_seed(3))
    gpu = GPU(capability=90, num_sms=4)
    here = planner(gpu, *windows, req_to_token=case.req_to_token.numpy())
    there = on(case, kernel_device)
    # A padded decode names any row that the host's table has.
    rows = np.where(case.seq_lens.numpy() > 0, case.rows.numpy(), 0).astype(np.int32)
    for allowed in ((WHOLE, CUT), (CUT,)):
        plans = here.plan_padded_decodes(rows, case.seq_lens.numpy(), allowed)
        for window, plan in copied(plans, kernel_device).decode.items():
            out = torch.full_like(q, torch.nan).to(kernel_device)
            lse = torch.full(q.shape[:2], torch.nan, device=kernel_device)
            scoring = Scoring(0.3, window=window)
            decode_attention(q.to(kernel_device), there.kv, plan, scoring, out=out, lse=lse, impl=impl)
            for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
                if not len(keys):
                    assert not out[i].any()
                    continue
                expected, expected_lse = dense_attention(q[i : i + 1], keys, values, Scoring(0.3, window=window))
                torch.testing.assert_close(out[i : i + 1].cpu().double(), expected, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(lse[i : i + 1].cpu().double(), expected_lse, atol=1e-4, rtol=1e-4)
    assert plans.shape == CUT


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("shares", [False, True])
def test_long_contexts_whose_heads_are_split_compute_the_same(
    kernel_device: torch.device, impl: Any, shares: bool
) -> None:
    """Of rows that share something, and of rows that do not."""
    tuning = PlanTuning(costs=CHEAP, long_tail=50, head_piece=40, min_head=10)
    if shares:
        case = share([(-1, 300), (0, 130), (0, 3), (0, 205), (-1, 140), (-1, 8)], [1, 2, 1, 4, 5, 3])
    else:
        case = make_case([140, 3, 205, 1, 56])
    rows, seq_lens = case.rows.numpy(), case.seq_lens.numpy()
    q = torch.randn(len(rows) + 2, 4, 16, generator=torch.Generator("cpu").manual_seed(3))
    here = planner(
        GPU(capability=90, num_sms=4), None, req_to_token=case.req_to_token.numpy(), tree=True, tuning=tuning
    )
    plans = here.plan_padded_decodes(np.append(rows, int32([0, 0])), np.append(seq_lens, int32([0, 0])), [TREE])
    assert plans.shape == TREE
    assert plans.decode[None].item_lens.max() < 70
    assert (plans.decode[None].shared_query_lens.max() > 1) == shares
    there = on(case, kernel_device)
    out = decode_attention(
        q.to(kernel_device),
        there.kv,
        plans.decode[None].to(kernel_device),
        Scoring(0.3),
        out=torch.full_like(q, torch.nan).to(kernel_device),
        impl=impl,
    )
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        expected, _ = dense_attention(q[i : i + 1], keys, values, Scoring(0.3))
        torch.testing.assert_close(out[i : i + 1].cpu().double(), expected, atol=1e-5, rtol=1e-5)
    assert not out[len(rows) :].any()


CHEAP = TreeCosts(item=1e-12, partial_crossings=0.1, launches=1e-12)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_what_decodes_share_is_read_once_but_behind_windows(
    kernel_device: torch.device, impl: Any, pads: bool
) -> None:
    case = share([(-1, 300), (0, 200), (0, 100), (1, 30), (1, 1), (2, 40), (2, 9)], [3, 5, 4, 6, 3, 5])
    rows, seq_lens = case.rows.numpy(), case.seq_lens.numpy()
    if pads:
        rows, seq_lens = np.append(rows, int32([0] * 3)), np.append(seq_lens, int32([0] * 3))
    q = torch.randn(len(rows), 4, 16, generator=torch.Generator("cpu").manual_seed(3))
    here = planner(
        GPU(capability=90, num_sms=4),
        None,
        11,
        req_to_token=case.req_to_token.numpy(),
        tree=True,
        tuning=PlanTuning(costs=CHEAP),
    )
    there = on(case, kernel_device)
    if pads:
        plans = here.plan_padded_decodes(rows, seq_lens, [WHOLE, CUT, TREE])
        assert plans.shape == TREE
    else:
        ones = np.ones_like(rows)
        plans = here.plan(InputMetadata.host_arrays(rows, seq_lens, seq_lens - ones, ones), 0)
    read = {window: int(plans.decode[window].item_lens.sum()) for window in (None, 11)}
    # The last token of each of two twins, and what two leaves have for themselves.
    assert read == {None: 2 * (1 + 1) + 1 + 9, 11: 6 * 11}
    assert not len(plans.decode[11].shared_lens)
    for window, plan in copied(plans, kernel_device).decode.items():
        out = decode_attention(
            q.to(kernel_device),
            there.kv,
            plan,
            Scoring(0.3, window=window),
            out=torch.full_like(q, torch.nan).to(kernel_device),
            impl=impl,
        )
        for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
            expected, _ = dense_attention(q[i : i + 1], keys, values, Scoring(0.3, window=window))
            torch.testing.assert_close(out[i : i + 1].cpu().double(), expected, atol=1e-5, rtol=1e-5)
        assert not out[6:].any()


# --- the order of items ---


def shared_rows(seed: int) -> tuple[Any, Any]:
    """A table of 24 requests behind three heads of 700 tokens, in any order, and their lengths."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(24 * 1000).reshape(24, 1000).astype(np.int32)
    head = rng.permutation(np.arange(24) % 3)
    for row, of in enumerate(head):
        table[row, :700] = table[of, :700]
    return table, rng.integers(650, 1000, 24).astype(np.int32)


@pytest.mark.parametrize("window", [None, 400])
@pytest.mark.parametrize("max_item_len", [None, 64, 256])
@pytest.mark.parametrize("seed", range(4))
def test_items_that_read_the_same_stand_side_by_side(
    seed: int, max_item_len: int | None, window: int | None
) -> None:
    table, lens = shared_rows(seed)
    rows = np.random.default_rng(seed).permutation(24).astype(np.int32)
    options: dict[str, Any] = {"max_item_len": max_item_len, "sliding_window": window}
    plain = AttentionPlan.flat(rows, lens, **options)
    ordered = AttentionPlan.flat(rows, lens, req_to_token=table, **options)

    def items(plan: AttentionPlan[Int32Array]) -> list[tuple[int, ...]]:
        names = ("item_req_pool_indices", "item_starts", "item_lens", "item_query_starts", "item_query_lens")
        return list(zip(*(getattr(plan, name).tolist() for name in names), strict=True))

    assert sorted(items(ordered)) == sorted(items(plain))
    longest = max(length for _, _, length, _, _ in items(ordered))
    seen: list[tuple[int, int]] = []  # length class and first slot
    for row, start, length, _, _ in items(ordered):
        kind = (length // max(longest // LENGTH_CLASSES, 1), int(table[row, start]))
        if not seen or seen[-1] != kind:
            seen.append(kind)
    assert len(set(seen)) == len(seen), "each place stands together"
    assert len(seen) < len(items(ordered)) or window is not None, "some are shared"
    classes = [kind for kind, _ in seen]
    assert classes == sorted(classes, reverse=True), "long items first"


def test_items_that_share_nothing_stand_by_length_alone() -> None:
    """The longest first, also of those that are about as long."""
    lens = np.random.default_rng(0).permutation(np.arange(100, 160)).astype(np.int32)
    table = np.arange(60 * 200, dtype=np.int32).reshape(60, 200)
    plan = AttentionPlan.flat(np.arange(60, dtype=np.int32), lens, req_to_token=table)
    assert plan.item_lens.tolist() == list(range(159, 99, -1))


def test_an_item_that_ends_the_table_is_ordered_too() -> None:
    """Its request is padding, or fills the context: what it starts at is in the table all the same."""
    table = np.arange(16, dtype=np.int32).reshape(2, 8)
    plan = AttentionPlan.flat([1, 0], [8, 0], max_item_len=4, req_to_token=table)
    assert plan.item_lens.tolist() == [4, 4, 0]
    assert plan.item_query_starts.tolist() == [0, 0, 1]


# --- extends in places that do not change ---


@dataclass(frozen=True)
class PaddedExtends:
    """Extends of `prefix` + `new` tokens each, then decodes, in a pass with room for more of both."""

    prefix: tuple[int, ...]
    new: tuple[int, ...]
    decodes: tuple[int, ...]
    num_tokens: int
    num_extends: int
    num_rows: int

    def host(self) -> dict[str, Any]:
        empty, spare = self.num_extends - len(self.new), self.num_tokens - sum(self.new)
        padded = self.num_rows - len(self.decodes)
        prefix = int32([*self.prefix, *[0] * empty, *(n - 1 for n in self.decodes), *[0] * padded])
        new = int32([*self.new, *[0] * (empty - 1), spare, *[1] * self.num_rows])
        slots = np.zeros(self.num_tokens + self.num_rows, np.int32)
        return InputMetadata.host_arrays(np.arange(len(new)), prefix + new, prefix, slots)

    def plans(self, here: AttentionPlanner, *shapes: PlanShape) -> PassPlans[Int32Array] | None:
        """In the room of one of these shapes, or of those of such passes."""
        lens = int32([*self.decodes, *[0] * (self.num_rows - len(self.decodes))])
        return here.plan_padded_extends(self.host(), self.num_extends, len(self.new), lens, shapes)


@st.composite
def padded_extends(draw: st.DrawFn) -> PaddedExtends:
    own = draw(st.lists(st.tuples(st.integers(0, 30_000), st.integers(2, 900)), max_size=30))
    new = tuple(n for _, n in own)
    return PaddedExtends(
        prefix=tuple(p for p, _ in own),
        new=new,
        decodes=tuple(draw(st.lists(st.integers(1, 5000), max_size=20))),
        num_tokens=sum(new) + draw(st.integers(0, 300)),
        num_extends=len(new) + draw(st.integers(1, 20)),
        num_rows=draw(st.sampled_from([20, TUNING.cuts_below])),
    )


@given(
    padded_extends(),
    GPUS,
    st.integers(1, 16),
    st.sampled_from([(None,), (None, 300), (64,)]),
    st.sampled_from([None, 0, 900, 20_000]),
)
def test_shapes_of_padded_extends(
    one: PaddedExtends, gpu: GPU, num_kv_heads: int, windows: tuple[int | None, ...], head: int | None
) -> None:
    """With `head`, as many tokens may be shared."""
    table = None if head is None else families(120, 31_000, head)
    here = planner(gpu, *windows, num_kv_heads=num_kv_heads, req_to_token=table, tree=head is not None)
    plans = one.plans(here)
    if plans is None:
        assert one.num_tokens > TUNING.max_cut_tokens
        assert max(p + n for p, n in zip(one.prefix, one.new, strict=True)) > TUNING.long_item
        return
    assert plans.shape in here.shapes(one.num_rows, one.num_tokens)
    idle = replace(one, prefix=(), new=(), decodes=()).plans(here, plans.shape)
    assert idle is not None
    assert idle.shape == plans.shape
    assert lengths_of(idle) == lengths_of(plans)
    assert list(idle.extend) == list(plans.extend) == list(plans.decode)
    for window in windows:
        extend, decode = plans.extend[window], plans.decode[window]
        assert idle.extend[window].tile_tokens == extend.tile_tokens
        lens = int32(one.new)
        reached = np.zeros(one.num_extends)
        np.maximum.at(reached, extend.item_requests, extend.item_starts + extend.item_lens)
        np.testing.assert_array_equal(reached[: len(lens)], int32(one.prefix) + lens)
        assert not reached[len(lens) :].any(), "padding reads nothing"
        starts, num_partials = extend.row_partial_starts, len(extend.row_partials)
        assert not len(starts) or starts[-1] <= num_partials
        assert (np.diff(starts) >= 0).all()
        is_short = one.num_tokens <= TUNING.max_cut_tokens
        shares = plans.shape.shares and window is None and is_short
        assert bool(len(extend.shared_lens)) == shares
        assert bool(num_partials) == is_short, "they take memory"
        read = int32(one.decodes) if window is None else int32(one.decodes).clip(max=window)
        covered = decode.item_lens @ decode.item_query_lens + decode.shared_lens @ decode.shared_query_lens
        assert covered == read.sum()


@pytest.mark.parametrize("num_rows", [20, TUNING.cuts_below])
@pytest.mark.parametrize("num_tokens", [1500, TUNING.max_cut_tokens, TUNING.max_cut_tokens + 1, 5000])
def test_padded_extends_share(num_tokens: int, num_rows: int) -> None:
    """Not behind windows, nor in long passes. Partial results have room."""
    one = PaddedExtends((2900,) * 90, (3,) * 90, (), num_tokens, num_extends=100, num_rows=num_rows)
    here = planner(H200, None, 300, num_kv_heads=8, req_to_token=families(170, 3000, 2800), tree=True)
    plans, padding = one.plans(here), replace(one, prefix=(), new=())
    assert plans is not None
    flat = padding.plans(here)
    assert flat is not None
    assert plans.shape == (CUT_TREE if num_rows < TUNING.cuts_below else TREE)
    if num_tokens > TUNING.max_cut_tokens:
        assert flat.shape == plans.shape
        assert not len(plans.extend[None].shared_lens)
        return
    assert flat.shape == CUT
    idle = padding.plans(here, plans.shape)
    assert idle is not None
    assert lengths_of(idle) == lengths_of(plans)
    assert (idle.extend[None].row_partial_starts == 0).all()
    assert np.count_nonzero(plans.extend[None].shared_lens) > 3
    assert not len(plans.extend[300].shared_lens)
    num_partials = len(plans.extend[None].row_partials)
    assert plans.extend[None].row_partial_starts[-1] >= 2 * 270
    assert num_partials * 4 * 8 * (16 + 1) * 4 <= here.max_partial_bytes(0, num_tokens)


def test_many_short_extends_on_few_prefixes_all_share() -> None:
    """There are more tiles of them than programs run side by side."""
    here = planner(H200, None, num_kv_heads=8, req_to_token=families(300, 9100, 9000), tree=True)
    new = tuple(2 + i % 7 for i in range(279))  # those of padding have the last place
    one = PaddedExtends((9000,) * 279, new, (), sum(new), num_extends=280, num_rows=0)
    plan = here.plan(one.host(), 279).extend[None]
    tiles = plan.shared_query_lens.sum() / 8
    assert tiles > 4 * 2 * 132 / 8
    assert plan.item_lens.sum() == sum(new)
    flat = planner(H200, None, num_kv_heads=8).plan(one.host(), 279).extend[None]
    assert not len(flat.shared_lens)


def test_long_prefixes_are_cut_or_left_to_other_plans() -> None:
    """A program that reads a long prefix alone would make all others wait."""
    here = planner(H200, None, num_kv_heads=8)
    one = PaddedExtends((32_000, 0, 0, 0), (40, 700, 700, 700), (), num_tokens=3072, num_extends=8, num_rows=20)
    assert one.plans(here) is None
    assert replace(one, prefix=(3000, 0, 0, 0)).plans(here) is not None
    assert replace(one, prefix=(0,), new=(16_384,), num_tokens=16_384).plans(here) is not None
    few = replace(one, prefix=(32_000,), new=(40,), num_tokens=256).plans(here)
    assert few is not None
    assert few.extend[None].item_lens.max() < 5000


# Heads of 128 have a kernel of their own on Hopper.
@pytest.mark.each_once
@pytest.mark.parametrize("head_dim", [16, pytest.param(128, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("window", [None, 50])
def test_padded_extends_attend_to_the_same(
    kernel_device: torch.device, window: int | None, cut: bool, head_dim: int
) -> None:
    """Of the same tokens the results are the same; those of the padding are zero."""
    tuning = PlanTuning(max_cut_tokens=2048 if cut else 0)
    one = PaddedExtends((1500, 0, 3), (40, 70, 2), (), num_tokens=200, num_extends=6, num_rows=1)
    torch.manual_seed(0)
    num_slots = 1700
    dtype = torch.bfloat16 if kernel_device.type == "cuda" else torch.float16
    kv = torch.randn(2, num_slots, 2, head_dim).to(kernel_device, dtype)
    table = torch.randint(1, num_slots, (7, 1600), dtype=torch.int32).to(kernel_device)
    q = torch.randn(201, 8, head_dim).to(kernel_device, dtype)
    k, v = torch.randn(2, 201, 2, head_dim).to(kernel_device, dtype)
    host = one.host()
    here = planner(replace(H200, num_sms=4), window, num_kv_heads=2, dtype=dtype, tuning=tuning)
    plans = one.plans(here)
    assert plans is not None
    arrays = {name: torch.tensor(array, device=kernel_device) for name, array in host.items()}
    assert bool(len(plans.extend[window].row_partials)) == cut

    def attend(num: int, plan: ExtendPlan | None, impl: Any) -> torch.Tensor:
        fields = ("req_pool_indices", "prefix_lens", "extend_start_loc", "extend_seq_lens")
        end = int(host["extend_seq_lens"][:num].sum())
        return extend_attention(
            q[:end],
            k[:end],
            v[:end],
            KVView(*kv, table),
            Extends(*(arrays[name][:num] for name in fields)),
            plan,
            Scoring(0.3, window=window),
            impl=impl,
            out=torch.full_like(q[:end], torch.nan),
        )

    expected = attend(3, None, "torch")
    found = attend(6, plans.extend[window].to(kernel_device), "triton")
    torch.testing.assert_close(found[:112], expected, atol=1e-2, rtol=1e-2)
    assert not found[112:].any()
