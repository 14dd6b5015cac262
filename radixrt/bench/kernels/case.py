"""A case: an operation at one shape, with its contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from radixrt.bench.kernels.goals import Goal, goal_of
from radixrt.bench.kernels.roofline import Work

Inputs = TypeVar("Inputs")


MAX_SLOWER = 1.03
"""The multiple of the time of `Case.never_slower_than` that ours may take."""


@dataclass(frozen=True)
class PlanFigures:
    """Figures of a call's plan.

    Attributes:
        seconds: that the host takes to make it.
        read_factor: tokens that its items read, over the distinct ones: 1 where each is read once.
        shared_items: of those, how many are read for several requests at once; 0: the plan is flat.
    """

    seconds: float
    read_factor: float
    shared_items: int


def tensors(out: Any) -> Sequence[Tensor]:
    """What an operation returns, one tensor or several."""
    return (out,) if isinstance(out, Tensor) else tuple(out)


@dataclass(frozen=True)
class Call:
    """A timed call: `run`. `results` gives the tensors to compare from the value that `run` returned. `plan` has
    figures of its plan, if it follows one.
    """

    run: Callable[[], object]
    results: Callable[[Any], Sequence[Tensor]] = tensors
    plan: PlanFigures | None = None


@dataclass(frozen=True)
class Expected:
    """Results of a reference for some `rows` of the first dimension; None: for all."""

    tensors: Sequence[Tensor]
    rows: Tensor | None = None


@dataclass(frozen=True)
class Contender(Generic[Inputs]):
    """An implementation. `prepare` is not timed; it raises if the implementation cannot run.

    `compiles`: whether torch.compile makes it, which takes seconds.
    """

    name: str
    prepare: Callable[[Inputs], Call]
    compiles: bool = False


@dataclass(frozen=True)
class Case(Generic[Inputs]):
    """An operation at one shape.

    Attributes:
        group, shape, variant: name it; goals belong to a group and a shape.
        work: the minimum work.
        inputs: makes n sets of inputs that share no memory that is read, the same each time.
        expected: the reference's results for a set of inputs.
        contenders: our kernel first.
        never_slower_than: the contender that ours may exceed in time by MAX_SLOWER at most, or None.
        sizes: the numbers of the shape, by name, for the axes of a plot; empty: in no plot.
    """

    group: str
    shape: str
    variant: str
    work: Work
    inputs: Callable[[torch.device, int], Sequence[Inputs]]
    expected: Callable[[Inputs], Expected]
    contenders: tuple[Contender[Inputs], ...]
    never_slower_than: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.shape} {self.variant}".strip()

    @property
    def goal(self) -> Goal | None:
        return goal_of(self.group, self.shape)


def seeded(make: Callable[[torch.Generator], Inputs]) -> Callable[[torch.device, int], Sequence[Inputs]]:
    """`Case.inputs` that makes one set after the other, on the generator's device."""

    def sets(device: torch.device, copies: int) -> Sequence[Inputs]:
        generator = torch.Generator(device).manual_seed(0)
        return [make(generator) for _ in range(copies)]

    return sets


def worst_error(results: Sequence[Tensor], expected: Expected) -> float:
    """The greatest |result - expected| / |expected| of a row, the last dimension, in the Euclidean norm; NaN where
    there is one. A row of zeros in the reference counts its absolute error.
    """
    worst = []
    for result, reference in zip(results, expected.tensors, strict=True):
        chosen = (result if expected.rows is None else result[expected.rows]).float()
        size = reference.float().norm(dim=-1)
        error = (chosen - reference.float()).norm(dim=-1) / size.masked_fill(size == 0, 1.0)
        worst.append(error.amax())  # keeps NaN
    return float(torch.stack(worst).amax())
