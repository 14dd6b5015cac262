"""Measuring a case: every contender is checked first, then timed."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from radixrt.bench.kernels.case import (
    MAX_SLOWDOWN,
    Call,
    Case,
    Contender,
    Expected,
    PlanFigures,
    worst_error,
)
from radixrt.bench.kernels.goals import published_times
from radixrt.bench.kernels.roofline import Bound, Machine
from radixrt.bench.kernels.timing import Timer, copies_beyond_l2
from radixrt.bench.report import reason_of

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
    """A case with what its contenders did, ours first.

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
    def goal_seconds(self) -> float | None:
        goal = self.case.goal
        return None if goal is None else goal.limit(self.case.work, self.machine)

    @property
    def verdict(self) -> str:
        """Of our best time: see `Goal.verdict`; "" without a goal or a time."""
        goal, seconds = self.case.goal, self.ours.best_seconds
        return "" if goal is None or seconds is None else goal.verdict(seconds, self.case.work, self.machine)

    @property
    def is_slower(self) -> bool | None:
        """Whether our best time exceeds the one that the case names by more than it may; None if it names none, or
        there is no time.
        """
        ours = self.ours.best_seconds
        for measurement in self.measurements:
            theirs = measurement.best_seconds
            if measurement.name == self.case.never_slower_than and theirs is not None and ours is not None:
                return ours > MAX_SLOWDOWN * theirs
        return None

    def percent_of_bound(self, seconds: float) -> float:
        """100 is as fast as the machine can be."""
        return 100 * self.bound.seconds / seconds

    def percent_of_bandwidth(self, seconds: float) -> float:
        """100 moves the case's bytes as fast as a copy does."""
        return 100 * self.case.work.bytes / (self.machine.bandwidth * seconds)

    def to_dict(self) -> dict[str, Any]:
        """Of JSON's types."""
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
            "goal_seconds": self.goal_seconds,
            "verdict": self.verdict,
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
            "published": [
                {"name": p.name, "eager_seconds": p.seconds}
                for p in published_times(case.group, case.shape, self.machine)
            ],
        }


def measure(
    case: Case[Any], machine: Machine, timer: Timer, device: torch.device, *, compiled: bool = True
) -> Result:
    """Check and time every contender of a case; with `compiled` false, those that torch.compile makes are left
    out.
    """
    copies = copies_beyond_l2(case.work.bytes, machine.l2_bytes)
    contenders = [contender for contender in case.contenders if compiled or not contender.compiles]
    # Exceptions of any kind: the report says which, and the others go on.
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
            torch.compiler.reset()  # it compiles anew for a few shapes only
        try:
            # The same inputs made anew: some operations write in place, and one must not find another's results.
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
