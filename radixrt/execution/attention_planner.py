"""AttentionPlans of a pass, built on the host: what attention reads, cut to what the GPU can do side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from layers.placement import Placement
from radixrt.models.config import ModelConfig
from triton_ops.attention_plan import AttentionPlan, ExtendPlan, Int32Array
from triton_ops.decode_attention import decode_item_len
from triton_ops.extend_attention import plan_extends
from triton_ops.implementation import gpu_of, runs_triton


@dataclass(frozen=True)
class PassPlans:
    """The plans of a pass: `arrays` to be copied to the device, and what becomes of the copies."""

    arrays: dict[str, Int32Array]
    windows: tuple[int | None, ...]
    tile_tokens: int | None

    def decode(self, arrays: Mapping[str, Tensor]) -> dict[int | None, AttentionPlan]:
        """The decodes' plans, of the copies."""
        return {window: AttentionPlan.from_arrays(arrays, f"decode {window} ") for window in self.windows}

    def extend(self, arrays: Mapping[str, Tensor]) -> dict[int | None, ExtendPlan]:
        """The extends' plans, of the copies; empty where there are none."""
        if self.tile_tokens is None:
            return {}
        return {
            window: ExtendPlan.from_arrays(arrays, f"extend {window} ", tile_tokens=self.tile_tokens)
            for window in self.windows
        }


class AttentionPlanner:
    """Plans each pass of a model: flat, one plan for each window among its layers.

    Where the kernels run, long contexts are cut so that all multiprocessors have work; the references need no
    cuts, and no plan of the extends.
    """

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self._config = config
        self._dtype = placement.dtype
        self._gpu = gpu_of(placement.device) if runs_triton(placement.impl, placement.device) else None
        self._windows = tuple({kind.window for kind in config.attention})

    def plan(self, host: Mapping[str, Int32Array], num_extends: int) -> PassPlans:
        """The plans for a pass of `InputMetadata.host_arrays` whose first `num_extends` requests are extends."""
        config, gpu = self._config, self._gpu
        rows, seq_lens = host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:]
        arrays: dict[str, Int32Array] = {}
        tile_tokens = None
        for window in self._windows:
            max_item_len = None
            if gpu is not None:
                read = seq_lens if window is None else seq_lens.clip(max=window)
                max_item_len = decode_item_len(gpu, config.num_kv_heads, int(read.sum()))
            decode = AttentionPlan.flat_arrays(rows, seq_lens, max_item_len=max_item_len, sliding_window=window)
            arrays |= {f"decode {window} {name}": array for name, array in decode.items()}
            if gpu is not None and num_extends:
                extend, tile_tokens = plan_extends(
                    host["prefix_lens"][:num_extends],
                    host["extend_start_loc"][:num_extends],
                    host["extend_seq_lens"][:num_extends],
                    gpu=gpu,
                    num_heads=config.num_heads,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    dtype=self._dtype,
                    sliding_window=window,
                )
                arrays |= {f"extend {window} {name}": array for name, array in extend.items()}
        return PassPlans(arrays, self._windows, tile_tokens)
