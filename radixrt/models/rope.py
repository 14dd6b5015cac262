"""Kinds of rope: from the rope_parameters of a config.json to RopeParameters."""

# Tests: tests/models/test_loader.py

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeParameters,
    RopeScaling,
    YarnScaling,
)
from radixrt.errors import ModelError

Parameters = Mapping[str, Any]


def read_rope(parameters: Parameters, head_dim: int, trained_length: int) -> RopeParameters:
    """Read an entry of transformers' `rope_parameters`, into which it also turns `rope_theta` and `rope_scaling`.

    `trained_length` is the config's max_position_embeddings. Raises ModelError if the kind is not supported or its
    numbers make no sense.
    """
    kind = parameters["rope_type"]
    if kind not in SCALINGS:
        raise ModelError(f"rope_type {kind!r} is not supported; these are: {', '.join(SCALINGS)}")
    share = float(parameters.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(
            f"{rotary_dim} of head_dim {head_dim} (partial_rotary_factor {share}) is odd or out of range: "
            "rotary embedding needs pairs"
        )
    found = {name for name, value in parameters.items() if value is not None or (kind, name) in _MAY_BE_NULL}
    if missing := [name for name in NEEDED.get(kind, ()) if name not in found]:
        raise ModelError(f"rope_type {kind!r} needs {', '.join(missing)}")
    scaling = SCALINGS[kind](parameters, trained_length)
    if isinstance(scaling, LongRopeScaling):
        for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
            if len(factors) != rotary_dim // 2:
                raise ModelError(f"{name} has {len(factors)} numbers, but {rotary_dim // 2} pairs are rotated")
    rope = RopeParameters(float(parameters["rope_theta"]), scaling, share)
    _check_frequencies(rope, head_dim, trained_length)
    return rope


def _check_frequencies(rope: RopeParameters, head_dim: int, trained_length: int) -> None:
    """Raise ModelError where the numbers of a rope give no frequencies."""
    problem = "they are not finite"
    try:
        found = [rope.frequencies(head_dim, length) for length in (2, trained_length)]  # short and long ones
        if all(frequencies.isfinite().all() for frequencies in found):
            return
    except ArithmeticError as error:
        problem = str(error)
    raise ModelError(f"rope_theta {rope.theta} and {rope.scaling or 'no scaling'} give no frequencies: {problem}")


def longest_context(rope: RopeParameters, trained_length: int) -> int:
    """Return the longest sequence that a rope is meant for: max_position_embeddings, or more with scaling."""
    scaling = rope.scaling
    if isinstance(scaling, (LinearScaling, DynamicScaling)):
        return int(trained_length * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return max(trained_length, int(scaling.original_max_position_embeddings * scaling.factor))
    return trained_length


def _factor(parameters: Parameters) -> float:
    factor = float(parameters["factor"])
    if not 1.0 <= factor < math.inf:
        raise ModelError(f"the rope's factor is {factor}; it must be at least 1")
    return factor


def _llama3(parameters: Parameters, trained_length: int) -> RopeScaling:
    return Llama3Scaling(
        factor=_factor(parameters),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
    )


def _yarn(parameters: Parameters, trained_length: int) -> RopeScaling:
    original = int(parameters["original_max_position_embeddings"])
    factor = trained_length / original if parameters["factor"] is None else _factor(parameters)

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = temperature(1.0)
        if mscale and mscale_all_dim:
            attention_factor = temperature(mscale) / temperature(mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=bool(parameters.get("truncate", True)),
    )


def _longrope(parameters: Parameters, trained_length: int) -> RopeScaling:
    original = int(parameters["original_max_position_embeddings"])
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        factor = parameters.get("factor") or trained_length / original
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factors=tuple(map(float, parameters["short_factor"])),
        long_factors=tuple(map(float, parameters["long_factor"])),
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
    )


# What a kind cannot do without.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}

_MAY_BE_NULL = frozenset({("yarn", "factor")})  # it follows from the lengths

# rope_type of transformers: from its parameters and max_position_embeddings to the scaling.
SCALINGS: Mapping[str, Callable[[Parameters, int], RopeScaling | None]] = {
    "default": lambda parameters, trained_length: None,
    "linear": lambda parameters, trained_length: LinearScaling(_factor(parameters)),
    "dynamic": lambda parameters, trained_length: DynamicScaling(_factor(parameters), trained_length),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
