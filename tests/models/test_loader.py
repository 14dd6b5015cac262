"""Loading checkpoints: what is read where, and the error for each thing that can be wrong with a folder."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layers.checkpoint_slot import unpacked
from layers.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, RopeParameters
from radixrt.errors import ModelError, ParameterError, RadixrtError, TokenizerError
from radixrt.models import loader
from radixrt.models.config import AttentionKind, ModelConfig
from radixrt.models.decoder import Decoder
from radixrt.models.families import FAMILIES as SUPPORTED
from radixrt.models.families import REFUSED
from radixrt.models.gemma import GemmaConfig
from radixrt.models.loader import load_model, reload_weights
from radixrt.models.qwen_hybrid import HybridMixtureConfig
from radixrt.models.weight_files import INDEX_FILE, WeightTensors
from radixrt.text.tokenizer import load_tokenizer
from tests.support import checkpoints
from tests.support.checkpoints import edit_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama whose head is its own."""
    return checkpoints.write(checkpoints.llama(), tmp_path / "model")


def edit_json(file: Path, **changes: Any) -> None:
    """Change entries of a JSON file; None removes one."""
    value = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: entry for name, entry in value.items() if entry is not None}))


def loaded(folder: Path, **options: Any) -> dict[str, Tensor]:
    model, _ = load_model(folder, **options)
    return {name: unpacked(place) for name, place in model.checkpoint_tensors()}


def assert_same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# --- what is read ---


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": checkpoints.llama,
    "llama with biases": lambda: checkpoints.llama(attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "qwen3 with biases": lambda: checkpoints.qwen3(attention_bias=True),
    "qwen2": checkpoints.qwen2,
    "phi3": checkpoints.phi3,
    "olmo2": checkpoints.olmo2,
    "gemma3": checkpoints.gemma3,
    "mixtral": checkpoints.mixtral,
    "qwen3-moe": checkpoints.qwen3_moe,
    "glm4-moe": checkpoints.glm4_moe,
    "lfm2-moe": partial(checkpoints.lfm2_moe, conv_bias=True),
}
HYBRID = {"qwen3-next": checkpoints.qwen3_next}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_every_tensor_is_in_its_place(family: str, max_shard_size: str, tmp_path: Path) -> None:
    checkpoints.write(FAMILIES[family](), tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    stored = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    model, _ = load_model(tmp_path)
    ours = {name: unpacked(place) for name, place in model.checkpoint_tensors()}
    assert_same_weights(ours, {name: tensor for file in stored for name, tensor in file.items()})
    assert sum(tensor.numel() for tensor in ours.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "glm4-moe", "lfm2-moe", "qwen3-next"])
def test_experts_may_be_stored_stacked(family: str, tmp_path: Path) -> None:
    """transformers writes expert by expert, as the hub has them, or the stacks that it computes with."""
    reference = {**FAMILIES, **HYBRID}[family]()
    apart = checkpoints.write(reference, tmp_path / "apart")
    stacked = checkpoints.write(reference, tmp_path / "stacked", save_original_format=False)
    names = [*load_file(stacked / "model.safetensors")]
    assert any(re.fullmatch(r"model\.layers\.1\.\w+\.experts\.gate_up_proj", name) for name in names)
    assert not any("gate_up_proj" in name for name in load_file(apart / "model.safetensors"))
    assert_same_weights(loaded(stacked), loaded(apart))
    edit_weights(stacked, lambda w: w.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(7, 32, 48)}))
    with pytest.raises(
        ModelError, match=r"experts.0.(w2|down_proj).weight .* \[32, 48\]|belong nowhere: .*experts.6"
    ):
        load_model(stacked)


IN_MEMORY = {
    "tied": partial(checkpoints.llama, tie_word_embeddings=True),
    "qwen3-moe": checkpoints.qwen3_moe,
    "gpt-oss": checkpoints.gpt_oss,
    "qwen3.5": checkpoints.qwen3_5,
    "with images": checkpoints.mistral_with_images,
}


@pytest.mark.parametrize("family", IN_MEMORY)
def test_other_weights_from_memory_or_one_file(family: str, tmp_path: Path) -> None:
    """Of transformers' model, as a training loop has it: by its own names, experts stacked, a tied head twice."""
    trained = IN_MEMORY[family](seed=1)
    expected = loaded(checkpoints.write(trained, tmp_path / "trained"))
    WeightTensors(trained.state_dict()).write(tmp_path / "one.safetensors")
    sources: list[Any] = [trained.state_dict(), dict(trained.named_parameters()), tmp_path / "one.safetensors"]
    for number, source in enumerate(sources):
        folder = checkpoints.write(IN_MEMORY[family](seed=0), tmp_path / f"model {number}")
        model, config = load_model(folder)
        reload_weights(model, config, source, before_change=lambda: None)
        ours = {name: unpacked(place) for name, place in model.checkpoint_tensors()}
        assert_same_weights(ours, expected)


def test_weights_in_memory_that_do_not_fit_change_nothing(folder: Path) -> None:
    model, config = load_model(folder)
    before = {name: unpacked(place).clone() for name, place in model.checkpoint_tensors()}
    own, name = checkpoints.llama(seed=1).state_dict(), "model.norm.weight"

    class Sharded(torch.Tensor):
        def full_tensor(self) -> Tensor:
            return self

    for other, told in (
        (3.5, "'model.norm.weight' of the given weights is a float, not a tensor"),
        (own[name].to("meta"), "is on the device meta"),
        (torch.eye(2).to_sparse(), "is of the layout torch.sparse_coo"),
        (own[name].as_subclass(Sharded), r"is in parts \(DTensor\); give its full_tensor\(\)"),
        (own[name][:-1], r"in the given mapping has shape \[31\]; config.json asks for \[32\]"),
        (own[name].to(torch.int64), r"in the given mapping is stored as torch.int64"),
        (own[name].to(torch.float8_e4m3fn), r"is stored as F8_E4M3, but config.json has no quantization_config"),
    ):
        with pytest.raises(ModelError, match=told):
            reload_weights(model, config, {**own, name: other}, before_change=pytest.fail)
    with pytest.raises(ModelError, match="3 of the given weights is no name"):
        reload_weights(model, config, {**own, 3: own[name]}, before_change=pytest.fail)  # type: ignore[dict-item]
    del own["lm_head.weight"]
    for source, told in (
        (own, "the weights in the given mapping .*: 1 tensors are missing: lm_head.weight"),
        ({}, "tensors are missing"),
        ({**checkpoints.llama().state_dict(), "vision": torch.ones(1)}, "1 tensors belong nowhere: vision"),
        (model, "weights are a Decoder; give a path, a hub id or tensors by name"),
        (folder / "none.safetensors", "there is no folder"),
    ):
        with pytest.raises(ModelError, match=told):
            reload_weights(model, config, source, before_change=pytest.fail)
    (folder / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match=r"bad.safetensors cannot be read"):
        reload_weights(model, config, folder / "bad.safetensors", before_change=pytest.fail)
    assert_same_weights({name: unpacked(place) for name, place in model.checkpoint_tensors()}, before)


def test_a_file_that_cannot_be_read_any_more_leaves_weights_of_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which another error says than one that has changed nothing."""
    model, config = load_model(folder)
    with pytest.raises(RadixrtError, match=r"some weights are those of before: .*cannot be read") as raised:
        reload_weights(model, config, folder, before_change=(folder / "model.safetensors").unlink)
    assert not isinstance(raised.value, ModelError)


def test_gate_and_up_in_turns_are_put_apart(tmp_path: Path) -> None:
    """Of gpt-oss, which stores its experts stacked and transposed, and sinks in the weights' dtype."""
    stored = checkpoints.gpt_oss().bfloat16()
    checkpoints.write(stored, tmp_path)
    model, _ = load_model(tmp_path, dtype="bfloat16")
    attention, experts = model.blocks[1].attention, model.blocks[1].feed_forward
    theirs = stored.model.layers[1]
    assert torch.equal(attention.sinks, theirs.self_attn.sinks.float())
    assert attention.attention.scoring.sinks is attention.sinks
    for ours, own in (
        (experts.gate_up, theirs.mlp.experts.gate_up_proj.mT),
        (experts.gate_up_bias, theirs.mlp.experts.gate_up_proj_bias),
    ):
        assert torch.equal(ours, torch.cat((own[:, 0::2], own[:, 1::2]), 1))
    assert torch.equal(experts.down, theirs.mlp.experts.down_proj.mT)
    assert torch.equal(experts.down_bias, theirs.mlp.experts.down_proj_bias)
    assert torch.equal(experts.router.bias, theirs.mlp.router.bias)
    edit_weights(tmp_path, lambda w: w.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(6, 32, 20)}))
    with pytest.raises(ModelError, match=r"experts.0.down_proj.weight .* shape \[20, 32\]; .* \[32, 20\]"):
        load_model(tmp_path)


def test_mxfp4_stays_as_it_is_stored(tmp_path: Path) -> None:
    """Rows of gate and up are put apart, and nothing else is done to them."""
    reference = checkpoints.gpt_oss_in_mxfp4()
    checkpoints.write(reference, tmp_path, max_shard_size="20KB")
    edit_json(tmp_path / "config.json", dtype=None)  # as it is published
    for dtype in ("float32", "bfloat16"):
        model, config = load_model(tmp_path, dtype=dtype)
        experts = model.blocks[1].feed_forward
        stored = {
            name.rpartition(".")[2]: value for name, value in reference.packed.items() if "layers.1." in name
        }
        for part in ("blocks", "scales"):
            own = stored[f"gate_up_proj_{part}"]
            ours = experts.gate_up.get_parameter(part)
            assert ours.dtype == torch.uint8
            assert torch.equal(ours, torch.cat((own[:, 0::2], own[:, 1::2]), 1))
            assert torch.equal(experts.down.get_parameter(part), stored[f"down_proj_{part}"])
    assert config.dtype == torch.bfloat16, "as config.json names none"
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match="weights quantised by 'awq' are not supported; 'mxfp4' is"):
        load_model(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=None)
    with pytest.raises(ModelError, match=r"down_proj.bias|missing: .*down_proj.weight"):
        load_model(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"}, intermediate_size=20)
    with pytest.raises(ModelError, match="intermediate_size is 20; in MXFP4 it must be a multiple of 32"):
        load_model(tmp_path)


def test_dummy_weights_in_mxfp4(tmp_path: Path) -> None:
    checkpoints.write(checkpoints.gpt_oss_in_mxfp4(), tmp_path)
    edit_json(tmp_path / "config.json", initializer_range=0.02)
    model, _ = load_model(tmp_path, load_format="dummy", seed=1)
    again, _ = load_model(tmp_path, load_format="dummy", seed=1)
    assert_same_weights(dict(model.checkpoint_tensors()), dict(again.checkpoint_tensors()))
    weights = model.blocks[0].feed_forward.gate_up.value.dequantised(torch.float32)
    assert 0.015 < weights.std() < 0.03
    assert len(weights.unique()) == 15


@pytest.mark.gpu
def test_mxfp4_on_a_gpu_means_the_same(tmp_path: Path) -> None:
    """Also where it is held in words, from a checkpoint and by chance."""
    checkpoints.write(checkpoints.gpt_oss_in_mxfp4(), tmp_path)
    for options in ({}, {"load_format": "dummy", "seed": 1}):
        ours, _ = load_model(tmp_path, dtype="bfloat16", device="cuda", **options)
        expected, _ = load_model(tmp_path, dtype="bfloat16", **options)
        for own, theirs in zip(ours.blocks, expected.blocks, strict=True):
            for name in ("gate_up", "down"):
                stacks = [getattr(one.feed_forward, name).value for one in (own, theirs)]
                values, theirs_values = (stack.dequantised(torch.float32).cpu() for stack in stacks)
                assert stacks[0].is_contiguous()
                assert torch.equal(values, theirs_values)


def test_stacked_experts_may_be_transposed(tmp_path: Path) -> None:
    """As Qwen3-VL's are on the hub."""
    folder = checkpoints.write(checkpoints.qwen3_vl_moe(), tmp_path)
    expected = loaded(folder)

    def transpose(weights: dict[str, Tensor]) -> None:
        stacks = {name: tensor for name, tensor in weights.items() if ".mlp.experts." in name}
        assert stacks
        assert all(tensor.dim() == 3 for tensor in stacks.values())
        weights.update({name: tensor.transpose(1, 2).contiguous() for name, tensor in stacks.items()})

    edit_weights(folder, transpose)
    assert_same_weights(loaded(folder), expected)


def test_layers_that_predict_tokens_ahead_are_left_out(tmp_path: Path) -> None:
    """GLM-4.5's checkpoints hold one after the last layer; one more belongs nowhere."""
    folder = checkpoints.write(checkpoints.glm4_moe(), tmp_path)
    expected = loaded(folder)
    ahead = {
        "model.layers.3.eh_proj.weight": torch.zeros(32, 64),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.zeros(3),
    }
    edit_weights(folder, lambda w: w.update(ahead))
    assert_same_weights(loaded(folder), expected)
    edit_weights(folder, lambda w: w.update({"model.layers.4.eh_proj.weight": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"1 tensors belong nowhere: model.layers.4.eh_proj.weight"):
        load_model(folder)


def test_a_packed_projection_of_another_shape_is_named(tmp_path: Path) -> None:
    checkpoints.write(checkpoints.phi3(), tmp_path)
    edit_weights(tmp_path, lambda w: w.update({"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(96, 32)}))
    with pytest.raises(ModelError, match=r"layers.0.self_attn.qkv_proj.weight .* \[96, 32\]; .* \[64, 32\]"):
        load_model(tmp_path)


def test_parameters_are_on_the_device_in_the_dtype_without_gradients(folder: Path) -> None:
    model, _ = load_model(str(folder), dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {name for name, _ in model.named_buffers()} == {"blocks.0.attention.attention.cos_sin_cache"}
    assert not model.training


def test_dtype_auto_is_the_checkpoints_but_float32_on_a_cpu(folder: Path) -> None:
    edit_json(folder / "config.json", dtype="float16")
    assert load_model(folder)[0].norm.weight.dtype == torch.float32
    assert load_model(folder, device="meta", load_format="dummy")[0].norm.weight.dtype == torch.float16
    assert load_model(folder, dtype="bfloat16")[0].norm.weight.dtype == torch.bfloat16
    # Older configs call it torch_dtype; where there is none, float32 is what such checkpoints hold.
    edit_json(folder / "config.json", dtype=None, torch_dtype="bfloat16")
    assert ModelConfig.from_folder(folder).dtype == torch.bfloat16
    edit_json(folder / "config.json", torch_dtype=None)
    assert ModelConfig.from_folder(folder).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["int8", "float99", "Tensor", torch.float64])
def test_other_dtypes_are_refused(folder: Path, dtype: str | torch.dtype) -> None:
    with pytest.raises(ModelError, match=f"dtype .*{dtype}.*bfloat16"):
        load_model(folder, dtype=dtype)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    expected = loaded(folder)
    edit_weights(folder, lambda w: w.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert_same_weights(loaded(folder), expected)


def test_a_tied_head_in_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    """If it is the embedding; transformers takes another one, in spite of config.json."""
    reference = checkpoints.llama(tie_word_embeddings=True)
    checkpoints.write(reference, tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    other = embedding.clone()
    other[-1, -1] += 1
    for head in (torch.zeros(3, 3), other):
        edit_weights(tmp_path, lambda w, head=head: w.update({"lm_head.weight": head}))
        with pytest.raises(ModelError, match=r"tensor lm_head.weight in .*model.safetensors differs from the emb"):
            load_model(tmp_path)
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": embedding.clone()}))
    model, _ = load_model(tmp_path)
    assert "lm_head.weight" not in dict(model.checkpoint_tensors())
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.embedding.weight, reference.model.embed_tokens.weight)


SILENT: dict[str, Callable[..., Any]] = {
    "llama": checkpoints.llama,  # whose class is tied by default: no
    "gemma3": checkpoints.gemma3,  # yes
    "lfm2": checkpoints.lfm2,
    "mistral with images": checkpoints.mistral_with_images,  # by its text no, as a whole yes
    "qwen2.5-vl": checkpoints.qwen2_vl,  # whose text knows no such field
    "qwen3-vl": checkpoints.qwen3_vl,
    "qwen3-vl-moe": checkpoints.qwen3_vl_moe,
}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", SILENT)
def test_what_is_stored_says_whether_a_head_is_tied(family: str, is_tied: bool, tmp_path: Path) -> None:
    """Where config.json says nothing."""
    folder = checkpoints.write(SILENT[family](tie_word_embeddings=is_tied), tmp_path / "model")
    told, expected = load_model(folder)
    raw = json.loads((folder / "config.json").read_text())
    for part in (raw, raw.get("text_config", {})):
        part.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(raw))
    silent, config = load_model(folder)
    assert (config, config.tie_word_embeddings) == (expected, is_tied)
    ours = {name: unpacked(place) for name, place in silent.checkpoint_tensors()}
    assert_same_weights(ours, {name: unpacked(place) for name, place in told.checkpoint_tensors()})
    reload_weights(silent, config, folder, before_change=lambda: None)
    if is_tied:  # stored twice, equal and not
        stored = load_file(folder / "model.safetensors")
        (embedding,) = (tensor for name, tensor in stored.items() if name.endswith("embed_tokens.weight"))
        edit_weights(folder, put("lm_head.weight", embedding.clone()))
        assert load_model(folder)[1].tie_word_embeddings
        edit_weights(folder, put("lm_head.weight", embedding + 1))
        other, config = load_model(folder)
        assert not config.tie_word_embeddings
        assert torch.equal(other.head.weight, embedding + 1)
        with pytest.raises(ModelError, match=r"lm_head.weight in .* differs from the embedding, but the model"):
            reload_weights(silent, expected, folder, before_change=pytest.fail)


def test_a_head_that_the_index_names_is_missed(tmp_path: Path) -> None:
    """It is no sign of tied embeddings where the file that had it lost it."""
    folder = checkpoints.write(checkpoints.llama(), tmp_path / "model", max_shard_size="20KB")
    edit_json(folder / "config.json", tie_word_embeddings=None)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index["lm_head.weight"]
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}, file)
    with pytest.raises(ModelError, match=r"1 tensors are missing: lm_head.weight"):
        load_model(folder)


# --- what is wrong with the weights ---


def drop(*names: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda w: [w.pop(name) for name in names]


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda w: w.update({name: tensor})


BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (
        drop("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"),
        r"LlamaForCausalLM.*2 tensors are missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight$",
    ),
    "no head of its own": (drop("lm_head.weight"), "1 tensors are missing: lm_head.weight"),
    "many missing": (
        lambda w: [w.pop(name) for name in list(w) if "layers.0" in name],
        r"9 tensors are missing: model.layers.0.input_layernorm.weight, .* and 1 more$",
    ),
    "extra": (
        put("model.layers.2.self_attn.q_proj.weight", torch.zeros(1)),
        "1 tensors belong nowhere: model.layers.2.self_attn.q_proj.weight",
    ),
    "a bias the config knows nothing of": (
        put("model.layers.0.self_attn.q_proj.bias", torch.zeros(32)),
        "belong nowhere: model.layers.0.self_attn.q_proj.bias",
    ),
    "renamed": (
        lambda w: w.update({"norm.weight": w.pop("model.norm.weight")}),
        "1 tensors are missing: model.norm.weight; 1 tensors belong nowhere: norm.weight",
    ),
    "shape of a part": (
        put("model.layers.1.self_attn.v_proj.weight", torch.zeros(32, 16)),
        r"model.layers.1.self_attn.v_proj.weight in .*model.safetensors has shape \[32, 16\]; .* \[16, 32\]",
    ),
    "transposed": (
        lambda w: w.update({"lm_head.weight": w["lm_head.weight"].T.contiguous()}),
        r"lm_head.weight in .* has shape \[32, 101\]; .* \[101, 32\]",
    ),
    "broadcastable": (put("model.norm.weight", torch.zeros(1)), r"model.norm.weight in .* has shape \[1\]"),
    "quantised": (
        put("model.norm.weight", torch.zeros(32, dtype=torch.int8)),
        "model.norm.weight in .* is stored as I8; these are supported: F64, F32, BF16, F16, and F8_E4M3 for the",
    ),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_wrong_tensors_are_named(folder: Path, name: str) -> None:
    change, message = BAD_WEIGHTS[name]
    edit_weights(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_tensor_stored_twice_is_named(tmp_path: Path) -> None:
    checkpoints.write(checkpoints.llama(), tmp_path, max_shard_size="20KB")
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "more.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    edit_json(index, weight_map={**json.loads(index.read_text())["weight_map"], "x": "more.safetensors"})
    with pytest.raises(ModelError, match=r"model.norm.weight is stored twice"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "absent-1.safetensors", "b": "absent-2.safetensors"}, "lacks .* absent-1.safetensors, absent-2"),
        ({"a": "../model.safetensors"}, "names files outside its folder: ../model.safetensors"),
        ({}, "holds no weight_map"),
        (["model.safetensors"], "holds no weight_map"),
    ],
)
def test_a_wrong_index_is_refused(folder: Path, weight_map: object, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_an_index_may_name_no_more_than_the_files_hold(tmp_path: Path) -> None:
    checkpoints.write(checkpoints.llama(), tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = next(iter(weight_map.values()))
    edit_json(index, weight_map={**weight_map, "model.layers.0.self_attn.rotary_emb.inv_freq": shard})
    load_model(tmp_path)
    edit_json(index, weight_map={**weight_map, "model.layers.7.x": shard})
    with pytest.raises(ModelError, match=r"index.json names 1 tensors that no file holds: model.layers.7.x"):
        load_model(tmp_path)


def test_a_header_longer_than_its_file_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: its header has 4,611,.* only 10"):
        load_model(folder)


def test_more_layers_than_weights(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=900)
    with pytest.raises(ModelError, match=r"num_hidden_layers is 900 in .*config.json, but the weights have 2 l"):
        load_model(folder)


# --- what must not be opened, or built ---


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", INDEX_FILE]
)
def test_a_fifo_is_not_opened(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for read in (load_model, load_tokenizer):
        with pytest.raises((ModelError, TokenizerError), match=f"{name} is a FIFO, not a regular file"):
            read(folder)


def test_links_are_followed(folder: Path, tmp_path: Path) -> None:
    """The hub's cache is made of them."""
    (folder / "config.json").rename(tmp_path / "blob")
    (folder / "config.json").symlink_to(tmp_path / "blob")
    load_model(folder)
    (tmp_path / "blob").unlink()
    with pytest.raises(ModelError, match=r"config.json cannot be read: No such file"):
        load_model(folder)


def test_a_folder_in_place_of_a_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"model.safetensors is a folder, not a regular file"):
        load_model(folder)


def test_files_too_large_to_be_what_they_are_called(folder: Path) -> None:
    sizes = {INDEX_FILE: 2**25 + 1, "config.json": 2**24 + 1, "tokenizer.json": 2**28 + 1}
    for name, size in sizes.items():
        with (folder / name).open("ab") as file:
            file.truncate(size)  # a hole
        with pytest.raises(ModelError, match=rf"{name} has {size:,} bytes; at most {size - 1:,} are read"):
            load_model(folder)


ABSURD: dict[str, int] = {
    "num_hidden_layers": 10_000_000,
    "max_position_embeddings": -5,
    "hidden_size": 10**12,
    "vocab_size": -(10**400),
    "num_attention_heads": 0,
    "head_dim": 10**9,
}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", ABSURD)
def test_absurd_numbers_are_refused_at_once(folder: Path, name: str, load_format: Any) -> None:
    edit_json(folder / "config.json", **{name: ABSURD[name]})
    began = time.monotonic()
    with pytest.raises(ModelError, match=rf"{name} is {ABSURD[name]:,}; it must be a whole number from"):
        load_model(folder, load_format=load_format)
    assert time.monotonic() - began < 5, "a second, on a machine with other work"


def test_weights_that_no_memory_holds_are_not_made(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=2**24, hidden_size=2**16)
    with pytest.raises(ModelError, match=r"takes 4,096.* GiB in torch.bfloat16, and cpu has"):
        load_model(folder, load_format="dummy", dtype="bfloat16")
    with pytest.raises(ModelError, match=r"lm_head.weight .* asks for \[16777216, 65536\]"):
        load_model(folder)


def test_a_config_that_nests_without_end(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(ModelError, match=r"config.json cannot be read: maximum recursion depth"):
        load_model(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        load_model(folder)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: pickles can run code and are not read"):
        load_model(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_model(folder)


# --- where it comes from ---


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_hub_id_fetches_no_code_and_no_pickles(
    folder: Path, monkeypatch: pytest.MonkeyPatch, load_format: Any
) -> None:
    calls: list[dict[str, Any]] = []

    def fetch(source: str, **options: Any) -> str:
        calls.append({"source": source, **options})
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    _, config = load_model("someone/model", load_format=load_format)
    assert config.architecture == "LlamaForCausalLM"
    (call,) = calls
    assert call["source"] == "someone/model"
    assert ("*.safetensors" in call["allow_patterns"]) == (load_format == "auto")
    assert not {"*", "*.py", "*.bin", "*.pt"} & set(call["allow_patterns"])


def test_neither_a_folder_nor_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(source: str, **_: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(ModelError, match=r"'someone/model' is neither a folder nor .* OSError: no network"):
        load_model("someone/model")


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", Path("nowhere")])
def test_a_path_that_is_no_name_asks_no_hub(source: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(ModelError, match=f"there is no folder {source}"):
        load_model(source)


def test_a_path_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(ModelError, match=r"n{300} cannot be read: File name too long"):
        load_model("n" * 300)
    with pytest.raises(ModelError, match="there is no folder ~nobody-of-that-name/model"):
        load_model("~nobody-of-that-name/model")


# --- dummy weights ---


def test_dummy_weights_depend_on_the_seed_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first = loaded(folder, load_format="dummy", seed=7)
    assert_same_weights(loaded(folder, load_format="dummy", seed=7), first)
    other = loaded(folder, load_format="dummy", seed=8)
    assert all(torch.equal(other[name], first[name]) == ("norm" in name) for name in first)


def test_dummy_weights_are_noise_of_the_configs_range(folder: Path) -> None:
    weights = loaded(folder, load_format="dummy")
    matrices = [tensor for name, tensor in weights.items() if "norm" not in name]
    assert all((weights[name] == 1).all() for name in weights if "norm" in name)
    values = torch.cat([tensor.flatten() for tensor in matrices])
    assert values.std().item() == pytest.approx(0.3, rel=0.05)
    assert values.unique().numel() > 0.99 * values.numel(), "no stretch is used twice"


def test_dummy_norms_change_nothing(tmp_path: Path) -> None:
    """A norm of Gemma multiplies by 1 + w, one of OLMo 2 by w."""
    for build, neutral in ((checkpoints.gemma3, 0.0), (checkpoints.olmo2, 1.0)):
        checkpoints.write(build(), tmp_path)
        weights = loaded(tmp_path, load_format="dummy")
        norms = [tensor for name, tensor in weights.items() if "norm" in name]
        assert norms
        assert all((tensor == neutral).all() for tensor in norms)


def test_dummy_experts_differ(tmp_path: Path) -> None:
    checkpoints.write(checkpoints.mixtral(), tmp_path)
    model, _ = load_model(tmp_path, load_format="dummy")
    gate_up = model.get_parameter("blocks.0.feed_forward.gate_up")
    assert gate_up.unique().numel() > 0.99 * gate_up.numel()


def test_dummy_weights_longer_than_the_cycle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "DUMMY_PERIOD", 997)
    weights = loaded(folder, load_format="dummy")
    head = weights["lm_head.weight"].flatten()
    assert torch.equal(head[:997], head[997:1994])
    assert len({tuple(row) for row in weights["lm_head.weight"].tolist()}) == checkpoints.VOCAB_SIZE
    assert all(tensor.abs().max() < 2 for tensor in weights.values()), "all are filled"


def test_an_unknown_load_format_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="load_format 'gguf' is unknown; these are: auto, dummy"):
        load_model(folder, load_format="gguf")  # type: ignore[arg-type]


# --- the config ---


def test_config_of_a_llama(tmp_path: Path) -> None:
    reference = checkpoints.llama(
        rope_parameters=checkpoints.LLAMA3_ROPE, head_dim=16, attention_bias=True, tie_word_embeddings=True
    )
    checkpoints.write(reference, tmp_path)
    rope = RopeParameters(10000.0, Llama3Scaling(8.0, 1.0, 4.0, 32))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=101,
        context_length=256,
        max_context_length=256,
        rms_norm_eps=1e-6,
        attention=(AttentionKind(rope), AttentionKind(rope)),
        activation="silu",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=False,
        initializer_range=0.3,
        dtype=torch.float32,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_config_of_a_gemma3(tmp_path: Path) -> None:
    checkpoints.write(checkpoints.gemma3(), tmp_path)
    config = GemmaConfig.from_folder(tmp_path)
    local = AttentionKind(RopeParameters(100.0), checkpoints.WINDOW)
    assert config.attention == (local, local, AttentionKind(RopeParameters(10000.0, LinearScaling(8.0))))
    assert (config.activation, config.attention_scale) == ("gelu_pytorch_tanh", 24**-0.5)
    assert (config.attention_softcap, config.logits_softcap) == (None, None)
    assert (config.context_length, config.max_context_length) == (256, 256), "the local rope reaches no farther"


def test_older_names_of_a_gemma3(tmp_path: Path) -> None:
    """Released configs have a pattern instead of layer_types, and two bases."""
    file = checkpoints.write(checkpoints.gemma3(), tmp_path) / "config.json"
    edit_json(file, layer_types=None, rope_parameters=None, _sliding_window_pattern=None)
    edit_json(file, sliding_window_pattern=2, rope_theta=5000.0, rope_local_base_freq=50.0, num_hidden_layers=4)
    kinds = GemmaConfig.from_folder(tmp_path).attention
    assert [kind.window for kind in kinds] == [checkpoints.WINDOW, None] * 2
    assert [kind.rope for kind in kinds] == [RopeParameters(50.0), RopeParameters(5000.0)] * 2


def test_older_names_of_a_phi3(tmp_path: Path) -> None:
    """As Phi-3 128k has them."""
    file = checkpoints.write(checkpoints.phi3(), tmp_path) / "config.json"
    old = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    edit_json(file, rope_parameters=None, rope_theta=1e4, rope_scaling=old, original_max_position_embeddings=64)
    factor = math.sqrt(1 + math.log(4) / math.log(64))
    scaling = LongRopeScaling((1.0,) * 4, (2.0,) * 4, 64, factor)
    assert ModelConfig.from_folder(tmp_path).attention[0].rope == RopeParameters(1e4, scaling)


def test_windows_of_layers(tmp_path: Path) -> None:
    """A window is of all layers, or of those of its type; types that know none ignore it."""

    def windows(folder: Path) -> list[int | None]:
        return [kind.window for kind in ModelConfig.from_folder(folder).attention]

    assert windows(checkpoints.write(checkpoints.mistral(), tmp_path / "a")) == [checkpoints.WINDOW] * 2
    qwen = checkpoints.qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert windows(checkpoints.write(qwen, tmp_path / "b")) == [None, 8]
    edit_json(tmp_path / "b" / "config.json", use_sliding_window=False, layer_types=None)
    assert windows(tmp_path / "b") == [None, None]
    checkpoints.write(checkpoints.llama(), tmp_path / "c")
    edit_json(tmp_path / "c" / "config.json", sliding_window=8, layer_types=["sliding_attention"] * 2)
    assert windows(tmp_path / "c") == [None, None]
    checkpoints.write(checkpoints.gemma2(num_hidden_layers=3), tmp_path / "d")
    assert windows(tmp_path / "d") == [checkpoints.WINDOW, None, checkpoints.WINDOW]


def test_layers_without_rope(tmp_path: Path) -> None:
    checkpoints.write(checkpoints.smollm3(num_hidden_layers=4), tmp_path)
    ropes = [kind.rope for kind in ModelConfig.from_folder(tmp_path).attention]
    assert ropes == [RopeParameters(2000000.0), None] * 2
    model, _ = load_model(tmp_path)
    assert {name for name, _ in model.named_buffers()} == {"blocks.0.attention.attention.cos_sin_cache"}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
        (checkpoints.LLAMA3_ROPE, 256),
        (checkpoints.LINEAR_ROPE, 1024),
        (checkpoints.DYNAMIC_ROPE, 1024),
        ({**checkpoints.YARN_ROPE, "factor": 4.0}, 256),
        ({**checkpoints.YARN_ROPE, "factor": 16.0}, 512),
    ],
)
def test_context_lengths(folder: Path, rope: dict[str, Any], longest: int) -> None:
    edit_json(folder / "config.json", rope_parameters=rope)
    model, config = load_model(folder)
    assert (config.context_length, config.max_context_length) == (256, longest)
    for length in (2, longest):
        model, config = load_model(folder, context_length=length)
        assert (config.context_length, config.max_context_length) == (length, longest)
        assert model.get_buffer("blocks.0.attention.attention.cos_sin_cache").shape == (length, 8)
    assert type(load_model(folder, context_length=16.0)[1].context_length) is int  # type: ignore[arg-type]
    for length in (1, longest + 1, 16.5):
        with pytest.raises(ParameterError, match=f"context_length is {length}; .* from 2 to {longest}"):
            load_model(folder, context_length=length)  # type: ignore[arg-type]


def test_older_names_of_the_rope(folder: Path) -> None:
    config = folder / "config.json"

    def rope() -> RopeParameters | None:
        return ModelConfig.from_folder(folder).attention[0].rope

    old = {key: value for key, value in checkpoints.LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_json(config, rope_parameters=None, rope_theta=500000.0, rope_scaling=old)
    assert rope() == RopeParameters(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 32))
    edit_json(config, rope_scaling=None)
    assert rope() == RopeParameters(500000.0)
    edit_json(config, rope_theta=None)
    assert rope() == RopeParameters(10000.0)
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    edit_json(config, rope_scaling=scaling, original_max_position_embeddings=64)
    factor = math.sqrt(1 + math.log(4) / math.log(64))
    expected = LongRopeScaling((1.0,) * 4, (2.0,) * 4, 64, factor)
    assert rope() == RopeParameters(10000.0, expected), "as in a Phi-3, whose type knows the name"


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": 5}, (2, 5)),
        ({"eos_token_id": [9, 5, 9]}, (2, 5, 9)),
        ({"eos_token_id": 0}, (0, 2)),
        ({"eos_token_id": [-1, 7, 101, 2**40]}, (2, 7)),  # the vocabulary has 101
        ({"temperature": 0.6}, (2,)),
        (None, (2,)),
    ],
)
def test_end_tokens(folder: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    """Those of both files; config.json names 2."""
    file = folder / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    assert ModelConfig.from_folder(folder).eos_token_ids == expected


def test_end_tokens_of_a_whole_model_come_before_those_of_its_text(tmp_path: Path) -> None:
    """A text_config may hold what is its type's default."""
    folder = checkpoints.write(checkpoints.gemma3_with_images(), tmp_path)
    (folder / "generation_config.json").unlink()
    raw = json.loads((folder / "config.json").read_text())
    assert "eos_token_id" not in raw
    raw["text_config"]["eos_token_id"] = 7
    (folder / "config.json").write_text(json.dumps(raw))
    assert GemmaConfig.from_folder(folder).eos_token_ids == (7,)
    edit_json(folder / "config.json", eos_token_id=[1, 50])
    assert GemmaConfig.from_folder(folder).eos_token_ids == (1, 50)


def test_an_end_token_that_no_file_names_is_none(folder: Path) -> None:
    """The default of Llama's class, 2, is an ordinary token of most vocabularies."""
    raw = json.loads((folder / "config.json").read_text())
    del raw["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 50}))
    assert ModelConfig.from_folder(folder).eos_token_ids == (50,)


def test_no_end_token_at_all(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(re.sub(r'"eos_token_id": \d+', '"eos_token_id": null', text))
    assert ModelConfig.from_folder(folder).eos_token_ids == ()


@pytest.mark.parametrize("value", ["2", [2, "3"], 1.5, True])
def test_end_tokens_that_are_none(folder: Path, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"eos_token_id in .*generation_config.json must be a token id or a"):
        ModelConfig.from_folder(folder)


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **parameters}}


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"hidden_act": "relu"},
        "activation 'relu' is not supported; these are: silu, gelu, gelu_pytorch_tanh",
    ),
    (
        "llama",
        {"quantization_config": {"quant_method": "hqq", "bits": 4}},
        "quant_method 'hqq'; fp8, awq, gptq and compressed-tensors are supported: take the checkpoint",
    ),
    (
        "llama",
        rope(rope_type="proportional"),
        "rope_type 'proportional' is not supported; .*: default, linear, dyn",
    ),
    ("llama", rope(rope_type="default", partial_rotary_factor=0.4), "3 of head_dim 8 .*factor 0.4.* is odd"),
    (
        "llama",
        rope(rope_type="default", partial_rotary_factor=1.5),
        "12 of head_dim 8 .*factor 1.5.* out of range",
    ),
    ("llama", rope(rope_type="llama3", factor=8.0), "rope_type 'llama3' needs low_freq_factor, high_freq_factor"),
    ("llama", rope(rope_type="linear", factor=0.5), "the rope's factor is 0.5; it must be at least 1"),
    ("llama", rope(rope_type="yarn"), "rope_type 'yarn' needs factor"),
    ("phi3", rope(rope_type="longrope", short_factor=[1.0] * 4), "rope_type 'longrope' needs long_factor"),
    ("llama", rope(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[1.0]), "long_factor has 1 numbers"),
    ("llama", rope(rope_type="default", rope_theta=0), "rope_theta 0.0 and no scaling give no freq.* not finite"),
    ("llama", rope(rope_type="default", rope_theta=math.nan), "rope_theta nan and no scaling give no frequencies"),
    ("llama", rope(rope_type="longrope", short_factor=[0] * 4, long_factor=[1] * 4), "give no frequencies: they"),
    ("llama", rope(rope_type="dynamic", factor=2, partial_rotary_factor=0.25), "give no frequencies: division by"),
    ("llama", {"rms_norm_eps": -1e-6}, "the eps of norms is -1e-06; it must be a number from 0 on"),
    ("llama", {"is_causal": False}, "is_causal is false: attention that is not causal is not supported"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ("llama", {"head_dim": 7}, "7 of head_dim 7 .* is odd"),
    ("llama", {"hidden_size": "32"}, "config.json cannot be used: .*hidden_size"),
    ("llama", {"model_type": "no_such_type"}, "config.json cannot be used: .*no_such_type"),
    (
        "llama",
        {"architectures": ["GPT2LMHeadModel"]},
        "'GPT2LMHeadModel' is not supported; .*LlamaForCausalLM, Minist",
    ),
    ("llama", {"architectures": None}, "names no architecture: architectures is None"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "names no architecture: architectures is 'LlamaForCausalLM'"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0; a token sees at least itself"),
    ("gemma2", {"sliding_window": None}, "cannot be used|names sliding_attention, but there is no sliding_window"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types.* 1 .*2 layers|cannot be used.*layer_types"),
    (
        "gemma2",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layers of kind chunked_attention are not",
    ),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries, but the model has 2 layers"),
    ("mixtral", {"hidden_act": "gelu"}, "experts with hidden_act 'gelu' are not supported; 'silu' is"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; 7.0 alone is supported"),
    ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; it must be 1 to 6"),
    ("glm4_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; it must be 1 to 6"),
    ("glm4_moe", {"n_group": 4}, "n_group is 4 and topk_group 1, with 6 experts"),
    ("glm4_moe", {"topk_group": 2}, "n_group is 1 and topk_group 2"),
    ("glm4_moe", {"n_group": 6}, "n_group is 6, with 6 experts; a group has at least two"),
    ("glm4_moe", {"n_group": 3}, "num_experts_per_tok is 3; the 1 groups of topk_group have 2 experts"),
    (
        "ministral3",
        rope(rope_type="default", llama_4_scaling_beta=0.1),
        "llama_4_scaling_beta is 0.1, but there is no original_max_position_embeddings",
    ),
    ("nemotron_h_moe", {"moe_latent_size": 16}, "moe_latent_size is 16; experts of another size than the model's"),
    ("nemotron_h_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be 1 to 6"),
    ("nemotron_h_moe", {"n_group": 4}, "n_group is 4 and topk_group 1, with 6 experts"),
    ("nemotron_h", {"layers_block_type": ["mlp", "mamba"]}, "layers of kind mlp are supported after others alone"),
    ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "mlp"]}, "layers of kind mlp .* not in a row"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; 'relu2' alone is supported"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; 'silu' alone is supported"),
    ("granite4_hybrid", {"hidden_act": "gelu"}, "layers of Mamba-2 with hidden_act 'gelu' are not supported"),
    ("granite4_hybrid", {"layer_types": ["mamba"] * 3}, "none of the 3 layers has attention"),
    ("granite4_hybrid", {"mamba_n_groups": 3}, "8 heads of Mamba-2 are not a multiple of its 3 groups"),
    ("granite4_hybrid", {"mamba_d_conv": 1}, "mamba_d_conv is 1; it must be a whole number from 2 to 256"),
    ("granite4_hybrid", {"mamba_d_state": None}, "state_size of config.json is None; it must be a whole number"),
    (
        "hunyuan",
        rope(rope_type="dynamic", factor=1.0, alpha=0.5),
        "the rope's alpha is 0.5; it must be at least 1",
    ),
    ("granite4", {"num_local_experts": 4}, "num_experts_per_tok is 0; it must be 1 to 4"),
    *(
        (
            "llama",
            {"architectures": [name]},
            f"architecture '{name}' is not supported: {re.escape(reason)}; all that",
        )
        for name, reason in REFUSED.items()
    ),
]


def test_no_architecture_is_supported_and_refused() -> None:
    assert not REFUSED.keys() & SUPPORTED.keys()


@pytest.mark.parametrize(("family", "changes", "message"), UNSUPPORTED)
def test_unsupported_configs_are_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    folder = checkpoints.write(getattr(checkpoints, family)(), tmp_path)
    file = folder / "config.json"
    # A value of None is written, where edit_json would drop the entry.
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load_model(folder)


def test_fields_that_the_type_of_a_mixture_does_not_know_are_ignored(tmp_path: Path) -> None:
    """As transformers ignores them: the weights of experts sum to 1."""
    folder = checkpoints.write(checkpoints.qwen3_5_moe(), tmp_path)
    expected = HybridMixtureConfig.from_folder(folder)
    edit_json(folder / "config.json", norm_topk_prob=False, mlp_only_layers=[0], decoder_sparse_step=2)
    assert HybridMixtureConfig.from_folder(folder) == expected


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff"])
def test_a_damaged_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config.json (cannot be read|holds no JSON object)"):
        load_model(folder)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"test_a_folder_.* has no config.json, so it is no folder of a model"):
        load_model(tmp_path)


def test_a_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json is a file; a model is a folder in Hugging Face format"):
        load_model(str(folder / "config.json"))


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_in_a_model_folder_is_not_run(folder: Path, tmp_path: Path, model_type: str) -> None:
    proof = tmp_path / "ran"
    code = f"open({str(proof)!r}, 'w')\nfrom transformers import LlamaConfig\nclass Evil(LlamaConfig): pass\n"
    (folder / "evil.py").write_text(code)
    edit_json(folder / "config.json", model_type=model_type, auto_map={"AutoConfig": "evil.Evil"})
    if model_type == "llama":
        assert isinstance(load_model(folder)[0], Decoder)
    else:
        with pytest.raises(ModelError, match=r"config.json cannot be used"):
            load_model(folder)
    assert not proof.exists()
