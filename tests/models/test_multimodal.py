"""The text part of checkpoints with images: names of tensors, and what is refused. Logits: test_parity.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixrt import ModelError, PromptError, Runtime, SamplingParams
from radixrt.models.loader import load_model
from radixrt.models.multimodal import text_name
from tests.support import checkpoints
from tests.support.small_tokenizers import chat_tokenizer


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),  # older ones
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),  # Qwen2.5-VL's first ones
        ("visual.blocks.0.norm1.weight", None),
        ("model.visual.blocks.0.norm1.weight", None),
        ("vision_tower.vision_model.embeddings.patch_embedding.weight", None),
        ("model.multi_modal_projector.linear_1.weight", None),
    ],
)
def test_names(stored: str, name: str | None) -> None:
    assert text_name(stored) == name


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **changes}))


def test_what_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write(checkpoints.mistral_with_images(), tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config={**text, "model_type": "llama"})
    with pytest.raises(
        ModelError, match="of type 'llama', which is not supported; these are: mistral, ministral3"
    ):
        load_model(folder)
    change_config(folder, text_config={**text, "num_hidden_layers": 10_000})
    with pytest.raises(ModelError, match="num_hidden_layers is 10,000"):
        load_model(folder)
    change_config(folder, text_config=text, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ModelError, match="has the quant_method 'bitsandbytes'"):
        load_model(folder)


def test_a_head_of_its_own_where_the_config_does_not_say_so(tmp_path: Path) -> None:
    """transformers' default for the whole model is another one than that of its text."""
    folder = checkpoints.write(checkpoints.mistral_with_images(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config["text_config"].pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    model, read = load_model(folder)
    assert not read.tie_word_embeddings
    assert "lm_head.weight" in dict(model.checkpoint_tensors())


def test_an_image_in_a_chat(tmp_path: Path) -> None:
    """It is refused by name; text is answered."""
    model = checkpoints.gemma3_with_images(vocab_size=400)
    folder = checkpoints.write(model, tmp_path)
    chat_tokenizer(folder)
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with Runtime(folder, max_total_tokens=500) as runtime:
        params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
        (answer,) = runtime.generate([[{"role": "user", "content": "Hello"}]], params)
        assert len(answer.token_ids) == 4
        with pytest.raises(PromptError, match="part 0 is of type 'image_url'; only text is taken"):
            runtime.generate([[{"role": "user", "content": [image]}]], params)
