"""Sparse mixture of experts: a router, and gated experts whose weights are stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from layers.checkpoint_slot import CheckpointSlot
from layers.formats.weight_format import PLAIN, Tensors, WeightFormat
from layers.input_metadata import InputMetadata
from layers.linear import Linear
from layers.norm import Hidden
from layers.placement import Layer, Placement
from layers.ranks import PartialSum
from layers.sigmoid_router import SigmoidRouter
from layers.sublayer import Sublayer
from layers.weight import Stack, places_of
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.moe.moe import Activation, moe
from triton_ops.moe.topk_softmax import topk_softmax

EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


class SparseMoE(Sublayer):
    """Each token passes through the `top_k` of `num_experts` feed-forward layers that a router chooses.

    `renormalize` makes a token's weights sum to 1. `bias`: the router and all projections have biases.
    `activation` is of an expert's gate | up. `held`: the format of the experts' matrices, in a checkpoint and in
    memory; None: that of linear layers, or the model's dtype in place of it for the reasons that `Weight` has.
    Each rank has all experts, of whose inner features `intermediate_size` are its own, as in `SummedLinear`.
    `names` are those of an expert's gate, up and down projections in a checkpoint; of up and down for an
    `activation` without a gate. A `router` of sigmoids takes the place of a softmax over a linear layer.
    `emits_parts`: see `Linear`; one rank emits those of `moe`, if its kind `makes_parts`.
    """

    emits_parts = False
    makes_parts: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool,
        bias: bool = False,
        activation: Activation = silu_and_mul,
        held: WeightFormat | None = None,
        names: Sequence[str] = EXPERT_NAMES,
        router: SigmoidRouter | None = None,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize, self.activation = top_k, renormalize, activation
        self.names, self.impl, self.deterministic = names, placement.impl, placement.deterministic
        self.ranks = placement.ranks
        self.stored, self._placement = held or placement.quantization, placement
        self.shape = num_experts, hidden_size, intermediate_size
        self.router = router or Linear(hidden_size, num_experts, bias=bias, placement=placement.unquantised())
        self.first_size = (len(names) - 1) * intermediate_size
        fits = fits_experts(self.stored, hidden_size, intermediate_size)
        self._hold(held or (self.stored if placement.holds_quantised and fits else PLAIN))
        self.gate_up_bias = placement.parameter(num_experts, self.first_size) if bias else None
        self.down_bias = placement.parameter(num_experts, hidden_size) if bias else None

    @property
    def ends(self) -> tuple[None, SparseMoE]:
        return None, self  # the router and the experts read the same tokens

    def forward(self, x: Hidden, metadata: InputMetadata) -> PartialSum:
        """`x [num_tokens, hidden_size]` to the same shape, or to parts: see `emits_parts`."""
        assert isinstance(x, Tensor)  # two layers read it, so nobody quantises it for one
        part = self.of_rank(x, metadata)
        return self.ranks.partial_sum(part) if self.emits_parts else self.ranks.summed(part)

    def of_rank(self, x: Tensor, metadata: InputMetadata) -> Tensor:
        """`forward`, before ranks are summed."""
        weights, experts = self.route(x, metadata)
        parts_ok = self.emits_parts and self.makes_parts and self.ranks.is_alone and not self.deterministic
        return moe(
            x,
            weights,
            experts,
            self.held.matrices(_tensors(self.gate_up)),
            self.held.matrices(_tensors(self.down)),
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias if self.ranks.rank == 0 else None,
            activation=self.activation,
            deterministic=self.deterministic,
            parts_ok=parts_ok,
            impl=self.impl,
        )

    def route(self, x: Tensor, metadata: InputMetadata) -> tuple[Tensor, Tensor]:
        """Weights float32 and experts int64 `[num_tokens, top_k]`, as `moe` takes them."""
        routed: Tensor | tuple[Tensor, Tensor] = self.router(x, metadata)
        if isinstance(routed, Tensor):
            return topk_softmax(routed, self.top_k, renormalize=self.renormalize, impl=self.impl)
        return routed

    def hold_plain(self) -> None:
        """Hold the experts in the model's dtype. They are not filled any more."""
        self._hold(PLAIN)

    def _hold(self, held: WeightFormat) -> None:
        self.held, (_, hidden_size, intermediate_size) = held, self.shape
        self.gate_up = self._stack(self.first_size, hidden_size)
        self.down = self._stack(hidden_size, intermediate_size)

    def _stack(self, size: int, inner: int) -> nn.Parameter | Stack:
        """A matrix `[size, inner]` of each expert; in the model's dtype it is a parameter of this layer."""
        shape = self.shape[0], size, inner
        if self.held == PLAIN:
            return self._placement.parameter(*shape)
        return Stack(self.held, *shape, placement=self._placement)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        """As `Layer.checkpoint_tensors`, of the router, then expert by expert."""
        yield from self.router.checkpoint_tensors(f"{name}.gate")
        (num_experts, hidden_size, size), (*firsts, last) = self.shape, self.names
        parts = [(part, self.gate_up, self.gate_up_bias, nth * size, size) for nth, part in enumerate(firsts)]
        parts.append((last, self.down, self.down_bias, 0, hidden_size))
        each = [(f"{name}.experts.{expert}", expert, part) for expert in range(num_experts) for part in parts]
        for own, expert, (part, stack, _, start, length) in each:
            tensors = {kind: tensor[expert] for kind, tensor in _tensors(stack).items()}
            rows = self.held.rows(tensors, start, start + length)
            yield from places_of(f"{own}.{part}", self.stored, self.held, rows, self.hold_plain)
        for own, expert, (part, _, bias, start, length) in each:
            if bias is not None:
                yield f"{own}.{part}.bias", bias[expert, start : start + length]


class SharedMoE(SparseMoE):
    """A mixture beside which every token goes through a `shared` expert, whose ranks are not summed by itself.
    `shared_name` is its name within the mixture's in a checkpoint; None: it is stored elsewhere.
    """

    makes_parts = False

    def __init__(self, *sizes: int, shared: Layer, shared_name: str | None, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.shared, self.shared_name = shared, shared_name

    def of_rank(self, x: Tensor, metadata: InputMetadata) -> Tensor:
        shared = self.of_shared(x, metadata)
        return super().of_rank(x, metadata).add_(shared)

    def of_shared(self, x: Tensor, metadata: InputMetadata) -> Tensor:
        """What the shared expert adds, of this rank."""
        added: Tensor = self.shared(x, metadata)
        return added

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield from super().checkpoint_tensors(name)
        if self.shared_name is not None:
            yield from self.shared.checkpoint_tensors(f"{name}.{self.shared_name}")


def fits_experts(held: WeightFormat, hidden_size: int, intermediate_size: int) -> bool:
    """Whether experts of these sizes, whose gate and up are stacked, can be held in that format."""
    return held.of_experts and held.fits(hidden_size, (0, intermediate_size))


def _tensors(stack: nn.Parameter | Stack) -> Tensors:
    return {"values": stack} if isinstance(stack, nn.Parameter) else stack.tensors
