"""PassPlans: the attention plans of one pass, a plan for each window among the model's layers.

Padded plans are of sizes that do not depend on what they read, so that a captured graph serves any of them.
Padding reads nothing: items of no tokens, shared items without rows, partial results that no row merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from radixrt.execution.staging import padded
from triton_ops.attention.plan import Array, AttentionPlan, ExtendPlan, Int32Array, Other, SharingPlan

Plan = TypeVar("Plan", bound=SharingPlan[Int32Array])
Window: TypeAlias = "int | None"  # positions that a layer sees; None: all


@dataclass(frozen=True)
class PlanShape:
    """The kernels that the plans of decodes need. With its sizes it decides the lengths of a padded plan."""

    cuts: bool  # long contexts, or tails of them, are several items, whose results a kernel of its own merges
    shares: bool  # what decodes have in common is read once for all of them


WHOLE = PlanShape(cuts=False, shares=False)
CUT = PlanShape(cuts=True, shares=False)


@dataclass(frozen=True)
class PassPlans(Generic[Array]):
    """The plans of a pass by window, on the host or the device. Those of the references have none of extends."""

    decode: Mapping[Window, AttentionPlan[Array]]
    extend: Mapping[Window, ExtendPlan[Array]] = field(default_factory=dict)
    num_passes: int | None = None  # of growing decodes that the plans serve, at most; None: any number

    @property
    def shape(self: PassPlans[Int32Array]) -> PlanShape:
        """That of the decodes' plans."""
        plans = self.decode.values()
        cuts = any(len(plan.row_partial_starts) for plan in plans)
        return PlanShape(cuts, shares=any(len(plan.shared_lens) for plan in plans))

    def arrays(self) -> tuple[Array, ...]:
        """All arrays, in an order that depends on the windows alone."""
        plans = (*self.decode.values(), *self.extend.values())
        return tuple(array for plan in plans for array in plan.arrays())

    def with_arrays(self, arrays: Iterable[Other]) -> PassPlans[Other]:
        """These plans with others in place of `arrays()`: copies on the device, or places in a buffer."""
        left = iter(arrays)
        decode = {window: plan.with_arrays(left) for window, plan in self.decode.items()}
        return PassPlans(decode, {window: plan.with_arrays(left) for window, plan in self.extend.items()})

    def numbered(self) -> dict[str, Array]:
        """`arrays()` by names that number them, for a layout that has names."""
        return {f"plan {number}": array for number, array in enumerate(self.arrays())}

    def grow(self: PassPlans[Int32Array], seq_lens: Int32Array) -> None:
        """Update the decodes' plans, in place, to the same requests with other lengths `[B]`, none shorter.

        The item that reads a request's last position grows. With a window, items begin where they did when the
        plan was made; attention itself leaves out the positions that the window has passed. The arrays must be
        places in a buffer: others may be the caller's own.
        """
        for plan, (items, starts, queries) in zip(self.decode.values(), self._last_items, strict=True):
            plan.seq_lens[: len(seq_lens)] = seq_lens
            plan.item_lens[items] = seq_lens[queries] - starts

    @cached_property
    def _last_items(self: PassPlans[Int32Array]) -> list[tuple[Int32Array, ...]]:
        """Of each decodes' plan the items that read last positions, where they start, and whose they are."""
        found: list[tuple[Int32Array, ...]] = []
        for plan in self.decode.values():
            ends = plan.item_starts + plan.item_lens == plan.seq_lens[plan.item_query_starts]
            items = np.flatnonzero(ends & (plan.item_lens > 0)).astype(np.int32)
            found.append((items, plan.item_starts[items], plan.item_query_starts[items]))
        return found


class Capacity(NamedTuple):
    """How many items a plan has room for, requests' own or shared ones, and how many partial results of these."""

    num_items: int = 0
    num_partials: int = 0


def padded_plan(plan: Plan, num_rows: int, own: Capacity, shared: Capacity, **fillers: ArrayLike) -> Plan:
    """A plan of up to `num_rows` query rows in room for as much as the capacities say.

    Rows are merged where own items have partial results, and share where there are shared items. Arrays are filled
    up with `fillers`, by name, or with 0.
    """
    merges, shares = own.num_partials > 0, shared.num_items > 0
    num_items = {"item": own.num_items, "shared": shared.num_items}
    lengths = {
        "shared_queries": shares * num_rows,
        "row_partial_starts": merges * (num_rows + 1),
        "row_partials": own.num_partials + shared.num_partials,
        "seq_lens": max(len(plan.seq_lens), shares * num_rows),
        "tail_partial_starts": shares * (num_rows + 1),
    }
    if not plan.superblock:
        lengths |= dict.fromkeys(("item_sources", "shared_sources", "shared_levels"), 0)
    fillers |= {
        "row_partial_starts": plan.row_partial_starts.max(initial=0),
        "item_sources": -1,
        "shared_sources": -1,
    }
    arrays: dict[str, Any] = {}
    for name, array in vars(plan).items():
        length = lengths[name] if name in lengths else num_items.get(name.partition("_")[0])
        if length is not None and length != len(array):
            arrays[name] = padded(array, length, fillers.get(name, 0))
    return replace(plan, **arrays)
