"""Sparse mixture of experts: a router, and gated experts whose weights are stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from layers.input_metadata import InputMetadata
from layers.linear import Linear
from layers.norm import Hidden
from layers.place import Filled, LeftPlain, Place
from layers.placement import Layer, Placement
from layers.quantization import Quantization, Scales, held_places, plain_places
from layers.ranks import Addend
from layers.sigmoid_router import SigmoidRouter
from layers.sublayer import Sublayer
from triton_ops.activations.quantised_rows import BLOCK
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import cdiv, gpu_of
from triton_ops.moe.e4m3 import ScaledE4M3
from triton_ops.moe.moe import Activation, Matrices, moe
from triton_ops.moe.mxfp4 import BYTES, GROUP, Mxfp4, scales_of, words_of
from triton_ops.moe.mxfp4_hopper import takes_words
from triton_ops.moe.topk_softmax import topk_softmax

EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


class Mxfp4Matrices(nn.Module):
    """A matrix `[size, inner]` of each expert in MXFP4: see `Mxfp4`. `inner` is a multiple of 32. Where the kernel
    for words runs, they are in words.
    """

    def __init__(self, num_experts: int, size: int, inner: int, placement: Placement) -> None:
        super().__init__()
        on_gpu = placement.device.type == "cuda" and placement.impl != "torch"
        self.in_words = on_gpu and takes_words(gpu_of(placement.device), placement.dtype)
        self._groups = inner // GROUP
        self.blocks = placement.parameter(num_experts, size, self._groups, BYTES, dtype=torch.uint8)
        num_scales = scales_of(self._groups, self.in_words)
        self.scales = placement.parameter(num_experts, size, num_scales, dtype=torch.uint8)

    @property
    def value(self) -> Mxfp4:
        """As `moe` takes them."""
        return Mxfp4(self.blocks, self.scales, self.in_words)

    def stored(self) -> dict[str, tuple[tuple[int, ...], Iterator[Tensor]]]:
        """By a parameter's name: its shape as a checkpoint has it, and that, an expert at a time."""
        shape = *self.blocks.shape[:2], self._groups
        each = range(shape[0])
        return {
            "blocks": ((*shape, BYTES), (self.value[nth].as_bytes().blocks for nth in each)),
            "scales": (shape, (self.value[nth].as_bytes().scales for nth in each)),
        }

    def places(self, name: str, expert: int, start: int, stop: int) -> Iterator[tuple[str, Place]]:
        """Of rows of an expert, as a checkpoint has them."""
        blocks, scales = self.blocks[expert, start:stop], self.scales[expert, start:stop]
        if not self.in_words:
            yield from ((f"{name}.blocks", blocks), (f"{name}.scales", scales))
            return

        def fill(source: Tensor) -> None:
            blocks.copy_(words_of(source.to(blocks.device)))

        def fill_scales(source: Tensor) -> None:
            scales[:, : self._groups] = source
            scales[:, self._groups :] = 0

        yield f"{name}.blocks", Filled(blocks.shape, torch.uint8, fill)
        yield f"{name}.scales", Filled(scales[:, : self._groups].shape, torch.uint8, fill_scales)


class E4M3Matrices(nn.Module):
    """A matrix `[size, inner]` of each expert in e4m3: see `ScaledE4M3`."""

    def __init__(self, num_experts: int, size: int, inner: int, placement: Placement, *, by_blocks: bool) -> None:
        super().__init__()
        scales = (cdiv(size, BLOCK), cdiv(inner, BLOCK)) if by_blocks else (size,)
        self.values = placement.parameter(num_experts, size, inner, dtype=E4M3)
        self.scale = placement.parameter(num_experts, *scales, dtype=torch.float32)

    @property
    def value(self) -> ScaledE4M3:
        """As `moe` takes them."""
        return ScaledE4M3(self.values, self.scale)


Stack = nn.Parameter | Mxfp4Matrices | E4M3Matrices


class SparseMoE(Sublayer):
    """Each token passes through the `top_k` of `num_experts` feed-forward layers that a router chooses.

    `renormalize` makes a token's weights sum to 1. `bias`: the router and all projections have biases.
    `activation` is of an expert's gate | up; `mxfp4`: the experts' matrices stay in four bits. Where weights are
    held in e4m3, so are theirs, unless blocks of gate and up would not lie on those of their stack, or, by
    `hold_plain`, a checkpoint leaves some of them as they are. Each rank has all experts, of whose inner features
    `intermediate_size` are its own, as in `SummedLinear`. `names` are the names of an expert's gate, up and
    down projections in a checkpoint; those of up and down for an `activation` without a gate. A `router` of
    sigmoids takes the place of a softmax over a linear layer. `emits_parts`: see `Linear`; one rank emits those of
    `moe`, if its kind `makes_parts`.
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
        mxfp4: bool = False,
        names: Sequence[str] = EXPERT_NAMES,
        router: SigmoidRouter | None = None,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize, self.activation = top_k, renormalize, activation
        self.names, self.impl, self.deterministic = names, placement.impl, placement.deterministic
        self.ranks = placement.ranks
        self.quantization, self._placement = placement.quantization, placement
        self.shape = num_experts, hidden_size, intermediate_size
        self.router = router or Linear(hidden_size, num_experts, bias=bias, placement=placement.unquantised())
        by_blocks = self.quantization is not None and self.quantization.scales is Scales.BLOCK
        in_e4m3 = placement.holds_quantised and fit_e4m3(intermediate_size, self.quantization)

        def stack(size: int, inner: int) -> Stack:
            if mxfp4:
                return Mxfp4Matrices(num_experts, size, inner, placement)
            if in_e4m3:
                return E4M3Matrices(num_experts, size, inner, placement, by_blocks=by_blocks)
            return placement.parameter(num_experts, size, inner)

        self.first_size = (len(names) - 1) * intermediate_size
        self.gate_up: Stack = stack(self.first_size, hidden_size)
        self.down: Stack = stack(hidden_size, intermediate_size)
        self.gate_up_bias = placement.parameter(num_experts, self.first_size) if bias else None
        self.down_bias = placement.parameter(num_experts, hidden_size) if bias else None

    @property
    def ends(self) -> tuple[None, SparseMoE]:
        return None, self  # the router and the experts read the same tokens

    def forward(self, x: Hidden, metadata: InputMetadata) -> Addend:
        """`x [num_tokens, hidden_size]` to the same shape, or to parts: see `emits_parts`."""
        assert isinstance(x, Tensor)  # two layers read it, so nobody quantises it for one
        part = self.of_rank(x, metadata)
        return self.ranks.addend(part) if self.emits_parts else self.ranks.summed(part)

    def of_rank(self, x: Tensor, metadata: InputMetadata) -> Tensor:
        """`forward`, before ranks are summed."""
        weights, experts = self.route(x, metadata)
        parts_ok = self.emits_parts and self.makes_parts and self.ranks.is_alone and not self.deterministic
        return moe(
            x,
            weights,
            experts,
            _matrices(self.gate_up),
            _matrices(self.down),
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
        num_experts, hidden_size, intermediate_size = self.shape
        self.gate_up = self._placement.parameter(num_experts, self.first_size, hidden_size)
        self.down = self._placement.parameter(num_experts, hidden_size, intermediate_size)

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Place]]:
        """As `Layer.checkpoint_tensors`, of the router, then expert by expert."""
        yield from self.router.checkpoint_tensors(f"{name}.gate")
        if isinstance(self.gate_up, E4M3Matrices) and isinstance(self.down, E4M3Matrices):
            yield from self._e4m3_places(name, self.gate_up, self.down)
        if isinstance(self.gate_up, Mxfp4Matrices) and isinstance(self.down, Mxfp4Matrices):
            gate, up, down = (f".{part}" for part in self.names)
            for expert in range(self.shape[0]):
                own, size = f"{name}.experts.{expert}", self.shape[2]
                yield from self.gate_up.places(own + gate, expert, 0, size)
                yield from self.gate_up.places(own + up, expert, size, 2 * size)
                yield from self.down.places(own + down, expert, 0, self.shape[1])
        for kind, stacks in self._stacks():
            for expert, (gate_up, down) in enumerate(zip(*stacks, strict=True)):
                for part, tensor in zip(self.names, (*gate_up.chunk(len(self.names) - 1), down), strict=True):
                    own = f"{name}.experts.{expert}.{part}"
                    if kind == "weight":
                        yield from plain_places(own, tensor, self.quantization)
                    else:
                        yield f"{own}.{kind}", tensor

    def _e4m3_places(self, name: str, gate_up: E4M3Matrices, down: E4M3Matrices) -> Iterator[tuple[str, Place]]:
        assert self.quantization is not None
        for expert in range(self.shape[0]):
            parts = len(self.names) - 1
            values = *gate_up.values[expert].chunk(parts), down.values[expert]
            scales = *gate_up.scale[expert].chunk(parts), down.scale[expert]
            for part, codes, scale in zip(self.names, values, scales, strict=True):
                own = f"{name}.experts.{expert}.{part}"
                if self.quantization.ignores(own):
                    yield f"{own}.weight", LeftPlain(codes.shape, self._placement.dtype, codes.copy_, self)
                else:
                    yield from held_places(own, codes, scale, self.quantization)

    def _stacks(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Of gate | up and of down, what all experts have, by its name in a checkpoint, in the model's dtype."""
        if isinstance(self.gate_up, nn.Parameter) and isinstance(self.down, nn.Parameter):
            yield "weight", (self.gate_up, self.down)
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield "bias", (self.gate_up_bias, self.down_bias)


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

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Place]]:
        yield from super().checkpoint_tensors(name)
        if self.shared_name is not None:
            yield from self.shared.checkpoint_tensors(f"{name}.{self.shared_name}")


def fit_e4m3(intermediate_size: int, quantization: Quantization | None) -> bool:
    """Whether experts of that size can be held in e4m3, in a model that may be quantised otherwise or not."""
    if quantization is None:
        return True
    return quantization.words is None and not (quantization.scales is Scales.BLOCK and intermediate_size % BLOCK)


def _matrices(stack: Stack) -> Matrices:
    return stack if isinstance(stack, nn.Parameter) else stack.value
