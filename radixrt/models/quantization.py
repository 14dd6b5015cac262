"""What the `quantization_config` of config.json says: which weights are in e4m3, and how scales are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layers.quantization import Quantization, Scales
from radixrt.errors import ModelError
from radixrt.models.multimodal import text_name
from triton_ops.linear.e4m3_linear import BLOCK

_BLOCKS = [BLOCK, BLOCK]
_REMEDY = "take the checkpoint that is not quantised; quantization='fp8' makes it as small"
# compressed-tensors' names of what has a scale of its own.
_STRATEGIES = {"tensor": Scales.TENSOR, "channel": Scales.ROW, "block": Scales.BLOCK}


def read_quantization(given: object) -> Quantization | None:
    """What a `quantization_config` says; None for None. Raises ModelError, with the remedy, for other formats than
    FP8 as DeepSeek and Qwen publish it, as AutoFP8 does, and in compressed-tensors.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refusal(f"is {given!r}")
    readers = {"fp8": _read_fp8, "compressed-tensors": _read_compressed}
    method = given.get("quant_method")
    if method not in readers:
        raise _refusal(f"has the quant_method {method!r}; {' and '.join(readers)} are supported")
    if given.get("kv_cache_scheme") is not None:
        raise _refusal("has a kv_cache_scheme, whose scales of KV are not read")
    return readers[method](given)


def _read_fp8(given: Mapping[str, Any]) -> Quantization:
    ignored = _names(given, "modules_to_not_convert") + _names(given, "ignored_layers")
    blocks, scheme = given.get("weight_block_size"), given.get("activation_scheme", "dynamic")
    if given.get("fmt", "e4m3") != "e4m3":
        raise _refusal(f"has the fmt {given['fmt']!r}; e4m3 is supported")
    if blocks is None:
        return Quantization(Scales.TENSOR, "weight_scale", ignored)
    if blocks != _BLOCKS or scheme != "dynamic":
        raise _refusal(
            f"has weight_block_size {blocks!r} and activation_scheme {scheme!r}; {_BLOCKS} and 'dynamic' are "
            "supported"
        )
    return Quantization(Scales.BLOCK, "weight_scale_inv", ignored)


def _read_compressed(given: Mapping[str, Any]) -> Quantization:
    groups = given.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) and len(groups) == 1 else None
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise _refusal("has other config_groups than one, with the targets ['Linear']")
    for part in ("weights", "input_activations"):
        numbers = group.get(part)
        kind = {} if not isinstance(numbers, Mapping) else numbers
        if (kind.get("num_bits"), kind.get("type")) != (8, "float") or not kind.get("symmetric", True):
            raise _refusal(f"has {part} of {numbers!r}; symmetric floats of 8 bits are supported")
    weights = group["weights"]
    scales = _STRATEGIES.get(weights.get("strategy"))
    if scales is None:
        raise _refusal(
            f"has weights of the strategy {weights.get('strategy')!r}; {', '.join(_STRATEGIES)} are supported"
        )
    if scales is Scales.BLOCK and weights.get("block_structure") != _BLOCKS:
        raise _refusal(f"has the block_structure {weights.get('block_structure')!r}; {_BLOCKS} is supported")
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise _refusal("has a sparsity_config")
    return Quantization(scales, "weight_scale", _names(given, "ignore"))


def _names(given: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of layers, under their names in a checkpoint of text alone."""
    names = given.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refusal(f"has {key} {names!r}, which is no list of names")
    own = (name if name.startswith("re:") else text_name(name) for name in names)
    return tuple(name for name in own if name is not None)


def _refusal(what: str) -> ModelError:
    return ModelError(f"the quantization_config of config.json {what}: {_REMEDY}")
