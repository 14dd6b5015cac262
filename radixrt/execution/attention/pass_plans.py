"""PassPlans: the attention plans of one pass, a plan for each window among the model's layers.

Padded plans are of sizes that do not depend on what they read, so that a captured graph serves any of them.
Padding reads nothing: items of no tokens, shared items without rows, partial results that no row merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from radixrt.execution.staging import padded
from triton_ops.attention.plan import Array, AttentionPlan, ExtendPlan, Int32Array, Other, SharingPlan

Window: TypeAlias = "int | None"  # positions that a layer sees; None: all


@dataclass(frozen=True)
class PlanShape:
    """The kernels that the plans of decodes need. With its sizes it decides the lengths of a padded plan."""

    cuts: bool  # long contexts, or tails of them, are several items, whose results a kernel of its own merges
    shares: bool  # what decodes have in common is read once for all of them


WHOLE = PlanShape(cuts=False, shares=False)
CUT = PlanShape(cuts=True, shares=False)
TREE = PlanShape(cuts=False, shares=True)
CUT_TREE = PlanShape(cuts=True, shares=True)


@dataclass(frozen=True)
class PassPlans(Generic[Array]):
    """The plans of a pass by window, on the host or the device. Those of the references have none of extends."""

    decode: Mapping[Window, AttentionPlan[Array]]
    extend: Mapping[Window, ExtendPlan[Array]] = field(default_factory=dict)

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


@dataclass(frozen=True)
class PlanCapacity:
    """What a padded plan has room for; its query rows are given."""

    num_items: int  # of requests' own
    num_partials: int  # partial results of all items
    merges: bool  # rows may be merged from partial results by a kernel of its own
    num_shared_items: int | None = None  # None: nothing is shared


def _names(plan: type[SharingPlan[Int32Array]], group: str) -> list[str]:
    return [field.name for field in fields(plan) if field.name.startswith(group)]


DECODE_ITEMS, EXTEND_ITEMS = _names(AttentionPlan, "item_"), _names(ExtendPlan, "item_")
SHARED_ITEMS = [name for name in _names(SharingPlan, "shared_") if name != "shared_queries"]


def padded_decodes(plan: AttentionPlan[Int32Array], capacity: PlanCapacity) -> AttentionPlan[Int32Array]:
    """The plan of R rows in room for as much as the capacity says."""
    num_rows = len(plan.seq_lens)
    arrays = _padded(plan, DECODE_ITEMS, capacity.num_items)
    if capacity.merges:
        arrays |= _padded(plan, ["row_partial_starts"], num_rows + 1)
    if capacity.num_shared_items is not None:
        arrays |= _padded(plan, SHARED_ITEMS, capacity.num_shared_items)
        arrays |= _padded(plan, ["shared_queries"], num_rows)
        arrays |= _padded(plan, ["tail_partial_starts"], num_rows + 1)
    return replace(plan, **arrays, row_partials=padded(plan.row_partials, capacity.num_partials))


def padded_extends(
    plan: ExtendPlan[Int32Array], capacity: PlanCapacity, num_tokens: int, num_extends: int, num_padding: int
) -> ExtendPlan[Int32Array]:
    """The plan in room for as much as the capacity says, of `num_tokens` rows. The last `num_padding` of them
    belong to the last of `num_extends` extends, which reads nothing and gets results of zero.
    """
    # Tiles of zeros for the padding; after them items of no tokens, whose tiles begin beyond its end.
    begins = np.arange(0, num_padding, plan.tile_tokens, dtype=np.int32)
    num_empty = capacity.num_items - len(plan.item_lens) - len(begins)
    begins = np.append(begins, np.full(num_empty, num_tokens, np.int32))
    arrays = _padded(plan, EXTEND_ITEMS, capacity.num_items)
    for name, filler in (("item_requests", num_extends - 1), ("item_query_starts", begins), ("item_partials", -1)):
        arrays |= _padded(plan, [name], capacity.num_items, filler)
    if capacity.num_shared_items is not None:
        arrays |= _padded(plan, SHARED_ITEMS, capacity.num_shared_items)
        arrays |= _padded(plan, ["shared_queries", "seq_lens"], num_tokens)
    if capacity.merges:
        arrays |= _padded(plan, ["row_partials"], capacity.num_partials)
        last = plan.row_partial_starts[-1] if len(plan.row_partial_starts) else 0
        arrays |= _padded(plan, ["row_partial_starts"], num_tokens + 1, last)
    return replace(plan, **arrays)


def _padded(
    plan: SharingPlan[Int32Array], names: Iterable[str], length: int, filler: ArrayLike = 0
) -> dict[str, Any]:
    return {name: padded(getattr(plan, name), length, filler) for name in names}
