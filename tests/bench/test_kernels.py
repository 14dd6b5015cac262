"""The kernel benchmark without a GPU: rooflines, tables, and cases that run, with pretended times."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from layers.formats import weight_format
from radixrt.errors import ParameterError
from radixrt.execution.attention import planner as attention_planner
from radixrt.execution.attention.tuning import PlanTuning, TreeCosts
from scripts import bench_kernels
from scripts.bench_kernels import GROUPS, Options, choose_cases, describe, main
from scripts.kernel_benchmarks import elementwise, kv_copy, linear
from scripts.kernel_benchmarks import tree as tree_bench
from scripts.kernel_benchmarks.attention import decode_case, extend_case, ordered_case
from scripts.kernel_benchmarks.attention_inputs import AttentionShape, attention_inputs
from scripts.kernel_benchmarks.backward import TrainingShape, backward_case
from scripts.kernel_benchmarks.case import Call, Case, Contender, Expected, PlanFigures, worst_error
from scripts.kernel_benchmarks.experts import ExpertShape, experts_case
from scripts.kernel_benchmarks.linear_fp8 import e4m3_case
from scripts.kernel_benchmarks.measurement import MAX_ERROR, Measurement, Result, copies_beyond_l2, measure
from scripts.kernel_benchmarks.roofline import Machine, Work, decode_work, extend_work, training_work
from scripts.kernel_benchmarks.sampling import sampling_cases
from scripts.kernel_benchmarks.table import Report
from scripts.kernel_benchmarks.tree import FLAT, ordered_tree_case, tree_case, tree_shape
from triton_ops.implementation import GPU, compiling_for, gpu_of
from triton_ops.norms.rms_norm import add_rms_norm
from triton_ops.tuning import SplitKConfig

CARD = Machine(
    "NVIDIA H200",
    bandwidth=4e12,
    flops=800e12,
    exps=4e12,
    l2_bytes=60 * 2**20,
    host_to_device=50e9,
    device_to_host=40e9,
)
OTHER = replace(CARD, name="NVIDIA A100-SXM4-80GB")
CPU = torch.device("cpu")


class PretendedTimer:
    """Calls what it is given, and says what it is told to."""

    def __init__(self, eager: float = 2e-4, graph: float = 1e-4) -> None:
        self.seconds = eager, graph
        self.sets: list[int] = []

    def eager(self, call: Callable[[], object]) -> float:
        call()
        return self.seconds[0]

    def graph(self, calls: Sequence[Callable[[], object]], eager_seconds: float) -> float:
        assert eager_seconds == self.seconds[0]
        for call in calls:
            call()
        self.sets.append(len(calls))
        return self.seconds[1]


def measured(case: Case[Any], device: torch.device) -> Result:
    """With two sets of inputs, and without torch.compile."""
    machine = replace(CARD, l2_bytes=int(case.work.bytes))
    return measure(case, machine, PretendedTimer(), device, compiled=False)


def check_right(measurements: Iterable[Measurement], error: float = MAX_ERROR) -> None:
    """Each ran, and was right."""
    for measurement in measurements:
        assert measurement.reason is None, (measurement.name, measurement.traceback)
        assert measurement.error is not None
        assert measurement.error <= error


def printed(results: list[Result]) -> str:
    """The tables of results that are sorted by group."""
    console = Console(file=io.StringIO(), width=bench_kernels._WIDTH, record=True, highlight=False)
    report = Report(console)
    for _, members in groupby(results, lambda result: result.case.group):
        report.print_group(list(members))
    report.print_end()
    return console.export_text()


def case_of(group: str, shape: str) -> Case[Any]:
    return next(case for case in choose_cases(Options()) if (case.group, case.shape) == (group, shape))


def result_of(group: str, shape: str, eager: float, graph: float, machine: Machine = CARD) -> Result:
    return Result(case_of(group, shape), machine, (Measurement("radixrt", 3e-3, eager, graph),), 4)


# --- rooflines ---


def test_rooflines() -> None:
    work = decode_work([2048] * 64, 32, 8, 128, 2)
    assert work.bytes == 64 * 2048 * 4096 + 64 * 2 * 32 * 128 * 2
    assert work.flops == 4 * 128 * 32 * 64 * 2048
    assert work.exps == 32 * 64 * 2048
    assert work.bound(CARD).limit == "bytes"
    assert work.bound(CARD).seconds == work.bytes / 4e12

    # Pairs of a query and a key, counted one by one.
    requests = [(7, 5), (0, 9), (3, 0)]
    pairs = sum(prefix + i + 1 for prefix, new in requests for i in range(new))
    work = extend_work(requests, 4, 2, 16, 2)
    assert work.flops == 4 * 16 * 4 * pairs
    assert work.exps == 4 * pairs
    assert work.bytes == 2 * 16 * (2 * 2 * (12 + 9 + 3) + 2 * 4 * 14)

    # The published rates: causal, 509 TFLOP/s in 1.08 ms and 4.35 TB/s in 1.975 ms.
    assert case_of("extend", "B=1 0+8192").work.flops / 1.08e-3 == pytest.approx(509e12, rel=0.01)
    assert case_of("decode", "B=256 L=8192").work.bytes / 1.975e-3 == pytest.approx(4.35e12, rel=0.01)
    # Small heads are limited by exponentials, large ones by products.
    assert case_of("extend", "B=4 0+4096 H=48/48 D=32").work.bound(CARD).limit == "exp"
    assert case_of("extend", "B=4 0+4096 H=32/32").work.bound(CARD).limit == "flops"
    assert all(case.work.bound(CARD).limit == "bytes" for case in choose_cases(Options(only=("elementwise",))))
    assert Work(4e9).bound(CARD).seconds == 1e-3


def test_every_elementwise_case_is_larger_than_64_mb() -> None:
    assert all(case.work.bytes > 64 * 2**20 for case in choose_cases(Options(only=("elementwise",))))


def test_input_sets_exceed_twice_the_cache() -> None:
    assert copies_beyond_l2(1e9, 60 * 2**20) == 1
    assert copies_beyond_l2(33.5e6, 60 * 2**20) == 4
    assert copies_beyond_l2(100, 60 * 2**20) == 64


# --- the tables ---


def test_table() -> None:
    shape = ("extend", "B=8 0+2048")
    result = result_of(*shape, eager=0.9e-3, graph=0.75e-3)
    others = (
        Measurement("SDPA FlashAttention-2", reason="RuntimeError: no kernel"),
        Measurement("SDPA cuDNN", 2e-3, 1.5e-3, 1.6e-3),
        Measurement("FlexAttention", 0.4, reason="wrong: a row's relative error is 0.4"),
    )
    decode = result_of("decode", "B=1 L=8192", eager=30e-6, graph=20e-6)
    decode = replace(decode, measurements=(*decode.measurements, others[0]))
    shown = printed([decode, replace(result, measurements=(result.ours, *others))])
    lines = ([cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line)
    cells = {line[0]: line for line in lines}
    percent = f"{100 * result.bound.seconds / 0.75e-3:.0f}"
    assert cells["B=8 0+2048"][1:-1] == [
        *("900.0", "750.0", f"{result.case.work.flops / 0.75e-3 / 1e12:.0f} TF/s", percent),
        *("flops", "3.0e-03"),
    ]
    assert cells["SDPA cuDNN"][-1] == "2.00x"
    assert cells["SDPA FlashAttention-2"][1:3] == ["- [1]", "-"]
    assert cells["FlexAttention"][1:3] == ["- [2]", "-"]
    # The first note is that of two tables, and said once.
    assert shown.count("RuntimeError: no kernel") == 1
    assert re.search(r"\[1\] RuntimeError.*\n\[2\] wrong: a row", shown)


def test_a_case_that_stays_in_the_cache_says_so() -> None:
    case = decode_case(AttentionShape(1, 127, 1))
    result = Result(case, CARD, (Measurement("radixrt", 1e-3, 1e-5, 1e-5),), input_sets=64)
    assert result.in_l2
    assert "stay in L2" in printed([result])
    assert not result_of("decode", "B=64 L=2048", 1e-3, 1e-3).in_l2


# --- cases that run ---

SMALL = AttentionShape(2, 0, 1, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)


@pytest.mark.parametrize(
    "case",
    [
        decode_case(replace(SMALL, prefix=37)),
        decode_case(replace(SMALL, prefix=37, scattered=False)),
        extend_case(replace(SMALL, extend=33)),
        extend_case(replace(SMALL, prefix=20, extend=150)),
    ],
)
def test_attention_cases(case: Case[Any], kernel_device: torch.device) -> None:
    """With the kernels themselves."""
    timer = PretendedTimer()
    result = measure(case, replace(CARD, l2_bytes=int(case.work.bytes)), timer, kernel_device, compiled=False)
    assert result.input_sets == 2
    ours = result.ours
    assert ours.reason is None
    assert ours.error is not None
    assert ours.error < 1e-5
    assert (ours.eager_seconds, ours.graph_seconds, ours.best_seconds) == (2e-4, 1e-4, 1e-4)
    # Ours, and on contiguous KV torch's: every set went through it, and it is right.
    flash = [m for m in result.measurements if m.name == "SDPA FlashAttention-2"]
    assert set(timer.sets) == {2}
    for measurement in flash:
        assert measurement.reason is not None or (measurement.error or 0) < 1e-5, measurement
    assert len(flash) == ("scattered" not in case.name)
    assert "FlexAttention" not in [m.name for m in result.measurements]


@pytest.mark.parametrize("prefix_and_extend", [(37, 1), (20, 50)])
def test_same_bits_cases(prefix_and_extend: tuple[int, int], kernel_device: torch.device) -> None:
    """Deterministic attention beside the other one, which computes the same."""
    prefix, extend = prefix_and_extend
    case = ordered_case(replace(SMALL, prefix=prefix, extend=extend))
    result = measured(case, kernel_device)
    assert [measurement.name for measurement in result.measurements] == ["radixrt, deterministic", "radixrt"]
    check_right(result.measurements, 1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_backward_cases(causal: bool, kernel_device: torch.device) -> None:
    """With the kernels themselves; torch's own computes the same."""
    case = backward_case(TrainingShape(1, 64, 2, 1, 16, causal, torch.float32))
    ours, flash, _ = measured(case, kernel_device).measurements
    check_right([ours], 1e-5)
    assert flash.reason is not None or (flash.error or 0) < 1e-5, flash


def test_work_of_training() -> None:
    """What the forward pass has, and the backward pass with it: q, k, v and the result, then these again with four
    gradients.
    """
    full, causal = (training_work(2, 64, 4, 2, 16, 2, causal=causal) for causal in (False, True))
    forward = extend_work([(0, 64)] * 2, 4, 2, 16, 2)
    assert causal.flops == 3.5 * forward.flops
    assert causal.exps == 2 * forward.exps
    assert full.flops == 7 * 2 * 16 * 4 * 2 * 64**2
    assert full.bytes == causal.bytes == 3 * forward.bytes


def small_elementwise_cases() -> list[Case[Any]]:
    """In float16: Triton's interpreter does not know bfloat16."""
    rows = (*elementwise.NORMS, *elementwise.ACTIVATIONS, elementwise.SOFT_CAP)
    return [
        *(elementwise.row_case(operation, 5, 48, torch.float16) for operation in rows),
        *elementwise.head_cases(5, 4, 2, 16, torch.float16),
    ]


@pytest.mark.parametrize("case", small_elementwise_cases(), ids=lambda case: case.name)
def test_elementwise_cases(case: Case[Any], kernel_device: torch.device) -> None:
    """With the kernels themselves."""
    timer = PretendedTimer()
    machine = replace(CARD, l2_bytes=int(case.work.bytes))
    check_right([measure(case, machine, timer, kernel_device, compiled=False).ours])
    assert timer.sets == [2]
    assert [c.name for c in case.contenders] == ["radixrt", "torch.compile"]


def test_all_elementwise_operations_are_measured() -> None:
    usual = {case.name.rpartition(" ")[0] for case in choose_cases(Options(only=("elementwise",)))}
    assert {case.name.rpartition(" ")[0] for case in small_elementwise_cases()} == usual


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_sampling_cases(kernel_device: torch.device) -> None:
    """With the kernels themselves; torch's own draws obey the filters."""
    for case in sampling_cases(3, 500, torch.float16):
        ours, by_torch = measured(case, kernel_device).measurements
        check_right([ours, by_torch])
    assert case_of("sampling", "temperature 512x151936").work.bytes == 512 * 151_936 * 2


@pytest.mark.parametrize("parts", [1, 3])
def test_linear_cases(parts: int, monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device) -> None:
    """With the kernels themselves, and where the product is not cut."""
    config = SplitKConfig(16, 16, 2, 32) if parts > 1 else None
    monkeypatch.setattr(weight_format, "split_k_config", lambda *_: config)
    added: list[int] = []

    def recorded(x: Tensor, *arguments: Any, **options: Any) -> Any:
        added.append(x.dim() - 1)
        return add_rms_norm(x, *arguments, **options)

    monkeypatch.setattr(linear, "add_rms_norm", recorded)
    result = measured(linear.linear_case(5, 96, 64, torch.float16), kernel_device)
    check_right(result.measurements)
    assert set(added) == ({1, 2} if parts > 1 else {1})
    assert result.case.work.bytes == 2 * (5 * 96 + 64 * 96 + 64 + 3 * 5 * 64)
    usual = choose_cases(Options(only=("linear",)))
    assert len(usual) == 4 * len(linear.BATCHES)
    assert [case.work.bound(CARD).limit for case in (usual[0], usual[-1])] == ["bytes", "flops"]


@pytest.mark.parametrize("blocks", [False, True])
def test_linear_fp8_cases(blocks: bool, kernel_device: torch.device) -> None:
    """With the kernels themselves; torch's product runs on a CPU for results in bfloat16 alone."""
    case = e4m3_case(5, 256, 64, blocks=blocks, dtype=torch.float16)
    result = measured(case, kernel_device)
    check_right((m for m in result.measurements if not m.name.startswith("torch")), 1e-3)
    assert [m.name for m in result.measurements] == (
        ["radixrt", "Triton", "torch", "bf16"] if blocks else ["radixrt", "Triton", "torch, exact sums", "bf16"]
    )
    assert case.work.bytes == 2 * 5 * (256 + 64) + 64 * 256
    quick = replace(CARD, e4m3_flops=1600e12)
    large = e4m3_case(16_384, 4096, 4096, blocks=blocks).work
    assert large.bound(quick).seconds == large.bound(CARD).seconds / 2 == 2 * 16_384 * 4096**2 / 1600e12
    assert ", of e4m3 1600" in describe(quick)


def test_experts_cases(kernel_device: torch.device) -> None:
    """With the kernels themselves."""
    case = experts_case(ExpertShape(5, 6, 2, 64, 32, torch.float16, stored="mxfp4"))
    check_right(measured(case, kernel_device).measurements)
    assert case.work.bytes == 6 * 3 * 64 * 32 * (0.5 + 1 / 32) + 2 * 5 * 64 * 2
    usual = choose_cases(Options(only=("experts",)))
    assert [case.work.bound(CARD).limit for case in (usual[0], usual[-1])] == ["bytes", "flops"]


def test_kv_copy_cases(kernel_device: torch.device) -> None:
    """With the kernel itself."""
    shape = kv_copy.Shape(20, 2, 2, 16)
    for case in kv_copy.kv_copy_cases(shape):
        result = measured(case, kernel_device)
        check_right(result.measurements, 0.0)
        assert result.bound.limit == ("bytes" if "pool" in case.name else "link")
    usual = {case.name: case for case in choose_cases(Options(only=("kv_copy",)))}
    to_host, in_pool = usual["to host 2048x28x8x128 scattered"], usual["in the pool 2048x28x8x128"]
    assert to_host.work.device_to_host == 2048 * 28 * 2 * 8 * 128 * 2
    assert in_pool.work.link_seconds(CARD) == 0
    assert "9.4 GB/s" in printed([result_of("kv_copy", to_host.shape, 25e-3, 25e-3)])


def test_elementwise_bytes() -> None:
    """Counted from the tensors of a case: read once, written once."""
    sizes = {case.name.rpartition(" ")[0]: case.work.bytes for case in small_elementwise_cases()}
    rows = 5 * 48 * 2
    moved = {"rms_norm": 2, "rms_norm_add offset 0.0": 3, "add_layer_norm": 4, "silu_and_mul": 3}
    for name, count in moved.items():
        assert sizes[name] == count * rows
    assert sizes["gelu_new"] == sizes["soft_cap cap 30.0"] == 2 * rows
    # q read and written, k read, written and stored, v read and stored; angles; position and slot.
    assert (
        sizes["qk_norm_rope_store"] == sizes["rotary_store"] == 5 * (16 * 2 * (2 * 4 + 3 * 2 + 2 * 2) + 16 * 4 + 8)
    )


def test_input_sets_share_no_slots() -> None:
    sets = attention_inputs(replace(SMALL, prefix=20, extend=5), CPU, 3)
    slots = torch.cat([one.kv.req_to_token.flatten() for one in sets])
    assert sorted(slots.tolist()) == list(range(1, 3 * 50 + 1))
    for one in sets:
        new = one.kv.req_to_token[:, 20:].flatten()
        assert torch.equal(one.k, one.kv.k[new])
        assert torch.equal(one.v, one.kv.v[new])
    kv = sets[1].kv
    assert torch.equal(sets[1].dense(kv.k)[1, 3], kv.k[kv.req_to_token[1, 3]])
    consecutive = attention_inputs(replace(SMALL, prefix=20, scattered=False), CPU, 1)[0]
    assert (consecutive.kv.req_to_token.diff(dim=1) == 1).all()


def test_trees() -> None:
    shape = tree_shape((1, 2), (2, 3), (4, 1), attention=SMALL)
    assert shape.words == "B=4 1/2/4 of 2/3/1 H=4/2 D=16"
    assert shape.tokens().tolist() == [
        [0, 1, 2, 3, 4, 8],
        [0, 1, 2, 3, 4, 9],
        [0, 1, 5, 6, 7, 10],
        [0, 1, 5, 6, 7, 11],
    ]
    # Keys and values of the twelve tokens, queries and results.
    assert shape.work().bytes == 12 * 2 * 2 * 16 * 4 + 4 * 2 * 4 * 16 * 4
    assert shape.work().flops == decode_work([6] * 4, *SMALL.heads).flops
    (inputs,) = attention_inputs(shape.attention, CPU, 1, shape.tokens())
    assert sorted(inputs.kv.req_to_token.unique().tolist()) == list(range(1, 13))
    assert (inputs.kv.req_to_token[0, :5] == inputs.kv.req_to_token[1, :5]).all()


def test_names_and_sizes_of_trees() -> None:
    deep = tree_shape(*((2**level, 128) for level in range(9)))
    chain = tree_shape(*((1, 256) for _ in range(4)), (256, 128))
    two_level, unshared = tree_shape((1, 8192), (64, 128)), tree_shape((64, 8320))
    assert [shape.words for shape in (deep, chain, two_level, unshared, tree_shape((8, 64), (256, 64)))] == [
        "B=256 1/2/../256 (9) of 128",
        "B=256 1/1/../256 (5) of 256/256/../128 (5)",
        "B=64 8192+128",
        "B=64 8320",
        "B=256 8/256 of 64",
    ]
    assert two_level.sizes == {"batch": 64, "shared": 8192, "private": 128}
    assert not any(shape.sizes for shape in (deep, chain, unshared))


CHEAP = TreeCosts(reread_bandwidth=4.2e12, operations=1e18, item=0.0, partial_crossings=0.1, launches=0.0)


@pytest.fixture
def cheap_trees(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trees are worth reading once, too, fill the few programs there are, and are cut to small pieces."""
    few = 8 / gpu_of(kernel_device).num_sms
    tuning = PlanTuning(costs=CHEAP, shared_programs_per_sm=few, piece_tokens=16, min_piece=16)
    monkeypatch.setattr(attention_planner, "H200", tuning)


@pytest.mark.usefixtures("cheap_trees")
@pytest.mark.parametrize(
    ("levels", "flat_factor"),
    [
        pytest.param([(1, 90), (3, 7)], 3 * 97 / 111, marks=pytest.mark.long),
        pytest.param([(1, 1), (2, 40), (4, 9), (12, 2)], 12 * 52 / 141, marks=pytest.mark.long),
        ([(1, 30), (1, 40), (6, 1)], 6 * 71 / 76),
        ([(3, 40)], 1.0),
    ],
)
def test_tree_cases(levels: list[tuple[int, int]], flat_factor: float, kernel_device: torch.device) -> None:
    """With the kernels themselves, and the engine's own plans."""
    case = tree_case(tree_shape(*levels, attention=SMALL))
    timer = PretendedTimer()
    machine = replace(CARD, l2_bytes=int(case.work.bytes))
    result = measure(case, machine, timer, kernel_device)
    tree, flat = result.measurements
    assert timer.sets == [2, 2]
    check_right((tree, flat), 1e-5)
    for measurement in (tree, flat):
        assert measurement.plan is not None
        assert measurement.plan.seconds > 0
    assert tree.plan is not None
    assert flat.plan is not None
    assert flat.plan.read_factor == pytest.approx(flat_factor)
    assert flat.plan.shared_items == 0
    # Each is read once, but for a single token that several tiles read.
    assert 1 <= tree.plan.read_factor < 1.01
    assert (tree.plan.shared_items > 0) == (len(levels) > 1)


@pytest.mark.parametrize("levels", [((1, 24), (3, 9))])
def test_deterministic_trees(levels: Any, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the others: both read each token once. Plans have room for a few items, not for a thousand."""
    monkeypatch.setattr(attention_planner, "MAX_SUPERBLOCKS", 16)
    case = ordered_tree_case(tree_shape(*levels, attention=SMALL))
    measurements = measured(case, kernel_device).measurements
    check_right(measurements, 1e-5)
    assert all(measurement.plan is not None for measurement in measurements)


@pytest.mark.parametrize(("levels", "shares"), [([(1, 8192), (256, 128)], True), ([(64, 2048)], False)])
def test_what_is_measured_is_what_the_engine_plans(
    levels: list[tuple[int, int]], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine's own costs, for the card that the goals are of; kernels are left out."""
    asked: list[tuple[int, ...]] = []

    planner = attention_planner.AttentionPlanner
    plan = planner.plan_padded_decodes

    def watched(self: Any, rows: Any, seq_lens: Any) -> Any:
        asked.append((len(rows), *set(seq_lens.tolist())))
        return plan(self, rows, seq_lens)

    monkeypatch.setattr(planner, "plan_padded_decodes", watched)
    shape = tree_shape(*levels, attention=replace(SMALL, num_heads=32, num_kv_heads=8, dtype=torch.float16))
    (inputs,) = attention_inputs(shape.attention, CPU, 1, shape.tokens())
    with compiling_for(GPU(90, 132)):
        tree = tree_bench.our_decode(inputs, shape, tree=True).plan
        flat = tree_bench.our_decode(inputs, shape, tree=False).plan
    assert tree is not None
    assert flat is not None
    assert set(asked) == {(shape.attention.batch, shape.attention.length)}
    if not shares:
        assert replace(tree, seconds=0) == replace(flat, seconds=0) == PlanFigures(0, 1.0, 0)
        return
    assert flat.read_factor == pytest.approx(256 * 8320 / 40_960)
    # A tile of 128 is 32 requests times the heads of a group, so that eight read each segment.
    assert tree.shared_items % 8 == 0
    assert tree.read_factor == (8 * 8192 + 256 * 128) / shape.distinct


def tree_result(shape: str, tree: float, flat: float | None, machine: Machine = CARD) -> Result:
    """Of given times, in seconds."""
    case = case_of("tree", shape)
    reason = "it failed" if flat is None else None
    plan = PlanFigures(123.4e-6, 1.25, 8)
    return Result(
        case,
        machine,
        (
            Measurement("radixrt", 3e-3, 2 * tree, tree, plan=plan),
            Measurement(FLAT, 3e-3, flat, flat, reason, plan=replace(plan, read_factor=52, shared_items=0)),
        ),
        1,
    )


def test_table_of_trees() -> None:
    fast = tree_result("B=256 8192+128", 100e-6, 1000e-6)
    shown = printed([fast, tree_result("B=64 8192+128", 100e-6, 96e-6), tree_result("B=256 2048", 100e-6, 98e-6)])
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    percent, moved = (
        f"{100 * seconds / 100e-6:.0f}" for seconds in (fast.bound.seconds, fast.case.work.bytes / 4e12)
    )
    assert lines[0] == [
        *("B=256 8192+128", "200.0", "100.0", percent, fast.bound.limit),
        *(moved, "1.25x", "123", "3.0e-03", ""),
    ]
    flat = [line for line in lines if line[0] == FLAT]
    assert [line[-1] for line in flat] == ["10.00x", "0.96x (!)", "0.98x"]
    assert flat[0][6:8] == ["52.00x", "123"]
    assert "Tree is more than 3 % slower than flat in 1 of 3 cases." in shown
    assert "tokens that the plan's items read" in shown
    assert "(!)" not in printed([result_of("extend", "B=1 0+8192", 1e-3, 1e-3)])
    assert "…" not in shown


@pytest.mark.parametrize("group", ["same-bits", "tree"])
def test_tables_with_plans_have_errors(group: str) -> None:
    """Whole, whatever else there is to say about a tree."""
    plan = PlanFigures(9.9e-4, 99.0, 8)
    results = [
        Result(case, CARD, tuple(Measurement(c.name, 2.5e-3, 0.1, 0.09, plan=plan) for c in case.contenders), 1)
        for case in choose_cases(Options(only=(group,)))
    ]
    shown = printed(results)
    count = sum(len(result.measurements) for result in results)
    assert len(re.findall(r"│ 2\.5e-03 │", shown)) == count >= 20
    assert "…" not in shown


def test_tree_is_compared_with_what_was_timed() -> None:
    assert tree_result("B=256 2048", 1.031, 1.0).is_slower is True
    assert tree_result("B=256 2048", 1.029, 1.0).is_slower is False
    assert tree_result("B=256 2048", 1.0, None).is_slower is None
    assert result_of("extend", "B=1 0+8192", 1.0, 1.0).is_slower is None
    written = tree_result("B=256 8192+128", 2.0, 1.0).to_dict()
    assert written["is_slower"] is True
    assert written["sizes"] == {"batch": 256, "shared": 8192, "private": 128}
    assert written["measurements"][0]["plan"] == {"seconds": 123.4e-6, "read_factor": 1.25, "shared_items": 8}


def swept_trees() -> list[dict[str, Any]]:
    """As if each token took a time of its own, of the sweep of trees."""
    results = []
    for case in choose_cases(Options(only=("tree",), sweep=True)):
        seconds = case.work.bytes / 4e12, case.work.flops / 16e12
        times = (Measurement(name, 0.0, 1.0, time) for name, time in zip(("radixrt", FLAT), seconds, strict=True))
        results.append(Result(case, CARD, tuple(times), 1).to_dict())
    return results


def test_figure_of_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script reads what --json has written."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from scripts.plot_tree_attention import lines_of
    from scripts.plot_tree_attention import main as plot

    results = json.loads(json.dumps(swept_trees()))
    drawn: list[Any] = []
    savefig = Figure.savefig

    def saved(figure: Figure, *arguments: Any, **options: Any) -> None:
        drawn.extend(figure.axes)
        savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    report, picture = tmp_path / "tree.json", tmp_path / "out.png"
    report.write_text(json.dumps({"machine": {"name": "NVIDIA H200"}, "results": results[::-1]}))
    plot([str(report), str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    flat, tree = ([line for line in axes.lines if line.get_linestyle() == style] for style in ("--", "-"))
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["tree", "flat", *(f"{n:,} tokens shared" for n in (32_768, 8192, 2048, 512, 128))]
    assert [line.get_color() for line in tree] == [line.get_color() for line in flat]
    by_name = {result["shape"]: result for result in results}
    for shared, solid, dashed in zip((128, 512, 2048, 8192, 32_768), tree, flat, strict=True):
        batches = [4, 8, 16, 32, 64, 128, 256, 512] if shared > 128 else [16, 64, 256, 512]
        for i, line in enumerate((solid, dashed)):
            assert list(line.get_xdata()) == batches
            expected = [
                1e6 * by_name[f"B={batch} {shared}+128"]["measurements"][i]["graph_seconds"] for batch in batches
            ]
            assert list(line.get_ydata()) == pytest.approx(expected)
    assert "128 tokens of each request's own, on NVIDIA H200" in axes.get_title()

    # What is not timed is left out, and so are few points, and what is no sweep of trees.
    for measurement in by_name["B=4 512+128"]["measurements"]:
        measurement["eager_seconds"] = measurement["graph_seconds"] = None
    assert [batch for batch, _, _ in lines_of(results)[512]] == [8, 16, 32, 64, 128, 256, 512]
    other = result_of("extend", "B=1 0+8192", 1.0, 1.0).to_dict()
    assert lines_of([by_name["B=64 8192+128"], by_name["B=256 8192+128"], by_name["B=256 2048"], other]) == {}


def contender(name: str, result: Callable[[], Tensor], **options: Any) -> Contender[Tensor]:
    return Contender(name, lambda _: Call(result, lambda out: (out,)), **options)


def pretended_case(*contenders: Contender[Tensor], expected: Callable[[Tensor], Expected]) -> Case[Tensor]:
    return Case(
        "elementwise", "pretended", "", Work(1e9), lambda *_: [torch.zeros(1)], expected, tuple(contenders)
    )


def test_wrong_results_and_failures_are_no_times() -> None:
    right = torch.ones(3, 8)
    nan, one_row = right.clone(), right.clone()
    nan[2, 1], one_row[1] = torch.nan, 1.1

    def fails() -> Tensor:
        raise ZeroDivisionError("it\ncannot")

    case = pretended_case(
        contender("radixrt", lambda: one_row),
        contender("nan", lambda: nan),
        contender("fails", fails),
        contender("right", lambda: right),
        contender("shape", lambda: right[:2]),
        expected=lambda _: Expected([right]),
    )
    timer = PretendedTimer()
    result = measure(case, CARD, timer, CPU)
    reasons = {m.name: m.reason for m in result.measurements}
    assert reasons.pop("right") is None
    assert reasons.pop("radixrt") == "wrong: a row's relative error is 0.1"
    assert reasons.pop("nan") == "wrong: a row's relative error is nan"
    assert reasons.pop("fails") == "ZeroDivisionError: it"
    assert (reasons.pop("shape") or "").startswith("RuntimeError: ")
    assert timer.sets == [1]  # only what is right is timed
    assert all(m.eager_seconds is None for m in result.measurements if m.name != "right")


def test_every_contender_gets_inputs_of_its_own() -> None:
    def adds_one(x: Tensor) -> Call:
        return Call(lambda: x.add_(1), lambda _: (x,))

    def expected(x: Tensor) -> Expected:
        return Expected([x + 1])

    case = pretended_case(Contender("radixrt", adds_one), Contender("other", adds_one), expected=expected)
    assert [m.error for m in measure(case, CARD, PretendedTimer(), CPU).measurements] == [0.0, 0.0]


def test_a_reference_that_fails_is_said_of_everyone() -> None:
    def expected(_: Tensor) -> Expected:
        raise MemoryError("too large")

    case = pretended_case(contender("radixrt", lambda: torch.ones(1)), expected=expected)
    result = measure(case, CARD, PretendedTimer(), CPU)
    assert result.ours.reason == "no reference: MemoryError: too large"


def test_worst_error_compares_the_rows_that_the_reference_has() -> None:
    out = torch.tensor([[3.0, 4.0], [9.0, 9.0], [0.0, 5.0], [0.5, 0.0]])
    expected = Expected([torch.tensor([[3.0, 4.0], [0.0, 4.0], [0.0, 0.0]])], rows=torch.tensor([0, 2, 3]))
    assert worst_error([out], expected) == 0.5
    assert worst_error([out[:3]], replace(expected, tensors=[out[[0, 2]]], rows=torch.tensor([0, 2]))) == 0.0


# --- the command ---


def test_cases_are_chosen_by_group_and_pattern() -> None:
    def names(*only: str, **options: bool) -> list[str]:
        return [f"{case.group}/{case.name}" for case in choose_cases(Options(only=only, **options))]

    assert names("short-extend/B=[14]*", "decode/B=1 *") == [
        "decode/B=1 L=8192 scattered",
        "decode/B=1 L=8192 consecutive",
        "short-extend/B=1 32768+16",
        "short-extend/B=4 32768+16",
    ]
    everything = names()
    assert len(everything) == len(set(everything))
    swept = names(sweep=True)
    assert set(everything) < set(swept)
    assert len(swept) == len(set(swept))
    assert "extend/B=8 0+2048 D=80" in swept
    # What torch.compile makes: of the usual cases only.
    compiled = [case for case in choose_cases(Options(sweep=True)) if any(c.compiles for c in case.contenders)]
    usual = [case for case in choose_cases(Options()) if any(c.compiles for c in case.contenders)]
    assert [case.name for case in compiled] == [case.name for case in usual]


def test_command_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def fails(arguments: list[str], message: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        shown = capsys.readouterr().err
        assert re.search(r"error: .*" + message + r".*\n$", shown), shown

    fails([], "needs an NVIDIA GPU")
    fails(
        ["--only", "dekode"],
        "one of: decode, decode-fp8, tree, extend, short-extend, same-bits, backward, elementwise, sampling",
    )
    fails(["--only", "decode/B=3*"], "none of decode's: 'B=1 L=8192 scattered', ")
    fails(["--json", str(tmp_path)], "is in the way of the report")
    with pytest.raises(ParameterError, match="only is 'x'"):
        choose_cases(Options(only=("x",)))


@pytest.mark.parametrize("works", [True, False])
def test_run(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, on a card that is pretended."""
    right = torch.ones(3, 8)
    case = pretended_case(
        contender("radixrt", lambda: right if works else -right), expected=lambda _: Expected([right])
    )
    monkeypatch.setattr(bench_kernels, "choose_cases", lambda options: [case])
    monkeypatch.setattr(bench_kernels, "measure_machine", lambda timer, device: CARD)
    monkeypatch.setattr(bench_kernels, "CudaTimer", lambda seconds: PretendedTimer())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    report_file = tmp_path / "out.json"
    assert main(["--quick", "--json", str(report_file)]) == int(not works)
    shown = capsys.readouterr().out
    assert "NVIDIA H200: copies 4.00 TB/s" in shown
    written = json.loads(report_file.read_text())
    assert set(written) == {"environment", "machine", "options", "results"}
    assert written["machine"]["bandwidth"] == 4e12
    assert written["options"] == {"only": [], "sweep": False, "quick": True}
    assert (written["results"][0]["measurements"][0]["reason"] is None) == works


def test_help_has_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for group, words in GROUPS.items():
        assert re.search(rf"  {group} +{re.escape(words)}\n", shown), group
