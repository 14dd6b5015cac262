"""The numbers of captured decode passes: all that a pass is told, packed as it is sent to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layers.input_metadata import InputMetadata, Int32Array
from radixrt.execution.attention.pass_plans import PassPlans, PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
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
    """Numbers of passes of `size` decodes, the last of which pad, with plans of one shape.

    Attributes:
        size: of the passes.
        host: what `InputMetadata` is made of, `[size]` each, by field name; parts of `words`.
        arrays: all arrays by name, parts of `words`; those of the plans come last.
        words: int32, what is sent.
        plan_shape: of the plans.
        plans: those that the form was begun with, parts of `words`.
    """

    def __init__(self, size: int, padding_row: int, plan_shape: PlanShape, plans: PassPlans[Int32Array]) -> None:
        zeros = np.zeros(size, np.int32)
        host = InputMetadata.host_arrays(zeros + np.int32(padding_row), zeros + 1, zeros, zeros)
        self.size = size
        self.plan_shape = plan_shape
        self.words, self.arrays = packed(
            {
                "input_ids": zeros,
                **host,
                **{name: np.zeros(size, dtype) for name, dtype in DRAW_DTYPES.items()},
                **plans.numbered(),
            }
        )
        self.host: dict[str, Int32Array] = {name: self.arrays[name] for name in host}
        self.plans = plans.with_arrays(self.arrays[name] for name in plans.numbered())
        self._idle = self.words.copy()

    def begin(self, rows: Int32Array, plans: PassPlans[Int32Array]) -> None:
        """Fill in what does not change while the requests `rows` `[B]` decode by these plans."""
        self.words[:] = self._idle
        self.arrays["req_pool_indices"][: len(rows)] = rows
        for place, array in zip(self.plans.arrays(), plans.arrays(), strict=True):
            place[:] = array
        self.plans = replace(self.plans)  # other items grow

    def update(self, batch: Pass, features: Features, draws: Mapping[str, NDArray[Any]]) -> None:
        """Fill in what is new in a pass of the requests that it was begun for; of draws what the features name."""
        arrays, count = self.arrays, len(batch.req_pool_indices)
        seq_lens = arrays["seq_lens"]
        seq_lens[:count] = batch.seq_lens
        arrays["prefix_lens"][:count] = batch.prefix_lens
        arrays["positions"][:count] = batch.prefix_lens
        arrays["out_cache_loc"][:count] = batch.out_cache_loc
        arrays["input_ids"][:count] = batch.input_ids
        np.cumsum(seq_lens, out=arrays["start_loc"])
        arrays["start_loc"] -= seq_lens
        for name in features.array_names:
            arrays[name][:count] = draws[name]
        self.plans.grow(batch.seq_lens)


class DecodeNumbers:
    """Numbers of one pass after another: what is the same of two passes is not computed again.

    Args:
        planner: plans the decodes.
        padding_row: of decodes that belong to no request.
    """

    def __init__(self, planner: AttentionPlanner, padding_row: int) -> None:
        self._planner = planner
        self._padding_row = padding_row
        self._forms: dict[tuple[int, PlanShape], DecodeForm] = {}
        self._form: DecodeForm | None = None
        self._rows: Int32Array | None = None  # the very array of the pass before
        self._steps_left = 0  # that the plan serves

    def plan_shapes(self, size: int) -> tuple[PlanShape, ...]:
        """Those of the plans of passes of `size` decodes."""
        return self._planner.decode_shapes(size)

    def idle(self, size: int, plan_shape: PlanShape) -> DecodeForm:
        """The form of passes of `size` decodes with plans of that shape, filled in for padded ones."""
        zeros = np.zeros(size, np.int32)
        plans = self._planner.plan_padded_decodes(zeros, zeros, [plan_shape])
        form = DecodeForm(size, self._padding_row, plan_shape, plans)
        self._forms[size, plan_shape] = form
        return form

    def of(self, batch: Pass, size: int, features: Features, draws: Mapping[str, NDArray[Any]]) -> DecodeForm:
        """The form, filled in for a pass of B decodes, padded to `size`: it is valid until the next call.

        `draws` has the arrays that the features name, each `[B]`. Raises KeyError where there has been no `idle`
        form of the size.
        """
        rows = batch.req_pool_indices
        if self._form is None or rows is not self._rows or not self._steps_left:
            plans = self._planner.plan_padded_decodes(padded(rows, size), padded(batch.seq_lens, size))
            form = self._forms[size, plans.shape]
            form.begin(rows, plans)
            self._form, self._rows, self._steps_left = form, rows, PLAN_STEPS
        self._form.update(batch, features, draws)
        self._steps_left -= 1
        return self._form
