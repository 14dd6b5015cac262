"""ModelConfig: what a model folder's config.json and generation_config.json say, checked once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from layers.rotary import Llama3Scaling, RopeParameters
from radixrt.errors import ModelError


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder and the tokens that mean something to it.

    `dtype` is the one the checkpoint was saved in (float32 where it does not say), `context_length` the
    longest sequence that positions exist for, `eos_token_ids` the tokens that end an answer, sorted.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    initializer_range: float
    dtype: torch.dtype
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` and, where there is one, `generation_config.json`; no code of the folder is
        run.

        Raises ModelError where a file cannot be read, or asks for what is not supported, which it names. The
        architecture is not judged here: see the registry.
        """
        architecture = read_architecture(folder)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            _refuse_unsupported(config)
            return cls(
                architecture=architecture,
                num_layers=config.num_hidden_layers,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                vocab_size=config.vocab_size,
                context_length=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope=_rope(config.rope_parameters),
                tie_word_embeddings=config.tie_word_embeddings,
                attention_bias=config.attention_bias,
                mlp_bias=getattr(config, "mlp_bias", False),
                qk_norm=config.model_type == "qwen3",
                initializer_range=config.initializer_range,
                dtype=config.dtype or torch.float32,
                bos_token_id=config.bos_token_id,
                eos_token_ids=_end_tokens(folder, config.eos_token_id),
            )
        except ModelError:
            raise
        except Exception as error:  # whatever transformers' validators raise
            raise ModelError(f"{folder / 'config.json'} cannot be used: {error}") from error


def read_architecture(folder: Path) -> str:
    """The architecture that `config.json` names, supported or not; ModelError if it names none."""
    architectures = read_json(folder / "config.json").get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(f"{folder / 'config.json'} names no architecture: architectures is {architectures!r}")
    return architectures[0]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder; ModelError names the file where there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object")
    return value


def _refuse_unsupported(config: Any) -> None:
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act {config.hidden_act!r} is not supported; 'silu' is")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError("quantised weights are not supported, but config.json holds a quantization_config")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ModelError(f"layers of kind {', '.join(sorted(kinds))} are not supported; full_attention is")
    if config.num_hidden_layers < 1:
        raise ModelError(f"num_hidden_layers is {config.num_hidden_layers}; a decoder has at least one")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"head_dim {config.head_dim} is odd: rotary embedding needs pairs")


def _rope(parameters: dict[str, Any]) -> RopeParameters:
    """`rope_parameters`, which transformers also makes of the older `rope_theta` and `rope_scaling`."""
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported; 1.0 is")
    theta, kind = float(parameters["rope_theta"]), parameters["rope_type"]
    if kind == "default":
        return RopeParameters(theta)
    if kind == "llama3":
        return RopeParameters(
            theta,
            Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
            ),
        )
    raise ModelError(f"rope_type {kind!r} is not supported; 'default' and 'llama3' are")


def _end_tokens(folder: Path, config_value: object) -> tuple[int, ...]:
    """The end tokens of generation_config.json; config.json's where that file, or its entry, is missing."""
    file = folder / "generation_config.json"
    value = read_json(file).get("eos_token_id") if file.exists() else None
    if value is None:
        value = config_value
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in tokens):
        raise ModelError(f"eos_token_id must be a token id or a list of them, but is {value!r}")
    return tuple(sorted(set(tokens)))
