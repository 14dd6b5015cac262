"""Writes of new tokens' keys and values into the pool."""

from __future__ import annotations

from torch import Tensor

from triton_ops.e4m3 import put_slots


def kv_store(k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, out_cache_loc: Tensor) -> None:
    """Write token t's K and V into slot `out_cache_loc[t]`, in place, in the buffers' dtype.

    `k` and `v` are `[num_tokens, num_kv_heads, head_dim]` with any strides, the buffers
    `[num_slots, num_kv_heads, head_dim]`, `out_cache_loc` int32 `[num_tokens]`. Slots are distinct, except for
    slot 0, which padding writes to and nothing reads.
    """
    slots = out_cache_loc.long()
    put_slots(k_buffer, slots, k.to(k_buffer.dtype))
    put_slots(v_buffer, slots, v.to(v_buffer.dtype))
