"""The numbers of captured decode passes: all that a pass is told, packed as it is sent to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layers.input_metadata import InputMetadata, Int32Array
from radixrt.execution.attention.planner import MERGES_BELOW, AttentionPlanner, PassPlans, PlanKind
from radixrt.execution.staging import packed, padded
from radixrt.schedule.passes import Features, Pass

DRAW_DTYPES: Mapping[str, type[np.generic]] = {
    "temperatures": np.float32,
    "seeds": np.int64,
    "sample_indices": np.int32,
    "draw_positions": np.int32,
    "top_ks": np.int32,
    "top_ps": np.float32,
    "min_ps": np.float32,
}
PLAN_STEPS = 64  # passes that a plan serves at most: it stays exact as contexts grow, but its balance ages


class DecodeForm:
    """Numbers of passes of `size` decodes, the last of which pad, with plans of one kind.

    Attributes:
        size: of the passes.
        host: what `InputMetadata` is made of, `[size]` each, by field name; parts of `words`.
        arrays: all arrays by name, parts of `words`; those of the plans come last.
        words: int32, what is sent.
        kind: of the plans.
        plans: those of a pass of padded decodes alone; of their arrays nothing but the shapes has a meaning.
    """

    def __init__(self, size: int, padding_row: int, kind: PlanKind, plans: PassPlans) -> None:
        zeros = np.zeros(size, np.int32)
        host = InputMetadata.host_arrays(zeros + np.int32(padding_row), zeros + 1, zeros, zeros)
        self.size = size
        self.kind = kind
        self.plans = plans
        self.words, self.arrays = packed(
            {
                "input_ids": zeros,
                **host,
                **{name: np.zeros(size, dtype) for name, dtype in DRAW_DTYPES.items()},
                **plans.arrays,
            }
        )
        self.host: dict[str, Int32Array] = {name: self.arrays[name] for name in host}
        self._idle = self.words.copy()
        self._growing: list[_Growing] = []

    def begin(self, rows: Int32Array, plans: PassPlans) -> None:
        """Fill in what does not change while the requests `rows` `[B]` decode by these plans."""
        self.words[:] = self._idle
        self.arrays["req_pool_indices"][: len(rows)] = rows
        for name, array in plans.arrays.items():
            self.arrays[name][:] = array
        self._growing = [_Growing(self.arrays, f"decode {window} ") for window in plans.windows]

    def update(self, batch: Pass, features: Features, draws: Mapping[str, NDArray[Any]]) -> None:
        """Fill in what is new in a pass of the requests that it was begun for; of draws what the features name."""
        arrays, count = self.arrays, len(batch.req_pool_indices)
        seq_lens = arrays["seq_lens"]
        seq_lens[:count] = batch.seq_lens
        arrays["prefix_lens"][:count] = batch.prefix_lens
        arrays["positions"][:count] = batch.prefix_lens
        arrays["out_cache_loc"][:count] = batch.out_cache_loc
        arrays["input_ids"][:count] = batch.input_ids
        for name in features.array_names:
            arrays[name][:count] = draws[name]
        for growing in self._growing:
            growing.update(batch.seq_lens)


class _Growing:
    """What grows in a plan as its requests do: the item of each that reads its last position.

    With a window, items begin where it did when the plan was made; attention itself leaves out what it has passed.
    """

    def __init__(self, arrays: Mapping[str, Int32Array], prefix: str) -> None:
        self._seq_lens, self._item_lens = arrays[prefix + "seq_lens"], arrays[prefix + "item_lens"]
        starts, queries = arrays[prefix + "item_starts"], arrays[prefix + "item_query_starts"]
        ends = (starts + self._item_lens == self._seq_lens[queries]) & (self._item_lens > 0)
        self._items = np.flatnonzero(ends)
        self._starts, self._queries = starts[self._items], queries[self._items]

    def update(self, seq_lens: Int32Array) -> None:
        """To requests that are so long `[B]`."""
        self._seq_lens[: len(seq_lens)] = seq_lens
        self._item_lens[self._items] = seq_lens[self._queries] - self._starts


class DecodeNumbers:
    """Numbers of one pass after another: what is the same of two passes is not computed again.

    Args:
        planner: plans the decodes.
        padding_row: of decodes that belong to no request.
    """

    def __init__(self, planner: AttentionPlanner, padding_row: int) -> None:
        self._planner = planner
        self._padding_row = padding_row
        self._forms: dict[tuple[int, PlanKind], DecodeForm] = {}
        self._form: DecodeForm | None = None
        self._rows: Int32Array | None = None  # the very array of the pass before
        self._steps_left = 0  # that the plan serves

    def kinds(self, size: int) -> tuple[PlanKind, ...]:
        """Those of the plans of passes of `size` decodes: both cut and of trees are those that are cut anyway."""
        least, both = _least(size), PlanKind.CUT | PlanKind.TREE
        return tuple(kind for kind in self._planner.kinds if least in kind and (kind != both or least))

    def idle(self, size: int, kind: PlanKind) -> DecodeForm:
        """The form of passes of `size` decodes with plans of that kind, filled in for padded ones."""
        zeros = np.zeros(size, np.int32)
        form = DecodeForm(size, self._padding_row, kind, self._planner.plan_padded(zeros, zeros, least=kind))
        self._forms[size, kind] = form
        return form

    def of(self, batch: Pass, size: int, features: Features, draws: Mapping[str, NDArray[Any]]) -> DecodeForm:
        """The form, filled in for a pass of B decodes, padded to `size`: it is valid until the next call.

        `draws` has the arrays that the features name, each `[B]`. Raises KeyError where there has been no `idle`
        form of the size.
        """
        rows = batch.req_pool_indices
        if self._form is None or rows is not self._rows or not self._steps_left:
            plans = self._planner.plan_padded(padded(rows, size), padded(batch.seq_lens, size), least=_least(size))
            form = self._forms[size, plans.kind]
            form.begin(rows, plans)
            self._form, self._rows, self._steps_left = form, rows, PLAN_STEPS
        self._form.update(batch, features, draws)
        self._steps_left -= 1
        return self._form


def _least(size: int) -> PlanKind:
    """What plans of `size` decodes are of at least."""
    return PlanKind.CUT if size < MERGES_BELOW else PlanKind.WHOLE
