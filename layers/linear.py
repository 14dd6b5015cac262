"""Linear projections: plain, and several stacked into one matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from layers.placement import Placement
from triton_ops.implementation import gpu_of, runs_triton
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.tuning import split_k_config


class Linear(nn.Module):
    """`x W^T + b`. The weights are uninitialised until the tensors of `checkpoint_tensors` are filled."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(out_features, in_features)
        self.bias = placement.parameter(out_features) if bias else None
        self.impl = placement.impl

    def forward(self, x: Tensor, *, split_k_ok: bool = False) -> Tensor:
        """`x [..., in_features]` to `[..., out_features]`.

        With `split_k_ok`, for callers that can add parts (`RMSNorm.add`), the result may be float32 parts
        `[P, num_tokens, out_features]`, where `split_k_linear` is faster: on a GPU, for small batches.
        """
        if split_k_ok and self.bias is None and runs_triton(self.impl, x.device):
            config = split_k_config(gpu_of(x.device), len(x), *self.weight.shape, self.weight.dtype)
            if config is not None:
                return split_k_linear(x, self.weight, config, impl=self.impl)
        return nn.functional.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The layer's tensors in a checkpoint, where it is called `name`: (tensor name, destination)."""
        yield f"{name}.weight", self.weight
        if self.bias is not None:
            yield f"{name}.bias", self.bias


class StackedLinear(Linear):
    """Projections of the same input as one matrix, their outputs side by side.

    `parts` maps the last component of each part's name to its number of outputs, in the order of the stack. A
    checkpoint stores the parts one by one, or as one tensor whose name ends in `packed_as`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        packed_as: str | None = None,
        bias: bool,
        placement: Placement,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, placement=placement)
        self.parts = dict(parts)
        self.packed_as = packed_as

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """As `Linear.checkpoint_tensors`, with a view for each part; `name` is the prefix of their names."""
        if self.packed_as is not None:
            yield from super().checkpoint_tensors(f"{name}.{self.packed_as}")
            return
        start = 0
        for part, size in self.parts.items():
            yield f"{name}.{part}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{name}.{part}.bias", self.bias[start : start + size]
            start += size


class QKVLinear(StackedLinear):
    """The query, key and value projections of an attention layer."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        packed_as: str | None = None,
        bias: bool,
        placement: Placement,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        kv_size = num_kv_heads * head_dim
        parts = {"q_proj": num_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(hidden_size, parts, packed_as=packed_as, bias=bias, placement=placement)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output `[T, ...]` as views: q `[T, num_heads, head_dim]`, k and v `[T, num_kv_heads, head_dim]`."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        k_end = self.num_heads + self.num_kv_heads
        return heads[:, : self.num_heads], heads[:, self.num_heads : k_end], heads[:, k_end:]


class GateUpLinear(StackedLinear):
    """The gate and up projections of a gated feed-forward layer: gate | up."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        packed_as: str | None = None,
        bias: bool,
        placement: Placement,
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        super().__init__(hidden_size, parts, packed_as=packed_as, bias=bias, placement=placement)
