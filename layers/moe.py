"""Sparse mixture of experts: a router, and gated experts whose weights are stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from layers.linear import Linear
from layers.placement import Layer, Placement
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.moe.moe import Activation, moe
from triton_ops.moe.topk_softmax import topk_softmax

EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


class SparseMoE(Layer):
    """Each token passes through the `top_k` of `num_experts` feed-forward layers that a router chooses.

    `renormalize` makes a token's weights sum to 1. `bias`: the router and all projections have biases. `activation`
    is of an expert's gate | up. `names` are the names of an expert's gate, up and down projections in a checkpoint.
    """

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
        names: Sequence[str] = EXPERT_NAMES,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize, self.activation = top_k, renormalize, activation
        self.names, self.impl, self.deterministic = names, placement.impl, placement.deterministic
        self.router = Linear(hidden_size, num_experts, bias=bias, placement=placement)
        self.gate_up = placement.parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.down = placement.parameter(num_experts, hidden_size, intermediate_size)
        self.gate_up_bias = placement.parameter(num_experts, 2 * intermediate_size) if bias else None
        self.down_bias = placement.parameter(num_experts, hidden_size) if bias else None

    def forward(self, x: Tensor, *, split_k_ok: bool = False) -> Tensor:
        """`x [num_tokens, hidden_size]` to the same shape; never parts, whatever `split_k_ok`."""
        weights, experts = topk_softmax(self.router(x), self.top_k, renormalize=self.renormalize, impl=self.impl)
        return moe(
            x,
            weights,
            experts,
            self.gate_up,
            self.down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            activation=self.activation,
            deterministic=self.deterministic,
            impl=self.impl,
        )

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """As `Layer.checkpoint_tensors`, of the router, then expert by expert."""
        yield from self.router.checkpoint_tensors(f"{name}.gate")
        stacks = [("weight", self.gate_up, self.down)]
        if self.gate_up_bias is not None and self.down_bias is not None:
            stacks.append(("bias", self.gate_up_bias, self.down_bias))
        for kind, *both in stacks:
            for expert, (gate_up, down) in enumerate(zip(*both, strict=True)):
                for part, tensor in zip(self.names, (*gate_up.chunk(2), down), strict=True):
                    yield f"{name}.experts.{expert}.{part}.{kind}", tensor
