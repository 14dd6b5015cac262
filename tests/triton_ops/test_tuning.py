"""Which GPUs the kernels have configurations for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from triton_ops import implementation
from triton_ops.implementation import GPU, Vendor, compiling_for, gpu_of, has_gluon, overlapped, runs_triton
from triton_ops.tuning import (
    copy_config,
    decode_config,
    delta_chunks_config,
    delta_step_config,
    e4m3_linear_config,
    expert_config,
    expert_rows,
    extend_config,
    few_rows_config,
    gated_linear_config,
    shared_config,
    split_k_config,
    token_by_token_config,
    training_config,
)

CONFIGS: dict[str, Callable[[GPU], object]] = {
    "decode": lambda gpu: decode_config(gpu, 128, torch.bfloat16, alibi=False),
    "extend": lambda gpu: extend_config(gpu, 128, torch.bfloat16, short=False),
    "shared": lambda gpu: shared_config(gpu, 128, torch.bfloat16),
    "training": lambda gpu: training_config(gpu, 128, torch.bfloat16, kind="dkv"),
    "split-K": lambda gpu: split_k_config(gpu, 16, 1024, 2048, torch.bfloat16),
    "few rows": lambda gpu: few_rows_config(gpu, 8, 4096, 1024, torch.bfloat16, gated=False),
    "gated": lambda gpu: gated_linear_config(gpu, 2048, 4096, 4096, torch.bfloat16, gluon=True),
    "e4m3": lambda gpu: e4m3_linear_config(gpu, 16, 1024),
    "experts": lambda gpu: expert_config(gpu, 16, 64, 1536, 2048, torch.bfloat16),
    "delta, chunks": lambda gpu: delta_chunks_config(gpu, 128, 128, torch.bfloat16),
    "delta, steps": lambda gpu: delta_step_config(gpu, 128, torch.float16),
    "token by token": lambda gpu: token_by_token_config(gpu, 128, 128),
    "copy": lambda gpu: copy_config(gpu, from_host=False, to_host=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gpus_of_other_vendors_have_no_configuration(name: str) -> None:
    assert CONFIGS[name](GPU(90, 132)) is not None
    with pytest.raises(ValueError, match="no configurations for AMD GPUs"):
        CONFIGS[name](GPU(90, 132, Vendor.AMD))


def test_tiles_of_e4m3_lie_in_a_block_and_occupy_a_gpu() -> None:
    """Scales of blocks are read once for all columns of a tile."""
    gpu = GPU(90, 132)
    for num_rows in (1, 16, 17, 64, 500, 5000):
        for num_columns in (100, 1024, 4096, 28_672):
            config = e4m3_linear_config(gpu, num_rows, num_columns)
            assert 128 % config.columns == 0
            assert 16 <= config.rows <= max(16, 2 * num_rows)
            if num_rows <= 32 and num_columns == 4096:
                assert num_columns // config.columns == 128


def test_most_experts_have_one_tile() -> None:
    """Of 128 experts from which tokens choose 8 evenly; those with more rows than a tile can have need several."""
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (1, 16, 64, 128, 256, 512, 900):
        counts = torch.rand(num_tokens, 128, generator=generator).topk(8).indices.flatten().bincount(minlength=128)
        rows = expert_rows(num_tokens * 8, 128, torch.bfloat16)
        assert (counts <= rows).sum() >= 0.9 * 128, num_tokens
        assert rows == 16 or num_tokens * 8 / 128 > rows / 4, "not many more than it has"


def test_few_experts_occupy_a_gpu() -> None:
    gpu = GPU(90, 132)
    for size, inner in ((1536, 2048), (2048, 768)):
        one, many = (expert_config(gpu, 16, num_tiles, size, inner, torch.bfloat16) for num_tiles in (8, 128))
        assert one.columns < many.columns
        assert 8 * size // one.columns >= 2 * gpu.num_sms


def test_what_architectures_can_do() -> None:
    assert [GPU(capability, 1).has_wgmma for capability in (80, 89, 90, 100)] == [False, False, True, False]
    assert not GPU(90, 1, Vendor.AMD).has_wgmma
    assert not GPU(90, 1, Vendor.AMD).overlaps_launches
    assert not GPU(89, 1).overlaps_launches


@pytest.mark.parametrize(
    ("version", "has"),
    [("3.6.0", True), ("3.7.1", True), ("3.6.0+git1", True), ("3.5.1", False), ("3.60.0", False), ("", False)],
)
def test_gluon_is_that_of_some_versions(version: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation.triton, "__version__", version)
    for interpreted in (False, True):
        monkeypatch.setattr(implementation, "_INTERPRETED", interpreted)
        assert has_gluon() == (has and not interpreted)


def test_kernels_do_not_run_on_gpus_of_other_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "VENDOR", Vendor.AMD)
    device = torch.device("cuda", 0)
    for impl in ("auto", "triton"):
        with pytest.raises(
            ValueError, match=rf'impl is "{impl}", but cuda:0 is a GPU of AMD, .* impl "torch" runs'
        ):
            runs_triton(impl, device)  # type: ignore[arg-type]
    assert not runs_triton("torch", device)
    assert not runs_triton("auto", torch.device("cpu"))


@pytest.mark.parametrize(
    ("launches", "spec", "message"),
    [
        (
            False,
            object(),
            "was not imported, as this build of torch is for CPUs; set TRITON_INTERPRET=1, or import",
        ),
        (False, None, "Triton is not installed"),
        (True, object(), "Triton is not installed"),
    ],
)
def test_why_there_is_no_triton(
    launches: bool, spec: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "triton", SimpleNamespace(__version__=""))
    monkeypatch.setattr(implementation, "_LAUNCHES", launches)
    monkeypatch.setattr(implementation, "_INTERPRETED", False)
    monkeypatch.setattr(implementation, "find_spec", lambda name: spec)
    with compiling_for(GPU(90, 132)), pytest.raises(ValueError, match=message):
        runs_triton("triton", torch.device("cpu"))


def test_a_device_is_asked_once_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(major=9, minor=device.index, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(implementation, "_gpu_of", cache(implementation._gpu_of.__wrapped__))
    devices = torch.device("cuda", 0), torch.device("cuda", 1)
    for _ in range(3):
        assert [gpu_of(device) for device in devices] == [GPU(90, 132), GPU(91, 132)]
        assert gpu_of(torch.device("cpu")) is implementation.INTERPRETER
        assert [gpu_of(device).has_wgmma for device in devices] == [True, False]
    assert asked == [*devices]
    with compiling_for(GPU(80, 108)):
        assert gpu_of(devices[0]) == gpu_of(torch.device("cpu")) == GPU(80, 108)
    assert gpu_of(devices[0]) == GPU(90, 132)


def test_gpus_of_the_same_kind_are_one_key() -> None:
    assert len({GPU(90, 132), GPU(90, 132), GPU(90, 132, Vendor.AMD), GPU(90, 114)}) == 3


def test_launches_of_few_rows_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where GPUs can; that changes when a kernel begins, and not what it does."""
    monkeypatch.setattr(implementation, "_INTERPRETED", False)
    cpu = torch.device("cpu")
    with compiling_for(GPU(90, 132)):
        assert overlapped(cpu, 64) == {"EARLY": True, "launch_pdl": True}
        assert overlapped(cpu, 65) == {"EARLY": True}
    with compiling_for(GPU(89, 132)):
        assert overlapped(cpu, 1) == {"EARLY": False}
