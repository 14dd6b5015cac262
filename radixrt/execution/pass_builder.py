"""The host half of a pass: from a Pass to the words that the device is sent."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from layers.input_metadata import InputMetadata
from radixrt.arrays import Int32Array
from radixrt.execution.attention.pass_plans import PassPlans, PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.graphs import PassShape
from radixrt.execution.staging import Layout, packed, padded
from radixrt.schedule.passes import NO_ROWS, Arrays, Pass

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
_NOTHING = Layout({}, 0)
_METADATA = tuple(InputMetadata.host_arrays([], [], [], []))  # its fields that are arrays on the host, too


class PassKey(NamedTuple):
    """Which captured graph computes a pass."""

    shape: PassShape
    plans: PlanShape


@dataclass(frozen=True)
class PackedPass:
    """What the device is sent of a pass. Valid until the next one is built: passes may share their words."""

    key: PassKey | None  # of the captured graph; None: the pass is launched kernel by kernel
    words: Int32Array  # all arrays of the pass
    # Where those lie that make the logits: the fields of InputMetadata, `input_ids`, the plans, and, if the model
    # keeps states, which are read and written; of a captured decode also what plain draws read, of any other pass
    # `last_tokens` and `logits_indices`.
    inputs: Layout
    plans: PassPlans[Int32Array]  # on the host
    num_extends: int  # rows that may have several tokens, with padding
    extras: Layout = _NOTHING  # where all others lie, after the inputs: changes of rows, draws, scored tokens

    @property
    def is_decode(self) -> bool:
        """Whether it is captured, of nothing but decodes."""
        return self.key is not None and self.key.shape.is_decode

    @property
    def num_tokens(self) -> int:
        """T, with padding."""
        words, _ = self.inputs.places["input_ids"]
        return int(words.stop - words.start)

    def with_extras(self, extras: Arrays) -> PackedPass:
        """The pass with other arrays after its inputs."""
        words, layout = packed(extras, before=self.words)
        return replace(self, words=words, extras=layout)

    def host_arrays(self) -> dict[str, Int32Array]:
        """What `InputMetadata.host_arrays` returned for the pass, with padding."""
        places = self.inputs.places
        return {name: self.words[places[name][0]] for name in _METADATA}


class PassBuilder:
    """Decides how each pass is computed, pads it, plans its attention, and packs all that it is told.

    `shapes` are of passes that are captured, of decodes and of others, each ascending. Padding belongs to no
    request: it reads nothing, writes its KV to slot 0 and its slots to `padding_row`, and where the model
    `keeps_states`, it begins with state 0 and leaves it. So do passes without states.

    Decodes of the same requests as one of the last `num_lanes` passes begin with what was made for that.
    """

    def __init__(
        self,
        planner: AttentionPlanner,
        shapes: list[PassShape],
        padding_row: int,
        max_plan_passes: int = MAX_PLAN_PASSES,
        num_lanes: int = 1,
        *,
        keeps_states: bool = False,
    ) -> None:
        self._keeps_states = keeps_states
        self._planner, self._padding_row, self._max_plan_passes = planner, padding_row, max_plan_passes
        self._decodes = [shape for shape in shapes if shape.is_decode]
        self._extends = [shape for shape in shapes if not shape.is_decode]
        self._layouts: dict[PassKey, Layout] = {}  # of passes with extends
        self._decode_words: dict[PassKey, list[_DecodeWords]] = {}  # one at first use, and not more than lanes
        self._current: deque[_DecodeWords] = deque(maxlen=num_lanes)  # of the captured decodes before
        # Of the decodes before that were not captured, those used last at the end.
        self._growing = deque(_GrowingPlans(max_plan_passes) for _ in range(num_lanes))

    def keys(self, shapes: Iterable[PassShape]) -> Iterator[PassKey]:
        """The keys of passes of these shapes, of each shape those first whose graphs need most memory."""
        for shape in shapes:
            for kind in reversed(self._planner.shapes(shape.num_rows, shape.num_tokens)):
                yield PassKey(shape, kind)

    def idle(self, key: PassKey) -> PackedPass:
        """A pass of nothing but padding, to be captured with."""
        if key.shape.is_decode:
            return self._words_of(key)[0].idle
        idle = self._padded(NO_ROWS, key.shape, [key.plans])
        assert idle is not None  # nothing is out of balance
        return idle

    def _idle_decode(self, shape: PassShape, plan_shape: PlanShape) -> PackedPass:
        size = shape.num_rows
        zeros = np.zeros(size, np.int32)
        host = InputMetadata.host_arrays(zeros + np.int32(self._padding_row), zeros + 1, zeros, zeros)
        states = {"state_reads": zeros, "state_writes": zeros} if self._keeps_states else {}
        draws = {name: np.zeros(size, dtype) for name, dtype in DRAW_DTYPES.items()}
        plans = self._planner.plan_padded_decodes(zeros, zeros, [plan_shape])
        # Plans come last: so the addresses of what draws read depend on the size alone.
        words, layout = packed({"input_ids": zeros, **host, **states, **draws, **plans.numbered()})
        return PackedPass(PassKey(shape, plan_shape), words, layout, plans, 0)

    def build(self, pass_: Pass) -> PackedPass:
        """Pack a pass: in the smallest captured shape that it fits, or, if there is none, as it is."""
        shape = self._shape_of(pass_)
        if shape is not None and shape.is_decode:
            return self._decode(pass_, shape)
        made = None if shape is None else self._padded(pass_, shape)
        return (made or self._as_it_is(pass_)).with_extras(_extras(pass_))

    def _unused_words(self, key: PassKey) -> _DecodeWords:
        """Words for other requests than those of the last lanes, of which the oldest may be given up."""
        if len(self._current) == self._current.maxlen:
            self._current.popleft()
        made = self._words_of(key)
        unused = next((words for words in made if words not in self._current), None)
        if unused is None:
            unused = made[0].another()
            made.append(unused)
        return unused

    def _words_of(self, key: PassKey) -> list[_DecodeWords]:
        """What has been made of a key, by now at the latest."""
        if key not in self._decode_words:
            self._decode_words[key] = [_DecodeWords(self._idle_decode(*key))]
        return self._decode_words[key]

    def _shape_of(self, pass_: Pass) -> PassShape | None:
        num_extends, count = pass_.num_extends, pass_.num_rows
        # Each request computes the last token that is known, and samples: so none is scored.
        if not num_extends and self._decodes and (pass_.num_samples == 1).all():
            place = bisect_left(self._decodes, count, key=attrgetter("num_rows"))
            return self._decodes[place] if place < len(self._decodes) else None
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
        growing = next((one for one in self._growing if one.serves(pass_)), self._growing[0])
        self._growing.remove(growing)
        self._growing.append(growing)
        plans = growing.of(pass_)
        if plans is None:
            plans = self._planner.plan(host, pass_.num_extends)
            growing.begin(pass_, plans)
        own = {"last_tokens": last, "logits_indices": last[pass_.sampling.logits_rows]}
        words, layout = packed(
            {**host, "input_ids": pass_.input_ids, **self._states(pass_), **own, **plans.numbered()}
        )
        return PackedPass(None, words, layout, plans, pass_.num_extends)

    def _padded(self, pass_: Pass, shape: PassShape, plan_shapes: Sequence[PlanShape] = ()) -> PackedPass | None:
        """A pass in a shape's places, its padding tokens in an extend of their own; None where plans are None."""
        num_live, num_decodes = pass_.num_extends, pass_.num_rows - pass_.num_extends
        num_tokens, num_extends = len(pass_.input_ids) - num_decodes, shape.num_extends

        def spread(array: Int32Array, count: int, size: int, filler: int = 0) -> Int32Array:
            """`count` numbers of the extends in `size` places, then those of the decodes; fillers after both."""
            decodes = padded(array[count:], shape.num_rows, filler)
            return np.concatenate([padded(array[:count], size, filler), decodes])

        seq_lens = spread(pass_.seq_lens, num_live, num_extends)
        seq_lens[num_extends - 1] = shape.num_tokens - num_tokens
        seq_lens[num_extends + num_decodes :] = 1
        host = InputMetadata.host_arrays(
            spread(pass_.req_pool_indices, num_live, num_extends, self._padding_row),
            seq_lens,
            spread(pass_.prefix_lens, num_live, num_extends),
            spread(pass_.out_cache_loc, num_tokens, shape.num_tokens),
        )
        host["positions"][num_tokens : shape.num_tokens] = 0  # there may be none so great
        lens = padded(pass_.seq_lens[num_live:], shape.num_rows)
        plans = self._planner.plan_padded_extends(host, num_extends, num_live, lens, plan_shapes)
        if plans is None:
            return None
        last = host["extend_start_loc"] + host["extend_seq_lens"] - 1
        last = np.concatenate([last[:num_live], last[num_extends : num_extends + num_decodes]])
        inputs: Arrays = {
            **host,
            "input_ids": spread(pass_.input_ids, num_tokens, shape.num_tokens),
            **{name: spread(array, num_live, num_extends) for name, array in self._states(pass_).items()},
            "last_tokens": padded(last, num_extends + shape.num_rows),
            "logits_indices": padded(last[pass_.num_samples > 0], shape.num_rows),
            **plans.numbered(),
        }
        key = PassKey(shape, plans.shape)
        words, self._layouts[key] = packed(inputs, self._layouts.get(key))
        return PackedPass(key, words, self._layouts[key], plans, num_extends)

    def _states(self, pass_: Pass) -> dict[str, Int32Array]:
        """What its rows begin with and leave, by the names of these arrays; none where no states are kept."""
        if not self._keeps_states:
            return {}
        none = np.zeros(pass_.num_rows, np.int32)
        reads, writes = pass_.state_reads, pass_.state_writes
        return {
            "state_reads": none if reads is None else reads,
            "state_writes": none if writes is None else writes,
        }

    def _decode(self, pass_: Pass, shape: PassShape) -> PackedPass:
        rows = pass_.req_pool_indices
        current = next((words for words in self._current if words.rows is rows and words.passes_left), None)
        if current is None:
            lens = padded(pass_.seq_lens, shape.num_rows)
            plans = self._planner.plan_padded_decodes(padded(rows, shape.num_rows), lens)
            current = self._unused_words(PassKey(shape, plans.shape))
            current.begin(rows, plans, self._max_plan_passes)
        else:
            self._current.remove(current)
        self._current.append(current)
        made, sampling = current.update(pass_, self._states(pass_)), pass_.sampling
        plain = sampling.features.array_names
        extras = {name: array for name, array in sampling.arrays.items() if name not in plain}
        if len(pass_.row_changes) > pass_.num_rows:  # else they are the new tokens', which the graph writes
            extras |= _row_changes(pass_)
        return made.with_extras(extras) if extras else made


class _GrowingPlans:
    """Plans of decodes that are not captured, updated in place from pass to pass of the same requests."""

    def __init__(self, max_passes: int) -> None:
        self._max_passes = max_passes
        self._rows: Int32Array | None = None  # the very array of the requests'
        self._plans: PassPlans[Int32Array] | None = None
        self._passes_left = 0  # that the plans still serve

    def begin(self, pass_: Pass, plans: PassPlans[Int32Array]) -> None:
        """Keep new plans for later passes of the same requests."""
        self._rows = self._plans = None
        most = plans.num_passes
        if pass_.num_extends or most == 1:
            return
        self._rows, self._passes_left = pass_.req_pool_indices, min(most or self._max_passes, self._max_passes) - 1
        self._plans = plans.with_arrays(array.copy() for array in plans.arrays())  # some may be the pass's own

    def serves(self, pass_: Pass) -> bool:
        """Whether the plans are for this pass."""
        return self._plans is not None and pass_.req_pool_indices is self._rows and self._passes_left > 0

    def of(self, pass_: Pass) -> PassPlans[Int32Array] | None:
        """The plans for this pass; None: others are to be made."""
        if self._plans is None or not self.serves(pass_):
            return None
        self._passes_left -= 1
        self._plans.grow(pass_.seq_lens)
        return self._plans


class _DecodeWords:
    """Captured decodes of one key, whose words are updated in place from pass to pass of the same requests."""

    def __init__(self, idle: PackedPass) -> None:
        words = idle.words.copy()
        self.idle, self._arrays = idle, idle.inputs.parts(words)
        plans = idle.plans.with_arrays(self._arrays[name] for name in idle.plans.numbered())
        self._packed = replace(idle, words=words, plans=plans)
        self.rows: Int32Array | None = None  # the very array of the requests'
        self.passes_left = 0  # that the plans still serve

    def another(self) -> _DecodeWords:
        """Of the same key, for other requests."""
        return _DecodeWords(self.idle)

    def begin(self, rows: Int32Array, plans: PassPlans[Int32Array], num_passes: int) -> None:
        """Fill in what does not change while the requests `rows` `[B]` decode by these plans."""
        most = plans.num_passes
        self.rows, self.passes_left = rows, num_passes if most is None else min(num_passes, most)
        self._packed.words[:] = self.idle.words
        self._arrays["req_pool_indices"][: len(rows)] = rows
        for place, array in zip(self._packed.plans.arrays(), plans.arrays(), strict=True):
            place[:] = array
        self._packed = replace(self._packed, plans=replace(self._packed.plans))  # other items grow

    def update(self, pass_: Pass, states: Mapping[str, Int32Array]) -> PackedPass:
        """Fill in what is new in a pass of the requests that it was begun for; of draws what the features name.
        `states` are the pass's, if the model keeps some: a row may leave another one than in the pass before.
        """
        self.passes_left -= 1
        arrays, count, draws = self._arrays, pass_.num_rows, pass_.sampling
        arrays["seq_lens"][:count] = pass_.seq_lens
        arrays["prefix_lens"][:count] = pass_.prefix_lens
        arrays["positions"][:count] = pass_.prefix_lens
        arrays["out_cache_loc"][:count] = pass_.out_cache_loc
        arrays["input_ids"][:count] = pass_.input_ids
        for name, array in states.items():
            arrays[name][:count] = array
        for name in draws.features.array_names:
            arrays[name][:count] = draws.arrays[name]
        self._packed.plans.grow(pass_.seq_lens)
        return self._packed


def _extras(pass_: Pass) -> Arrays:
    """What draws from S rows of logits read, and who they are for; changes of rows; scored tokens."""
    logits_rows = pass_.sampling.logits_rows
    first_samples = np.flatnonzero(np.diff(logits_rows, prepend=-1)).astype(np.int32)
    return {
        "logits_rows": logits_rows,
        "first_samples": first_samples,
        "first_rows": pass_.req_pool_indices[logits_rows[first_samples]],
        **pass_.sampling.arrays,
        **_row_changes(pass_),
        **({"scored": pass_.scored, "scored_targets": pass_.scored_targets} if len(pass_.scored) else {}),
    }


def _row_changes(pass_: Pass) -> Arrays:
    changes = pass_.row_changes
    return {"changed_rows": changes.rows, "changed_positions": changes.positions, "changed_slots": changes.slots}
