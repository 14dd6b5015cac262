"""InputMetadata: the batch of one forward pass, as the layers see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from memory_pool.state_pool import StatePool, StateView
from triton_ops.attention.extend import Extends
from triton_ops.attention.plan import AttentionPlan, ExtendPlan, Int32Array
from triton_ops.kv.view import KVView
from triton_ops.recurrent.rows import StateRows


class KVCache(Protocol):
    """The KV of all layers."""

    def view(self, layer_id: int, req_to_token: Tensor) -> KVView: ...


@dataclass(frozen=True)
class InputMetadata:
    """The batch of one pass: B requests, the `num_extends` extends first, then the decodes; and what layers keep.

    It is all that a layer may ask of a pass: layers are called as `forward(x, metadata)`.

    The pass computes T new tokens, contiguous by request, in batch order; a decode computes one. All tensors are
    int32, on the pass's device. A padded decode has `seq_len` 1 and writes to slot 0.
    """

    req_pool_indices: Tensor  # `[B]`, the request's row of `req_to_token`
    seq_lens: Tensor  # `[B]`, its tokens after this pass: seq = prefix + extend
    prefix_lens: Tensor  # `[B]`, those whose KV was in the pool before
    extend_seq_lens: Tensor  # `[B]`, those computed now
    extend_start_loc: Tensor  # `[B]`, its first token among the T
    positions: Tensor  # `[T]`, of each token in its request
    out_cache_loc: Tensor  # `[T]`, the slot for its KV
    req_to_token: Tensor  # `[max_requests, max_context_len]`, position to slot, the new tokens' included
    # A plan for each sliding window of the model's layers; None's serves all other layers. Query row 0 of a decode
    # plan is the first decode.
    decode_plans: Mapping[int | None, AttentionPlan]
    extend_plans: Mapping[int | None, ExtendPlan]
    num_extends: int
    num_extend_tokens: int  # the first of the T
    kv_pool: KVCache | None = None  # None: no layer attends
    states: StateRows | None = None  # the states that requests begin with and leave, in a model that keeps some
    state_pool: StatePool | None = None  # which has these

    @cached_property
    def extends(self) -> Extends:
        """The extends, for `extend_attention`."""
        fields = (self.req_pool_indices, self.prefix_lens, self.extend_start_loc, self.extend_seq_lens)
        return Extends(*(field[: self.num_extends] for field in fields))

    @cached_property
    def decode_rows(self) -> Tensor:
        """`req_pool_indices` of the decodes."""
        return self.req_pool_indices[self.num_extends :]

    def kv(self, layer_id: int) -> KVView:
        """The KV of a layer; `layer_id` counts the layers that keep KV."""
        assert self.kv_pool is not None
        return self.kv_pool.view(layer_id, self.req_to_token)

    def states_of(self, layer_id: int) -> tuple[StateRows, StateView]:
        """The states of the pass's rows, and where a layer keeps them; `layer_id` counts the layers that do."""
        assert self.states is not None
        assert self.state_pool is not None
        return self.states, self.state_pool.view(layer_id)

    def decode_plan(self, sliding_window: int | None) -> AttentionPlan:
        """The plan for the decodes in layers of that window."""
        plans = self.decode_plans
        return plans[sliding_window] if sliding_window in plans else plans[None]

    def extend_plan(self, sliding_window: int | None) -> ExtendPlan | None:
        """The plan for the extends in layers of that window, or None."""
        return self.extend_plans.get(sliding_window, self.extend_plans.get(None))

    @staticmethod
    def host_arrays(
        req_pool_indices: ArrayLike, seq_lens: ArrayLike, prefix_lens: ArrayLike, out_cache_loc: ArrayLike
    ) -> dict[str, Int32Array]:
        """All int32 arrays of a batch by field name, ready to be sent to the device.

        Raises ValueError where lengths disagree, a prefix is longer than its sequence, or a value is negative.
        """
        given = (req_pool_indices, seq_lens, prefix_lens, out_cache_loc)
        rows, seq, prefix, slots = (np.asarray(array, np.int32) for array in given)
        if not (rows.shape == seq.shape == prefix.shape == (rows.size,)):
            raise ValueError(
                "req_pool_indices, seq_lens and prefix_lens must be of one length, "
                f"but have shapes {rows.shape}, {seq.shape} and {prefix.shape}"
            )
        extend = seq - prefix
        for name, array in (("req_pool_indices", rows), ("prefix_lens", prefix), ("out_cache_loc", slots)):
            if array.size and array.min() < 0:
                raise ValueError(f"{name} must not be negative, but holds {array.min()}")
        if extend.size and extend.min() < 0:
            worst = int(extend.argmin())
            raise ValueError(f"request {worst}: prefix_len {prefix[worst]} exceeds seq_len {seq[worst]}")
        ends = np.cumsum(extend, dtype=np.int32)
        num_tokens = int(ends[-1]) if ends.size else 0
        if slots.shape != (num_tokens,):
            raise ValueError(
                f"out_cache_loc must have one slot for each of the {num_tokens} new tokens, "
                f"but has shape {slots.shape}"
            )
        extend_start = ends - extend
        return {
            "req_pool_indices": rows,
            "seq_lens": seq,
            "prefix_lens": prefix,
            "extend_seq_lens": extend,
            "extend_start_loc": extend_start,
            "positions": np.arange(num_tokens, dtype=np.int32) + np.repeat(prefix - extend_start, extend),
            "out_cache_loc": slots,
        }

    @staticmethod
    def count_extend_tokens(extend_seq_lens: Int32Array, num_extends: int) -> int:
        """The `num_extend_tokens` of a batch, from host arrays.

        Raises ValueError where `num_extends` is out of range or a request after the extends is no decode.
        """
        if not 0 <= num_extends <= extend_seq_lens.size:
            at_most = f"0 to {extend_seq_lens.size} (all requests)"
            raise ValueError(f"num_extends must be {at_most}, but is {num_extends}")
        decodes = extend_seq_lens[num_extends:]
        if (decodes != 1).any():
            raise ValueError(f"a decode computes one token, but extend_seq_lens are {decodes}")
        return int(extend_seq_lens[:num_extends].sum())


_NONE = torch.empty(0, dtype=torch.int32, device="cpu")
NO_PASS = InputMetadata(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, {}, {}, 0, 0)
"""No requests: for layers that are tried alone, and ask a pass for nothing, or for what `replace` adds."""
