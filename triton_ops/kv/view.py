"""KVView: the keys and values of a pool, as the attention of one layer reads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triton_ops.e4m3 import slots_of


@dataclass(frozen=True)
class KVView:
    """One layer's keys and values of all requests.

    Attributes:
        k, v: `[num_slots, num_kv_heads, head_dim]`, any float dtype, e4m3 included. Slots that are not read may
            hold anything, NaN included.
        req_to_token: int32 `[max_requests, max_context_len]`, position to slot.
        k_scale, v_scale: float32 `[num_kv_heads]`, positive: factors on the stored numbers of each head; None: 1.
    """

    k: Tensor
    v: Tensor
    req_to_token: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots int32 `[n]`: float32 `[n, num_kv_heads, head_dim]`."""
        return slots_of(self.k, slots, self.k_scale), slots_of(self.v, slots, self.v_scale)
