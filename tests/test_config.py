"""The options of a Runtime: defaults by device, and bounds."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from radixrt import ParameterError, RunLimits, Runtime
from radixrt.config import RuntimeConfig, config_as_json
from radixrt.execution.device import choose_device
from radixrt.limits import PassLimits


def test_defaults_go_by_the_device() -> None:
    config = RuntimeConfig()
    assert config.pass_limits(on_gpu=True) == PassLimits(2048, 16_384) == RunLimits(1).of_pass
    assert config.pass_limits(on_gpu=False) == PassLimits(64, 2048)
    assert (config.share_of_memory(on_gpu=True), config.share_of_memory(on_gpu=False)) == (0.95, 0.25)
    given = RuntimeConfig(memory_fraction=0.5, max_running_requests=7)
    assert given.pass_limits(on_gpu=False) == PassLimits(7, 2048)
    assert given.share_of_memory(on_gpu=True) == 0.5


def test_a_runtime_takes_every_option_as_a_keyword() -> None:
    taken = inspect.signature(Runtime).parameters
    assert {name: parameter.default for name, parameter in taken.items()} == {
        field.name: field.default for field in fields(RuntimeConfig)
    }
    assert [name for name, parameter in taken.items() if parameter.kind is not parameter.KEYWORD_ONLY] == ["model"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'sed'"):
        Runtime(sed=1)  # type: ignore[call-arg]
    with pytest.raises(ParameterError, match="seed is -1"):
        Runtime(seed=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_fraction": 0}, "memory_fraction is 0; it must be a number above 0 to 1"),
        ({"max_running_requests": 2**16 + 1}, "max_running_requests is 65537"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size is 0"),
        ({"schedule_policy": "random"}, "schedule_policy is 'random'; it must be one of: lpm, fcfs"),
        ({"attention": "paged"}, "attention is 'paged'; it must be one of: tree, flat"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'; it must be one of: auto, fp8"),
        ({"quantization": "awq"}, "quantization is 'awq'; it must be one of: None, fp8"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"model": ""}, "model is ''; it must be a folder or a hub id"),
        ({"model": 5}, "model is 5; it must be a folder or a hub id"),
        ({"model": ["a"]}, r"model is \['a'\]; it must be a folder"),
        ({"tensor_parallel_size": None}, "tensor_parallel_size is None; it must be a whole number from 1 to 64"),
        ({"pipeline_parallel_size": None}, "pipeline_parallel_size is None"),
        ({"cuda_graphs": "no"}, "cuda_graphs is 'no'; it must be True, False or None"),
        ({"context_length": -1}, "context_length is -1"),
        ({"chat_template_kwargs": []}, r"chat_template_kwargs is \[\]; it must be a dict"),
        ({"threads": 4096}, "threads is 4096; it must be a whole number from 1 to 1024"),
        ({"host_memory_gb": 1.0, "enable_prefix_cache": False}, "nothing is kept that could go to the host"),
    ],
)
def test_options_outside_their_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        RuntimeConfig(**options)


def test_numbers_of_other_libraries_become_those_of_json() -> None:
    given = {"max_total_tokens": np.int64(9), "context_length": np.float32(8), "memory_fraction": np.float32(0.5)}
    values = config_as_json(RuntimeConfig(**given))  # type: ignore[arg-type]
    assert {name: json.loads(json.dumps(values))[name] for name in given} == given


def test_a_number_that_is_no_device_is_refused() -> None:
    with pytest.raises(ParameterError, match="device is 9223372036854775808; it must be on cpu or cuda"):
        choose_device(2**63)  # type: ignore[arg-type]


def test_whole_floats_become_ints() -> None:
    config = RuntimeConfig(max_running_requests=8.0, chunked_prefill_size=64.0, threads=2.0)  # type: ignore[arg-type]
    numbers = (config.max_running_requests, config.chunked_prefill_size, config.threads)
    assert [(type(number), number) for number in numbers] == [(int, 8), (int, 64), (int, 2)]


def test_the_facade_imports_neither_torch_nor_rich() -> None:
    code = "import sys, radixrt.runtime; sys.exit(bool({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
