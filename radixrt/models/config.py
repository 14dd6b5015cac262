"""ModelConfig: what a model folder's config.json and generation_config.json say, checked once."""

# Tests: tests/models/test_loader.py

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from layers.formats.weight_format import PLAIN, WeightFormat
from layers.rotary import RopeParameters
from memory_pool.layout import Layout, Part
from memory_pool.token_to_kv_pool import kv_part
from radixrt.checks import check_int
from radixrt.errors import ModelError, ParameterError
from radixrt.models.config_fields import read_fields
from radixrt.models.families import text_models_of
from radixrt.models.quantization import read_quantization
from radixrt.models.rope import longest_context, read_rope
from radixrt.sampling_params import SamplingParams
from triton_ops.implementation import cdiv

if TYPE_CHECKING:
    from typing import Self

MAX_CONFIG_BYTES = 2**24

# Bounds of numbers in config.json, far beyond any model's: with greater ones, reading alone would take minutes.
_BOUNDS = {
    "num_hidden_layers": (1, 2**10),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "moe_intermediate_size": (1, 2**22),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "num_experts": (1, 2**12),
    "num_local_experts": (0, 2**12),
    "n_routed_experts": (1, 2**12),
    "n_shared_experts": (1, 2**12),
    "shared_intermediate_size": (1, 2**22),
    "shared_expert_intermediate_size": (1, 2**22),
    "head_dim": (1, 2**14),
    "linear_num_key_heads": (1, 2**12),
    "linear_num_value_heads": (1, 2**12),
    "linear_key_head_dim": (1, 2**14),
    "linear_value_head_dim": (1, 2**14),
    "linear_conv_kernel_dim": (2, 2**8),
    "conv_L_cache": (2, 2**8),
    "moe_shared_expert_intermediate_size": (1, 2**22),
    "mamba_n_heads": (1, 2**12),
    "mamba_n_groups": (1, 2**12),
    "mamba_d_state": (1, 2**14),
    "mamba_d_head": (1, 2**14),
    "mamba_d_conv": (2, 2**8),
    "mamba_num_heads": (1, 2**12),
    "mamba_head_dim": (1, 2**14),
    "n_groups": (1, 2**12),
    "ssm_state_size": (1, 2**14),
    "conv_kernel": (2, 2**8),
    "vocab_size": (1, 2**24),
    "max_position_embeddings": (2, 2**24),
    "original_max_position_embeddings": (2, 2**24),
}

# What generation_config.json may say of sampling; the names are our own, too.
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
# Other names of the same functions.
_ALSO_CALLED = {
    "swish": "silu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_pytorch_tanh"),
}
_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act")


@dataclass(frozen=True)
class AttentionKind:
    """Per-layer attention settings: rope (None: no positions), window in tokens (None: unlimited).

    `is_recurrent`: the layer has no attention, but keeps a state of each sequence.
    """

    rope: RopeParameters | None
    window: int | None = None
    is_recurrent: bool = False


RECURRENT = AttentionKind(rope=None, is_recurrent=True)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, and its special tokens.

    `attention` has an entry a layer. `dtype` is the checkpoint's own (float32 if unnamed). `context_length` is the
    longest sequence that positions exist for, `max_context_length` the longest that the rope's scaling allows.
    `eos_token_ids`, sorted, end an answer, as does the tokenizer's own (see `RequestBuilder.end_ids`).
    `quantization` is the checkpoint's own. Where config.json does not say whether embeddings are tied,
    `is_tying_known` is False until weights are there to tell; `tie_word_embeddings` is the family's default then.

    A family with fields of its own derives a class that adds them and overrides `read_family`. `inner_sizes` are
    those that are divided among ranks besides heads of attention, with their names in config.json; of
    `shared_sizes` a rank has at least one, which several have where there are fewer than ranks. `output_sizes` are
    those of all that are of no layer's inputs. `recurrent_type` is what `layer_types` call the family's layers
    that keep states; None: it has none.
    """

    recurrent_type: ClassVar[str | None] = None
    inner_sizes: ClassVar[Mapping[str, str]] = MappingProxyType({"intermediate_size": "intermediate_size"})
    shared_sizes: ClassVar[Mapping[str, str]] = MappingProxyType({"num_kv_heads": "num_key_value_heads"})
    output_sizes: ClassVar[frozenset[str]] = frozenset({"num_kv_heads"})

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    max_context_length: int
    rms_norm_eps: float
    attention: tuple[AttentionKind, ...]
    activation: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    initializer_range: float
    dtype: torch.dtype
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: WeightFormat = field(default=PLAIN, kw_only=True)
    is_tying_known: bool = field(default=True, kw_only=True)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read `config.json` and `generation_config.json`, if there is one; no code of the folder is run.

        Raises ModelError if a file cannot be read, or names something unsupported. The architecture is not judged
        here: see the registry.
        """
        architecture = read_architecture(folder)
        raw = read_json(folder / "config.json")
        parts = [part for part in (raw, raw.get("text_config")) if isinstance(part, dict)]
        for part in parts:
            check_sizes(part)
        quantizations = [cls.read_quantization(part.get("quantization_config")) for part in parts]
        try:
            source = _text_config(*read_fields(folder, raw), architecture, raw)
            for name in _ACTIVATION_FIELDS:
                if (known := _ALSO_CALLED.get(str(getattr(source, name, None)))) is not None:
                    setattr(source, name, known)
            own = cls.read_family(source)
            config = cls(
                **{**_read_common(source, own, recurrent=cls.recurrent_type), **own},
                architecture=architecture,
                eos_token_ids=_end_tokens(folder, parts, source.vocab_size),
                quantization=next((found for found in quantizations if found != PLAIN), PLAIN),
                is_tying_known=any(part.get("tie_word_embeddings") is not None for part in parts),
            )
        except ModelError:
            raise
        except Exception as error:  # whatever values that make no sense, and transformers' validators, raise
            told = " ".join(str(error).split()) or type(error).__name__  # some have several lines
            raise ModelError(f"{folder / 'config.json'} cannot be used: {told}") from error
        config.check()
        return config

    @classmethod
    def read_family(cls, source: Any) -> dict[str, Any]:
        """Read the fields that a derived class adds, or reads from other names, from a config's fields.

        Raises ModelError. It is called before the common fields are read: its error comes first.
        """
        return {}

    @classmethod
    def read_quantization(cls, given: object) -> WeightFormat:
        """The format of linear layers by the `quantization_config` of config.json. Raises ModelError.

        A family whose checkpoints are quantised in a way of its own overrides this.
        """
        return read_quantization(given)

    def check(self) -> None:
        """Raise ModelError if the fields describe no model that can be built."""
        for own in fields(self):
            if own.type in ("int", int) and type(value := getattr(self, own.name)) is not int:
                raise ModelError(f"{own.name} of config.json is {value!r}; it must be a whole number")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ModelError(f"the eps of norms is {self.rms_norm_eps}; it must be a number from 0 on")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.activation not in ACTIVATIONS:
            raise ModelError(
                f"the activation {self.activation!r} is not supported; these are: {', '.join(ACTIVATIONS)}"
            )
        if all(kind.is_recurrent for kind in self.attention):
            raise ModelError(f"none of the {self.num_layers} layers has attention, which is not supported")
        for kind in self.attention:
            if kind.window is not None and kind.window < 1:
                raise ModelError(f"sliding_window is {kind.window}; a token sees at least itself")

    def kv_layout(
        self, dtype: torch.dtype, layers: range | None = None, state_dtype: torch.dtype | None = None
    ) -> Layout:
        """What some layers keep, or all of them, with KV in `dtype`, and what else they keep of inputs in
        `state_dtype`, or in that, too.
        """
        layers = range(self.num_layers) if layers is None else layers
        recurrent = sum(self.attention[layer].is_recurrent for layer in layers)
        kv = kv_part(len(layers) - recurrent, self.num_kv_heads, self.head_dim, dtype)
        return Layout((kv,), self.state_parts(recurrent, state_dtype or dtype) if self.keeps_states else ())

    def state_parts(self, num_layers: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """What `num_layers` recurrent layers keep, of inputs in `dtype`; a stage may have none of the model's. A
        family that has such layers overrides this.
        """
        raise NotImplementedError

    @property
    def recurrent_weights(self) -> int:
        """Weights of a recurrent layer in the place of attention's, without small ones. A family that has such
        layers overrides this.
        """
        raise NotImplementedError

    @property
    def size_of_all(self) -> int:
        """The intermediate size of what all tokens go through beside experts, with gates and in each layer."""
        return self.intermediate_size

    @property
    def keeps_states(self) -> bool:
        """Whether some layer keeps a state of each sequence."""
        return any(kind.is_recurrent for kind in self.attention)

    def place_of(self, layer_id: int, layers: range) -> int:
        """How many of `layers` before `layer_id` keep what that keeps: where it lies in the pool of these."""
        is_recurrent = self.attention[layer_id].is_recurrent
        return sum(self.attention[layer].is_recurrent == is_recurrent for layer in range(layers.start, layer_id))

    def with_context_length(self, context_length: int) -> Self:
        """Return the config for sequences up to `context_length`, 2 to `max_context_length`, or ParameterError."""
        length = check_int("context_length", context_length, 2, self.max_context_length)
        return replace(self, context_length=length)

    @property
    def widths(self) -> dict[str, int]:
        """Features of one of each, where that is not 1, of what ranks divide."""
        return {"num_heads": self.head_dim, "num_kv_heads": self.head_dim}

    def for_ranks(self, size: int) -> Self:
        """The shape of one rank's part of the model, of `size` that hold it together: its heads, and its share of
        the inner and shared sizes. Where there are fewer KV heads than ranks, several hold the same one. Of a
        mixture each rank has all experts, and its share of each.

        Raises ModelError for what does not divide, or not between a checkpoint's quantised blocks.
        """
        divided = {"num_heads": "num_attention_heads", **self.inner_sizes}
        parts = {own: getattr(self, own) // size for own in divided}
        for own, name in divided.items():
            if parts[own] * size != getattr(self, own):
                raise _indivisible(name, getattr(self, own), "not a multiple", size)
        for own, name in self.shared_sizes.items():
            count = getattr(self, own)
            if count % size and size % count:
                raise _indivisible(name, count, "neither a multiple nor a divisor", size)
            parts[own] = cdiv(count, size)
        part = replace(self, **parts)
        part._check_units(self)
        return part

    def check_stages(self, count: int) -> None:
        """Raise ModelError where there are not so many layers."""
        if count > self.num_layers:
            raise ModelError(f"num_hidden_layers {self.num_layers} is less than pipeline_parallel_size {count}")

    def _check_units(self, whole: ModelConfig) -> None:
        """Raise ModelError where this part of the `whole` model would begin within a unit of its weights."""
        widths, heads = self.widths, {"num_heads": "num_attention_heads"}
        for each, name in {**heads, **self.shared_sizes, **self.inner_sizes}.items():
            own, every = (widths.get(each, 1) * getattr(config, each) for config in (self, whole))
            self._check_unit(name, own, every, is_output=each in self.output_sizes)

    def _check_unit(self, name: str, own: int, every: int, *, is_output: bool) -> None:
        """Raise ModelError where `own` of `every` features are no whole units of outputs, or of inputs, too."""
        outputs, inputs = self.quantization.units
        unit = outputs if is_output else math.lcm(outputs, inputs)
        if own != every and own % unit:
            raise ModelError(
                f"{name} gives a rank {own} of {every} features, but weights in {self.quantization.numbers} "
                f"are stored in units of {unit}, which cannot be cut; tensor_parallel_size must be smaller"
            )


def _indivisible(name: str, value: int, what: str, size: int) -> ModelError:
    return ModelError(f"{name} {value} is {what} of tensor_parallel_size {size}")


def read_architecture(folder: Path) -> str:
    """Return the architecture that `config.json` names, supported or not. Raises ModelError if it names none."""
    if not os.path.lexists(folder / "config.json"):
        raise ModelError(f"{folder} has no config.json, so it is no folder of a model in Hugging Face format")
    architectures = read_json(folder / "config.json").get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(f"{folder / 'config.json'} names no architecture: architectures is {architectures!r}")
    return architectures[0]


def read_json(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder. Raises ModelError, which names the file."""
    try:
        if (size := file.stat().st_size) > max_bytes:
            raise ModelError(f"{file} has {size:,} bytes; at most {max_bytes:,} are read")
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object")
    return value


def check_sizes(raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a whole number of config.json that is out of bounds. Other types are not judged."""
    for name, (low, high) in _BOUNDS.items():
        value = raw.get(name)
        if type(value) is int and not low <= value <= high:
            raise ModelError(f"{name} is {value:,}; it must be a whole number from {low} to {high:,}")


def _text_config(whole: Any, source: Any, architecture: str, raw: Mapping[str, Any]) -> Any:
    """The part of a config that is about text, or all of it. Raises ModelError where it is of another model.

    `raw` is config.json itself: where it does not say whether embeddings are tied, the text's own default counts,
    if it has one, as transformers' default for the whole model may be another one. Special tokens of the whole
    model come before those of its text, which may be defaults.
    """
    text_models = text_models_of(architecture)
    if not text_models:
        return whole
    if source.model_type not in text_models:
        raise ModelError(
            f"the text_config of this {architecture} is of type {source.model_type!r}, which is not supported; "
            f"these are: {', '.join(text_models)}"
        )
    told = [part.get("tie_word_embeddings") for part in (raw, raw.get("text_config")) if isinstance(part, dict)]
    tied = [value for value in told if value is not None]
    source.tie_word_embeddings = tied[0] if tied else source.type_defaults.get("tie_word_embeddings", False)
    source.dtype = source.dtype or whole.dtype
    for name in ("bos_token_id", "eos_token_id"):
        if raw.get(name) is not None or getattr(source, name, None) is None:
            setattr(source, name, getattr(whole, name, None))
    return source


def optional(source: Any, name: str, default: Any) -> Any:
    """A field of a config, if its type knows it.

    A config.json may hold names that the model's type does not know (a Llama with a sliding_window, say);
    transformers ignores them, and so does this.
    """
    return getattr(source, name) if name in source.type_defaults else default


def head_dim_of(source: Any) -> int:
    """Elements of a head, by a config's fields."""
    return int(getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads)


def read_attention(source: Any, *, recurrent: str | None = None) -> tuple[AttentionKind, ...]:
    """Read the kind of each layer's attention from a config's fields. Layers of the type `recurrent`
    have none. Raises ModelError, also for layers of a type that is neither that nor one of attention.
    """
    num_layers, trained_length = source.num_hidden_layers, source.max_position_embeddings
    window = optional(source, "sliding_window", None)
    types = optional(source, "layer_types", None) or [None] * num_layers
    rotated = optional(source, "no_rope_layers", [True] * num_layers)  # by transformers' convention, 1 is for rope
    for name, values in (("layer_types", types), ("no_rope_layers", rotated)):
        if len(values) < num_layers:
            raise ModelError(f"{name} has {len(values)} entries, but the model has {num_layers} layers")
    known = ["full_attention", "sliding_attention", *([recurrent] if recurrent else [])]
    if unknown := set(types) - {None, *known}:
        raise ModelError(
            f"layers of kind {', '.join(sorted(unknown))} are not supported; "
            f"{', '.join(known[:-1])} and {known[-1]} are"
        )
    if "sliding_attention" in types and window is None:
        raise ModelError("layer_types names sliding_attention, but there is no sliding_window")

    def rope(layer_type: str | None) -> RopeParameters:
        parameters = source.rope_parameters.get(layer_type or "", source.rope_parameters)
        if not parameters or "rope_type" not in parameters:
            raise ModelError(f"rope_parameters says nothing of {layer_type or 'any layer'}")
        return read_rope(parameters, head_dim_of(source), trained_length)

    return tuple(
        RECURRENT
        if kind is not None and kind == recurrent
        else AttentionKind(rope(kind) if with_rope else None, None if kind == "full_attention" else window)
        for kind, with_rope, _ in zip(types, rotated, range(num_layers), strict=False)
    )


def _read_common(source: Any, own: Mapping[str, Any], *, recurrent: str | None) -> dict[str, Any]:
    """Read the fields that all families have, with the `attention` that a family has read itself, if it has;
    `recurrent` as in `read_attention`.
    """
    if optional(source, "use_bidirectional_attention", None):
        raise ModelError("use_bidirectional_attention is not supported")
    if not getattr(source, "is_causal", True):  # transformers reads it of any model
        raise ModelError("is_causal is false: attention that is not causal is not supported")
    # Quantised checkpoints hold the rest in bfloat16.
    usual_dtype = torch.bfloat16 if getattr(source, "quantization_config", None) else torch.float32
    attention, trained_length = own.get("attention"), source.max_position_embeddings
    if attention is None:
        attention = read_attention(source, recurrent=recurrent)
    lengths = [longest_context(kind.rope, trained_length) for kind in attention if kind.rope is not None]
    return {
        "num_layers": source.num_hidden_layers,
        "hidden_size": source.hidden_size,
        "intermediate_size": getattr(source, "intermediate_size", 0),  # there are mixtures of experts alone
        "num_heads": source.num_attention_heads,
        "num_kv_heads": source.num_key_value_heads,
        "head_dim": head_dim_of(source),
        "vocab_size": source.vocab_size,
        "context_length": trained_length,
        "max_context_length": min(lengths, default=trained_length),
        "rms_norm_eps": getattr(source, "rms_norm_eps", None),  # some families call it otherwise
        "attention": attention,
        "activation": optional(source, "hidden_activation", getattr(source, "hidden_act", None)),
        "tie_word_embeddings": source.tie_word_embeddings,
        "attention_bias": optional(source, "attention_bias", False),
        "mlp_bias": optional(source, "mlp_bias", False),
        "initializer_range": source.initializer_range,
        "dtype": source.dtype or usual_dtype,
        "bos_token_id": source.bos_token_id,
    }


def generation_defaults(folder: Path) -> SamplingParams:
    """The parameters of `generation_config.json`, and our own defaults of the others. Raises ModelError."""
    file = folder / "generation_config.json"
    given = read_json(file) if file.exists() else {}
    try:
        return SamplingParams(**{name: given[name] for name in GENERATION_DEFAULTS if given.get(name) is not None})
    except ParameterError as error:
        raise ModelError(f"{file} cannot be used: {error}") from error


def _end_tokens(folder: Path, parts: Sequence[Mapping[str, Any]], vocab_size: int) -> tuple[int, ...]:
    """The end tokens that generation_config.json and config.json name; those that the model has no logits for,
    such as -1, end nothing.

    Of config.json's `parts` the first that names some counts: a text_config may hold defaults. Those of
    transformers' classes do not count, as they are of one vocabulary.
    """
    generation = folder / "generation_config.json"
    named = {generation: read_json(generation).get("eos_token_id") if generation.exists() else None}
    in_parts = [part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None]
    named[folder / "config.json"] = next(iter(in_parts), None)
    ends: set[int] = set()
    for file, value in named.items():
        tokens = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in tokens):
            raise ModelError(f"eos_token_id in {file} must be a token id or a list of them, but is {value!r}")
        ends.update(token for token in tokens if 0 <= token < vocab_size)
    return tuple(sorted(ends))
