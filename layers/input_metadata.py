"""InputMetadata: what a forward pass is told about its batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from triton_ops.attention.plan import AttentionPlan, ExtendPlan

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class InputMetadata:
    """The batch of one pass: B requests, the `num_extends` extends first, then the decodes.

    The pass computes T new tokens, contiguous by request, in batch order. A decode computes one. All
    tensors are int32, on the pass's device:

    - `req_pool_indices` [B]: the request's line of `req_to_token`,
    - `seq_lens` [B]: its tokens after this pass, `prefix_lens` [B]: those whose KV was in the pool
      before, `extend_seq_lens` [B]: those computed now (seq = prefix + extend),
    - `extend_start_loc` [B]: its first token among the T, `start_loc` [B]: the same were prefixes
      counted too (exclusive sum of `seq_lens`),
    - `positions` [T]: position of each token in its request, `out_cache_loc` [T]: the slot for its KV,
    - `logits_indices` [S]: the tokens, among the T, whose logits are wanted,
    - `req_to_token` [max_requests, max_context_len]: position to slot, the new tokens' included.

    `decode_plans` and `extend_plans` say what the decodes and the extends read, for each sliding window of the
    model's layers; those under None serve every layer. Query row 0 is the first decode.

    A padded decode has `seq_len` 1 and writes to slot 0. `total_num_tokens` is the sum of
    `seq_lens`, `max_seq_len` their maximum, `max_extend_len` the longest of the extends (0 if there
    are none), `num_extend_tokens` the extends' share of T.
    """

    req_pool_indices: Tensor
    seq_lens: Tensor
    prefix_lens: Tensor
    extend_seq_lens: Tensor
    extend_start_loc: Tensor
    start_loc: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    logits_indices: Tensor
    req_to_token: Tensor
    decode_plans: Mapping[int | None, AttentionPlan]
    extend_plans: Mapping[int | None, ExtendPlan]
    total_num_tokens: int
    max_seq_len: int
    max_extend_len: int
    num_extends: int
    num_extend_tokens: int

    def decode_plan(self, sliding_window: int | None) -> AttentionPlan:
        """The plan for the decodes in layers of that window."""
        plans = self.decode_plans
        return plans[sliding_window] if sliding_window in plans else plans[None]

    def extend_plan(self, sliding_window: int | None) -> ExtendPlan | None:
        """The plan for the extends in layers of that window; None where nobody made one."""
        plans = self.extend_plans
        return plans[sliding_window] if sliding_window in plans else plans.get(None)

    @staticmethod
    def host_arrays(
        req_pool_indices: ArrayLike, seq_lens: ArrayLike, prefix_lens: ArrayLike, out_cache_loc: ArrayLike
    ) -> dict[str, Int32Array]:
        """All int32 arrays of a batch but `logits_indices`, by field name, ready to be sent to the device.

        Raises ValueError where the lengths disagree, a prefix is longer than its sequence, or a value is
        negative.
        """
        rows = np.asarray(req_pool_indices, np.int32)
        seq = np.asarray(seq_lens, np.int32)
        prefix = np.asarray(prefix_lens, np.int32)
        slots = np.asarray(out_cache_loc, np.int32)
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
            "start_loc": np.cumsum(seq, dtype=np.int32) - seq,
            "positions": np.arange(num_tokens, dtype=np.int32) + np.repeat(prefix - extend_start, extend),
            "out_cache_loc": slots,
        }

    @classmethod
    def from_host_and_device(
        cls,
        host: Mapping[str, Int32Array],
        device: Mapping[str, Tensor],
        *,
        logits_indices: Tensor,
        req_to_token: Tensor,
        num_extends: int,
        decode_plans: Mapping[int | None, AttentionPlan],
        extend_plans: Mapping[int | None, ExtendPlan] = MappingProxyType({}),
    ) -> InputMetadata:
        """The metadata whose numbers come from `host` (see `host_arrays`) and whose tensors from
        `device`.

        `device` holds the same arrays, under the same names, on the device. Raises ValueError where
        `num_extends` is out of range or a request after the extends is no decode.
        """
        extend = host["extend_seq_lens"]
        if not 0 <= num_extends <= extend.size:
            raise ValueError(f"num_extends must be 0 to {extend.size} (all requests), but is {num_extends}")
        if (extend[num_extends:] != 1).any():
            raise ValueError(f"a decode computes one token, but extend_seq_lens are {extend[num_extends:]}")
        seq, extends = host["seq_lens"], extend[:num_extends]
        return cls(
            **{name: device[name] for name in host},
            logits_indices=logits_indices,
            req_to_token=req_to_token,
            decode_plans=decode_plans,
            extend_plans=extend_plans,
            total_num_tokens=int(seq.sum(dtype=np.int64)),
            max_seq_len=int(seq.max(initial=0)),
            max_extend_len=int(extends.max(initial=0)),
            num_extends=num_extends,
            num_extend_tokens=int(extends.sum()),
        )

    @classmethod
    def from_lengths(
        cls,
        req_pool_indices: ArrayLike,
        seq_lens: ArrayLike,
        prefix_lens: ArrayLike,
        out_cache_loc: ArrayLike,
        req_to_token: Tensor,
        *,
        num_extends: int | None = None,
        logits_indices: ArrayLike | None = None,
        plan: AttentionPlan | None = None,
    ) -> InputMetadata:
        """`host_arrays`, copied to `req_to_token`'s device array by array: handy, not fast.

        `num_extends` is all requests if None, `logits_indices` the last token of each request that has
        one, `plan` (of the decodes) the flat plan.
        """
        host = cls.host_arrays(req_pool_indices, seq_lens, prefix_lens, out_cache_loc)
        if logits_indices is None:
            extend = host["extend_seq_lens"]
            logits_indices = (host["extend_start_loc"] + extend - 1)[extend > 0]

        num_extends = host["seq_lens"].size if num_extends is None else num_extends
        if plan is None:
            rows, seq = host["req_pool_indices"][num_extends:], host["seq_lens"][num_extends:]
            plan = AttentionPlan.flat(rows, seq).to(req_to_token.device)

        def to_device(array: NDArray[Any]) -> Tensor:
            return torch.tensor(array, dtype=torch.int32, device=req_to_token.device)

        return cls.from_host_and_device(
            host,
            {name: to_device(array) for name, array in host.items()},
            logits_indices=to_device(np.asarray(logits_indices, np.int32)),
            req_to_token=req_to_token,
            num_extends=num_extends,
            decode_plans={None: plan},
        )
