"""The subject of a benchmark: a model on a device, and their peak speed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from layers.formats.e4m3 import FP8
from layers.formats.weight_format import PLAIN
from radixrt.assembly import LoadedModel
from radixrt.bench.catalogue import SHAPES, write_shape
from radixrt.builtin import MODEL_PATH
from radixrt.errors import ParameterError, RadixrtError
from radixrt.execution.device import choose_device
from radixrt.models.loader import model_folder
from radixrt.planning.cards import shape_of
from radixrt.runtime import Runtime
from radixrt.text.tokenizer import load_tokenizer
from radixrt.version import __version__
from radixrt.workloads.bound import KNOWN_DEVICES, DeviceSpeed, ModelShape

BUILT_IN, SMOLLM2 = "built-in", "smollm2"
SMOLLM2_VOCABULARY = 49_152
_TOKENIZER_FILES = ("*token*", "vocab*", "merges.txt", "*.tiktoken", "tekken.json")


@contextlib.contextmanager
def model_of(
    model: str | None, config: str | None, tokenizer: str | None = None
) -> Iterator[tuple[Path | str, Any]]:
    """A model's folder or id and its load format: of `model`, or of the shape `config` ("tiny" if None), which has
    a tokenizer if `tokenizer` names one (see `tokenizer_folder`).
    """
    if model is not None:
        yield (MODEL_PATH if model == BUILT_IN else model), "auto"
        return
    with tempfile.TemporaryDirectory() as name:
        folder = write_shape(config or "tiny", Path(name))
        if tokenizer is not None:
            _add_tokenizer(tokenizer_folder(tokenizer), folder)
        yield folder, "dummy"


def _add_tokenizer(source: Path, folder: Path) -> None:
    """Copy a model's tokenizer, without the longest length of that model: other engines would keep to it."""
    for file in {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern)}:
        shutil.copy(file, folder)
    if (file := folder / "tokenizer_config.json").exists():
        settings = json.loads(file.read_text(encoding="utf-8"))
        settings.pop("model_max_length", None)
        file.write_text(json.dumps(settings), encoding="utf-8")


def usual_tokenizer(config: str) -> str:
    """For a shape: SmolLM2's, if it is there and the shape has as many tokens; otherwise the built-in model's."""
    if SHAPES[config]["vocab_size"] < SMOLLM2_VOCABULARY:
        return BUILT_IN
    try:
        model_folder(SMOLLM2, weights=False)
    except RadixrtError:
        return BUILT_IN
    return SMOLLM2


def tokenizer_folder(name: str) -> Path:
    """The folder of a model's tokenizer: "built-in", "smollm2", a folder or a hub id. Raises ModelError."""
    return MODEL_PATH if name == BUILT_IN else model_folder(name, weights=False)


def check_tokenizer(name: str, config: str | None) -> None:
    """Raise ParameterError if a tokenizer has ids that the shape `config` has not, TokenizerError or ModelError if
    there is none of that name that can be read.
    """
    size = load_tokenizer(tokenizer_folder(name)).vocab_size
    if config is not None and size > (known := SHAPES[config]["vocab_size"]):
        raise ParameterError(
            f"tokenizer {name} has {size:,} tokens, and the shape {config} has {known:,}: name one with fewer"
        )


def environment_of(device: str | None, model: str) -> dict[str, str]:
    """Versions, device and model, for the header of a report."""
    chosen = choose_device(device)
    return {
        "radixrt": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(chosen)
        if chosen.type == "cuda"
        else f"CPU ({platform.machine()}, {os.cpu_count()} cores, torch threads {torch.get_num_threads()})",
        "model": model,
    }


def device_speed(device: torch.device, bandwidth: float | None, flops: float | None) -> DeviceSpeed | None:
    """The given `bandwidth` in bytes/s and `flops` in operations/s, or else those of a known device."""
    if bandwidth is not None and flops is not None:
        return DeviceSpeed(bandwidth, flops)
    if device.type != "cuda":
        return None
    return KNOWN_DEVICES.get(torch.cuda.get_device_name(device))


def model_shape(runtime: Runtime) -> ModelShape:
    """The shape of a Runtime's model, as it holds weights and KV."""
    model, asked, own = runtime.parts.model, runtime.parts.config, runtime.config.quantization
    assert isinstance(model, LoadedModel)
    dtype = model.decoder.placement.dtype
    if own == PLAIN and asked.quantization is not None:
        own = FP8
    numbers = own.numbers if own.is_multiplied(asked.impl, runtime.device, dtype) else None
    shape = shape_of(runtime.config, in_e4m3=numbers == "e4m3", in_int4=numbers == "4 bits")
    layout = runtime.config.kv_layout(model.kv_pool.dtype)
    return replace(shape, bytes_per_value=dtype.itemsize, kv_bytes=layout.bytes_per_token)
