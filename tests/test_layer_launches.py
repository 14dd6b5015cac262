"""How many kernels a layer launches besides its matrix products and its attention."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layers import radix_attention
from layers.input_metadata import InputMetadata
from radixrt.models.loader import load_model
from triton_ops import rms_norm

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


class Pool:
    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self.kv = torch.zeros(2, 8, num_kv_heads, head_dim)

    def k_buffer(self, layer_id: int) -> Tensor:
        return self.kv[0]

    def v_buffer(self, layer_id: int) -> Tensor:
        return self.kv[1]


@pytest.mark.parametrize(
    ("family", "launches"), [("llama", 4), ("qwen3", 4), ("phi3", 4), ("gemma2", 6), ("olmo2", 8)]
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
    config = model.config
    hidden, pool = torch.zeros(3, config.hidden_size), Pool(config.num_kv_heads, config.head_dim)
    with torch.no_grad(), Computed() as computed:
        model.blocks[1](hidden, hidden, metadata, pool)
    products = computed.counts.pop("mm", 0) + computed.counts.pop("addmm", 0)
    assert products == 4
    assert len(launched) + computed.counts.total() == launches, (launched, computed.counts)
