"""Models whose layers are in stages, beside those that one rank holds: each rank is a thread."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import radixrt.models.loader
from layers.products import same_bits
from layers.stages import Stage
from radixrt.errors import ModelError
from radixrt.models.decoder import Decoder
from radixrt.models.loader import load_model, reload_weights
from radixrt.ranks.group import ALONE, RankGroup, Shape
from tests.models.test_parity import MODELS, Session, prompt
from tests.support import checkpoints, int4_checkpoints, quantised_checkpoints
from tests.support.input_metadata import input_metadata
from tests.support.stages import on_stages

# Layers are three: of two stages the first has two.
LAYERS = {"num_hidden_layers": 3}


class StagedSession(Session):
    """Hidden states come from the stage before and go to the next one."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, model.config)
        self.kv = self.kv.to(model.placement.dtype)

    def hidden(self, *requests: tuple[int, list[int], int], num_extends: int | None = None) -> Tensor:
        """Of all new tokens of (row, tokens so far, how many of them have their KV in the pool)."""
        stage = self.model.stage
        slots = [self.req_to_token[row, prefix : len(ids)] for row, ids, prefix in requests]
        metadata = input_metadata(
            [row for row, _, _ in requests],
            [len(ids) for _, ids, _ in requests],
            [prefix for _, _, prefix in requests],
            torch.cat(slots).numpy(),
            self.req_to_token,
            num_extends=num_extends,
            kv_pool=self,
            states=None if self.states is None else self._states_of(requests),
            state_pool=self.states,
        )
        ids = torch.tensor([token for _, ids, prefix in requests for token in ids[prefix:]], dtype=torch.int32)
        handed = None
        if stage.before is not None:
            size = len(ids), self.model.config.hidden_size
            handed = stage.before.receive(torch.empty(size, dtype=self.model.placement.dtype))
        hidden: Tensor = self.model(ids, metadata, handed=handed)
        if stage.after is not None:
            stage.after.send(hidden)
        return hidden


def logits(model: Decoder) -> Tensor | None:
    """Of all tokens of two requests, cold, then a chunk and a decode; None but in the last stage."""
    session = StagedSession(model)
    a, b = prompt(23, 1), prompt(9, 2)
    hidden = [session.hidden((1, a[:17], 0), (0, b[:8], 0))]
    hidden.append(session.hidden((1, a, 17), (0, b, 8), num_extends=1))
    return model.compute_logits(torch.cat(hidden), None) if model.stage.is_last else None


def loaded_logits(folder: Path, group: RankGroup = ALONE, **options: Any) -> Tensor | None:
    return logits(load_model(folder, ranks=group.ranks, stage=group.stage, **options)[0])


def assert_same_logits(folder: Path, shape: Shape, **options: Any) -> None:
    """The bits of one stage; with ranks in each, about them."""
    expected = loaded_logits(folder, **options)
    found = on_stages(shape, partial(loaded_logits, folder, **options))
    assert expected is not None
    assert [one is not None for one in found] == [rank < shape.stage_size for rank in range(shape.size)]
    assert found[0] is not None
    if shape.stage_size == 1 and found[0].dtype == torch.float32:
        assert same_bits(found[0], expected)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-5)


# One of each kind of layer that hands something else on, or is told its number.
KEPT = (
    "llama",
    "llama3 rope, tied",
    "olmo3",
    "granite",
    "glm4-moe",
    "smollm3",
    "gemma2",
    "gemma3",
    "qwen3-moe",
    "gpt-oss",
    "mistral, the text of a model with images",
    "qwen3-next",
    "qwen3.5-moe",
    "granite4 hybrid, moe",
    "nemotron-h, moe",
)


@pytest.mark.long_unless(kept=lambda given: given["name"] in KEPT)
@pytest.mark.parametrize("name", MODELS)
def test_families(name: str, tmp_path: Path) -> None:
    """Norms that the next layer applies, factors, windows and kinds of layers stay where they are."""
    make: Any = MODELS[name]
    try:
        model = make(**LAYERS)
    except Exception:  # lists of layers in its config
        model = make()
    count = model.config.get_text_config().num_hidden_layers
    assert_same_logits(checkpoints.write(model, tmp_path), Shape(min(count, 3), min(count, 3)))


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "qwen3-next"])
def test_ranks_in_stages(name: str, tmp_path: Path) -> None:
    make: Any = MODELS[name]
    assert_same_logits(checkpoints.write(make(), tmp_path), Shape(4, 2))


def test_bfloat16(tmp_path: Path) -> None:
    folder = checkpoints.write(checkpoints.gemma2(), tmp_path)
    exact, alone = loaded_logits(folder), loaded_logits(folder, dtype="bfloat16")
    found, _ = on_stages(Shape(2, 2), partial(loaded_logits, folder, dtype="bfloat16"))
    assert exact is not None
    assert alone is not None
    assert found is not None
    assert (found - exact).abs().mean() < 1.5 * (alone - exact).abs().mean()


def test_parts_of_a_product_are_handed_on_as_their_sum(tmp_path: Path) -> None:
    """On a GPU a layer may leave it to the next norm to add them."""
    model, _ = load_model(checkpoints.write(checkpoints.llama(), tmp_path))
    parts, residual = torch.randn(3, 5, 32), torch.randn(5, 32, dtype=torch.bfloat16)
    expected = model.blocks[0].attention_norm.add(parts, residual)[1]
    torch.testing.assert_close(model.handed_on(parts, residual), expected)


# --- what a stage has ---


def test_layers_are_divided_equally() -> None:
    for num_layers, count, expected in ((4, 2, [2, 2]), (5, 2, [3, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1])):
        layers = [Stage(index, count).layers(num_layers) for index in range(count)]
        assert [len(own) for own in layers] == expected
        assert [layer for own in layers for layer in own] == [*range(num_layers)]


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_stage_holds_and_reads(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers, the embedding in the first stage, norm and head in the last; other tensors are not read."""
    make = partial(checkpoints.llama, tie_word_embeddings=tied, **LAYERS)
    folder, other = (checkpoints.write(make(seed), tmp_path / str(seed)) for seed in (0, 1))
    whole, config = load_model(folder)
    everything = dict(whole.checkpoint_tensors())
    safe_open, read = radixrt.models.weight_files.safe_open, set[str]()

    class Watched:
        def __init__(self, file: Any, **options: Any) -> None:
            self._file = safe_open(file, **options)

        def __enter__(self) -> Any:
            file = self._file.__enter__()
            watched = Watched.__new__(Watched)
            watched._file = file
            return watched

        def __exit__(self, *error: Any) -> None: ...

        def keys(self) -> Any:
            return self._file.keys()

        def get_slice(self, name: str) -> Any:
            return self._file.get_slice(name)

        def get_tensor(self, name: str) -> Tensor:
            read.add(name)
            tensor: Tensor = self._file.get_tensor(name)
            return tensor

    monkeypatch.setattr(radixrt.models.weight_files, "safe_open", Watched)
    found = []
    for index in range(3):
        read.clear()
        part, same = load_model(folder, stage=Stage(index, 3))
        assert same == config
        own = dict(part.checkpoint_tensors())
        layers = {name for name in own if name.startswith("model.layers.")}
        assert {name.split(".")[2] for name in layers} == {str(index)}
        found.append(own.keys() - layers)
        for name, place in own.items():
            assert torch.equal(place, everything[name])  # type: ignore[arg-type]
        assert read == own.keys()
        assert sum(weight.numel() for weight in part.parameters()) == sum(
            everything[name].shape.numel() for name in own
        )
        read.clear()
        reload_weights(part, config, other, before_change=lambda: None)
        assert read == own.keys()
    embedding, last = {"model.embed_tokens.weight"}, {"model.norm.weight"}
    assert found == [embedding, set(), last | (embedding if tied else {"lm_head.weight"})]


@pytest.mark.parametrize(
    "make", [checkpoints.llama, checkpoints.phi3, checkpoints.gpt_oss_in_mxfp4, checkpoints.qwen3_5]
)
def test_random_weights_are_those_of_one_stage(make: Any, tmp_path: Path) -> None:
    assert_same_logits(checkpoints.write(make(), tmp_path), Shape(2, 2), load_format="dummy")


def test_other_weights_in_place(tmp_path: Path) -> None:
    folders = [checkpoints.write(checkpoints.gemma2(seed), tmp_path / str(seed)) for seed in (0, 1)]

    def work(group: RankGroup) -> Tensor | None:
        model, config = load_model(folders[0], stage=group.stage)
        reload_weights(model, config, folders[1], before_change=lambda: None)
        return logits(model)

    expected = loaded_logits(folders[1])
    assert expected is not None
    found = on_stages(Shape(2, 2), work)[0]
    assert found is not None
    assert same_bits(found, expected)


def test_quantised_checkpoints(tmp_path: Path) -> None:
    """Experts, which are stored one by one; packed matrices."""
    wide: dict[str, Any] = {
        "hidden_size": 256,
        "head_dim": 128,
        "intermediate_size": 512,
        "num_attention_heads": 2,
    }
    quantised_checkpoints.write(
        checkpoints.qwen3_moe(**wide, moe_intermediate_size=256), tmp_path / "e4m3", "fp8 blocks"
    )
    int4_checkpoints.write(checkpoints.phi3(**wide), tmp_path / "int4", int4_checkpoints.Int4Packing.AWQ)
    for folder in (tmp_path / "e4m3", tmp_path / "int4"):
        assert_same_logits(folder, Shape(2, 2))


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    folder = checkpoints.write(checkpoints.llama(**LAYERS), tmp_path)
    with pytest.raises(ModelError, match=r"^num_hidden_layers 3 is less than pipeline_parallel_size 4$"):
        load_model(folder, stage=Stage(0, 4))
    folder = checkpoints.write(checkpoints.nemotron_h_moe(), tmp_path / "nemotron")
    with pytest.raises(ModelError, match=r"^the model has 4 layers, each with the feed-forward layer after it"):
        load_model(folder, stage=Stage(0, 5))
