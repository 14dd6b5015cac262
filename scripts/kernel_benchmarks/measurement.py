"""Measures cases: each contender checked against a reference, then timed eager and as a captured graph."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from radixrt.bench.report import reason_of
from scripts.kernel_benchmarks.case import MAX_SLOWER, Call, Case, Contender, Expected, PlanFigures, worst_error
from scripts.kernel_benchmarks.roofline import EXPS_PER_SM, Bound, Machine
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import gpu_of
from triton_ops.linear.e4m3_linear import torch_scaled_product

MAX_ERROR = 0.02
"""Relative error of a row beyond which a result is wrong: bf16 keeps 8 bits, a sum of products errs by more."""


@dataclass(frozen=True)
class Measurement:
    """A contender on a case.

    Attributes:
        name: of the contender.
        error: the worst row's relative error; None where it did not run.
        eager_seconds, graph_seconds: see `Timer`; None where it was not timed.
        reason: why there is no time; None where there is.
        traceback: of the exception that was the reason.
        plan: what it followed, where that is of interest.
    """

    name: str
    error: float | None = None
    eager_seconds: float | None = None
    graph_seconds: float | None = None
    reason: str | None = None
    traceback: str | None = None
    plan: PlanFigures | None = None

    @property
    def best_seconds(self) -> float | None:
        """The better of its times."""
        return min((s for s in (self.eager_seconds, self.graph_seconds) if s is not None), default=None)


@dataclass(frozen=True)
class Result:
    """A case with the measurements of its contenders, ours first.

    Attributes:
        bound: the least time on the machine.
        input_sets: that the graph went through.
        in_l2: whether these fit into twice the L2 cache: then a graph's calls may find their inputs there.
    """

    case: Case[Any]
    machine: Machine
    measurements: tuple[Measurement, ...]
    input_sets: int

    @property
    def ours(self) -> Measurement:
        return self.measurements[0]

    @property
    def bound(self) -> Bound:
        return self.case.work.bound(self.machine)

    @property
    def in_l2(self) -> bool:
        return self.input_sets * self.case.work.bytes < 2 * self.machine.l2_bytes

    @property
    def is_slower(self) -> bool | None:
        """Whether our best time exceeds the one that the case names by more than it may; None if it names none, or
        there is no time.
        """
        ours = self.ours.best_seconds
        for measurement in self.measurements:
            theirs = measurement.best_seconds
            if measurement.name == self.case.never_slower_than and theirs is not None and ours is not None:
                return ours > MAX_SLOWER * theirs
        return None

    def percent_of_bound(self, seconds: float) -> float:
        """Percent of the machine's limit."""
        return 100 * self.bound.seconds / seconds

    def percent_of_bandwidth(self, seconds: float) -> float:
        """Percent of a copy's speed at moving the case's bytes."""
        return 100 * self.case.work.bytes / (self.machine.bandwidth * seconds)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        case = self.case
        return {
            "group": case.group,
            "shape": case.shape,
            "variant": case.variant,
            "sizes": dict(case.sizes),
            "bytes": case.work.bytes,
            "flops": case.work.flops,
            "exps": case.work.exps,
            "bound_seconds": self.bound.seconds,
            "bound_by": self.bound.limit,
            "is_slower": self.is_slower,
            "input_sets": self.input_sets,
            "in_l2": self.in_l2,
            "measurements": [
                {
                    **asdict(m),
                    "percent_of_bound": None if m.best_seconds is None else self.percent_of_bound(m.best_seconds),
                }
                for m in self.measurements
            ],
        }


def measure(
    case: Case[Any], machine: Machine, timer: Timer, device: torch.device, *, compiled: bool = True
) -> Result:
    """Check and time every contender of a case; with `compiled` false, contenders of torch.compile are left
    out.
    """
    copies = copies_beyond_l2(case.work.bytes, machine.l2_bytes)
    contenders = [contender for contender in case.contenders if compiled or not contender.compiles]
    # Exceptions of any kind are reported, and the other contenders run.
    try:
        expected = case.expected(case.inputs(device, copies)[0])
    except Exception as error:
        reason, trace = f"no reference: {reason_of(error)}", traceback.format_exc()
        return Result(
            case,
            machine,
            tuple(Measurement(c.name, reason=reason, traceback=trace) for c in contenders),
            copies,
        )
    measurements = []
    for contender in contenders:
        if contender.compiles:
            torch.compiler.reset()  # otherwise it compiles for a few shapes only
        try:
            # Fresh inputs: some operations write in place, and must not find another's results.
            measurements.append(_time(contender, case.inputs(device, copies), expected, timer))
        except Exception as error:
            measurements.append(
                Measurement(contender.name, reason=reason_of(error), traceback=traceback.format_exc())
            )
    return Result(case, machine, tuple(measurements), copies)


def _time(contender: Contender[Any], inputs: Sequence[Any], expected: Expected, timer: Timer) -> Measurement:
    calls: list[Call] = [contender.prepare(one) for one in inputs]
    error = worst_error(calls[0].results(calls[0].run()), expected)
    if not error <= MAX_ERROR:  # NaN is wrong too
        return Measurement(contender.name, error, reason=f"wrong: a row's relative error is {error:.2g}")
    eager = timer.eager(calls[0].run)
    graph = timer.graph([call.run for call in calls], eager)
    return Measurement(contender.name, error, eager, graph, plan=calls[0].plan)


WARM_UP_MS = 25
GRAPH_SECONDS = 2e-3  # of work in a captured graph, so that its launch does not count
MAX_CALLS = 256  # in a captured graph
MAX_SETS = 64  # of inputs


class Timer(Protocol):
    """Seconds of one call."""

    def eager(self, call: Callable[[], object]) -> float:
        """Each call by itself, with nothing of its inputs in the L2 cache; median."""
        ...

    def graph(self, calls: Sequence[Callable[[], object]], eager_seconds: float) -> float:
        """One of `calls`, all captured in one graph, one after the other; median of many replays.

        The calls do the same on different tensors; `eager_seconds` is what one took.
        """
        ...


class CudaTimer:
    """The times on the current CUDA device, each from about `measure_seconds` of calls."""

    def __init__(self, measure_seconds: float = 0.1) -> None:
        self.measure_seconds = measure_seconds

    def eager(self, call: Callable[[], object]) -> float:
        """By Triton's do_bench: the L2 cache is overwritten before each call."""
        from triton.testing import do_bench  # Triton exists for Linux only

        milliseconds = do_bench(
            call, warmup=WARM_UP_MS, rep=round(1e3 * self.measure_seconds), return_mode="median"
        )
        return float(milliseconds) / 1e3

    def graph(self, calls: Sequence[Callable[[], object]], eager_seconds: float) -> float:
        """A graph holds whole rounds of the calls, about GRAPH_SECONDS in all."""
        rounds = max(1, round(GRAPH_SECONDS / (eager_seconds * len(calls))))
        rounds = min(rounds, max(1, MAX_CALLS // len(calls)))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # warm up
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        num_calls = rounds * len(calls)
        replays = min(200, max(10, math.ceil(self.measure_seconds / (eager_seconds * num_calls))))
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(replays):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            graph.replay()
            ended.record()
            times.append((began, ended))
        torch.cuda.synchronize()
        milliseconds: float = median(began.elapsed_time(ended) for began, ended in times)
        return milliseconds / 1e3 / num_calls


def measure_machine(timer: Timer, device: torch.device) -> Machine:
    """Measure this GPU: a copy of 1 GiB, within its memory and both ways to pinned host memory, and products of
    8192 x 8192 matrices in bf16 and, on Hopper, in e4m3.
    """
    source = torch.zeros(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = timer.eager(lambda: target.copy_(source))
    host = torch.zeros(2**30, dtype=torch.uint8, device="cpu", pin_memory=True)
    to_device_seconds = timer.eager(lambda: target.copy_(host, non_blocking=True))
    to_host_seconds = timer.eager(lambda: host.copy_(source, non_blocking=True))
    matrices = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device=device)

    def product() -> Tensor:
        return matrices[0] @ matrices[1]

    product_seconds = timer.eager(product)
    properties = torch.cuda.get_device_properties(device)
    e4m3_flops = None
    if gpu_of(device).has_wgmma:
        codes, scale = matrices.to(E4M3), torch.ones(8192, device=device)
        given = codes[0], scale.unsqueeze(1), codes[1], scale, None, torch.bfloat16
        e4m3_flops = 2 * 8192**3 / timer.eager(lambda: torch_scaled_product(*given, fast_sums=True))
    return Machine(
        name=properties.name,
        bandwidth=2 * 2**30 / copy_seconds,
        flops=2 * 8192**3 / product_seconds,
        exps=EXPS_PER_SM * properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        host_to_device=2**30 / to_device_seconds,
        device_to_host=2**30 / to_host_seconds,
        e4m3_flops=e4m3_flops,
    )


def copies_beyond_l2(num_bytes: float, l2_bytes: int) -> int:
    """The number of input sets with which a graph finds none in L2 when its turn comes: twice the cache, at most
    MAX_SETS.
    """
    return min(MAX_SETS, max(1, math.ceil(2 * l2_bytes / num_bytes)))
