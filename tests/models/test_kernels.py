"""Models on kernels: the logits of the references, and how many kernels a layer launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from layers import radix_attention
from layers.formats import weight_format
from layers.formats.e4m3 import FP8
from layers.input_metadata import NO_PASS
from layers.linear import Linear
from layers.norm import RMSNorm
from layers.placement import Placement
from layers.relu2_mlp import Relu2MLP
from layers.weight import Weight
from memory_pool.state_pool import StatePool
from radixrt.models.decoder import Block, Decoder, FeedForward, MixerBlock
from radixrt.models.families import FAMILIES as ARCHITECTURES
from radixrt.models.granite import GraniteBlock
from radixrt.models.loader import load_model
from radixrt.models.olmo import Olmo2Block
from radixrt.models.registry import find_architecture
from radixrt.models.sandwich import SandwichBlock
from tests.support import checkpoints, probe_kernels
from tests.support.input_metadata import input_metadata
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import gpu_of
from triton_ops.kv.view import KVView
from triton_ops.linear.gated_linear import gated_linear
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.tuning import WIDE_GATED, SplitKConfig


class Pool:
    """KV of all layers in few slots, NaN until written; with e4m3, the same scale for all keys and another for all
    values.
    """

    def __init__(self, model: Decoder, device: torch.device, *, e4m3: bool = False) -> None:
        config = model.config
        layout = model.kv_layout(torch.float32)
        shape = (2, layout.tokens[0].num_layers, 16, config.num_kv_heads, config.head_dim)
        self.states = StatePool(2, layout.sequences, device=device) if layout.sequences else None
        self.kv = torch.full(shape, torch.nan, device=device).to(E4M3 if e4m3 else torch.float32)
        self.scales = torch.ones(2, config.num_kv_heads, device=device) / 16 if e4m3 else None
        if self.scales is not None:
            self.scales[1] /= 2

    def view(self, layer_id: int, req_to_token: Tensor) -> KVView:
        scales = (None, None) if self.scales is None else self.scales
        return KVView(self.kv[0, layer_id], self.kv[1, layer_id], req_to_token, *scales)


def passes(model: Decoder, device: torch.device, *, e4m3: bool = False) -> Tensor:
    """Logits of a prompt in two chunks, and of two decodes."""
    pool, slots = Pool(model, device, e4m3=e4m3), [5, 3, 11, 7, 1, 2, 9, 14]
    rows = torch.tensor([slots], dtype=torch.int32, device=device)
    logits = []
    with torch.inference_mode():
        for start, end in ((0, 4), (4, 6), (6, 7), (7, 8)):
            metadata = input_metadata(
                [0],
                [end],
                [start],
                slots[start:end],
                rows,
                num_extends=int(end - start > 1),
                kv_pool=pool,
                states=None if pool.states is None else ([int(start > 0)], [1]),
                state_pool=pool.states,
            )
            ids = torch.arange(start + 20, end + 20, dtype=torch.int32, device=device)
            hidden = model(ids, metadata)
            logits.append(model.compute_logits(hidden, torch.arange(len(ids), dtype=torch.int32, device=device)))
    return torch.cat(logits)


FAMILIES = {
    "qwen3": checkpoints.qwen3,
    "qwen3-moe": checkpoints.qwen3_moe,
    "gpt-oss in MXFP4": checkpoints.gpt_oss_in_mxfp4,
    "glm4-moe": checkpoints.glm4_moe,
    "phi3, partial rotary": partial(
        checkpoints.phi3, rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "gemma2": checkpoints.gemma2,
    "gemma3": checkpoints.gemma3,
    "olmo2": checkpoints.olmo2,
    "ministral3, queries scaled from position 3 on": partial(
        checkpoints.ministral3,
        rope_parameters={**checkpoints.MINISTRAL_ROPE, "original_max_position_embeddings": 3},
    ),
    "smollm3": checkpoints.smollm3,
    "qwen3.5": checkpoints.qwen3_5,
    "qwen3-next": checkpoints.qwen3_next,
    "lfm2-moe": checkpoints.lfm2_moe,
    "granite4 hybrid, moe": checkpoints.granite4_hybrid_moe,
    "nemotron-h, moe": checkpoints.nemotron_h_moe,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_what_the_references_do(family: str, tmp_path: Path, kernel_device: torch.device) -> None:
    checkpoints.write(FAMILIES[family](), tmp_path)
    on_kernels, on_references = (
        passes(load_model(tmp_path, device=kernel_device, dtype="float32", impl=impl)[0], kernel_device)
        for impl in ("triton", "torch")
    )
    assert on_kernels.isfinite().all()
    torch.testing.assert_close(on_kernels, on_references, atol=2e-4, rtol=1e-4)


@pytest.mark.long_unless(kept=lambda given: given["family"] in ("gpt-oss in MXFP4", "gemma3", "qwen3.5"))
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_over_e4m3_compute_what_the_references_do(
    family: str, dtype: str, tmp_path: Path, kernel_device: torch.device
) -> None:
    """A key or value may be rounded to the next number, which is up to an eighth away."""
    checkpoints.write(FAMILIES[family](), tmp_path)
    on_kernels, on_references = (
        passes(load_model(tmp_path, device=kernel_device, dtype=dtype, impl=impl)[0], kernel_device, e4m3=True)
        for impl in ("triton", "torch")
    )
    assert on_kernels.isfinite().all()
    off = (on_kernels.float() - on_references.float()).norm() / on_references.float().norm()
    assert off < (2e-3 if dtype == "float32" else 5e-2), off


@pytest.mark.parametrize(
    ("family", "in_parts"),
    [("llama", 4), ("qwen3", 4), ("qwen3_moe", 3), ("gemma2", 0), ("olmo2", 0)],
)
def test_outputs_in_parts_are_those_that_a_norm_adds_up(
    family: str, in_parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    """Of two layers, with the same kernels without parts beside them. Experts and other blocks have none."""
    make = getattr(checkpoints, family)
    checkpoints.write(make(hidden_size=64, intermediate_size=80, head_dim=16), tmp_path)
    model, _ = load_model(tmp_path, device=kernel_device, dtype="float16", impl="triton")
    whole = passes(model, kernel_device)
    shapes: list[tuple[int, ...]] = []

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        parts = split_k_linear(*arguments, **options)
        shapes.append(tuple(parts.shape))
        return parts

    monkeypatch.setattr(weight_format, "split_k_linear", recorded)
    monkeypatch.setattr(weight_format, "split_k_config", lambda *_: SplitKConfig(16, 16, 2, 32))
    logits = passes(model, kernel_device)
    assert len(shapes) == in_parts * 4
    assert {shape[0] for shape in shapes} == ({2, 3} if in_parts else set())
    assert logits.isfinite().all()
    off = (logits.float() - whole.float()).norm() / whole.float().norm()
    assert off < 5e-3, off


@pytest.mark.parametrize("norm", [RMSNorm, partial(RMSNorm, offset=0.0)])
def test_a_block_settles_what_is_handed_on(norm: Callable[..., RMSNorm]) -> None:
    placement = Placement(torch.float32, torch.device("cpu"))
    norms = [norm(8, 1e-5, placement=placement) for _ in range(2)]
    sublayers = [Relu2MLP(8, 16, bias=False, placement=placement) for _ in range(2)]
    parts: Any = dict(zip(("attention", "feed_forward"), sublayers, strict=True))
    parts |= dict(zip(("attention_norm", "feed_forward_norm"), norms, strict=True))
    Block(**parts)
    assert [sublayer.down.emits_parts for sublayer in sublayers] == [norm is RMSNorm] * 2
    assert not any(sublayer.up.emits_parts for sublayer in sublayers)
    assert [norm.reader for norm in norms] == [(sublayer.up.weight,) for sublayer in sublayers]


def test_blocks_with_a_forward_of_their_own_join_nothing() -> None:
    """They would have to read parts and quantised rows. Nor do those with norms between."""
    for architecture in ARCHITECTURES:
        find_architecture(architecture)
    kinds, found = [MixerBlock], set[type[MixerBlock]]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found.add(kind)
        assert not kind.joins or kind.forward in (MixerBlock.forward, Block.forward), kind
    assert {kind for kind in found if not kind.joins} >= {SandwichBlock, GraniteBlock, Olmo2Block}


def test_biased_and_referenced_outputs_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_format, "split_k_config", lambda *_: SplitKConfig(16, 16, 2, 32))
    x = torch.ones(3, 64)
    for bias, impl in ((True, "triton"), (False, "torch"), (False, "auto")):
        placement = Placement(torch.float32, torch.device("cpu"), impl)
        projection = Linear(64, 64, bias=bias, placement=placement)
        for parameter in projection.parameters():
            parameter.fill_(0.5)
        projection.emits_parts = True
        assert torch.equal(projection(x, NO_PASS), torch.full((3, 64), 32.0 + 0.5 * bias))


@pytest.mark.parametrize(
    ("family", "changes", "fused"),
    [
        ("llama", {}, 2),
        ("phi3", {}, 2),
        ("glm4", {}, 2),
        ("gemma2", {}, 0),  # its activation is GELU
        ("llama", {"mlp_bias": True}, 0),
    ],
)
def test_gate_and_up_are_fused_with_silu_alone(
    family: str,
    changes: dict[str, Any],
    fused: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel_device: torch.device,
) -> None:
    """Of two layers, with the same kernels but those beside them. Both round at the same places."""
    if kernel_device.type == "cuda" and not gpu_of(kernel_device).has_wgmma:
        pytest.skip("the kernel is Hopper's")
    make = getattr(checkpoints, family)
    checkpoints.write(make(hidden_size=64, intermediate_size=80, head_dim=16, **changes), tmp_path)
    model, _ = load_model(tmp_path, device=kernel_device, dtype="float16", impl="triton")
    apart = passes(model, kernel_device)
    calls: list[Tensor] = []

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        calls.append(gated_linear(*arguments, **options))
        return calls[-1]

    monkeypatch.setattr(weight_format, "gated_linear", recorded)
    monkeypatch.setattr(weight_format, "gated_linear_config", lambda *_, **__: WIDE_GATED)
    logits = passes(model, kernel_device)
    assert [call.shape[1] for call in calls] == [80] * (fused * 4)
    assert logits.isfinite().all()
    off = (logits.float() - apart.float()).norm() / apart.float().norm()
    assert off < 2e-3, off


def test_what_one_kernel_may_not_compute_is_left_to_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised weights, references, deterministic models, and shapes without a tile."""
    monkeypatch.setattr(weight_format, "gated_linear", None)  # nothing calls it
    x, cpu = torch.ones(3, 64), torch.device("cpu")
    plain = Placement(torch.float32, cpu, "triton")
    assert Weight(64, 64, placement=plain).silu_gated(x) is None
    monkeypatch.setattr(weight_format, "gated_linear_config", lambda *_, **__: True)
    for impl in ("torch", "auto"):
        assert Weight(64, 64, placement=replace(plain, impl=impl)).silu_gated(x) is None
    held = replace(plain, quantization=FP8, holds_quantised=True)
    assert Weight(64, 64, placement=held).silu_gated(x) is None
    config: Any = SimpleNamespace(hidden_size=64, intermediate_size=32, mlp_bias=False, activation="silu")
    assert FeedForward(config, placement=plain).fuses
    assert not FeedForward(config, placement=replace(plain, deterministic=True)).fuses


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 300, 1000, 2048])
def test_a_fused_layer_is_within_rounding_of_one_that_is_not(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiles of this GPU; on others than Hopper nothing is fused."""
    device = torch.device("cuda")
    config: Any = SimpleNamespace(hidden_size=1024, intermediate_size=3072, mlp_bias=False, activation="silu")
    layer = FeedForward(config, placement=Placement(torch.bfloat16, device))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    calls: list[Tensor] = []

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        calls.append(gated_linear(*arguments, **options))
        return calls[-1]

    monkeypatch.setattr(weight_format, "gated_linear", recorded)
    x = torch.randn(num_rows, 1024, dtype=torch.bfloat16, device=device)
    fused = layer(x, NO_PASS)
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert len(calls) == int(is_hopper and num_rows in (1000, 2048))
    layer.fuses = False
    torch.testing.assert_close(fused, layer(x, NO_PASS), atol=2e-2, rtol=2e-2)
    assert len(calls) == int(is_hopper and num_rows in (1000, 2048))


# --- launches ---

# What allocates or looks at memory, and computes nothing.
FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "view",
    "_unsafe_view",
    "slice",
    "t",
    "transpose",
    "detach",
    "alias",
    "select",
    "split_with_sizes",
)


class Computed(TorchDispatchMode):
    """Counts the operations of torch that run on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "launches"), [("llama", 4), ("qwen3", 4), ("phi3", 4), ("gemma2", 4), ("olmo2", 6)]
)
def test_launches_of_a_layer(family: str, launches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.write(getattr(checkpoints, family)(), tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernels are not run, only asked for
    model, _ = load_model(tmp_path, device="cpu", impl="triton")
    launched = []
    kernel_type = type(probe_kernels.sums)  # of this process: interpreted or compiled
    monkeypatch.setattr(kernel_type, "run", lambda kernel, *_, **__: launched.append(kernel))
    monkeypatch.setattr(radix_attention, "extend_attention", lambda q, *_, **__: torch.empty_like(q))
    rows = torch.arange(8, dtype=torch.int32).view(1, 8)
    metadata = input_metadata([0], [3], [0], [1, 2, 3], rows, kv_pool=Pool(model, torch.device("cpu")))
    hidden = torch.zeros(3, model.config.hidden_size)
    with torch.no_grad(), Computed() as computed:
        model.blocks[1](hidden, None if family == "olmo2" else hidden, metadata)
    products = computed.counts.pop("mm", 0) + computed.counts.pop("addmm", 0)
    assert products == 4
    assert len(launched) + computed.counts.total() == launches, (launched, computed.counts)
