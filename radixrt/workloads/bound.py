"""Roofline lower bound of the time for a list of prompts: bytes over bandwidth, operations over speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from radixrt.workloads.lists import WorkloadPrompt
from radixrt.workloads.programs import Round, with_history
from radixrt.workloads.statistics import Prompt, shared_prefixes, token_statistics


@dataclass(frozen=True)
class DeviceSpeed:
    """Measured peak speed of a device: memory `bandwidth` in bytes/s, dense `flops` in operations/s."""

    bandwidth: float
    flops: float


# By CUDA's names; dense products are of bf16.
KNOWN_DEVICES = {"NVIDIA H200": DeviceSpeed(bandwidth=4.26e12, flops=790e12)}


FloatOrArray = TypeVar("FloatOrArray", float, npt.NDArray[Any])
_INT4_GROUP = 128  # weights in 4 bits that share a scale and a zero, of a byte


@dataclass(frozen=True)
class Experts:
    """The mixture in each layer: a token goes through `chosen` of `count` experts of an intermediate `size`.

    `bytes_per_weight`: of theirs; None: as of other values. `in_e4m3`: they take a byte each, and products are of
    e4m3.
    """

    count: int
    chosen: int
    size: int
    bytes_per_weight: float | None = None
    in_e4m3: bool = False


@dataclass(frozen=True)
class RecurrentLayers:
    """The layers of a model that keep a state of each sequence in the place of keys and values.

    Attributes:
        count: of these layers.
        weights: of what one has in the place of attention.
        state_bytes: of a sequence's state in all of them.
    """

    count: int
    weights: int
    state_bytes: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that determine the cost of a token, without norms and biases, which are small.

    `intermediate_size` is of what all tokens go through, `experts` comes on top.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    kv_bytes: int  # of what a token keeps in all layers, without the few scales of e4m3
    bytes_per_value: int = 2  # of weights
    layers_in_e4m3: bool = False  # their weights take a byte each, whatever the others take
    layers_in_int4: bool = False  # half a byte each, with their scales and zeros besides
    experts: Experts | None = None
    recurrent: RecurrentLayers | None = None  # some of the layers

    @property
    def _attention_layers(self) -> int:
        return self.num_layers - (0 if self.recurrent is None else self.recurrent.count)

    @property
    def layer_weights(self) -> int:
        """Weights of all layers without experts: the attention's four projections or what is in their place, and
        the MLP's three.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        recurrent = 0 if self.recurrent is None else self.recurrent.count * self.recurrent.weights
        mlps = self.num_layers * 3 * self.hidden_size * self.intermediate_size
        return self._attention_layers * attention + recurrent + mlps

    @property
    def head_weights(self) -> int:
        """Weights of the projection to logits."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, without the scales of e4m3."""
        num_experts = 0 if self.experts is None else self.experts.count
        return self._bytes_of_common + round(num_experts * self._bytes_of_an_expert)

    def read_bytes(self, num_tokens: FloatOrArray) -> FloatOrArray:
        """Bytes of the weights that a pass of `num_tokens` tokens reads, each once. Of experts, those that so many
        tokens choose in the mean if they choose evenly.
        """
        if self.experts is None:
            return self._bytes_of_common + 0.0 * num_tokens
        left_out: FloatOrArray = (1 - self.experts.chosen / self.experts.count) ** num_tokens
        return self._bytes_of_common + self.experts.count * (1 - left_out) * self._bytes_of_an_expert

    @property
    def _weights_of_an_expert(self) -> int:
        """In all layers."""
        return 0 if self.experts is None else self.num_layers * 3 * self.hidden_size * self.experts.size

    @property
    def _bytes_of_an_expert(self) -> float:
        if self.experts is not None and self.experts.in_e4m3:
            return self._weights_of_an_expert
        own = None if self.experts is None else self.experts.bytes_per_weight
        return self._weights_of_an_expert * (self.bytes_per_value if own is None else own)

    @property
    def _bytes_of_common(self) -> int:
        return self._bytes_of_layers + self.head_weights * self.bytes_per_value

    @property
    def _bytes_of_layers(self) -> int:
        if self.layers_in_int4:
            groups = self.layer_weights // _INT4_GROUP
            return self.layer_weights // 2 + groups * (self.bytes_per_value + 1)
        return self.layer_weights * (1 if self.layers_in_e4m3 else self.bytes_per_value)

    @property
    def layer_ops(self) -> int:
        """Operations of a token's products with the layers' weights, 2 a weight. Of e4m3 two count as one: GPUs
        that have such products do twice as many of them as of bf16, by published figures.
        """
        ops = (1 if self.layers_in_e4m3 else 2) * self.layer_weights
        if self.experts is not None:
            ops += (1 if self.experts.in_e4m3 else 2) * self.experts.chosen * self._weights_of_an_expert
        return ops

    @property
    def weight_ops(self) -> int:
        """The same for all weights."""
        return self.layer_ops + 2 * self.head_weights

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers that keep one."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes

    @property
    def attention_ops(self) -> int:
        """Operations of all layers for one token to attend to another: two products, 2 operations a value each."""
        return 4 * self._attention_layers * self.num_heads * self.head_dim


def list_bound(
    prompts: Sequence[WorkloadPrompt],
    shape: ModelShape,
    speed: DeviceSpeed,
    computed_before: Sequence[Prompt] = (),
) -> float:
    """Lower bound in seconds for `prompts`, submitted together.

    Prefill: every distinct prompt token that is not part of `computed_before` goes once through the layers, with
    its causal attention, and one row a request through the head. Decode: all requests run from the first step on.
    A step costs its bytes over bandwidth (all weights once, of experts those that it touches, each distinct KV
    once, each state twice) or its operations over flops, whichever is more. The prompts' distinct tokens count for
    the share of the requests that still run.
    """
    inputs = [prompt.input_ids for prompt in prompts]
    work = shared_prefixes(inputs, computed_before)
    attended = sum(w.distinct * w.shared + w.distinct * (w.distinct + 1) / 2 for w in work)
    prefill_ops = (
        shape.layer_ops * sum(w.distinct for w in work)
        + 2 * shape.head_weights * len(prompts)
        + shape.attention_ops * attended
    )

    # A request of n new tokens takes part in decode steps 1 to n - 1: its first token comes from its prefill.
    new_tokens = np.array([prompt.max_new_tokens for prompt in prompts])
    by_length = np.argsort(new_tokens)
    steps = np.arange(1, new_tokens.max(initial=1))
    ended = np.searchsorted(new_tokens[by_length], steps, side="right")
    running = len(prompts) - ended
    lengths = np.array([len(tokens) for tokens in inputs])[by_length]
    prompt_context = lengths.sum() - np.concatenate([[0], np.cumsum(lengths)])[ended]

    distinct = token_statistics(inputs).distinct_tokens
    kv_tokens = distinct * running / max(1, len(prompts)) + running * steps
    step_bytes = shape.read_bytes(running) + kv_tokens * shape.kv_bytes + 2 * running * shape.state_bytes
    step_ops = shape.weight_ops * running + shape.attention_ops * (prompt_context + running * steps)
    decode = np.maximum(step_bytes / speed.bandwidth, step_ops / speed.flops).sum()
    return float(prefill_ops / speed.flops + decode)


def program_bound(rounds: Iterable[Round], shape: ModelShape, speed: DeviceSpeed) -> float:
    """Lower bound in seconds for a program: its rounds one after the other, none computed twice."""
    return sum(list_bound(played.prompts, shape, speed, history) for played, history in with_history(rounds))
