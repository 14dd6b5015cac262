"""InputMetadata from lengths alone, array by array: handy, not fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from layers.input_metadata import InputMetadata, KVCache
from memory_pool.state_pool import StatePool
from triton_ops.attention.plan import AttentionPlan
from triton_ops.recurrent.rows import StateRows


def input_metadata(
    req_pool_indices: ArrayLike,
    seq_lens: ArrayLike,
    prefix_lens: ArrayLike,
    out_cache_loc: ArrayLike,
    req_to_token: Tensor,
    *,
    num_extends: int | None = None,
    plan: AttentionPlan | None = None,
    kv_pool: KVCache | None = None,
    states: tuple[ArrayLike, ArrayLike] | None = None,
    state_pool: StatePool | None = None,
) -> InputMetadata:
    """On `req_to_token`'s device. `num_extends` is all requests if None, `plan` (of the decodes) the flat plan.
    `states` `[B]` are those that requests begin with, and those that they leave.
    """
    host = InputMetadata.host_arrays(req_pool_indices, seq_lens, prefix_lens, out_cache_loc)
    num_extends = host["seq_lens"].size if num_extends is None else num_extends
    if plan is None:
        rows, seq = host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:]
        plan = AttentionPlan.flat(rows, seq).to(req_to_token.device)

    def to_device(array: NDArray[Any]) -> Tensor:
        return torch.tensor(array, dtype=torch.int32, device=req_to_token.device)

    state_rows: StateRows | None = None
    if states is not None:
        fields = (host["extend_start_loc"], host["extend_seq_lens"], *map(np.asarray, states))
        start_loc, lens, read_from, write_to = map(to_device, fields)
        state_rows = StateRows(start_loc, lens, read_from, write_to, num_extends)
    return InputMetadata(
        **{name: to_device(array) for name, array in host.items()},
        req_to_token=req_to_token,
        decode_plans={None: plan},
        extend_plans={},
        num_extends=num_extends,
        num_extend_tokens=InputMetadata.count_extend_tokens(host["extend_seq_lens"], num_extends),
        kv_pool=kv_pool,
        states=state_rows,
        state_pool=state_pool,
    )
