"""What the `quantization_config` of config.json says: how weights in e4m3 or 4 bits are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from layers.formats.e4m3 import E4M3Format, Scales
from layers.formats.int4 import Int4Format, Int4Packing
from layers.formats.weight_format import PLAIN, WeightFormat
from radixrt.errors import ModelError
from radixrt.models.multimodal import text_name
from triton_ops.activations.quantised_rows import BLOCK
from triton_ops.linear.int4_linear import GROUP

_BLOCKS = [BLOCK, BLOCK]
_REMEDY = "take the checkpoint that is not quantised; quantization='fp8' makes it half as large"
_FORMATS = ("checkpoint_format", "format")  # where GPTQModel says how words are packed: in one of them, or both
# compressed-tensors' names of what has a scale of its own.
_STRATEGIES = {"tensor": Scales.TENSOR, "channel": Scales.ROW, "block": Scales.BLOCK}


def read_quantization(given: object) -> WeightFormat:
    """What a `quantization_config` says; PLAIN for None. Raises ModelError, with the remedy, for others than FP8
    as DeepSeek and Qwen publish it, as AutoFP8 does, and in compressed-tensors; and 4 bits in groups of 128 as
    AWQ (gemm), GPTQ (desc_act false) and compressed-tensors (pack-quantized, symmetric) store them.
    """
    if given is None:
        return PLAIN
    if not isinstance(given, Mapping):
        raise _refusal(f"is {given!r}")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        *others, last = READERS
        raise _refusal(f"has the quant_method {method!r}; {', '.join(others)} and {last} are supported")
    if given.get("kv_cache_scheme") is not None:
        raise _refusal("has a kv_cache_scheme, whose scales of KV are not read")
    return READERS[method](given)


def _read_fp8(given: Mapping[str, Any]) -> WeightFormat:
    ignored = _names(given, "modules_to_not_convert") + _names(given, "ignored_layers")
    blocks, scheme = given.get("weight_block_size"), given.get("activation_scheme", "dynamic")
    if given.get("fmt", "e4m3") != "e4m3":
        raise _refusal(f"has the fmt {given['fmt']!r}; e4m3 is supported")
    if blocks is None:
        return E4M3Format(Scales.TENSOR, "weight_scale", ignored=ignored)
    if blocks != _BLOCKS or scheme != "dynamic":
        raise _refusal(
            f"has weight_block_size {blocks!r} and activation_scheme {scheme!r}; {_BLOCKS} and 'dynamic' are "
            "supported"
        )
    return E4M3Format(Scales.BLOCK, "weight_scale_inv", ignored=ignored)


def _read_awq(given: Mapping[str, Any]) -> WeightFormat:
    """Zeros are stored, whatever zero_point says."""
    _check_four_bits(given)
    for name in ("version", *_FORMATS):
        if str(given.get(name) or "gemm").lower() != "gemm":
            raise _refusal(f"has the {name} {given[name]!r}; 'gemm' is supported")
    return Int4Format(Int4Packing.AWQ, ignored=_names(given, "modules_to_not_convert"))


def _read_gptq(given: Mapping[str, Any]) -> WeightFormat:
    """Zeros are stored, whether sym or not."""
    _check_four_bits(given)
    if given.get("desc_act", False) is not False:
        raise _refusal(f"has desc_act {given['desc_act']!r}; False is supported")
    if given.get("is_marlin_format"):
        raise _refusal("has is_marlin_format, whose words are not read")
    forms = {name: given[name] for name in _FORMATS if given.get(name)}
    for name, form in forms.items():
        if form not in ("gptq", "gptq_v2"):
            raise _refusal(f"has the {name} {form!r}; 'gptq' and 'gptq_v2' are supported")
    if len(set(forms.values())) > 1:
        raise _refusal(f"has {' and '.join(f'the {name} {form!r}' for name, form in forms.items())}")
    form = next(iter(forms.values()), "gptq")
    for own in ("lm_head", "dynamic", "modules_in_block_to_quantize"):
        if given.get(own):
            raise _refusal(f"has {own} {given[own]!r}; all linear layers but the output head are to be alike")
    return Int4Format(Int4Packing(form), ignored=_names(given, "modules_to_not_convert"))


def _check_four_bits(given: Mapping[str, Any]) -> None:
    bits, size = given.get("bits"), given.get("group_size")
    if (bits, size) != (4, GROUP):
        raise _refusal(f"has bits {bits!r} and group_size {size!r}; 4 and {GROUP} are supported")


def _read_compressed(given: Mapping[str, Any]) -> WeightFormat:
    groups = given.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) and len(groups) == 1 else None
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise _refusal("has other config_groups than one, with the targets ['Linear']")
    if given.get("transform_config"):
        raise _refusal("has a transform_config, whose rotations of inputs are not made")
    if given.get("format") == "pack-quantized":
        return _read_packed(given, group)
    for part in ("weights", "input_activations"):
        numbers = group.get(part)
        kind = {} if not isinstance(numbers, Mapping) else numbers
        if (kind.get("num_bits"), kind.get("type")) != (8, "float") or not kind.get("symmetric", True):
            raise _refusal(f"has {part} of {numbers!r}; symmetric floats of 8 bits are supported")
    weights = group["weights"]
    scales = _STRATEGIES.get(str(weights.get("strategy")))
    if scales is None:
        raise _refusal(
            f"has weights of the strategy {weights.get('strategy')!r}; {', '.join(_STRATEGIES)} are supported"
        )
    if scales is Scales.BLOCK and weights.get("block_structure") != _BLOCKS:
        raise _refusal(f"has the block_structure {weights.get('block_structure')!r}; {_BLOCKS} is supported")
    _check_dense(given)
    return E4M3Format(scales, "weight_scale", ignored=_names(given, "ignore"))


def _read_packed(given: Mapping[str, Any], group: Mapping[str, Any]) -> WeightFormat:
    numbers = group.get("weights")
    kind = {} if not isinstance(numbers, Mapping) else numbers
    wanted = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    if any(kind.get(name) != value for name, value in wanted.items()) or kind.get("actorder"):
        raise _refusal(
            f"has weights of {numbers!r}; symmetric integers of 4 bits in groups of {GROUP}, without actorder, "
            "are supported"
        )
    if group.get("input_activations") is not None:
        raise _refusal(f"has input_activations of {group['input_activations']!r}; none are supported with 4 bits")
    _check_dense(given)
    return Int4Format(Int4Packing.COMPRESSED, ignored=_names(given, "ignore"))


def _check_dense(given: Mapping[str, Any]) -> None:
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise _refusal("has a sparsity_config")


def _names(given: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of layers, under their names in a checkpoint of text alone."""
    names = given.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refusal(f"has {key} {names!r}, which is no list of names")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise _refusal(f"has {key} {name!r}, which is no regular expression: {error}") from error
    own = (name if name.startswith("re:") else text_name(name) for name in names)
    return tuple(name for name in own if name is not None)


def _refusal(what: str) -> ModelError:
    return ModelError(f"the quantization_config of config.json {what}: {_REMEDY}")


READERS = {"fp8": _read_fp8, "awq": _read_awq, "gptq": _read_gptq, "compressed-tensors": _read_compressed}
