"""The shape of a model, for the bound: as a Runtime holds it; and the tokenizer of a shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from radixrt.bench import subject
from radixrt.bench.catalogue import write_shape
from radixrt.bench.subject import model_of, model_shape, usual_tokenizer
from radixrt.builtin import MODEL_PATH
from radixrt.errors import ModelError
from radixrt.runtime import Runtime
from radixrt.text.tokenizer import load_tokenizer
from radixrt.workloads.bound import ModelShape

TINY = ModelShape(2, 128, 384, 4, 2, 32, 10_240, 512)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {"bytes_per_value": 4, "kv_bytes": 1024}),
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "bfloat16", "kv_dtype": "fp8"}, {"kv_bytes": 256}),
        # In torch, weights of e4m3 are dequantised as they are loaded.
        ({"quantization": "fp8"}, {"bytes_per_value": 4, "kv_bytes": 1024}),
    ],
)
def test_shapes(
    options: dict[str, str], changes: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_shape("tiny", tmp_path_factory.mktemp("tiny"))
    with Runtime(folder, load_format="dummy", device="cpu", max_total_tokens=100, **options) as runtime:
        assert model_shape(runtime) == replace(TINY, **changes)


def test_a_tokenizer_that_fits_and_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(subject, "model_folder", lambda name, weights: asked.append(name))
    assert (usual_tokenizer("tiny"), usual_tokenizer("qwen3-0.6b")) == ("built-in", "smollm2")
    assert asked == ["smollm2"]

    def is_not_there(name: str, weights: bool) -> None:
        raise ModelError(name)

    monkeypatch.setattr(subject, "model_folder", is_not_there)
    assert usual_tokenizer("qwen3-0.6b") == "built-in"


def test_a_shape_gets_a_tokenizer_without_the_longest_length_of_its_model() -> None:
    assert "model_max_length" in (MODEL_PATH / "tokenizer_config.json").read_text()
    with model_of(None, "tiny", "built-in") as (folder, load_format):
        assert load_format == "dummy"
        assert "model_max_length" not in (Path(folder) / "tokenizer_config.json").read_text()
        assert load_tokenizer(folder).identity == load_tokenizer(MODEL_PATH).identity
