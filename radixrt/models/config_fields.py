"""The fields of a config.json, as its model type reads them: what it says, over the type's defaults.

The types of all families are read here. transformers, whose import takes seconds, reads what others there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from radixrt.models.model_types import MODEL_TYPES, TEXT_TYPES, ModelType, Values

_NUMBERS = (int, float)


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(type(entry) is kind for entry in value)


_KINDS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "a whole number": lambda value: type(value) is int,
        "a number": lambda value: type(value) in _NUMBERS,
        "true or false": lambda value: type(value) is bool,
        "a string": lambda value: isinstance(value, str),
        "a list of strings": _is_list_of(str),
        "a list of whole numbers": _is_list_of(int),
        "two numbers": lambda value: (
            isinstance(value, (list, tuple))
            and len(value) == 2
            and all(type(entry) in _NUMBERS for entry in value)
        ),
    }
)
# Of fields whose default does not tell it.
_KINDS_OF_FIELDS = MappingProxyType(
    {
        **dict.fromkeys(
            ("num_key_value_heads", "head_dim", "bos_token_id", "sliding_window", "moe_latent_size"),
            "a whole number",
        ),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq"), "a number"),
        **dict.fromkeys(("no_rope_layers", "mlp_only_layers", "full_attn_idxs"), "a list of whole numbers"),
        "layer_types": "a list of strings",
        "position_embedding_type": "a string",
        "use_bidirectional_attention": "true or false",
        "time_step_limit": "two numbers",
    }
)
# Of several kinds: whoever takes them judges them.
_UNJUDGED = frozenset({"mamba_d_head", "sliding_window_pattern"})
# May be null, whatever the default; all whose default is null may, too.
_NULLABLE = frozenset(
    {
        *_KINDS_OF_FIELDS,
        "mamba_conv_bias",
        "mamba_d_state",
        "mamba_proj_bias",
        "max_window_layers",
        "num_local_experts",
        "num_nextn_predict_layers",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "use_bias",
        "use_sliding_window",
    }
)
_SCALED_ROPES = ("llama3", "yarn", "longrope")  # those that know a length before they were scaled
_ABSENT_IF_NULL = frozenset({"rope_type", "type", "rope_theta", "original_max_position_embeddings"})  # in a rope
_FULL, _LOCAL = "full_attention", "sliding_attention"
_SPECIAL_FLOATS = MappingProxyType({name: float(name) for name in ("Infinity", "-Infinity", "NaN")})


class ConfigFields:
    """They are attributes, those that the type does not know, too. `type_defaults`: of those that it knows."""

    type_defaults: Mapping[str, Any]

    def __init__(self, values: Mapping[str, Any], type_defaults: Mapping[str, Any]) -> None:
        vars(self).update(values, type_defaults=type_defaults)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is missing")


def read_fields(folder: Path, raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """Read the fields of the model in a folder, and of its text, the same if it has no other parts, from what
    config.json says. Raises ValueError for fields of another kind; values that make no sense, and transformers,
    may raise anything.
    """
    raw = _with_special_floats(raw)
    model_type, text = raw.get("model_type"), raw.get("text_config")
    if not isinstance(model_type, str) or "per_layer_config" in raw:
        return _by_transformers(folder)
    if model_type in MODEL_TYPES and not (model_type == "mistral" and "layer_types" in raw):
        whole = _fields(raw, MODEL_TYPES[model_type], model_type)
        return whole, whole
    if text is None and model_type == "qwen2_5_vl":  # older ones have no parts
        text = {**raw, "model_type": TEXT_TYPES[model_type]}
    if model_type not in TEXT_TYPES or not isinstance(text, Mapping):
        return _by_transformers(folder)
    own = TEXT_TYPES[model_type]
    text_type = text.get("model_type", own)
    if model_type == "mistral3" and text_type in MODEL_TYPES:  # the only one with text of several types
        own = text_type
    whole = ConfigFields({"bos_token_id": None, "eos_token_id": None, **raw, "dtype": _dtype(raw)}, {})
    return whole, _fields(text, MODEL_TYPES[own], text_type)


def _by_transformers(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoConfig

    whole: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    text = whole.get_text_config()
    for part in (whole, text):
        part.type_defaults = vars(type(part)())
        if getattr(part, "rope_parameters", None):  # as transformers does before it computes frequencies
            part.standardize_rope_params()
    return whole, text


def _fields(raw: Mapping[str, Any], model_type: ModelType, name: object) -> ConfigFields:
    values: Values = {**model_type.defaults, **raw, "dtype": _dtype(raw), "model_type": name}
    for other, own in model_type.other_names.items():
        if other in raw:
            values[own] = raw[other]
    for field, default in model_type.defaults.items():
        _check_kind(field, values[field], default)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for derive in model_type.derive:
        derive(values)
    layer_types = values["layer_types"] if "layer_types" in model_type.defaults else None
    if layer_types is not None and len(layer_types) != values["num_hidden_layers"]:
        raise ValueError(
            f"layer_types has {len(layer_types)} entries, but the model has {values['num_hidden_layers']} layers"
        )
    if model_type.theta is not None:
        values["rope_parameters"] = _rope(values, model_type)
    return ConfigFields(values, model_type.defaults)


def _check_kind(field: str, value: object, default: object) -> None:
    """Raise ValueError for a value of another kind than the field's."""
    if field in _UNJUDGED or (value is None and (default is None or field in _NULLABLE)):
        return
    kind = _KINDS_OF_FIELDS.get(field)
    if kind is None:
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        kind = kinds[type(default)]
    if not _KINDS[kind](value):
        raise ValueError(f"{field} is {value!r}; it must be {kind}")


def _dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    name = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    if name is None:
        return None
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {name!r}; it must be one of torch's, such as 'bfloat16'")
    return found


def _rope(values: Values, model_type: ModelType) -> dict[str, Any]:
    """The rope's parameters, or those of each kind of layers, under their present names."""
    given, scaling = (_object(name, values.get(name)) for name in ("rope_parameters", "rope_scaling"))
    theta = model_type.theta if values.get("rope_theta") is None else values["rope_theta"]
    if model_type.local_theta is None:
        return _filled(scaling or (model_type.rope if given is None else given), values, model_type, theta)
    plain, given = {"rope_type": "default"}, given or {}
    if extra := given.keys() - {_FULL, _LOCAL}:
        raise ValueError(f"rope_parameters has {', '.join(sorted(extra))}; it must have {_FULL} and {_LOCAL}")
    # Other types do not know the field.
    local_theta = values["rope_local_base_freq"] if "rope_local_base_freq" in model_type.defaults else None
    local_theta = model_type.local_theta if local_theta is None else local_theta
    full, local = (_object(f"rope_parameters of {kind}", given.get(kind)) or plain for kind in (_FULL, _LOCAL))
    full = {**full, **(scaling or {})}
    return {
        _FULL: _filled(full, values, model_type, theta),
        _LOCAL: _filled(local, values, model_type, local_theta),
    }


def _object(name: str, value: object) -> Mapping[str, Any] | None:
    """Raise ValueError for a value that is neither an object nor null."""
    if value is None or isinstance(value, Mapping):
        return value
    raise ValueError(f"{name} is {value!r}; it must be an object")


def _filled(rope: Mapping[str, Any], values: Values, model_type: ModelType, theta: object) -> dict[str, Any]:
    if kinds := [kind for kind in rope if kind in (values.get("layer_types") or ())]:
        parts = {kind: _object(f"rope_parameters of {kind}", rope[kind]) for kind in kinds}
        return {**rope, **{kind: _filled(part, values, model_type, theta) for kind, part in parts.items() if part}}
    share, original = values.get("partial_rotary_factor"), values.get("original_max_position_embeddings")
    rope = {name: value for name, value in rope.items() if value is not None or name not in _ABSENT_IF_NULL}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str):
        raise ValueError(f"rope_type is {kind!r}; it must be a string")
    kind = model_type.renamed_ropes.get(kind, kind)
    filled = {"rope_theta": theta, **({} if share is None else {"partial_rotary_factor": share}), **rope}
    filled["rope_type"] = kind
    if kind in _SCALED_ROPES:
        filled.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
        if original is not None and model_type.local_theta is None:  # said beside the rope, as by Phi-3
            filled["original_max_position_embeddings"] = original
    return filled


def _with_special_floats(value: Any) -> Any:
    """JSON as transformers writes it, with numbers that JSON does not know as objects of one entry."""
    if isinstance(value, Mapping):
        tag = value.get("__float__")
        if len(value) == 1 and isinstance(tag, str) and tag in _SPECIAL_FLOATS:
            return _SPECIAL_FLOATS[tag]
        return {name: _with_special_floats(entry) for name, entry in value.items()}
    return [_with_special_floats(entry) for entry in value] if isinstance(value, list) else value
