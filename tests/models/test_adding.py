"""The format and the family that docs/models.md adds as its examples, taken from there and checked."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from layers.formats.weight_format import PLAIN
from radixrt import ModelError, Runtime, SamplingParams
from radixrt.models import quantization, registry
from radixrt.models.families import FAMILIES, Family
from radixrt.models.loader import load_model
from tests.support import checkpoints

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One of the guide's files."""
    codes = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), flags=re.DOTALL)
    file = tmp_path / f"{name}.py"
    file.write_text(dict(zip(("q8_format", "scaled_llama"), codes, strict=True))[name])
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The guide's file of a family, imported, and registered as it says."""
    module = imported("scaled_llama", tmp_path, monkeypatch)
    family = Family("Scaled Llama", module.__name__, "ScaledLlama", "none")
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "ScaledLlamaForCausalLM": family})
    return module


def test_the_example_of_the_guide_is_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are loaded in the model's dtype."""
    own = imported("q8_format", tmp_path, monkeypatch).Q8Format()
    monkeypatch.setitem(quantization.READERS, "q8", lambda given: own)
    folder = checkpoints.write(checkpoints.llama(), tmp_path / "model")

    def quantise(tensors: dict[str, Tensor]) -> None:
        for weight in [name for name in tensors if re.search(r"layers.*_proj\.weight", name)]:
            layer, shape = weight.removesuffix(".weight"), tensors.pop(weight).shape
            tensors[f"{layer}.codes"] = torch.randint(256, shape, dtype=torch.uint8, device="cpu")
            tensors[f"{layer}.scale"] = torch.rand(shape[0], 1, device="cpu")

    checkpoints.edit_weights(folder, quantise)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "q8"}}))
    model, _ = load_model(folder, device="cpu")
    stored = load_file(folder / "model.safetensors")
    codes, scale = (stored[f"model.layers.1.mlp.down_proj.{kind}"] for kind in ("codes", "scale"))
    assert torch.equal(model.blocks[1].feed_forward.down.weight.values, (codes.float() - 128) * scale)
    assert own.is_stored
    assert (own.as_loaded(), own.of_experts) == (PLAIN, False)


def write(folder: Path, multiplier: float) -> Path:
    """A Llama's checkpoint under the new family's name."""
    file = checkpoints.write(checkpoints.llama(), folder) / "config.json"
    own = {"architectures": ["ScaledLlamaForCausalLM"], "attention_multiplier": multiplier}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    return folder


def test_the_example_of_the_guide_is_a_family(family: ModuleType, tmp_path: Path) -> None:
    """Scores scaled by m are those of a Llama whose queries are m * sqrt(head_dim) times as long."""
    reference, head_dim, multiplier = checkpoints.llama(), 8, 0.9
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.self_attn.q_proj.weight *= multiplier * head_dim**0.5
    prompt, params = list(range(3, 43)), SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    expected = list(prompt)
    with torch.no_grad():
        for _ in range(24):
            expected.append(int(reference(torch.tensor([expected])).logits[0, -1].argmax()))
    with Runtime(write(tmp_path / "model", multiplier), max_total_tokens=200, device="cpu") as runtime:
        assert isinstance(runtime.parts.engine.runner.model, family.ScaledLlama)
        for cached in (0, 39):
            output = runtime.generate(prompt, params)
            assert (prompt + list(output.token_ids), output.usage.cached_tokens) == (expected, cached)
    with Runtime(write(tmp_path / "other", 0.35), max_total_tokens=200, device="cpu") as runtime:
        assert prompt + list(runtime.generate(prompt, params).token_ids) != expected


def test_the_example_names_what_it_refuses(family: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="attention_multiplier is 0; it must be above 0"):
        Runtime(write(tmp_path / "model", 0), device="cpu")


def test_the_guide_lists_every_architecture() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", GUIDE.read_text("utf-8"), flags=re.MULTILINE)
    assert {name for name, _ in listed} == set(FAMILIES)
    for name, path in listed:
        module = registry.find_architecture(name).__module__
        assert path == f"{module.replace('.', '/')}.py", name
