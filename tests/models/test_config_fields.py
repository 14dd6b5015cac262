"""The fields of a config.json against those that transformers' classes read."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from radixrt.errors import ModelError
from radixrt.models import config, config_fields
from radixrt.models.config import ModelConfig
from radixrt.models.config_fields import read_fields
from radixrt.models.families import FAMILIES
from radixrt.models.model_types import MODEL_TYPES, TEXT_TYPES
from radixrt.models.registry import find_architecture

# The types that an architecture's checkpoints have.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
# What makes a model of defaults that make none.
NEEDED = {
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["mamba"] * 15 + ["attention"] + ["mamba"] * 16},
}

YARN = {"factor": 4.0, "original_max_position_embeddings": 77}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# As older and other checkpoints spell them; each is read whole, and with each entry left out.
SPELLINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": "bfloat16"}),
    (
        "llama",
        {"num_attention_heads": 8, "hidden_size": 64, "original_max_position_embeddings": 99, "dtype": None},
    ),
    ("llama", {"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 7.0, "partial_rotary_factor": 0.5}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 99}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 4, "head_dim": 24, "dtype": "float16"}),
    (
        "ministral3",
        {"rope_parameters": {"type": "yarn", **YARN}, "rope_theta": 9.0, "max_position_embeddings": 99},
    ),
    ("mixtral", {"num_experts": 3, "rope_theta": 5.0}),
    ("mixtral", {"num_local_experts": 3}),
    ("smollm3", {"no_rope_layer_interval": 3, "num_hidden_layers": 7}),
    (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1], "num_hidden_layers": 3},
    ),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "num_hidden_layers": 5}),
    ("qwen3", {"use_sliding_window": True}),
    ("qwen2_5_vl_text", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3_moe", {"use_sliding_window": True, "num_local_experts": 6, "mlp_only_layers": [1]}),
    ("qwen3_next", {"full_attention_interval": 3, "partial_rotary_factor": 0.5, "num_hidden_layers": 7}),
    *((kind, {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}) for kind in DELTA_NETS),
    ("qwen2_5_vl_text", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}, "rope_theta": 5.0}),
    (
        "qwen3_vl_moe_text",
        {"num_local_experts": 6, "rope_scaling": {"rope_type": "default", "mrope_section": [1]}},
    ),
    ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 64}),
    ("olmo3", {"rope_theta": 5.0, "num_hidden_layers": 4, "rope_local_base_freq": 3.0}),
    ("olmo3", {"rope_scaling": {"rope_type": "yarn", **YARN}, "num_hidden_layers": 5, "rope_theta": 5.0}),
    ("glm4", {"partial_rotary_factor": 0.25, "rope_theta": 5.0}),
    ("glm4_moe", {"num_nextn_predict_layers": 3, "num_local_experts": 6, "use_qk_norm": True}),
    ("glm4_moe", {"num_mtp_layers": 2}),
    ("glm4_moe", {"num_nextn_predict_layers": None}),
    ("granitemoehybrid", {"mamba_conv_bias": None, "mamba_proj_bias": None, "num_local_experts": None}),
    ("qwen2_5_vl_text", {"max_window_layers": None, "use_sliding_window": None}),
    ("exaone4", {"sliding_window_pattern": 3, "num_hidden_layers": 7, "sliding_window": 9}),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 50.0}}),
    ("gemma2", {"num_hidden_layers": 5, "hidden_activation": "gelu", "attn_logit_softcapping": None}),
    (
        "gemma3_text",
        {"sliding_window_pattern": 2, "rope_theta": 5.0, "rope_local_base_freq": 3.0, "num_hidden_layers": 5},
    ),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 3.0}),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}),
    ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", **YARN}, "num_experts": 6, "num_hidden_layers": 5}),
    ("gpt_oss", {"num_local_experts": 6}),
    ("gpt_oss", {"rope_parameters": {}, "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}}),
    (
        "granitemoehybrid",
        {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_n_heads": 64, "mamba_d_head": 128},
    ),
    ("granitemoehybrid", {"layers_block_type": ["full_attention"] * 32, "num_local_experts": 0}),
    ("granitemoehybrid", {"time_step_limit": [0.5, {"__float__": "Infinity"}], "mamba_expand": 4}),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "M*-M", "mamba_n_groups": 2, "mamba_d_conv": 5, "num_hidden_layers": 4},
    ),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "moe"], "mamba_conv_bias": False, "mamba_dt_limit": [0.5, 2.0]},
    ),
    ("nemotron_h", {"num_local_experts": 6}),
    ("lfm2", {"block_ff_dim": 50, "tie_embedding": False, "full_attn_idxs": [1, 2], "num_hidden_layers": 4}),
    (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "block_auto_adjust_ff_dim": False},
    ),
    ("lfm2_moe", {"tie_embedding": False, "layer_types": ["conv"] * 32}),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers logs what it finds odd."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def defaults_of(model_type: str) -> dict[str, Any]:
    """As transformers writes them all."""
    written: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    return {name: value for name, value in written.items() if name != "transformers_version"}


def each_left_out(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The whole, and all but one of its entries."""
    yield raw
    for left_out in raw:
        yield {name: value for name, value in raw.items() if name != left_out}


def comparable(name: str, value: Any, source: Any) -> Any:
    if name == "head_dim":
        return config.head_dim_of(source)
    if isinstance(value, dict):  # names of before, and what changes nothing
        kept = {key: comparable(key, entry, source) for key, entry in value.items()}
        whole_head = {"partial_rotary_factor": 1.0}
        ignored = ("type", "max_position_embeddings")
        return {k: entry for k, entry in kept.items() if k not in ignored and whole_head.get(k) != entry}
    return list(value) if isinstance(value, tuple) else value


def fields_of(source: Any, model_type: str) -> dict[str, Any]:
    known = MODEL_TYPES[model_type]
    # Those from which others follow are not kept by all classes.
    steps = {"hybrid_override_pattern", "full_attention_interval", "sliding_window_pattern", "full_attn_idxs"}
    in_ropes = {"partial_rotary_factor", "rope_local_base_freq"}
    names = [name for name in known.defaults if name not in steps | in_ropes]
    names += ["dtype", *([] if known.theta is None else ["rope_parameters"])]
    return {name: comparable(name, getattr(source, name, "missing"), source) for name in names}


def check_equal(model_type: str, raw: dict[str, Any]) -> None:
    theirs: Any = CONFIG_MAPPING[model_type](**config_fields._with_special_floats(copy.deepcopy(raw)))
    if getattr(theirs, "rope_parameters", None):
        theirs.standardize_rope_params()
    ours, _ = read_fields(Path("never read"), {**raw, "model_type": model_type})
    assert fields_of(ours, model_type) == fields_of(theirs, model_type), raw


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """All of them, and with each entry left out; and what a type knows."""
    check_equal(model_type, {})
    for raw in each_left_out(defaults_of(model_type)):
        check_equal(model_type, raw)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_type_knows_what_transformers_class_knows(model_type: str) -> None:
    """Of the names that are asked for so."""
    theirs, ours = vars(CONFIG_MAPPING[model_type]()), MODEL_TYPES[model_type].defaults
    for name in (
        "attention_bias",
        "decoder_sparse_step",
        "hidden_activation",
        "layer_types",
        "mlp_bias",
        "mlp_only_layers",
        "no_rope_layers",
        "norm_topk_prob",
        "use_bidirectional_attention",
    ):
        if (model_type, name) != ("nemotron_h", "layer_types"):  # its class calls them otherwise
            assert (name in ours) == (name in theirs), name


@pytest.mark.parametrize(("model_type", "raw"), SPELLINGS)
def test_other_spellings(model_type: str, raw: dict[str, Any]) -> None:
    for part in each_left_out(raw):
        try:
            CONFIG_MAPPING[model_type](**config_fields._with_special_floats(copy.deepcopy(part)))
        except Exception:  # what is left is not sound
            with pytest.raises(ValueError, match=r"layer_types has|are not mamba_expand"):
                read_fields(Path("never read"), {**part, "model_type": model_type})
        else:
            check_equal(model_type, part)


def by_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    with monkeypatch.context() as patch:
        patch.setattr(config, "read_fields", lambda folder, raw: config_fields._by_transformers(folder))
        return read(folder)


def read(folder: Path) -> ModelConfig:
    return find_architecture(config.read_architecture(folder)).config_class.from_folder(folder)


def write(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_every_architecture_is_compared() -> None:
    assert set(ARCHITECTURES.values()) == set(FAMILIES)
    assert set(ARCHITECTURES) | set(TEXT_TYPES.values()) == set(MODEL_TYPES) | set(TEXT_TYPES)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_config_of_a_family_is_the_one_by_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architectures = {"architectures": [ARCHITECTURES[model_type]]}
    raw = {**defaults_of(model_type), **architectures, **NEEDED.get(model_type, {})}
    expected = by_transformers(write(tmp_path, raw), monkeypatch)
    monkeypatch.setattr(config_fields, "_by_transformers", pytest.fail)
    assert read(tmp_path) == expected


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_what_a_model_of_several_parts_says_of_its_text(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"eos_token_id": 7, "bos_token_id": 3, "vocab_size": 99, "dtype": "float16"}
    raw = {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        "text_config": text,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    for part in (*each_left_out(raw), *({**raw, "text_config": each} for each in each_left_out(text))):
        if part.keys() >= {"model_type", "architectures", "text_config"}:
            assert read(write(tmp_path, part)) == by_transformers(tmp_path, monkeypatch), part
    untied = {**raw, "tie_word_embeddings": None}
    default = MODEL_TYPES[TEXT_TYPES[model_type]].defaults.get("tie_word_embeddings", False)
    assert read(write(tmp_path, untied)).tie_word_embeddings == default, "whatever that of the whole is"
    assert read(write(tmp_path, {**raw, "bos_token_id": 5})).bos_token_id == 5


def test_a_qwen_with_images_of_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were published first."""
    raw = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "torch_dtype": "bfloat16",
        "bos_token_id": 3,
        "eos_token_id": 4,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 1},
    }
    found = read(write(tmp_path, raw))
    assert replace(found, bos_token_id=None) == by_transformers(tmp_path, monkeypatch), "which loses it"
    assert found.bos_token_id == 3


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "mistral", "layer_types": ["full_attention"]},  # transformers takes it for another type
        {"model_type": "gemma3"},
        {"model_type": "gemma3", "text_config": None},
        {"model_type": "bert"},
        {"model_type": "llama", "per_layer_config": {"0": {}}},
        {"model_type": ["llama"]},
        {},
    ],
)
def test_other_types_are_read_by_transformers(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_fields, "_by_transformers", lambda folder: (folder, "found"))
    assert read_fields(Path("here"), raw) == (Path("here"), "found")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number"),
        ({"hidden_size": None}, "hidden_size is None; it must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole number"),
        ({"rms_norm_eps": "1"}, "rms_norm_eps is '1'; it must be a number"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"hidden_act": 3}, "hidden_act is 3; it must be a string"),
        ({"num_key_value_heads": 2.0}, r"num_key_value_heads is 2\.0; it must be a whole number"),
        ({"dtype": "nn"}, "dtype is 'nn'; it must be one of torch's, such as 'bfloat16'"),
        ({"dtype": 16}, "dtype is 16; it must be one of torch's"),
        ({"layer_types": "full"}, "layer_types is 'full'; it must be a list of strings"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but the model has 32 layers"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["0"]}, "mlp_only_layers is .*list of whole numbers"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, r"layers of kind \? are not known"),
        (
            {"model_type": "nemotron_h", "time_step_limit": [1]},
            r"time_step_limit is \[1\]; it must be two numbers",
        ),
        (
            {"model_type": "granitemoehybrid", "mamba_n_heads": 7},
            "mamba_n_heads 7 of .* are not mamba_expand 2 times",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"factor": 4}},
            "rope_parameters has factor; it must have",
        ),
        (
            {"model_type": "gemma3_text", "rope_local_base_freq": "1"},
            "rope_local_base_freq is '1'; it must be a n",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 4}},
            "rope_parameters of full_attention is 4; it must be an object",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type is \['yarn'\]; it must be a string"),
        ({"rope_parameters": {"rope_type": "linear", "factor": None}}, "rope_type 'linear' needs factor"),
        (
            {
                "model_type": "gpt_oss",
                "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None},
            },
            "rope_parameters says nothing of sliding_attention",
        ),
        (
            {"model_type": "gpt_oss", "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters says nothing of sliding_attention",
        ),
        *(
            (
                {"model_type": kind, "sliding_window_pattern": pattern},
                f"sliding_window_pattern is {pattern!r}; without a list of the layers it must be a whole number",
            )
            for kind in ("exaone4", "gemma3_text")
            for pattern in ("LLLG", 0, None)
        ),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; without a list"),
        ({"use_sliding_window": True, "max_window_layers": None}, "max_window_layers is None; with a sliding_win"),
        ({"model_type": "granitemoehybrid", "mamba_d_head": None}, "mamba_d_head is None; it must be a whole num"),
    ],
)
def test_fields_of_another_kind_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ModelError), match=message):
        config.read_attention(read_fields(Path("never read"), {"model_type": "qwen3", **changes})[0])


@pytest.mark.parametrize(
    ("rope", "changes"),
    [
        ({"rope_type": None, "type": "linear", "factor": 2.0}, {"rope_type": "linear"}),
        ({"rope_type": "default", "rope_theta": None}, {"rope_theta": 5.0}),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": None},
            {"original_max_position_embeddings": 99},
        ),
    ],
)
def test_null_says_nothing_of_a_rope(rope: dict[str, Any], changes: dict[str, Any]) -> None:
    raw = {"model_type": "llama", "rope_theta": 5.0, "max_position_embeddings": 99, "rope_parameters": rope}
    found = read_fields(Path("never read"), raw)[0].rope_parameters
    assert {**rope, "rope_theta": 5.0, **changes} == found


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_older_names_of_a_phi3s_rope(kind: str) -> None:
    raw = {"model_type": "phi3", "rope_scaling": {"type": kind, **FACTORS}, "original_max_position_embeddings": 64}
    rope = read_fields(Path("never read"), raw)[0].rope_parameters
    assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("longrope", 64)


def test_a_field_that_nothing_says_is_named() -> None:
    """And no name of a config.json is taken for anything else."""
    raw = {"model_type": "llama", "type_defaults": {"sliding_window": 3}, "__class__": 3, "spare": 4}
    source, _ = read_fields(Path("never read"), raw)
    assert (source.spare, source.type_defaults) == (4, MODEL_TYPES["llama"].defaults)
    with pytest.raises(AttributeError, match=r"^experts is missing$"):
        source.experts  # noqa: B018


def test_special_floats() -> None:
    tags = {"__float__": "Infinity"}, {"__float__": "NaN"}, {"__float__": "else"}, {"__float__": "NaN", "more": 1}
    infinite, nan, *others = config_fields._with_special_floats([*tags])
    assert infinite == math.inf
    assert math.isnan(nan)
    assert others == [*tags[2:]]
