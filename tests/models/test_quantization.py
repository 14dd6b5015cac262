"""Models whose weights are in e4m3: read from checkpoints, or quantised as they are loaded."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.formats.e4m3 import E4M3Format, Scales
from layers.formats.weight_format import PLAIN
from layers.input_metadata import NO_PASS
from layers.moe import SparseMoE
from layers.placement import Placement
from layers.weight import Stack, Weight
from radixrt.errors import ModelError
from radixrt.models import loader
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Decoder
from radixrt.models.loader import load_model, reload_weights
from radixrt.models.quantization import read_quantization
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from tests.models.test_parity import Session, assert_close, dense, prompt
from tests.support import checkpoints
from tests.support.checkpoints import edit_weights, linear_weights
from tests.support.interpreter import require_interpreter
from tests.support.quantised_checkpoints import FORMATS, SHAPE, compressed_config, fp8_config, write
from triton_ops.activations.quantised_rows import quantise_rows
from triton_ops.e4m3 import E4M3
from triton_ops.linear.e4m3_linear import dequantised_weight, quantised_weight
from triton_ops.moe.moe import moe

llama = partial(checkpoints.llama, **SHAPE)

MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    **{form: (llama, form) for form in FORMATS},
    "biases": (partial(llama, attention_bias=True), "compressed channels"),
    "parts that blocks do not divide": (partial(llama, head_dim=40), "fp8 blocks"),
    "experts in blocks": (
        partial(checkpoints.qwen3_moe, hidden_size=256, moe_intermediate_size=200, initializer_range=0.08),
        "fp8 blocks",
    ),
    "experts in channels": (checkpoints.mixtral, "compressed channels"),
    "packed": (checkpoints.phi3, "compressed channels"),
    "short convolutions": (partial(checkpoints.lfm2, **SHAPE, block_auto_adjust_ff_dim=False), "fp8 blocks"),
    "rows in another order": (checkpoints.glm4, "compressed channels"),
    "rows in another order, within blocks": (
        partial(checkpoints.glm4, hidden_size=256, head_dim=64, initializer_range=0.05),
        "compressed blocks",
    ),
    "the text of a model with images": (checkpoints.mistral_with_images, "compressed channels"),
}


def logits(model: Decoder, config: Any, ids: list[int]) -> Tensor:
    """Of all tokens: cold, then cached, in chunks."""
    session = Session(model, config)
    return torch.cat([session.run((1, ids[:end], start))[0] for start, end in ((0, 5), (5, 6), (6, len(ids)))])


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_what_transformers_makes_of_their_numbers(name: str, tmp_path: Path) -> None:
    """On a CPU, where they are dequantised."""
    make, form = MODELS[name]
    reference = write(make(), tmp_path, form)
    model, config = load_model(tmp_path)
    assert isinstance(config.quantization, E4M3Format)
    assert config.quantization.scales is FORMATS[form][0]
    assert all(weight.values.dtype == torch.float32 for weight in linear_weights(model))
    ids = prompt(30, 1)
    assert_close(logits(model, config, ids), dense(reference, ids), atol=1e-4)


# --- held in e4m3 ---


@pytest.fixture
def holding(device: torch.device) -> dict[str, Any]:
    """Options of `load_model` with which weights are held in e4m3, in float32 besides."""
    if device.type == "cpu":
        require_interpreter()
    elif torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of e4m3")
    return {"impl": "triton", "device": device, "dtype": "float32"}


def quantise_inputs(reference: Any, scales: Scales) -> None:
    """Let transformers' linear layers of blocks see their inputs in e4m3."""

    def rounded(_: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        x = given[0].flatten(0, -2)
        codes, scale = quantise_rows(x, groups=scales is Scales.BLOCK, impl="torch")
        if scales is Scales.BLOCK:
            scale = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
        return ((codes.float() * scale).view(given[0].shape),)

    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 tensors", "biases", "packed", "short convolutions"])
def test_held_weights_are_multiplied_as_they_are_stored(
    name: str, tmp_path: Path, holding: dict[str, Any]
) -> None:
    """As transformers' of the same rounded weights and inputs; a rounding may fall otherwise here and there."""
    make, form = MODELS[name]
    scales = FORMATS[form][0]
    reference = write(make(), tmp_path, form)
    model, config = load_model(tmp_path, **holding)
    assert all(weight.values.dtype == E4M3 and weight.scale is not None for weight in linear_weights(model))
    ids = prompt(9, 1)
    plain = dense(reference, ids)
    quantise_inputs(reference, scales)
    expected, (ours,) = dense(reference, ids), Session(model, config).run((1, ids, 0))
    off, rounding = (ours - expected).norm(), (plain - expected).norm()
    assert off < rounding / 4, (off, rounding)


def test_parts_that_blocks_do_not_divide_are_dequantised(tmp_path: Path, holding: dict[str, Any]) -> None:
    """q, k and v lie side by side in one matrix, whose blocks would not be theirs."""
    write(llama(head_dim=40), tmp_path, "fp8 blocks")
    model, _ = load_model(tmp_path, **holding)
    attention = model.blocks[0].attention
    assert attention.qkv.weight.values.dtype == torch.float32
    assert attention.output.weight.values.dtype == E4M3
    expected, _ = load_model(tmp_path, **{**holding, "impl": "torch"})
    assert torch.equal(attention.qkv.weight.values, expected.blocks[0].attention.qkv.weight.values)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_quantised_as_they_are_loaded(load_format: Any, tmp_path: Path, holding: dict[str, Any]) -> None:
    """With a scale for each output; on a CPU without kernels the rounded numbers are held."""
    checkpoints.write(llama(), tmp_path)
    options = {"load_format": load_format, "device": holding["device"], "dtype": "float32"}
    plain, _ = load_model(tmp_path, **options)
    held, _ = load_model(tmp_path, quantization="fp8", **{**options, **holding})
    rounded, _ = load_model(tmp_path, quantization="fp8", impl="torch", **options)
    for weight, codes, values in zip(*map(linear_weights, (plain, held, rounded)), strict=True):
        expected, scale = quantised_weight(weight.values, blocks=False)
        assert torch.equal(codes.values.float(), expected.float())
        assert torch.equal(codes.scale, scale)
        assert torch.equal(values.values, dequantised_weight(expected, scale))
    for name in ("embedding", "head", "norm"):
        assert torch.equal(getattr(held, name).weight, getattr(plain, name).weight)


def test_random_weights_of_a_quantised_checkpoint(tmp_path: Path, holding: dict[str, Any]) -> None:
    """Its config alone says what they are."""
    write(llama(), tmp_path, "fp8 blocks")
    (tmp_path / "model.safetensors").unlink()
    model, config = load_model(tmp_path, load_format="dummy", **holding)
    for weight in linear_weights(model):
        assert (weight.values.dtype, weight.scale.dim()) == (E4M3, 2)
        assert 0.5 < dequantised_weight(weight.values, weight.scale).std() / config.initializer_range < 2


def test_half_the_bytes(tmp_path: Path, holding: dict[str, Any]) -> None:
    checkpoints.write(llama(), tmp_path)

    def num_bytes(**options: Any) -> int:
        model, _ = load_model(tmp_path, **{**holding, "dtype": "bfloat16", **options})
        layers = (parameter for block in model.blocks for parameter in block.parameters())
        return sum(parameter.numel() * parameter.itemsize for parameter in layers)

    assert 0.5 < num_bytes(quantization="fp8") / num_bytes() < 0.52


def experts_of(model: Decoder) -> list[SparseMoE]:
    return [layer for layer in model.modules() if isinstance(layer, SparseMoE)]


EXPERTS = {
    "blocks": (partial(checkpoints.qwen3_moe, hidden_size=256, moe_intermediate_size=128), "fp8 blocks"),
    "channels": (checkpoints.mixtral, "compressed channels"),
    "tensors": (checkpoints.mixtral, "fp8 tensors"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_held_as_they_are_stored(name: str, tmp_path: Path, holding: dict[str, Any]) -> None:
    """And their router in the model's dtype."""
    make, form = EXPERTS[name]
    write(make(), tmp_path, form)
    held, config = load_model(tmp_path, **holding)
    plain, _ = load_model(tmp_path, **{**holding, "impl": "torch"})
    assert experts_of(held)
    for ours, theirs in zip(experts_of(held), experts_of(plain), strict=True):
        assert ours.router.weight.values.dtype == torch.float32
        for stack, expected in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down)):
            assert isinstance(stack, Stack)
            for expert in range(len(expected)):
                assert torch.equal(stack.value[expert].dequantised(torch.float32), expected[expert])
    layer = experts_of(held)[0]
    x = torch.randn(9, layer.shape[1], generator=torch.Generator().manual_seed(0)).to(holding["device"])
    matrices = layer.gate_up.value, layer.down.value  # type: ignore[union-attr]
    expected = moe(x, *layer.route(x, NO_PASS), *matrices, impl="torch")
    layer.emits_parts = False  # which the next norm would add
    assert (layer(x, NO_PASS) - expected).norm() < 0.01 * expected.norm()
    assert len(Session(held, config).run((1, prompt(9, 1), 0))) == 1


def leave_plain(folder: Path, end: str) -> None:
    """Let a checkpoint in channels not have quantised the weights whose names end so."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [one for one in tensors if one.endswith(end)]:
            scale = tensors.pop(f"{name}_scale")
            tensors[name] = tensors[name].float() * scale

    edit_weights(folder, change)
    file = folder / "config.json"
    ignored = compressed_config(ignore=["lm_head", f"re:.*{end.removesuffix('.weight')}$"])
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": ignored}))


def test_experts_whose_blocks_are_cut_or_that_are_left_as_they_are(
    tmp_path: Path, holding: dict[str, Any]
) -> None:
    """Then all of a layer's are held in the model's dtype."""
    write(checkpoints.qwen3_moe(hidden_size=256, moe_intermediate_size=200), tmp_path / "cut", "fp8 blocks")
    write(checkpoints.mixtral(), tmp_path / "left", "compressed channels")
    expected, _ = load_model(tmp_path / "left", **{**holding, "impl": "torch"})
    leave_plain(tmp_path / "left", "block_sparse_moe.experts.1.w2.weight")
    for folder in ("cut", "left"):
        model, _ = load_model(tmp_path / folder, **holding)
        for layer in experts_of(model):
            assert layer.gate_up.dtype == layer.down.dtype == torch.float32
        assert model.blocks[0].attention.output.weight.values.dtype == E4M3
    for ours, theirs in zip(experts_of(model), experts_of(expected), strict=True):
        assert torch.equal(ours.down, theirs.down)


def test_experts_quantised_as_they_are_loaded(tmp_path: Path, holding: dict[str, Any]) -> None:
    """Without kernels the rounded numbers are held."""
    checkpoints.write(checkpoints.mixtral(), tmp_path)
    options = {"device": holding["device"], "dtype": "float32"}
    plain, _ = load_model(tmp_path, **options)
    held, _ = load_model(tmp_path, quantization="fp8", **holding)
    rounded, _ = load_model(tmp_path, quantization="fp8", impl="torch", **options)
    for ours, values, theirs in zip(*map(experts_of, (held, rounded, plain)), strict=True):
        for stack, rows, expected in (
            (ours.gate_up, values.gate_up, theirs.gate_up),
            (ours.down, values.down, theirs.down),
        ):
            for expert in range(len(expected)):
                codes, scale = quantised_weight(expected[expert], blocks=False)
                assert torch.equal(stack.values[expert].float(), codes.float())
                assert torch.equal(stack.scale[expert], scale)
                assert torch.equal(rows[expert], dequantised_weight(codes, scale))


def test_other_weights_in_place(tmp_path: Path, holding: dict[str, Any]) -> None:
    """Codes and scales stay where they are, where captured graphs read them."""
    for seed, name in ((0, "one"), (1, "other")):
        write(llama(seed), tmp_path / name, "fp8 blocks")
    model, config = load_model(tmp_path / "one", **holding)
    other, _ = load_model(tmp_path / "other", **holding)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    reload_weights(model, config, tmp_path / "other", before_change=lambda: None)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    checkpoints.write(llama(2), tmp_path / "plain")
    with pytest.raises(ModelError, match="not a checkpoint of this model: quantization is plain, not E4M3Format"):
        reload_weights(model, config, tmp_path / "plain", before_change=lambda: None)


# --- what is refused ---


DOWN = "model.layers.1.mlp.down_proj"
WRONG_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scale": (
        lambda w: w.pop(f"{DOWN}.weight_scale_inv"),
        f"1 tensors are missing: {DOWN}.weight_scale_inv",
    ),
    "a scale of another shape": (
        lambda w: w.update({f"{DOWN}.weight_scale_inv": torch.ones(2, 2)}),
        rf"{DOWN}.weight_scale_inv in .* has shape \[2, 2\]; config.json asks for \[2, 3\]",
    ),
    "not quantised": (
        lambda w: w.update({f"{DOWN}.weight": torch.zeros(256, 384)}),
        f"{DOWN}.weight in .* is stored as F32; by the quantization_config of config.json it must be F8_E4M3",
    ),
    "quantised scales": (
        lambda w: w.update({f"{DOWN}.weight_scale_inv": torch.ones(2, 3).to(E4M3)}),
        f"{DOWN}.weight_scale_inv in .* is stored as F8_E4M3, but config.json has no quantization_config by which",
    ),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_wrong_tensors_are_named(name: str, tmp_path: Path) -> None:
    write(llama(), tmp_path, "fp8 blocks")
    change, message = WRONG_WEIGHTS[name]
    edit_weights(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


def test_codes_without_a_config_are_named(tmp_path: Path) -> None:
    write(llama(), tmp_path, "fp8 blocks")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": None}))
    with pytest.raises(ModelError, match=r"stored as F8_E4M3, but config.json has no quantization_config"):
        load_model(tmp_path)


def test_layers_that_a_checkpoint_leaves_as_they_are(tmp_path: Path, holding: dict[str, Any]) -> None:
    """They stay in the model's dtype, and so do the other parts of their stacks."""
    plain_layers = r"layers\.0\.mlp|layers\.1\.mlp\.up"
    reference = write(llama(), tmp_path, "compressed channels", plain=plain_layers)
    file = tmp_path / "config.json"
    ignored = compressed_config(ignore=["lm_head", "re:.*layers\\.0\\.mlp.*", "model.layers.1.mlp.up_proj"])
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": ignored}))
    ids = prompt(20, 1)
    plain = load_model(tmp_path, **{**holding, "impl": "torch"})
    assert_close(logits(*plain, ids), dense(reference, ids), atol=1e-4)
    held, _ = load_model(tmp_path, **holding)
    for ours, theirs in zip(linear_weights(held), linear_weights(plain[0]), strict=True):
        if ours.scale is None:
            assert torch.equal(ours.values, theirs.values)
        else:
            assert torch.equal(dequantised_weight(ours.values, ours.scale), theirs.values)
    is_plain = [weight.scale is None for weight in linear_weights(held)]
    assert is_plain == [False, False, True, True, False, False, True, False]
    random, _ = load_model(tmp_path, load_format="dummy", **holding)
    assert [weight.scale is None for weight in linear_weights(random)] == is_plain


def test_equal_bits_are_not_promised(tmp_path: Path, holding: dict[str, Any]) -> None:
    checkpoints.write(llama(), tmp_path)
    with pytest.raises(ModelError, match="deterministic is True, but weights are in e4m3, whose products cannot"):
        load_model(tmp_path, quantization="fp8", deterministic=True, **holding)
    load_model(tmp_path, quantization="fp8", deterministic=True)


def test_another_quantisation_than_fp8(tmp_path: Path) -> None:
    checkpoints.write(llama(), tmp_path)
    with pytest.raises(ModelError, match="quantization 'int4' is unknown; 'fp8' is known"):
        load_model(tmp_path, quantization="int4")  # type: ignore[arg-type]


def test_blocks_of_rows_that_are_put_in_another_order(tmp_path: Path) -> None:
    write(checkpoints.glm4(), tmp_path, "fp8 blocks")
    with pytest.raises(
        ModelError,
        match=r"[qk]_proj.weight_scale_inv is of blocks or words of rows, but these rows are loaded",
    ):
        load_model(tmp_path)


def test_blocks_in_which_some_heads_lie_in_part(tmp_path: Path) -> None:
    """Where rows are put in another order, within heads."""
    write(checkpoints.glm4(hidden_size=256, head_dim=96), tmp_path, "compressed blocks")
    with pytest.raises(ModelError, match=r"[qk]_proj.weight_scale is of blocks of 128 rows, .* 128; it is 96"):
        load_model(tmp_path)


# --- config.json ---


def test_what_configs_say() -> None:
    assert read_quantization(None) == PLAIN
    assert read_quantization(fp8_config()) == E4M3Format(
        Scales.BLOCK, "weight_scale_inv", ignored=("lm_head", "model.norm")
    )
    names = ["re:.*gate$", "model.language_model.layers.3.mlp", "vision_tower.x"]
    read = read_quantization(compressed_config(ignore=names))
    assert read == E4M3Format(Scales.ROW, "weight_scale", ignored=("re:.*gate$", "model.layers.3.mlp"))


def test_which_layers_are_ignored() -> None:
    ignored = E4M3Format(Scales.ROW, ignored=("lm_head", "model.layers.3.mlp", "re:.*gate$")).ignores
    assert all(
        map(ignored, ("lm_head", "model.layers.3.mlp", "model.layers.3.mlp.up_proj", "model.layers.0.gate"))
    )
    assert not any(
        map(ignored, ("model.layers.3.self_attn.q_proj", "model.layers.13.mlp", "model.layers.0.gate_proj"))
    )


REFUSED: list[tuple[object, str]] = [
    ({"quant_method": "hqq"}, "quant_method 'hqq'; fp8, awq, gptq and compressed-tensors are supported"),
    ({}, "quant_method None"),
    ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\]"),
    ([1], r"is \[1\]"),
    (fp8_config(weight_block_size=[64, 64]), r"weight_block_size \[64, 64\] and activation_scheme 'dynamic'"),
    (fp8_config(activation_scheme="static"), r"weight_block_size \[128, 128\] and activation_scheme 'static'"),
    (fp8_config(fmt="e5m2"), "fmt 'e5m2'; e4m3 is supported"),
    (fp8_config(modules_to_not_convert="lm_head"), "modules_to_not_convert 'lm_head', which is no list of names"),
    (compressed_config("group"), "strategy 'group'; tensor, channel, block are supported"),
    (compressed_config(["block"]), r"strategy \['block'\]; tensor, channel, block are supported"),
    (compressed_config(ignore=["re:*.gate"]), "ignore 're:.*', which is no regular expression: nothing to repeat"),
    (compressed_config(config_groups={}), "other config_groups than one"),
    (compressed_config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme, whose scales of KV are not read"),
    (compressed_config(sparsity_config={"format": "sparse-24-bitmask"}), "has a sparsity_config"),
    (compressed_config(transform_config={"config_groups": {"R4": {}}}), "transform_config, whose rotations of in"),
    (
        compressed_config(
            config_groups={"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}
        ),
        "weights of .* symmetric floats of 8 bits are supported",
    ),
    (
        compressed_config(
            config_groups={
                "group_0": {**compressed_config()["config_groups"]["group_0"], "input_activations": None}
            }
        ),
        "input_activations of None",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_other_formats_are_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(ModelError, match=f"quantization_config of config.json .*{message}.*: take the checkpoint"):
        read_quantization(given)


# --- in a Runtime ---


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["fp8 blocks", "compressed channels"])
def test_prompts_that_are_cached_and_captured(form: str, where: str, tmp_path: Path) -> None:
    """As alone, and without a cache: each row is quantised by itself."""
    write(llama(), tmp_path, form)
    prompts = [prompt(40, 1)[:30] + prompt(9, seed) for seed in range(5)]
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, logprobs=0)
    on_gpu = where == "cuda"
    options: dict[str, Any] = {
        "device": where,
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_total_tokens": 1000,
        "max_running_requests": 8,
    }
    with Runtime(tmp_path, **options, cuda_graphs=False) as runtime:
        alone = [runtime.generate(ids, params) for ids in prompts]
    with Runtime(tmp_path, **options) as runtime:
        runtime.generate(prompts[0], params)
        together = runtime.generate(prompts, params)
    assert all(output.usage.cached_tokens >= 30 for output in together)
    # Later tokens follow others where two are almost alike.
    ours, theirs = ([output.logprobs[0].logprob for output in outputs] for outputs in (together, alone))
    assert ours == pytest.approx(theirs, abs=0.3 if on_gpu else 1e-4)


def test_what_a_checkpoint_leaves_plain_goes_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At no time there are the quantised and the plain weights of all layers."""
    config = ModelConfig.from_folder(checkpoints.write(checkpoints.llama(num_hidden_layers=3), tmp_path))
    own = E4M3Format(Scales.ROW, scale_name="weight_scale", ignored=("re:.*down_proj",))
    placement = Placement(torch.float32, torch.device("cpu"), quantization=own, holds_quantised=True)
    decoder = Decoder(config, placement)
    held = [weakref.ref(block.feed_forward.down.weight.values) for block in decoder.blocks]
    alive: list[int] = []
    hold_plain = Weight.hold_plain

    def noted(self: Weight) -> None:
        alive.append(sum(one() is not None for one in held))
        hold_plain(self)

    monkeypatch.setattr(Weight, "hold_plain", noted)
    loader._hold_plain(decoder)
    assert alive == [3, 2, 1]


def test_a_block_whose_weights_are_held_otherwise_is_of_another_kind(tmp_path: Path) -> None:
    """Kernels are warmed up with a block of each kind."""
    config = ModelConfig.from_folder(checkpoints.write(checkpoints.llama(num_hidden_layers=6), tmp_path))
    placement = Placement(
        torch.float32, torch.device("meta"), quantization=E4M3Format(Scales.ROW), holds_quantised=True
    )
    decoder = Decoder(config, placement)
    for block in decoder.blocks[:3]:
        for weight in (module for module in block.modules() if isinstance(module, Weight)):
            weight.hold_plain()
    assert decoder.num_unlike_blocks == 4
    assert Decoder(config, placement).num_unlike_blocks == 2
