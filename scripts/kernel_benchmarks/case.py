"""A case: an operation at one shape, with its contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from scripts.kernel_benchmarks.roofline import Work

Inputs = TypeVar("Inputs")

MAX_SLOWER = 1.03
"""The multiple of the time of `Case.never_slower_than` that ours may take."""


@dataclass(frozen=True)
class Source:
    """Where the tensors of a case come from: a generator, on its device. Without one they are memory of the CPU
    that nobody has written: enough to compile kernels for them.
    """

    generator: torch.Generator | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.generator is None else self.generator.device

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Numbers of a standard normal distribution."""
        if self.generator is None:
            return torch.empty(shape, dtype=dtype)
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self.generator)

    def bytes(self, *shape: int) -> Tensor:
        """Any uint8."""
        if self.generator is None:
            return torch.empty(shape, dtype=torch.uint8)
        return torch.randint(256, shape, dtype=torch.uint8, device=self.device, generator=self.generator)

    def permutation(self, count: int) -> Tensor:
        """The numbers below `count`, int32."""
        return torch.randperm(count, device=self.device, generator=self.generator).int()


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
        group, shape, variant: name it.
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


def seeded(make: Callable[[Source], Inputs]) -> Callable[[torch.device, int], Sequence[Inputs]]:
    """`Case.inputs` that makes one set after the other."""

    def sets(device: torch.device, copies: int) -> Sequence[Inputs]:
        source = Source(torch.Generator(device).manual_seed(0))
        return [make(source) for _ in range(copies)]

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
