"""Inputs of attention: requests in a pool, and a reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from radixrt.arrays import Int32Array
from radixrt.execution.attention.flat import KernelShape
from scripts.kernel_benchmarks.case import Expected
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.extend import Extends
from triton_ops.implementation import gpu_of
from triton_ops.kv.view import KVView

CHECKED_ROWS = 128  # new tokens a request compared with the reference, including the first and the last


@dataclass(frozen=True)
class AttentionShape:
    """`batch` requests of `prefix` tokens in the pool and `extend` new ones; for decode, 1.

    `scattered`: the requests' slots are a random permutation of the pool's; else they are consecutive.
    """

    batch: int
    prefix: int
    extend: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    scattered: bool = True

    @property
    def length(self) -> int:
        """Of a request."""
        return self.prefix + self.extend

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """num_heads, num_kv_heads, head_dim, bytes of an element."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.dtype.itemsize

    @property
    def rows(self) -> Int32Array:
        """Of the requests in the page table."""
        return np.arange(self.batch, dtype=np.int32)

    def each(self, number: int) -> Int32Array:
        """The same number for each request."""
        return np.full(self.batch, number, np.int32)

    def kernel(self, device: torch.device) -> KernelShape:
        """As plans are made for the device."""
        return KernelShape(gpu_of(device), self.num_heads, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def words(self) -> str:
        """Differences from 32 heads on 8 KV heads of 128, in bf16."""
        usual = AttentionShape(0, 0, 0)
        words = []
        if (self.num_heads, self.num_kv_heads) != (usual.num_heads, usual.num_kv_heads):
            words.append(f"H={self.num_heads}/{self.num_kv_heads}")
        if self.head_dim != usual.head_dim:
            words.append(f"D={self.head_dim}")
        return " ".join(words)


@dataclass(frozen=True)
class AttentionInputs:
    """One set of inputs. All requests' tokens, the new ones too, are in the pool.

    Attributes:
        q: `[batch * extend, num_heads, head_dim]`; k, v: the new tokens', with num_kv_heads.
        kv: the pool `[num_slots, num_kv_heads, head_dim]`, which sets share, with a table `[batch, length]`; a
            slot belongs to one set.
    """

    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    kv: KVView
    scoring: Scoring

    @property
    def kernel(self) -> KernelShape:
        return self.shape.kernel(self.q.device)

    def extends(self) -> Extends:
        """The requests, as kernels for extends have them."""
        shape = self.shape
        numbers = shape.rows, shape.each(shape.prefix), shape.rows * shape.extend, shape.each(shape.extend)
        return Extends(*(torch.from_numpy(each).to(self.q.device) for each in numbers))

    def dense(self, buffer: Tensor) -> Tensor:
        """The requests' keys or values, gathered: `[batch, length, num_kv_heads, head_dim]`."""
        gathered = buffer.index_select(0, self.kv.req_to_token.flatten())
        return gathered.view(self.shape.batch, self.shape.length, *buffer.shape[1:])


def attention_inputs(
    shape: AttentionShape, device: torch.device, copies: int, tokens: Tensor | None = None
) -> list[AttentionInputs]:
    """`copies` sets in one pool; the padding slot 0 holds NaN. `tokens` int64 `[batch, length]` on the
    device: which of a set's tokens, counted from 0, a request has at a position; None: no two have the same.
    """
    if tokens is None:
        tokens = torch.arange(shape.batch * shape.length, device=device).view(shape.batch, shape.length)
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, dtype=shape.dtype, device=device, generator=generator)
    num_tokens = int(tokens.max()) + 1
    num_slots = copies * num_tokens + 1
    slots = torch.arange(1, num_slots, device=device)
    if shape.scattered:
        slots = slots[torch.randperm(num_slots - 1, device=device, generator=generator)]
    tables = slots.int().view(copies, num_tokens)[:, tokens]
    pool = (num_slots, shape.num_kv_heads, shape.head_dim)
    k_buffer, v_buffer = make(pool), make(pool)
    k_buffer[0] = v_buffer[0] = torch.nan
    sets = []
    for table in tables:
        new, kv = table[:, shape.prefix :].flatten(), KVView(k_buffer, v_buffer, table)
        q = make((len(new), shape.num_heads, shape.head_dim))
        sets.append(AttentionInputs(shape, q, k_buffer[new], v_buffer[new], kv, Scoring(shape.scale)))
    return sets


def expected_attention(inputs: AttentionInputs) -> Expected:
    """Dense attention in float32 of some new tokens of every request."""
    shape = inputs.shape
    device = inputs.q.device
    nth = torch.linspace(0, shape.extend - 1, min(shape.extend, CHECKED_ROWS), device=device).round().long()
    hidden = torch.arange(shape.length, device=device) > (shape.prefix + nth)[:, None]
    group = shape.num_heads // shape.num_kv_heads
    rows, outs = [], []
    for request in range(shape.batch):
        rows.append(request * shape.extend + nth)
        slots = inputs.kv.req_to_token[request]
        # [num_kv_heads, n, group, head_dim] and [num_kv_heads, length, head_dim]
        q = inputs.q[rows[-1]].float().view(-1, shape.num_kv_heads, group, shape.head_dim).transpose(0, 1)
        keys, values = (x[slots].float().transpose(0, 1) for x in (inputs.kv.k, inputs.kv.v))
        scores = (q.flatten(1, 2) @ keys.transpose(1, 2)).view(*q.shape[:3], -1).mul_(shape.scale)
        weights = scores.masked_fill_(hidden[:, None], -torch.inf).softmax(-1)
        out = (weights.flatten(1, 2) @ values).view_as(q)
        outs.append(out.transpose(0, 1).flatten(1, 2))
    return Expected([torch.cat(outs)], torch.cat(rows))
