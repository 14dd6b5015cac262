"""Stands in for CUDA graphs on a CPU: what would be replayed is computed anew, from the numbers that were sent."""

from __future__ import annotations

import torch

from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.graphs import GraphRecorder, Launch
from radixrt.models.config import ModelConfig
from triton_ops.attention.plan import Int32Array
from triton_ops.implementation import gpu_of


class Recomputing(GraphRecorder):
    """Computes what would be captured."""

    def __init__(self, device: torch.device) -> None:
        pass

    def captured(self, compute: Launch, warm_up: Launch) -> Launch:
        warm_up()
        return torch.inference_mode()(compute)


def planner_on_cpu(
    config: ModelConfig, req_to_token: Int32Array, kv_dtype: torch.dtype = torch.float32, *, tree: bool = False
) -> AttentionPlanner:
    """Plans of a model in float32 that are cut and padded as if kernels ran."""
    gpu = gpu_of(torch.device("cpu"))
    shape = KernelShape(gpu, config.num_heads, config.num_kv_heads, config.head_dim, torch.float32)
    windows = tuple({kind.window for kind in config.attention})
    return AttentionPlanner(shape, windows, req_to_token, kv_dtype, tree=tree)
