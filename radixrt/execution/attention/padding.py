"""Padded plans: of sizes that do not depend on what they read, so that a captured graph serves any of them.

Padding reads nothing: items of no tokens, shared items without rows, partial results that no row merges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from radixrt.execution.staging import padded
from triton_ops.attention.plan import AttentionPlan, ExtendPlan, Int32Array, SharingPlan


@dataclass(frozen=True)
class PlanCapacity:
    """What a padded plan has room for; its query rows are given.

    Attributes:
        num_items: of requests' own.
        num_partials: partial results of all items.
        merges: rows may be merged from partial results by a kernel of its own.
        num_shared_items: None: nothing is shared.
    """

    num_items: int
    num_partials: int
    merges: bool
    num_shared_items: int | None = None


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
