"""The router of DeepSeek-V3, GLM-4.5 and LFM2: sigmoids, whose choice has a correction of its own."""

# Tests: tests/models/test_parity.py, tests/execution/test_products.py

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from layers.input_metadata import InputMetadata
from layers.placement import Layer, Placement
from layers.products import Product
from triton_ops.moe.topk_sigmoid import topk_sigmoid


class SigmoidRouter(Layer):
    """Weight and correction are float32, whatever the model is in: logits are computed in it, as in training.

    `top_k` to `tiny` are the arguments of `topk_sigmoid`. The product has no table: a deterministic model
    computes it in one order at every number of rows.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool,
        factor: float,
        num_groups: int = 1,
        top_groups: int = 1,
        tiny: float = 1e-20,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.choose = partial(
            topk_sigmoid,
            top_k=top_k,
            renormalize=renormalize,
            factor=factor,
            num_groups=num_groups,
            top_groups=top_groups,
            tiny=tiny,
            impl=placement.impl,
        )
        wide = replace(placement, dtype=torch.float32)
        self.weight = wide.parameter(num_experts, hidden_size)
        self.correction = wide.parameter(num_experts)
        self.product = Product(placement.impl) if placement.deterministic else None

    def forward(self, x: Tensor, metadata: InputMetadata) -> tuple[Tensor, Tensor]:
        """`x [num_tokens, hidden_size]` to weights float32 and experts int64, `[num_tokens, top_k]`."""
        product = nn.functional.linear if self.product is None else self.product
        return self.choose(product(x.float(), self.weight), self.correction)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self.weight
        yield f"{name}.e_score_correction_bias", self.correction
