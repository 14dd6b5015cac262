"""A pass as the device is sent it: words, and the few numbers that say what to launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from layers.input_metadata import InputMetadata
from radixrt.execution.attention.pass_plans import PassPlans, PlanShape
from radixrt.execution.graphs.ladder import PassShape
from radixrt.execution.staging import Int32Array, Layout
from radixrt.schedule.passes import Features

# Fields of InputMetadata that are arrays on the host, too.
_METADATA = tuple(InputMetadata.host_arrays([], [], [], []))


class PassKey(NamedTuple):
    """Which captured graph computes a pass."""

    shape: PassShape
    plans: PlanShape


@dataclass(frozen=True)
class PackedPass:
    """One pass, ready to be sent. Valid until the next one is built: passes may share their words.

    Attributes:
        key: of the captured graph; None: the pass is launched kernel by kernel.
        words: all arrays of the pass, int32.
        inputs: where those lie that make the logits: the fields of InputMetadata, `input_ids`, `last_tokens` and
            `logits_indices`, the plans. Of a captured decode also what plain draws read, but none of the last two.
        extras: where all others lie: changes of rows, draws, scored tokens.
        plans: of attention, on the host.
    """

    key: PassKey | None
    words: Int32Array
    inputs: Layout
    extras: Layout
    plans: PassPlans[Int32Array]
    num_extends: int  # with padding
    num_rows: int  # B, without padding, as S and P
    num_samples: int  # S
    has_row_changes: bool  # `req_to_token` on the device has to change before the pass
    features: Features  # of the draws, as in SamplingInputs
    processed: Features | None
    num_top: int | None
    num_scored: int = 0  # P
    num_top_scored: int = 0  # alternatives to find for the P tokens

    @cached_property
    def is_captured_decode(self) -> bool:
        """Whether each row computes one token and samples one, in a graph."""
        return self.key is not None and self.key.shape.is_decode

    def host_arrays(self) -> dict[str, Int32Array]:
        """What `InputMetadata.host_arrays` returned for the pass, with padding."""
        places = self.inputs.places
        return {name: self.words[places[name][0]] for name in _METADATA}
