"""PassPlans: the attention plans of one pass on the host, a plan for each window among the model's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from torch import Tensor

from triton_ops.attention.plan import AttentionPlan, ExtendPlan, Int32Array

Window: TypeAlias = "int | None"  # positions that a layer sees; None: all


@dataclass(frozen=True)
class PlanShape:
    """The kernels that the plans of decodes need. With its sizes it decides how long a padded plan's arrays are.

    Attributes:
        cuts: long contexts, or tails of them, are several items, whose results a kernel of its own merges.
        shares: what decodes have in common is read once for all of them.
    """

    cuts: bool
    shares: bool


WHOLE = PlanShape(cuts=False, shares=False)
CUT = PlanShape(cuts=True, shares=False)
TREE = PlanShape(cuts=False, shares=True)
CUT_TREE = PlanShape(cuts=True, shares=True)


@dataclass(frozen=True)
class PassPlans:
    """The host plans of a pass by window. `extend` is empty where there are no extends, or the references run."""

    decode: Mapping[Window, AttentionPlan[Int32Array]]
    extend: Mapping[Window, ExtendPlan[Int32Array]] = field(default_factory=dict)

    @property
    def shape(self) -> PlanShape:
        """That of the decodes' plans."""
        plans = self.decode.values()
        cuts = any(len(plan.row_partial_starts) for plan in plans)
        return PlanShape(cuts, shares=any(len(plan.shared_lens) for plan in plans))

    def arrays(self) -> tuple[Int32Array, ...]:
        """All arrays, in an order that depends on the windows alone; what is to be copied to the device."""
        plans = (*self.decode.values(), *self.extend.values())
        return tuple(array for plan in plans for array in plan.arrays())

    def numbered(self) -> dict[str, Int32Array]:
        """`arrays()` by names that number them, for those who pack them with others."""
        return {f"plan {number}": array for number, array in enumerate(self.arrays())}

    def with_arrays(self, arrays: Iterable[Int32Array]) -> PassPlans:
        """These plans with other arrays in place of `arrays()`, such as their places in a buffer."""
        left = iter(arrays)
        decode = {window: plan.with_arrays(left) for window, plan in self.decode.items()}
        return PassPlans(decode, {window: plan.with_arrays(left) for window, plan in self.extend.items()})

    def on_device(self, tensors: Iterable[Tensor]) -> tuple[dict[Window, AttentionPlan], dict[Window, ExtendPlan]]:
        """The plans of decodes and of extends, of copies of `arrays()`."""
        left = iter(tensors)
        decode = {window: plan.with_arrays(left) for window, plan in self.decode.items()}
        return decode, {window: plan.with_arrays(left) for window, plan in self.extend.items()}

    def grow(self, seq_lens: Int32Array) -> None:
        """Update the decodes' plans, in place, to the same requests with other lengths `[B]`, none shorter.

        The item of each request that reads its last position grows. With a window, items begin where they did when
        the plan was made; attention itself leaves out the positions that the window has passed.
        """
        for items in self._last_items:
            items.grow(seq_lens)

    @cached_property
    def _last_items(self) -> tuple[_LastItems, ...]:
        return tuple(_LastItems(plan) for plan in self.decode.values())


class _LastItems:
    """The items of a plan that read the last positions of requests."""

    def __init__(self, plan: AttentionPlan[Int32Array]) -> None:
        self._plan = plan
        ends = plan.item_starts + plan.item_lens == plan.seq_lens[plan.item_query_starts]
        self._items = np.flatnonzero(ends & (plan.item_lens > 0))
        self._starts, self._queries = plan.item_starts[self._items], plan.item_query_starts[self._items]

    def grow(self, seq_lens: Int32Array) -> None:
        self._plan.seq_lens[: len(seq_lens)] = seq_lens
        self._plan.item_lens[self._items] = seq_lens[self._queries] - self._starts
