"""Options that a Runtime passes on: the chat template's variables, the model's own parameters; and its log."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.builtin import MODEL_PATH
from radixrt.errors import ModelError, ParameterError, PromptError
from radixrt.frontend.request_builder import builder_without_weights
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from triton_ops.linear.e4m3_linear import dequantised_weight, quantised_weight

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if not (briefly | default(false)) %}Q: Mira likes?\nA:{% endif %}"
)
CHAT = [{"role": "user", "content": [{"type": "text", "text": "Mira likes Oslo."}]}]
OPTIONS: dict[str, Any] = {"device": "cpu", "max_total_tokens": 2000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The built-in model with a chat template, and parameters of its own."""
    for file in MODEL_PATH.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    given = {
        "eos_token_id": 2,
        "do_sample": True,
        "temperature": 0.125,
        "top_k": 7,
        "max_new_tokens": 3,
        "top_p": None,
    }
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({**given, "top_p": None}))
    return tmp_path


def text_of(runtime: Runtime, prompt: Any, **params: Any) -> str:
    assert runtime.tokenizer is not None
    ids = runtime.prepare(prompt, params or None).prompt_ids
    return runtime.tokenizer.decode(ids, skip_special_tokens=False)


def test_variables_of_the_chat_template(folder: Path) -> None:
    with Runtime(folder, **OPTIONS, chat_template_kwargs={"briefly": True}) as runtime:
        assert text_of(runtime, CHAT) == "Mira likes Oslo.\n"
        asked = {"messages": CHAT, "chat_template_kwargs": {"briefly": False}}
        assert text_of(runtime, asked) == "Mira likes Oslo.\nQ: Mira likes?\nA:"
        outputs = runtime.generate([asked, {"messages": CHAT}], {"temperature": 0, "max_new_tokens": 4})
        assert outputs[0].text.strip() == "Oslo"
        assert '"name": "f"' in text_of(runtime, {**asked, "tools": [{"name": "f"}]})
        continued = [*CHAT, {"role": "assistant", "content": "Ines paints"}]
        going_on = {"messages": continued, "continue_final_message": True}
        assert text_of(runtime, going_on) == "Mira likes Oslo.\nInes paints"
        with pytest.raises(
            PromptError, match="the prompt cannot be encoded: chat_template_kwargs have 'brief', which"
        ):
            runtime.generate({"messages": CHAT, "chat_template_kwargs": {"brief": 1}})
    with pytest.raises(ParameterError, match="chat_template_kwargs have 'brief', which the chat template"):
        Runtime(folder, **OPTIONS, chat_template_kwargs={"brief": True})


def test_mistakes_of_the_config_are_told_as_its_own(folder: Path) -> None:
    """Not as the tokenizer's, for which transformers may read it, too; and with their cause."""
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    for change, told in (
        ({"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number"),
        ({"dtype": "bfloat17"}, "dtype is 'bfloat17'; it must be one of torch's"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x'; it must be a whole number"),
        ({"model_type": "bort"}, "model type `bort`"),  # which transformers says
    ):
        (folder / "config.json").write_text(json.dumps({**given, **change}))
        for begin in (partial(Runtime, **OPTIONS), builder_without_weights):
            with pytest.raises(ModelError, match=f"config.json cannot be used: .*{told}"):
                begin(folder)


ASKED = "Mira likes Oslo. Tarek counts 374. Ines paints blue.\nQ: Tarek counts?\nA:"


def test_quantised_weights_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU they are held in its dtype, which is said aloud."""
    with caplog.at_level(logging.WARNING, "radixrt"), Runtime(**OPTIONS, quantization="fp8") as runtime:
        output = runtime.generate(ASKED, SamplingParams(temperature=0, max_new_tokens=6))
        weight = runtime.parts.engine.runner.model.blocks[0].feed_forward.down.weight.values
    assert output.text.strip() == "374"
    assert weight.dtype == torch.float32
    assert (weight == quantised(weight)).all(), "with the values of e4m3"
    (told,) = (record.message for record in caplog.records)
    assert told == (
        "weights of e4m3 are held in torch.float32: their products need kernels and a GPU of compute capability "
        "8.9, and the model is on cpu, with impl 'auto'"
    )


def quantised(weight: torch.Tensor) -> torch.Tensor:
    return dequantised_weight(*quantised_weight(weight, blocks=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantised_weights_on_a_gpu(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """Held in e4m3, with captured graphs and without."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of e4m3")
    options = {**OPTIONS, "device": "cuda", "dtype": dtype, "quantization": "fp8"}
    for graphs in (None, False):
        with caplog.at_level(logging.INFO, "radixrt"), Runtime(**options, cuda_graphs=graphs) as runtime:
            output = runtime.generate(ASKED, SamplingParams(temperature=0, max_new_tokens=6))
        assert output.text.strip() == "374"
    assert "weights are held in e4m3" in caplog.text


def test_long_prompts_keep_their_ends(folder: Path) -> None:
    with Runtime(folder, **OPTIONS) as runtime:
        whole = runtime.prepare("Mira likes Oslo.").prompt_ids.tolist()
        for length in (1, 3, len(whole), 99):
            kept = runtime.prepare("Mira likes Oslo.", {"truncate_prompt_tokens": length}).prompt_ids
            assert kept.tolist() == whole[-length:]
        long = whole * 300
        assert len(long) > runtime.context_length
        assert runtime.generate(long, {"truncate_prompt_tokens": 9, "max_tokens": 1}).usage.prompt_tokens == 9
        assert text_of(runtime, CHAT, truncate_prompt_tokens=2) == "A:"


def test_parameters_of_the_model(folder: Path) -> None:
    own = SamplingParams(temperature=0.125, top_k=7, max_new_tokens=3)
    with Runtime(folder, **OPTIONS, generation_config="auto") as runtime:
        assert runtime.default_params == own
        assert runtime.prepare("x").params == own
        assert runtime.prepare("x", {"top_k": 3}).params == SamplingParams(
            temperature=0.125, top_k=3, max_new_tokens=3
        )
        assert runtime.prepare("x", SamplingParams()).params == SamplingParams(), "one that is given is whole"
        assert runtime.generate(["x"], {"ignore_eos": True})[0].usage.completion_tokens == 3
    with Runtime(folder, **OPTIONS) as runtime:
        assert runtime.default_params == runtime.prepare("x").params == SamplingParams()


def test_parameters_of_the_model_that_are_none(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ModelError, match=r"generation_config.json cannot be used: temperature is -1"):
        Runtime(folder, **OPTIONS)


@pytest.mark.parametrize("used", ["auto", "none"])
def test_the_log_of_starting_up(folder: Path, caplog: pytest.LogCaptureFixture, used: Any) -> None:
    with caplog.at_level(logging.INFO, logger="radixrt"), Runtime(folder, **OPTIONS, generation_config=used):
        pass
    weights, parameters, pool, ready = (record.getMessage() for record in caplog.records)
    assert weights.startswith(f"weights of {folder}: 11,117,568 bytes, torch.float32 on cpu, in ")
    assert weights.endswith(" s")
    told = "used where none are given" if used == "auto" else "not used"
    assert f"generation_config.json are {told}: {{'temperature': 0.125, 'top_k': 7, 'max_new" in parameters
    assert pool.startswith("KV pool: 2,000 tokens, 0.0")
    assert ready.startswith("ready after ")


def test_a_revision_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(source: str, **options: Any) -> str:
        asked.append((source, options["revision"]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with Runtime("someone/model", **OPTIONS, revision="v2") as runtime:
        assert runtime.tokenizer is not None
    assert asked == [("someone/model", "v2")], "weights and tokenizer are of one revision"
    with pytest.raises(ModelError, match=r"revision is 'v2', which is for hub ids, but .* is on this machine"):
        Runtime(folder, **OPTIONS, revision="v2")
