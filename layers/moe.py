"""Sparse mixture of experts: a router, and SwiGLU experts whose weights are stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from layers.linear import Linear
from layers.placement import Layer, Placement
from triton_ops.moe.moe import moe
from triton_ops.moe.topk_softmax import topk_softmax

EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


class SparseMoE(Layer):
    """Each token passes through the `top_k` of `num_experts` feed-forward layers that a router chooses.

    `renormalize` makes a token's weights sum to 1. `names` are the names of an expert's gate, up and down
    projections in a checkpoint. A `router` of its own is for families that override `route`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool,
        names: Sequence[str] = EXPERT_NAMES,
        router: Layer | None = None,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.names, self.impl, self.deterministic = names, placement.impl, placement.deterministic
        self.router = router or Linear(hidden_size, num_experts, bias=False, placement=placement)
        self.gate_up = placement.parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.down = placement.parameter(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor, *, split_k_ok: bool = False) -> Tensor:
        """`x [num_tokens, hidden_size]` to the same shape; never parts, whatever `split_k_ok`."""
        weights, experts = self.route(x)
        return moe(x, weights, experts, self.gate_up, self.down, deterministic=self.deterministic, impl=self.impl)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 and experts int64 `[num_tokens, top_k]`, as `moe` takes them."""
        return topk_softmax(self.router(x), self.top_k, renormalize=self.renormalize, impl=self.impl)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """As `Layer.checkpoint_tensors`, of the router, then expert by expert."""
        yield from self.router.checkpoint_tensors(f"{name}.gate")
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            for part, tensor in zip(self.names, (*gate_up.chunk(2), down), strict=True):
                yield f"{name}.experts.{expert}.{part}.weight", tensor
