"""Matrices of experts in MXFP4, as gpt-oss stores them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layers.checkpoint_slot import Filled
from layers.formats.weight_format import Shape, Slots, Tensors, WeightFormat
from triton_ops.implementation import Impl, gpu_of
from triton_ops.moe.mxfp4 import BYTES, GROUP, Mxfp4, scale_of, scales_of, words_of
from triton_ops.moe.mxfp4_hopper import takes_words


@dataclass(frozen=True)
class Mxfp4Format(WeightFormat):
    """`blocks` and `scales` of `Mxfp4`. K is a multiple of 32.

    Attributes:
        in_words: they are held in words; a checkpoint stores bytes.
    """

    in_words: bool = False

    numbers = "MXFP4"
    of_experts = True

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, impl: Impl) -> Mxfp4Format:
        """In words where the kernel for words runs, in a model of `dtype`."""
        return cls(device.type == "cuda" and impl != "torch" and takes_words(gpu_of(device), dtype))

    def tensors(self, *shape: int) -> dict[str, Shape]:
        *rows, depth = shape
        groups = depth // GROUP
        scales = (*rows, scales_of(groups, self.in_words))
        return {"blocks": ((*rows, groups, BYTES), torch.uint8), "scales": (scales, torch.uint8)}

    def slots(self, tensors: Tensors) -> Slots:
        if not self.in_words:
            yield from tensors.items()
            return
        blocks, scales = tensors["blocks"], tensors["scales"]
        groups = blocks.shape[1]

        def fill(source: Tensor) -> None:
            blocks.copy_(words_of(source.to(blocks.device)))

        def fill_scales(source: Tensor) -> None:
            scales[:, :groups] = source
            scales[:, groups:] = 0

        yield "blocks", Filled(blocks.shape, torch.uint8, fill)
        yield "scales", Filled(scales[:, :groups].shape, torch.uint8, fill_scales)

    def dummy(self, kind: str, std: float) -> int | None:
        return scale_of(std) if kind == "scales" else None

    def reordered(self, tensors: Tensors) -> dict[str, tuple[Sequence[int], Iterator[Tensor]]]:
        held, shape = self.matrices(tensors), tensors["blocks"].shape
        return {
            "blocks": (shape, (held[expert].as_bytes().blocks for expert in range(len(held.blocks)))),
            "scales": (shape[:-1], (held[expert].as_bytes().scales for expert in range(len(held.blocks)))),
        }

    def matrices(self, tensors: Tensors) -> Mxfp4:
        return Mxfp4(tensors["blocks"], tensors["scales"], self.in_words)
