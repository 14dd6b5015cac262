"""Models on kernels: the logits of the references, and how many kernels a layer launches."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layers import radix_attention
from layers.input_metadata import InputMetadata
from radixrt.models.decoder import Decoder
from radixrt.models.loader import load_model
from triton_ops import rms_norm
from triton_ops.e4m3 import E4M3


class Pool:
    """KV of all layers in few slots, NaN until written; with e4m3, the same scale for all keys and another for all
    values.
    """

    def __init__(self, model: Decoder, device: torch.device, *, e4m3: bool = False) -> None:
        config = model.config
        shape = (2, config.num_layers, 16, config.num_kv_heads, config.head_dim)
        self.kv = torch.full(shape, torch.nan, device=device).to(E4M3 if e4m3 else torch.float32)
        self.scales = torch.ones(2, config.num_kv_heads, device=device) / 16 if e4m3 else None
        if self.scales is not None:
            self.scales[1] /= 2

    def k_buffer(self, layer_id: int) -> Tensor:
        return self.kv[0, layer_id]

    def v_buffer(self, layer_id: int) -> Tensor:
        return self.kv[1, layer_id]

    def k_scale(self, layer_id: int) -> Tensor | None:
        return None if self.scales is None else self.scales[0]

    def v_scale(self, layer_id: int) -> Tensor | None:
        return None if self.scales is None else self.scales[1]


def passes(model: Decoder, device: torch.device, *, e4m3: bool = False) -> Tensor:
    """Logits of a prompt in two chunks, and of two decodes."""
    pool, slots = Pool(model, device, e4m3=e4m3), [5, 3, 11, 7, 1, 2, 9, 14]
    rows = torch.tensor([slots], dtype=torch.int32, device=device)
    logits = []
    with torch.inference_mode():
        for start, end in ((0, 4), (4, 6), (6, 7), (7, 8)):
            metadata = InputMetadata.from_lengths(
                [0], [end], [start], slots[start:end], rows, num_extends=int(end - start > 1)
            )
            ids = torch.arange(start + 20, end + 20, dtype=torch.int32, device=device)
            hidden = model(ids, metadata, pool)
            logits.append(model.compute_logits(hidden, torch.arange(len(ids), dtype=torch.int32, device=device)))
    return torch.cat(logits)


FAMILIES = {
    "qwen3": checkpoints.qwen3,
    "qwen3-moe": checkpoints.qwen3_moe,
    "phi3, partial rotary": partial(
        checkpoints.phi3, rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "gemma2": checkpoints.gemma2,
    "gemma3": checkpoints.gemma3,
    "olmo2": checkpoints.olmo2,
    "smollm3": checkpoints.smollm3,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_what_the_references_do(family: str, tmp_path: Path, kernel_device: torch.device) -> None:
    checkpoints.write(FAMILIES[family](), tmp_path)
    on_kernels, on_references = (
        passes(load_model(tmp_path, device=kernel_device, dtype="float32", impl=impl)[0], kernel_device)
        for impl in ("triton", "torch")
    )
    assert on_kernels.isfinite().all()
    torch.testing.assert_close(on_kernels, on_references, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_over_e4m3_compute_what_the_references_do(
    family: str, dtype: str, tmp_path: Path, kernel_device: torch.device
) -> None:
    """A key or value may be rounded to the next number, which is up to an eighth away."""
    checkpoints.write(FAMILIES[family](), tmp_path)
    on_kernels, on_references = (
        passes(load_model(tmp_path, device=kernel_device, dtype=dtype, impl=impl)[0], kernel_device, e4m3=True)
        for impl in ("triton", "torch")
    )
    assert on_kernels.isfinite().all()
    off = (on_kernels.float() - on_references.float()).norm() / on_references.float().norm()
    assert off < (2e-3 if dtype == "float32" else 5e-2), off


# --- launches ---

# What allocates or looks at memory, and computes nothing.
FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "view",
    "_unsafe_view",
    "slice",
    "t",
    "transpose",
    "detach",
    "alias",
    "select",
)


class Computed(TorchDispatchMode):
    """Counts the operations of torch that run on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "launches"), [("llama", 4), ("qwen3", 4), ("phi3", 4), ("gemma2", 4), ("olmo2", 6)]
)
def test_launches_of_a_layer(family: str, launches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.write(getattr(checkpoints, family)(), tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # kernels are not run, only asked for
    model, _ = load_model(tmp_path, device="cpu", impl="triton")
    launched = []
    kernel_type = type(rms_norm._rms_norm_kernel)
    monkeypatch.setattr(kernel_type, "run", lambda kernel, *_, **__: launched.append(kernel))
    monkeypatch.setattr(radix_attention, "extend_attention", lambda q, *_, **__: torch.empty_like(q))
    rows = torch.arange(8, dtype=torch.int32).view(1, 8)
    metadata = InputMetadata.from_lengths([0], [3], [0], [1, 2, 3], rows)
    hidden, pool = torch.zeros(3, model.config.hidden_size), Pool(model, torch.device("cpu"))
    with torch.no_grad(), Computed() as computed:
        model.blocks[1](hidden, None if family == "olmo2" else hidden, metadata, pool)
    products = computed.counts.pop("mm", 0) + computed.counts.pop("addmm", 0)
    assert products == 4
    assert len(launched) + computed.counts.total() == launches, (launched, computed.counts)
