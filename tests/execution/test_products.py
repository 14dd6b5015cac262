"""The comparison of a model's products at start-up, and a model that rests on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layers.input_metadata import NO_PASS
from layers.linear import Linear
from layers.moe import SparseMoE
from layers.placement import Placement
from layers.recurrent import RecurrentLayer
from layers.vocabulary import LogitsHead
from radixrt import Runtime, SamplingParams
from radixrt.builtin import MODEL_PATH
from radixrt.errors import ModelError, ParameterError
from radixrt.execution import products
from radixrt.execution.products import compare_all, product_rows
from radixrt.limits import CPU_LIMITS
from radixrt.models.decoder import Decoder, MixerBlock
from radixrt.models.loader import load_model
from tests.support import checkpoints
from tests.support.row_bits import ROWS, differing_counts, threads

DTYPES = ["float32", "bfloat16"]
FAMILIES = ["built in", "qwen2", "mixtral", "qwen3_moe", "gpt_oss_in_mxfp4", "glm4_moe", "gemma2", "qwen3_5_moe"]


def deterministic(source: Path | str, dtype: str = "float32") -> Decoder:
    decoder, _ = load_model(source, dtype=dtype, deterministic=True)
    return decoder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {"built in": Path(MODEL_PATH)}
    for name in FAMILIES[1:]:
        found[name] = tmp_path_factory.mktemp(name)
        checkpoints.write(getattr(checkpoints, name)(), found[name])
    return found


def test_numbers_of_rows() -> None:
    """Those of captured batches, then multiples of 128 up to the largest pass; on a CPU few."""
    for most in (1, 300, 512, 513, 8704, 16_896):
        rows = product_rows(most, on_gpu=True)
        assert rows == sorted(set(rows))
        assert rows[-1] >= most
        assert {1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 512} <= set(rows)
        assert all(count % 128 == 0 for count in rows if count > 512)
    assert product_rows(8704, on_gpu=False)[-1] == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_has_a_table(family: str, folders: dict[str, Path]) -> None:
    decoder = deterministic(folders[family])
    tables = compare_all(decoder, CPU_LIMITS, 512)
    layers = [layer for layer in decoder.modules() if isinstance(layer, Linear | LogitsHead)]
    for layer in layers:
        assert layer.product is not None
        assert layer.product.table in tables
        table = layer.product.table
        assert (table.columns, table.depth) == layer.weight.shape
        assert table.has_bias == (isinstance(layer, Linear) and layer.bias is not None)
    assert len(tables) == len({(table.columns, table.depth, table.has_bias) for table in tables}) < len(layers)


@pytest.mark.parametrize("family", ["built in", "qwen2", "gemma2"])
def test_activations_are_deterministic_too(family: str, folders: dict[str, Path]) -> None:
    gates = [
        module.activation for module in deterministic(folders[family]).modules() if hasattr(module, "activation")
    ]
    assert gates
    for gate in gates:
        assert isinstance(gate, partial)
        assert gate.keywords["deterministic"] is True


def test_other_models_are_not_compared(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        decoder, _ = load_model(folder)
        assert compare_all(decoder, CPU_LIMITS, 512) == ()


class Without(torch.nn.Module):
    """In place of attention: each token keeps its own heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
        return q * v.mean(1, keepdim=True)


class WithoutStates(torch.nn.Module):
    """In place of a recurrent layer: each token keeps its hidden state."""

    def forward(self, hidden: Tensor, *rest: object) -> Tensor:
        return hidden / 2


@pytest.mark.long_unless(
    kept=lambda case: (
        case["dtype"] == "float32"
        if case["num_threads"] == 2
        else case["dtype"] == "bfloat16" and case["family"] in ("built in", "gpt_oss_in_mxfp4")
    )
)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_attention(family: str, dtype: str, num_threads: int, folders: dict[str, Path]) -> None:
    """From ids to logits, a row's bits are its own; before the comparison, too, and they are the same."""
    decoder = deterministic(folders[family], dtype)
    for module in decoder.modules():
        if hasattr(module, "attention") and hasattr(module, "qkv"):
            module.attention = Without()
        if isinstance(module, MixerBlock) and isinstance(module.attention, RecurrentLayer):
            module.attention = WithoutStates()

    def logits(ids: Tensor) -> Tensor:
        return decoder.compute_logits(decoder(ids, NO_PASS), None)

    ids = torch.randint(3, 100, (ROWS,), generator=torch.Generator().manual_seed(0))
    counts = (1, 2, 3, 5, 13, 31, 64, 66)
    with torch.inference_mode(), threads(num_threads):
        before = logits(ids)
        assert not differing_counts(logits, ids, counts=(1, 3, 66))
        compare_all(decoder, CPU_LIMITS, 512)
        assert torch.equal(logits(ids), before)
        assert not differing_counts(logits, ids, counts=counts)
        indices = torch.tensor([5, 0, 63], dtype=torch.int32)
        hidden = decoder(ids, NO_PASS)
        assert torch.equal(decoder.compute_logits(hidden, indices), before[[5, 0, 63]])


def test_experts_that_know_their_place_are_refused() -> None:
    """As the torch form does that is not deterministic."""
    placement = Placement(torch.float32, torch.device("cpu"), deterministic=True)
    layer = SparseMoE(64, 32, 4, 2, renormalize=True, placement=placement)
    for weight in layer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    decoder = deterministic(MODEL_PATH)
    decoder.blocks[0].feed_forward = layer
    compare_all(decoder, CPU_LIMITS, 512)
    layer.deterministic = False
    with pytest.raises(ModelError, match=r"in experts of torch.float32 with weights \[64, 32\] on cpu, the bits"):
        compare_all(decoder, CPU_LIMITS, 512)


@pytest.mark.parametrize("family", ["qwen3_5", "granite4_hybrid"])
def test_states_that_know_where_a_sequence_was_cut_are_refused(family: str, tmp_path: Path) -> None:
    """As those of layers that are not deterministic do."""
    decoder = deterministic(checkpoints.write(getattr(checkpoints, family)(), tmp_path))
    compare_all(decoder, CPU_LIMITS, 512)
    recurrent = [layer for layer in decoder.modules() if isinstance(layer, RecurrentLayer)]
    for layer in recurrent:
        layer.deterministic = False
    with pytest.raises(
        ModelError, match=r"the bits of \w+ in torch.float32 on cpu depend on how a sequence is cut"
    ):
        compare_all(decoder, CPU_LIMITS, 512)


def test_products_that_know_their_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(columns: int, depth: int, **given: object) -> None:
        raise ValueError(f"in products of [{columns}, {depth}], the bits of a row depend on the rows beside it")

    monkeypatch.setattr(products, "compare_products", refuse)
    with pytest.raises(ModelError, match=r"deterministic is True, but in products of \[512, 256\], .* leave"):
        Runtime(device="cpu", deterministic=True)


def test_a_runtime_has_the_tables() -> None:
    with Runtime(device="cpu", deterministic=True, max_running_requests=4) as runtime:
        assert {(table.columns, table.depth) for table in runtime.products} == {
            (512, 256), (256, 256), (1024, 256), (256, 512), (1632, 256),
        }  # fmt: skip
        assert 0 < runtime.start_up["products"] < runtime.start_up["total"]
        before = runtime.generate("Mira likes Oslo.", SamplingParams(temperature=0, logprobs=2)).outputs
        tables = runtime.products
        runtime.update_weights(MODEL_PATH)
        assert runtime.products is tables
        assert runtime.generate("Mira likes Oslo.", SamplingParams(temperature=0, logprobs=2)).outputs == before
    with Runtime(device="cpu") as runtime:
        assert runtime.products == ()


def test_what_cannot_be_promised_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"deterministic is True and kv_dtype is 'fp8'.*leave one"):
        Runtime(device="cpu", deterministic=True, kv_dtype="fp8")
    with pytest.raises(ModelError, match=r"weights are to be float16.*dtype='bfloat16'"):
        load_model(MODEL_PATH, dtype="float16", device="cuda", deterministic=True)
