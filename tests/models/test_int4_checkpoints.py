"""Models whose weights are in 4 bits: AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.formats.int4 import Int4Format, Int4Packing
from layers.weight import Weight
from radixrt.errors import ModelError
from radixrt.models.loader import load_model, reload_weights
from radixrt.models.quantization import read_quantization
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from tests.models.test_parity import Session, assert_close, dense, prompt
from tests.support import checkpoints
from tests.support.checkpoints import edit_weights, linear_weights
from tests.support.int4_checkpoints import FORMATS, awq_config, gptq_config, packed_config, write
from tests.support.interpreter import require_interpreter
from tests.support.quantised_checkpoints import SHAPE
from triton_ops.linear.int4_linear import dequantized_int4

llama = partial(checkpoints.llama, **SHAPE)
# With larger weights its logits in float32 would be further from float64 than what is allowed.
glm4 = partial(checkpoints.glm4, hidden_size=256, initializer_range=0.05)
qwen3_moe = partial(checkpoints.qwen3_moe, hidden_size=256, moe_intermediate_size=192, initializer_range=0.08)

MODELS: dict[str, tuple[Callable[[], Any], Int4Packing]] = {
    **{words.value: (llama, words) for words in Int4Packing},
    "biases": (partial(llama, attention_bias=True), Int4Packing.GPTQ),
    "rows that groups do not divide": (partial(llama, intermediate_size=200), Int4Packing.AWQ),
    "experts of AWQ": (qwen3_moe, Int4Packing.AWQ),
    "experts of compressed-tensors": (qwen3_moe, Int4Packing.COMPRESSED),
    "packed": (partial(checkpoints.phi3, hidden_size=256, intermediate_size=128), Int4Packing.GPTQ_V2),
    "rows in another order": (glm4, Int4Packing.COMPRESSED),
}


def numbers_of(weight: Weight) -> Tensor:
    """In the model's dtype."""
    if weight.scale is None or weight.zeros is None:
        return weight.values
    return dequantized_int4(weight.values, weight.scale, weight.zeros, impl="torch")


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_what_transformers_makes_of_their_numbers(name: str, tmp_path: Path) -> None:
    """On a CPU, where they are dequantised: cold, then cached, in chunks."""
    make, words = MODELS[name]
    reference = write(make(), tmp_path, words)
    model, config = load_model(tmp_path)
    assert isinstance(config.quantization, Int4Format)
    assert config.quantization.words is words
    assert all(weight.values.dtype == torch.float32 for weight in linear_weights(model))
    ids = prompt(30, 1)
    session = Session(model, config)
    logits = [session.run((1, ids[:end], start))[0] for start, end in ((0, 5), (5, 6), (6, len(ids)))]
    assert_close(torch.cat(logits), dense(reference, ids), atol=1e-4)


def test_a_second_format_of_gptq_under_its_other_name(tmp_path: Path) -> None:
    """GPTQModel's `format` alone: zeros are not less one."""
    reference = write(llama(), tmp_path, Int4Packing.GPTQ_V2, checkpoint_format=None, format="gptq_v2")
    model, config = load_model(tmp_path)
    ids = prompt(9, 1)
    assert_close(Session(model, config).run((1, ids, 0))[0], dense(reference, ids), atol=1e-4)


# --- held in 4 bits ---


@pytest.fixture
def holding(device: torch.device) -> dict[str, Any]:
    """Options of `load_model` with which weights are held in 4 bits."""
    if device.type == "cpu":
        require_interpreter()
    return {"impl": "triton", "device": device, "dtype": "float16"}


@pytest.mark.parametrize("name", [*(words.value for words in Int4Packing), "biases", "packed"])
def test_held_weights_give_the_logits_of_dequantised_ones(
    name: str, tmp_path: Path, holding: dict[str, Any]
) -> None:
    make, words = MODELS[name]
    reference = write(make(), tmp_path, words)
    model, config = load_model(tmp_path, **holding)
    plain, _ = load_model(tmp_path, **{**holding, "impl": "torch"})
    for ours, theirs in zip(linear_weights(model), linear_weights(plain), strict=True):
        assert (ours.values.dtype, ours.zeros is None) == (torch.uint8, False)
        assert (theirs.values.dtype, theirs.zeros) == (torch.float16, None)
        assert torch.equal(numbers_of(ours), theirs.values)
    ids = prompt(9, 1)
    expected, (found,) = dense(reference, ids), Session(model, config).run((1, ids, 0))
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_a_quarter_of_the_bytes(tmp_path: Path, holding: dict[str, Any]) -> None:
    write(llama(), tmp_path, Int4Packing.AWQ)

    def num_bytes(**options: Any) -> int:
        model, _ = load_model(tmp_path, **{**holding, **options})
        return sum(
            weight.numel() * weight.itemsize for layer in linear_weights(model) for weight in layer.parameters()
        )

    assert num_bytes() / num_bytes(impl="torch") == (64 + 3) / 256


def test_experts_and_routers_stay_in_the_dtype_of_the_model(tmp_path: Path, holding: dict[str, Any]) -> None:
    write(qwen3_moe(), tmp_path, Int4Packing.GPTQ)
    model, _ = load_model(tmp_path, **holding)
    feed_forward = model.blocks[1].feed_forward
    assert feed_forward.router.weight.values.dtype == feed_forward.gate_up.dtype == torch.float16
    assert model.blocks[1].attention.qkv.weight.zeros is not None


def test_layers_that_a_checkpoint_leaves_as_they_are(tmp_path: Path, holding: dict[str, Any]) -> None:
    """They stay in the model's dtype, and so do the other parts of their stacks."""
    write(llama(), tmp_path, Int4Packing.AWQ, modules_to_not_convert=["model.layers.1.mlp.up_proj"])
    held, _ = load_model(tmp_path, **holding)
    plain, _ = load_model(tmp_path, **{**holding, "impl": "torch"})
    assert [weight.zeros is None for weight in linear_weights(held)] == [False] * 6 + [True, False]
    for ours, theirs in zip(linear_weights(held), linear_weights(plain), strict=True):
        assert torch.equal(numbers_of(ours), theirs.values)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Also after tests whose default device is another."""
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(before)


@pytest.mark.parametrize("named", [["self_attn"], ["gate"], ["k_proj", "layers.1."], ["model.layers.0"], None])
@pytest.mark.usefixtures("on_cpu")
def test_lists_of_names_that_others_match_otherwise(named: list[str] | None, tmp_path: Path) -> None:
    """AutoAWQ leaves what contains a name, transformers what begins or ends with one: what is stored decides."""
    left = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.self_attn.o_proj"]
    reference = write(llama(), tmp_path, Int4Packing.AWQ, modules_to_not_convert=left)
    file = tmp_path / "config.json"
    told = awq_config(modules_to_not_convert=named)
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": told}))
    model, config = load_model(tmp_path)
    ids = prompt(9, 1)
    assert_close(Session(model, config).run((1, ids, 0))[0], dense(reference, ids), atol=1e-4)


def test_random_weights(tmp_path: Path, holding: dict[str, Any]) -> None:
    """The config alone says what they are."""
    write(llama(), tmp_path, Int4Packing.GPTQ)
    (tmp_path / "model.safetensors").unlink()
    for impl in ("triton", "torch"):
        model, config = load_model(tmp_path, load_format="dummy", **{**holding, "impl": impl})
        for weight in linear_weights(model):
            assert (weight.zeros is not None) == (impl == "triton")
            assert 0.5 < numbers_of(weight).float().std() / config.initializer_range < 2


def test_other_weights_in_place(tmp_path: Path, holding: dict[str, Any]) -> None:
    """They stay where they are, where captured graphs read them; what is refused changes nothing."""
    for seed, name in ((0, "one"), (1, "other"), (2, "bad")):
        write(llama(seed), tmp_path / name, Int4Packing.GPTQ)
    model, config = load_model(tmp_path / "one", **holding)
    other, _ = load_model(tmp_path / "other", **holding)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    reload_weights(model, config, tmp_path / "other", before_change=lambda: None)
    edit_weights(tmp_path / "bad", lambda w: w[f"{DOWN}.g_idx"].copy_(w[f"{DOWN}.g_idx"].flip(0)))
    with pytest.raises(ModelError, match="g_idx"):
        reload_weights(model, config, tmp_path / "bad", before_change=lambda: None)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- what is refused ---


DOWN = "model.layers.1.mlp.down_proj"


WRONG_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no zeros": (lambda w: w.pop(f"{DOWN}.qzeros"), f"1 tensors are missing: {DOWN}.qzeros"),
    "other groups": (
        lambda w: w.update({f"{DOWN}.scales": torch.ones(6, 256)}),
        rf"{DOWN}.scales in .* has shape \[6, 256\]; config.json asks for \[3, 256\]",
    ),
    "no words": (
        lambda w: w.update({f"{DOWN}.qweight": torch.ones(48, 256)}),
        rf"{DOWN}.qweight in .* is stored as F32; by the quantization_config of config.json it must be I32",
    ),
    "scales in words": (
        lambda w: w.update({f"{DOWN}.scales": torch.ones(3, 256, dtype=torch.int32)}),
        rf"{DOWN}.scales in .* is stored as I32; these are supported: F64",
    ),
    "inputs in another order": (
        lambda w: w[f"{DOWN}.g_idx"].copy_(w[f"{DOWN}.g_idx"].flip(0)),
        rf"{DOWN}.g_idx in .* puts inputs into groups in another order than theirs; take a checkpoint with",
    ),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_wrong_tensors_are_named(name: str, tmp_path: Path) -> None:
    write(llama(), tmp_path, Int4Packing.GPTQ)
    change, message = WRONG_WEIGHTS[name]
    edit_weights(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


def test_what_cannot_be_asked_for(tmp_path: Path, holding: dict[str, Any]) -> None:
    write(llama(), tmp_path, Int4Packing.AWQ)
    with pytest.raises(
        ModelError, match="quantization is 'fp8', but the checkpoint's weights are in 4 bits; leave"
    ):
        load_model(tmp_path, quantization="fp8")
    with pytest.raises(
        ModelError, match="deterministic is True, but weights are in 4 bits, whose products cannot"
    ):
        load_model(tmp_path, deterministic=True, **holding)
    load_model(tmp_path, deterministic=True)


@pytest.mark.parametrize("words", [Int4Packing.AWQ, Int4Packing.GPTQ])
def test_words_of_rows_that_are_put_in_another_order(words: Int4Packing, tmp_path: Path) -> None:
    write(checkpoints.glm4(hidden_size=256), tmp_path, words)
    with pytest.raises(
        ModelError, match=r"[qk]_proj.q\w+ is of blocks or words of rows, but these rows are loaded"
    ):
        load_model(tmp_path)


# --- config.json ---


def test_what_configs_say() -> None:
    def read(given: dict[str, Any]) -> tuple[Any, ...]:
        found = read_quantization(given)
        assert isinstance(found, Int4Format)
        return found.words, found.ignored

    names = ["visual", "model.language_model.layers.3.mlp"]
    own = awq_config(version="GEMM", zero_point=False, modules_to_not_convert=names)
    assert read(own) == (Int4Packing.AWQ, ("visual", "model.layers.3.mlp"))
    assert read(gptq_config(checkpoint_format=None)) == (Int4Packing.GPTQ, ())
    for own in ({"checkpoint_format": "gptq_v2"}, {"format": "gptq_v2", "checkpoint_format": None}):
        assert read(gptq_config(**own))[0] is Int4Packing.GPTQ_V2
    assert read(gptq_config(format="gptq"))[0] is Int4Packing.GPTQ
    assert read(FORMATS[Int4Packing.GPTQ_V2]) == (Int4Packing.GPTQ_V2, ())
    assert read(packed_config()) == (Int4Packing.COMPRESSED, ("lm_head",))


REFUSED: list[tuple[object, str]] = [
    (awq_config(bits=8), "bits 8 and group_size 128; 4 and 128 are supported"),
    (awq_config(group_size=64), "bits 4 and group_size 64"),
    (awq_config(version="gemv"), "version 'gemv'; 'gemm' is supported"),
    (awq_config(version="marlin"), "version 'marlin'"),
    (awq_config(version=None, format="gemv"), "format 'gemv'; 'gemm' is supported"),
    (gptq_config(bits=3), "bits 3 and group_size 128"),
    (gptq_config(group_size=-1), "bits 4 and group_size -1"),
    (gptq_config(desc_act=True), "desc_act True; False is supported"),
    (gptq_config(checkpoint_format="marlin"), "checkpoint_format 'marlin'; 'gptq' and 'gptq_v2' are supported"),
    (gptq_config(is_marlin_format=True), "is_marlin_format, whose words are not read"),
    (gptq_config(format="marlin"), "format 'marlin'; 'gptq' and 'gptq_v2' are supported"),
    (gptq_config(format="gptq_v2"), "the checkpoint_format 'gptq' and the format 'gptq_v2'"),
    (gptq_config(lm_head=True), "lm_head True; all linear layers but the output head are to be alike"),
    (gptq_config(dynamic={"-:.*down.*": {}}), "dynamic .* are to be alike"),
    (packed_config({"num_bits": 8}), "symmetric integers of 4 bits in groups of 128, without actorder, are"),
    (packed_config({"symmetric": False}), "'symmetric': False"),
    (packed_config({"group_size": 32}), "'group_size': 32"),
    (packed_config({"strategy": "channel"}), "'strategy': 'channel'"),
    (packed_config({"actorder": "group"}), "'actorder': 'group'"),
    (
        packed_config(
            config_groups={
                "group_0": {**packed_config()["config_groups"]["group_0"], "input_activations": {"num_bits": 8}}
            }
        ),
        "input_activations of .*none are supported with 4 bits",
    ),
    (packed_config(format="marlin-24"), "symmetric floats of 8 bits"),
    (packed_config(sparsity_config={"format": "sparse-24-bitmask"}), "has a sparsity_config"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_other_formats_are_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(ModelError, match=f"quantization_config of config.json .*{message}.*: take the checkpoint"):
        read_quantization(given)


# --- in a Runtime ---


@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu),
        pytest.param("cuda", "float16", marks=pytest.mark.gpu),
    ],
)
def test_prompts_that_are_cached_and_captured(
    where: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As alone, and without a cache."""
    write(llama(), tmp_path, Int4Packing.AWQ)
    prompts = [prompt(40, 1)[:30] + prompt(9, seed) for seed in range(5)]
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, logprobs=0)
    options: dict[str, Any] = {
        "device": where,
        "dtype": dtype,
        "max_total_tokens": 1000,
        "max_running_requests": 8,
    }
    with caplog.at_level(logging.INFO, "radixrt"), Runtime(tmp_path, **options, cuda_graphs=False) as runtime:
        alone = [runtime.generate(ids, params) for ids in prompts]
    if where == "cpu":
        told = "weights of 4 bits are held in torch.float32: their products need kernels and float16 or bfloat16"
    else:
        told = "weights are held in 4 bits"
    assert told in caplog.text
    with Runtime(tmp_path, **options) as runtime:
        runtime.generate(prompts[0], params)
        together = runtime.generate(prompts, params)
    assert all(output.usage.cached_tokens >= 30 for output in together)
    # Later tokens follow others where two are almost alike.
    ours, theirs = ([output.logprobs[0].logprob for output in outputs] for outputs in (together, alone))
    assert ours == pytest.approx(theirs, abs=0.3 if where == "cuda" else 1e-4)
