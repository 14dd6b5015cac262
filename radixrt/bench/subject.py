"""The subject of a benchmark: a model on a device, and their peak speed."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from layers.quantization import Quantization, Scales
from radixrt.assembly import LoadedModel
from radixrt.bench.catalogue import write_shape
from radixrt.builtin import MODEL_PATH
from radixrt.execution.device import choose_device
from radixrt.models.loader import multiplies_quantised
from radixrt.planning.cards import shape_of
from radixrt.runtime import Runtime
from radixrt.version import __version__
from radixrt.workloads.bound import KNOWN_DEVICES, DeviceSpeed, ModelShape

BUILT_IN = "built-in"


@contextlib.contextmanager
def model_of(model: str | None, config: str | None) -> Iterator[tuple[Path | str, Any]]:
    """A model's folder or id and its load format: of `model`, or of the shape `config` ("tiny" if None)."""
    if model is not None:
        yield (MODEL_PATH if model == BUILT_IN else model), "auto"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_shape(config or "tiny", Path(folder)), "dummy"


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
    if own is None and asked.quantization is not None:
        own = Quantization(Scales.ROW)
    is_held = own is not None and multiplies_quantised(own, asked.impl, runtime.device, dtype)
    numbers = own.numbers if own is not None and is_held else None
    shape = shape_of(runtime.config, in_e4m3=numbers == "e4m3", in_int4=numbers == "4 bits")
    return replace(shape, bytes_per_value=dtype.itemsize, kv_in_e4m3=asked.kv_dtype == "fp8")
