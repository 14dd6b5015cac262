"""Tiny checkpoints in 4 bits, in the formats that are read, and the models that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layers.formats.int4 import Int4Packing
from tests.support import checkpoints
from tests.support.quantised_checkpoints import LINEAR
from triton_ops.linear.int4_linear import GROUP

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of a word, from its lowest bits on


def awq_config(**changes: Any) -> dict[str, Any]:
    """As AutoAWQ has it."""
    own = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    return {**own, "modules_to_not_convert": None, **changes}


def gptq_config(**changes: Any) -> dict[str, Any]:
    """As AutoGPTQ and GPTQModel have it."""
    own = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
    return {**own, "checkpoint_format": "gptq", "lm_head": False, **changes}


def packed_config(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """As llm-compressor writes W4A16; `weights` changes what it says of them."""
    number = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    own = {**number, "actorder": None, "dynamic": False, **(weights or {})}
    group = {"targets": ["Linear"], "weights": own, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **changes,
    }


FORMATS: dict[Int4Packing, dict[str, Any]] = {
    Int4Packing.AWQ: awq_config(),
    Int4Packing.GPTQ: gptq_config(),
    Int4Packing.GPTQ_V2: gptq_config(checkpoint_format="gptq_v2", sym=True),
    Int4Packing.COMPRESSED: packed_config(),
}


def write(model: Any, folder: Path, words: Int4Packing, **changes: Any) -> Any:
    """Save `model` in 4 bits into `folder`; `changes` go to its quantization_config.

    Returns transformers' model of the numbers that the checkpoint stands for, in float32.
    """
    config = {**FORMATS[words], **changes}
    left = config.get("ignore") or config.get("modules_to_not_convert") or []
    checkpoints.write(model, folder)
    weights = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = LINEAR.fullmatch(name)
        if match is None or match[1] in left:
            stored[name] = weight
            continue
        with torch.device("cpu"):
            symmetric = words in (Int4Packing.COMPRESSED, Int4Packing.GPTQ_V2)
            values, scales, zeros = quantised(weight, symmetric=symmetric)
            weights[name] = dequantised(values, scales, zeros)
            parts = packed(values, scales, zeros, words)
        stored |= {f"{match[1]}.{kind}": tensor for kind, tensor in parts.items()}
    save_file(weights, folder / "model.safetensors")
    reference = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    save_file(stored, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return reference


def quantised(weight: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers int64 `[N, K]`, scales float16 and zeros int64 `[N, K / 128]` rounded up; `weight` `[N, K]`."""
    num_rows, depth = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -depth % GROUP)).view(num_rows, -1, GROUP)
    low, high = padded.amin(2), padded.amax(2)
    if symmetric:
        scales = (padded.abs().amax(2) / 7).half()
        zeros = torch.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round().clamp(1, 15).long()
    values = (padded / scales.float().unsqueeze(2)).round().long() + zeros.unsqueeze(2)
    return values.clamp(0, 15).flatten(1)[:, :depth], scales, zeros


def dequantised(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    depth = values.shape[1]
    scales, zeros = (each.repeat_interleave(GROUP, 1)[:, :depth] for each in (scales, zeros))
    return (values - zeros).float() * scales.float()


def packed(values: Tensor, scales: Tensor, zeros: Tensor, words: Int4Packing) -> dict[str, Tensor]:
    """The tensors of a layer, by the last part of their names."""
    if words is Int4Packing.COMPRESSED:
        shape = torch.tensor(values.shape)
        return {"weight_packed": _words(values), "weight_scale": scales, "weight_shape": shape}
    if words is Int4Packing.AWQ:
        mixed = [each.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1) for each in (values, zeros)]
        return {"qweight": _words(mixed[0]), "qzeros": _words(mixed[1]), "scales": scales.T.contiguous()}
    return {
        "qweight": _words(values).T.contiguous(),
        "qzeros": _words(zeros.T - int(words is Int4Packing.GPTQ)),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(values.shape[1], dtype=torch.int32) // GROUP,
    }


def _words(numbers: Tensor) -> Tensor:
    """`[M, 8 n]` as int32 `[M, n]`, the first of eight in the lowest bits."""
    parts = numbers.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return parts.sum(2).to(torch.int32)
