"""The family that docs/models.md adds as its example, taken from there and checked against a reference."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from radixrt import ModelError, Runtime, SamplingParams
from radixrt.models import registry
from radixrt.models.families import FAMILIES, Family
from tests.support import checkpoints

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The guide's file of a family, imported, and registered as it says."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), flags=re.DOTALL)
    file = tmp_path / "scaled_llama.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    family = Family("Scaled Llama", file.stem, "ScaledLlama", "none")
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "ScaledLlamaForCausalLM": family})
    return module


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
