"""Tiny checkpoints in e4m3, in the formats that are read, and the models that they stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layers.formats.e4m3 import Scales
from tests.support import checkpoints
from triton_ops.e4m3 import E4M3
from triton_ops.linear.e4m3_linear import dequantised_weight, quantised_weight

# Linear layers of blocks: projections of attention, feed-forward and experts, no norms, no routers, and of gated
# delta nets none to single numbers.
LINEAR = re.compile(r"(.*layers\.\d+\..*(?:_proj|_linear|\.w[123]|\.in_proj_(?:qkvz?|z)))\.weight")

# Sizes that blocks of 128 divide, and some that they do not.
SHAPE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "initializer_range": 0.08}


def fp8_config(**changes: Any) -> dict[str, Any]:
    """As Qwen3-FP8 has it."""
    own = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    return {**own, "modules_to_not_convert": ["lm_head", "model.norm"], **changes}


def compressed_config(strategy: str = "channel", **changes: Any) -> dict[str, Any]:
    """As llm-compressor writes it; its FP8-dynamic is of the strategy channel."""
    number = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None}
    structure = [128, 128] if strategy == "block" else None
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": strategy, "block_structure": structure, "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    own = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return {**own, "ignore": ["lm_head"], "kv_cache_scheme": None, **changes}


FORMATS: dict[str, tuple[Scales, str, dict[str, Any]]] = {
    "fp8 blocks": (Scales.BLOCK, "weight_scale_inv", fp8_config()),
    "fp8 tensors": (
        Scales.TENSOR,
        "weight_scale",
        fp8_config(weight_block_size=None, activation_scheme="static"),
    ),
    "fp8 tensors of transformers": (  # Ministral 3's
        Scales.TENSOR,
        "weight_scale_inv",
        fp8_config(weight_block_size=None, activation_scheme="static"),
    ),
    "compressed channels": (Scales.ROW, "weight_scale", compressed_config()),
    "compressed tensors": (Scales.TENSOR, "weight_scale", compressed_config("tensor")),
    "compressed blocks": (Scales.BLOCK, "weight_scale", compressed_config("block")),
}


def write(model: Any, folder: Path, form: str, *, plain: str | None = None) -> Any:
    """Save `model` in e4m3 into `folder`, in one of `FORMATS`; layers whose names match `plain` stay as they are.

    Returns transformers' model of the numbers that the checkpoint stands for, in float32.
    """
    scales, scale_name, config = FORMATS[form]
    checkpoints.write(model, folder)
    weights = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = LINEAR.fullmatch(name)
        if match is None or (plain is not None and re.search(plain, name)):
            stored[name] = weight
            continue
        codes, scale = _quantised(weight, scales)
        weights[name] = dequantised_weight(codes, scale.expand(len(codes)) if scale.dim() == 0 else scale)
        stored[name] = codes
        stored[f"{match[1]}.{scale_name}"] = scale.unsqueeze(1) if scales is Scales.ROW else scale
        if config.get("activation_scheme") == "static":
            own = "activation_scale" if scale_name == "weight_scale_inv" else "input_scale"
            stored[f"{match[1]}.{own}"] = torch.tensor(0.5, device="cpu")
    save_file(weights, folder / "model.safetensors")
    reference = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    save_file(stored, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return reference


def _quantised(weight: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    if scales is not Scales.TENSOR:
        return quantised_weight(weight, blocks=scales is Scales.BLOCK)
    scale = weight.abs().amax() / 448
    return (weight / scale).to(E4M3), scale
