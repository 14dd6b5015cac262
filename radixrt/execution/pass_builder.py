"""The host half of a pass: from a Pass to the words that the device is sent."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layers.input_metadata import InputMetadata, Int32Array
from radixrt.execution.attention.pass_plans import PassPlans, PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.graphs.ladder import PassShape
from radixrt.execution.packed_pass import PackedPass, PassKey
from radixrt.execution.staging import Layout, packed, padded
from radixrt.schedule.passes import NO_ROWS, Pass

Arrays = dict[str, NDArray[Any]]

DRAW_DTYPES: Mapping[str, type[np.generic]] = {
    "temperatures": np.float32,
    "seeds": np.int64,
    "sample_indices": np.int32,
    "draw_positions": np.int32,
    "top_ks": np.int32,
    "top_ps": np.float32,
    "min_ps": np.float32,
}
MAX_PLAN_PASSES = 64  # that a plan of decodes serves: it stays exact as contexts grow, but its balance ages


class PassBuilder:
    """Decides how each pass is computed, pads it, plans its attention, and packs all that it is told.

    Padding belongs to no request: it reads nothing, writes its KV to slot 0 and its slots to `padding_row`.

    Args:
        planner: plans attention.
        shapes: of passes that may be captured, of decodes and of others, each ascending.
        padding_row: of `req_to_token`.
        max_plan_passes: decodes of the same requests that a plan serves.
    """

    def __init__(
        self,
        planner: AttentionPlanner,
        shapes: list[PassShape],
        padding_row: int,
        max_plan_passes: int = MAX_PLAN_PASSES,
    ) -> None:
        self._planner, self._shapes = planner, shapes
        self._padding_row, self._max_plan_passes = padding_row, max_plan_passes
        # Shapes of which there are idle passes, ascending: others are not captured. Of decodes also the sizes.
        self._decodes: list[PassShape] = []
        self._sizes: list[int] = []
        self._extends: list[PassShape] = []
        self._inputs: dict[PassKey, Layout] = {}
        self._decode_words: dict[PassKey, _DecodeWords] = {}
        # Of the captured decode before: its words, the very array of its rows, passes that its plan still serves.
        self._current: _DecodeWords | None = None
        self._rows: Int32Array | None = None
        self._plan_passes_left = 0

    def idle_passes(self, max_shapes: int | None = None) -> Iterator[PackedPass]:
        """A pass of nothing but padding for each key, to be captured with: `build` uses these keys from then on.

        The largest come first, as the others fit into the memory of their graphs; with `max_shapes`, only those of
        so many shapes with extends and of decodes.
        """
        for is_decode, known in ((False, self._extends), (True, self._decodes)):
            shapes = [shape for shape in reversed(self._shapes) if shape.is_decode == is_decode]
            for shape in shapes[:max_shapes]:
                known.insert(0, shape)
                self._sizes = [decodes.num_rows for decodes in self._decodes]
                for plans in reversed(self._planner.shapes(shape.num_rows, shape.num_tokens)):
                    yield self._idle(PassKey(shape, plans))

    def build(self, pass_: Pass) -> PackedPass:
        """Pack a pass: in the smallest captured shape that it fits, or, if there is none, as it is."""
        shape = self._shape_of(pass_)
        if shape is None:
            return self._as_it_is(pass_)
        if shape.is_decode:
            return self._decode(pass_, shape)
        return self._with_extends(pass_, shape) or self._as_it_is(pass_)

    def _shape_of(self, pass_: Pass) -> PassShape | None:
        num_extends, count = pass_.num_extends, pass_.num_rows
        # Each request computes the last token that is known, and samples: so none is scored.
        if not num_extends and self._decodes and (pass_.num_samples == 1).all():
            return self._decodes[bisect_left(self._sizes, count)] if count <= self._sizes[-1] else None
        if not self._extends or len(pass_.scored) or pass_.num_samples.max() > 1:
            return None
        num_decodes = count - num_extends
        num_tokens = len(pass_.input_ids) - num_decodes
        num_rows = max(num_decodes, len(pass_.sampling.logits_rows))
        for shape in self._extends:
            if shape.num_tokens >= num_tokens and shape.num_rows >= num_rows and shape.num_extends > num_extends:
                return shape
        return None

    def _as_it_is(self, pass_: Pass) -> PackedPass:
        host = InputMetadata.host_arrays(
            pass_.req_pool_indices, pass_.seq_lens, pass_.prefix_lens, pass_.out_cache_loc
        )
        last = host["extend_start_loc"] + host["extend_seq_lens"] - 1  # [B]
        plans = self._planner.plan(host, pass_.num_extends)
        inputs: Arrays = {
            **host,
            "input_ids": pass_.input_ids,
            "last_tokens": last,
            "logits_indices": last[pass_.sampling.logits_rows],
            **plans.numbered(),
        }
        scored: Arrays = {"scored": pass_.scored, "scored_targets": pass_.scored_targets}
        extras = _draw_arrays(pass_) | _row_changes(pass_) | scored
        return _packed_pass(pass_, None, *packed(inputs), extras, plans, pass_.num_extends)

    def _with_extends(self, pass_: Pass, shape: PassShape) -> PackedPass | None:
        """None: a plan of its own is better, see `plan_padded_extends`."""
        made = self._padded(pass_, shape)
        if made is None:
            return None
        inputs, plans = made
        key = PassKey(shape, plans.shape)
        words, layout = packed(inputs, self._inputs[key])
        extras = _draw_arrays(pass_) | _row_changes(pass_)
        return _packed_pass(pass_, key, words, layout, extras, plans, shape.num_extends)

    def _padded(
        self, pass_: Pass, shape: PassShape, plan_shapes: Sequence[PlanShape] = ()
    ) -> tuple[Arrays, PassPlans[Int32Array]] | None:
        """A pass in the places of a shape with extends. Its padding tokens are those of an extend of their own."""
        num_live, num_decodes = pass_.num_extends, pass_.num_rows - pass_.num_extends
        num_tokens = len(pass_.input_ids) - num_decodes

        def spread(
            array: Int32Array, count: int, size: int, filler: int = 0, decode_filler: int | None = None
        ) -> Int32Array:
            """`count` numbers of the extends in `size` places, then those of the decodes; fillers after both."""
            decode_filler = filler if decode_filler is None else decode_filler
            decodes = padded(array[count:], shape.num_rows, decode_filler)
            return np.concatenate([padded(array[:count], size, filler), decodes])

        seq_lens = spread(pass_.seq_lens, num_live, shape.num_extends, 0, 1)
        seq_lens[shape.num_extends - 1] = shape.num_tokens - num_tokens
        host = InputMetadata.host_arrays(
            spread(pass_.req_pool_indices, num_live, shape.num_extends, self._padding_row),
            seq_lens,
            spread(pass_.prefix_lens, num_live, shape.num_extends),
            spread(pass_.out_cache_loc, num_tokens, shape.num_tokens),
        )
        host["positions"][num_tokens : shape.num_tokens] = 0  # there may be none so great
        lens = padded(pass_.seq_lens[num_live:], shape.num_rows)
        plans = self._planner.plan_padded_extends(host, shape.num_extends, num_live, lens, plan_shapes)
        if plans is None:
            return None
        last = host["extend_start_loc"] + host["extend_seq_lens"] - 1
        last = np.concatenate([last[:num_live], last[shape.num_extends : shape.num_extends + num_decodes]])
        return {
            **host,
            "input_ids": spread(pass_.input_ids, num_tokens, shape.num_tokens),
            "last_tokens": padded(last, shape.num_extends + shape.num_rows),
            "logits_indices": padded(last[pass_.num_samples > 0], shape.num_rows),
            **plans.numbered(),
        }, plans

    def _decode(self, pass_: Pass, shape: PassShape) -> PackedPass:
        rows = pass_.req_pool_indices
        if self._current is None or rows is not self._rows or not self._plan_passes_left:
            lens = padded(pass_.seq_lens, shape.num_rows)
            plans = self._planner.plan_padded_decodes(padded(rows, shape.num_rows), lens)
            self._current = self._decode_words[PassKey(shape, plans.shape)]
            self._current.begin(rows, plans)
            self._rows, self._plan_passes_left = rows, self._max_plan_passes
        self._plan_passes_left -= 1
        current, sampling = self._current, pass_.sampling
        current.update(pass_)
        plain = sampling.features.array_names
        extras: Arrays = {name: array for name, array in sampling.arrays.items() if name not in plain}
        if len(pass_.row_changes) > pass_.num_rows:  # else they are the new tokens', which the graph writes
            extras |= _row_changes(pass_)
        elif not extras and current.packed is not None and current.packed.features == sampling.features:
            return current.packed  # nothing but its words has changed
        words, plans = current.words, current.plans
        made = _packed_pass(pass_, current.key, words, current.inputs, extras, plans, num_extends=0)
        current.packed = None if extras else made
        return made

    def _idle(self, key: PassKey) -> PackedPass:
        shape, zeros = key.shape, np.zeros(key.shape.num_rows, np.int32)
        if shape.is_decode:
            plans = self._planner.plan_padded_decodes(zeros, zeros, [key.plans])
            idle = self._decode_words[key] = _DecodeWords(key, self._padding_row, plans)
            return _packed_pass(NO_ROWS, key, idle.words.copy(), idle.inputs, {}, plans, num_extends=0)
        made = self._padded(NO_ROWS, shape, [key.plans])
        assert made is not None  # nothing is out of balance
        words, self._inputs[key] = packed(made[0])
        return _packed_pass(NO_ROWS, key, words, self._inputs[key], {}, made[1], shape.num_extends)


class _DecodeWords:
    """The words of captured decodes of one key, updated in place from pass to pass of the same requests.

    `arrays` and `plans` are parts of the words, laid out as `inputs` says. `packed` is a pass of these requests
    that has no extras, once there is one.
    """

    def __init__(self, key: PassKey, padding_row: int, plans: PassPlans[Int32Array]) -> None:
        size = key.shape.num_rows
        zeros = np.zeros(size, np.int32)
        host = InputMetadata.host_arrays(zeros + np.int32(padding_row), zeros + 1, zeros, zeros)
        draws = {name: np.zeros(size, dtype) for name, dtype in DRAW_DTYPES.items()}
        self.key = key
        # Plans come last: so the addresses of what draws read depend on the size alone.
        self.words, self.inputs = packed({"input_ids": zeros, **host, **draws, **plans.numbered()})
        self.arrays = self.inputs.parts(self.words)
        self._plan_arrays = [self.arrays[name] for name in plans.numbered()]
        self.plans = plans.with_arrays(self._plan_arrays)
        self.packed: PackedPass | None = None
        self._idle = self.words.copy()

    def begin(self, rows: Int32Array, plans: PassPlans[Int32Array]) -> None:
        """Fill in what does not change while the requests `rows` `[B]` decode by these plans."""
        self.packed = None
        self.words[:] = self._idle
        self.arrays["req_pool_indices"][: len(rows)] = rows
        for place, array in zip(self._plan_arrays, plans.arrays(), strict=True):
            place[:] = array
        self.plans = replace(self.plans)  # other items grow

    def update(self, pass_: Pass) -> None:
        """Fill in what is new in a pass of the requests that it was begun for; of draws what the features name."""
        arrays, count, draws = self.arrays, pass_.num_rows, pass_.sampling
        arrays["seq_lens"][:count] = pass_.seq_lens
        arrays["prefix_lens"][:count] = pass_.prefix_lens
        arrays["positions"][:count] = pass_.prefix_lens
        arrays["out_cache_loc"][:count] = pass_.out_cache_loc
        arrays["input_ids"][:count] = pass_.input_ids
        for name in draws.features.array_names:
            arrays[name][:count] = draws.arrays[name]
        self.plans.grow(pass_.seq_lens)


def _packed_pass(
    pass_: Pass,
    key: PassKey | None,
    words: Int32Array,
    inputs: Layout,
    extras: Arrays,
    plans: PassPlans[Int32Array],
    num_extends: int,
) -> PackedPass:
    """A pass whose inputs are packed in `words`; the extras come after them."""
    own = Layout.of(extras, inputs.num_words)
    if extras:
        words = np.append(words, np.zeros(own.num_words - len(words), np.int32))
        own.pack(extras, words)
    draws = pass_.sampling
    return PackedPass(
        key=key,
        words=words,
        inputs=inputs,
        extras=own,
        plans=plans,
        num_extends=num_extends,
        num_rows=pass_.num_rows,
        num_samples=len(draws.logits_rows),
        has_row_changes="changed_rows" in own.places,
        features=draws.features,
        processed=draws.processed,
        num_top=draws.num_top,
        num_scored=len(pass_.scored),
        num_top_scored=pass_.num_top_scored,
    )


def _draw_arrays(pass_: Pass) -> Arrays:
    """What draws from S rows of logits read, and who they are for."""
    logits_rows = pass_.sampling.logits_rows
    first_samples = np.flatnonzero(np.diff(logits_rows, prepend=-1)).astype(np.int32)
    return {
        "logits_rows": logits_rows,
        "first_samples": first_samples,
        "first_rows": pass_.req_pool_indices[logits_rows[first_samples]],
        **pass_.sampling.arrays,
    }


def _row_changes(pass_: Pass) -> Arrays:
    changes = pass_.row_changes
    return {"changed_rows": changes.rows, "changed_positions": changes.positions, "changed_slots": changes.slots}
