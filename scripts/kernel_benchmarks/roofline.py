"""The time that a device's bandwidth and arithmetic allow for an operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Limit = Literal["bytes", "flops", "exp", "link"]


@dataclass(frozen=True)
class Machine:
    """Measured speeds of a GPU.

    Attributes:
        name: as CUDA gives it.
        bandwidth: of its memory, in bytes/s: read and written bytes of a copy.
        flops: dense bf16 products, in operations/s.
        exps: exponentials a second; not measured, see EXPS_PER_SM.
        l2_bytes: of its L2 cache.
        host_to_device, device_to_host: its link's bandwidth, in bytes/s, from and to pinned memory.
        e4m3_flops: dense products of e4m3, in operations/s; None where torch's are not used.
    """

    name: str
    bandwidth: float
    flops: float
    exps: float
    l2_bytes: int
    host_to_device: float
    device_to_host: float
    e4m3_flops: float | None = None


EXPS_PER_SM = 3.9e12 / 132
"""Exponentials a second of one multiprocessor: 16 a clock at 1.85 GHz, from Ampere to Hopper."""


@dataclass(frozen=True)
class Bound:
    """The minimum time in seconds, and the resource that limits it."""

    seconds: float
    limit: Limit


@dataclass(frozen=True)
class Work:
    """Minimum work of an operation: bytes of device memory read and written once, operations of products,
    exponentials, and bytes that cross the link to the host. `in_e4m3`: the products are of e4m3.
    """

    bytes: float
    flops: float = 0.0
    exps: float = 0.0
    host_to_device: float = 0.0
    device_to_host: float = 0.0
    in_e4m3: bool = False

    def link_seconds(self, machine: Machine) -> float:
        """The minimum time of the link."""
        return self.host_to_device / machine.host_to_device + self.device_to_host / machine.device_to_host

    def bound(self, machine: Machine) -> Bound:
        """max(bytes / bandwidth, flops / F, exps / E, link)."""
        times: dict[Limit, float] = {
            "bytes": self.bytes / machine.bandwidth,
            "flops": self.flops / ((machine.e4m3_flops if self.in_e4m3 else None) or machine.flops),
            "exp": self.exps / machine.exps,
            "link": self.link_seconds(machine),
        }
        limit = max(times, key=lambda name: times[name])
        return Bound(times[limit], limit)


def decode_work(
    lens: Iterable[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int | None = None,
) -> Work:
    """One new token a request attends to `lens` tokens; each token's KV is read once, for its request alone. An
    element of KV takes `kv_itemsize` bytes, or `itemsize`.
    """
    lens = list(lens)
    tokens = sum(lens)
    return Work(
        bytes=head_dim
        * 2
        * ((kv_itemsize or itemsize) * num_kv_heads * tokens + itemsize * num_heads * len(lens)),
        flops=4 * head_dim * num_heads * tokens,
        exps=num_heads * tokens,
    )


def tree_work(
    lens: Iterable[int], distinct: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> Work:
    """`decode_work` of requests that have `distinct` tokens in all, each of which is read once for all that share
    it. Partial results are left out, as they depend on the plan.
    """
    lens = list(lens)
    work = decode_work(lens, num_heads, num_kv_heads, head_dim, itemsize)
    repeated = 2 * head_dim * itemsize * num_kv_heads * (sum(lens) - distinct)
    return replace(work, bytes=work.bytes - repeated)


def extend_work(
    requests: Iterable[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> Work:
    """Requests of (prefix, new) tokens: causal attention of the new ones; each KV is read once, q read, the
    result written.
    """
    requests = list(requests)
    pairs = sum(new * prefix + new * (new + 1) // 2 for prefix, new in requests)
    return Work(
        bytes=itemsize
        * head_dim
        * sum(2 * num_kv_heads * (prefix + new) + 2 * num_heads * new for prefix, new in requests),
        flops=4 * head_dim * num_heads * pairs,
        exps=num_heads * pairs,
    )


def training_work(
    batch: int, length: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, *, causal: bool
) -> Work:
    """Forward and backward pass of `batch` sequences: two products and five, scores being computed in both. The
    forward pass reads q, k and v and writes the result; the backward pass reads these and the result's gradient,
    and writes three more.
    """
    pairs = batch * (length * (length + 1) // 2 if causal else length**2)
    return Work(
        bytes=6 * itemsize * head_dim * batch * length * (num_heads + num_kv_heads),
        flops=14 * head_dim * num_heads * pairs,
        exps=2 * num_heads * pairs,
    )
