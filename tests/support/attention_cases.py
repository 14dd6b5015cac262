"""Batches for attention tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixrt.execution.attention.flat import KernelShape
from triton_ops.attention.extend import Extends
from triton_ops.attention.plan import AttentionPlan, ExtendPlan, Int32Array, SharedItems, SharingPlan
from triton_ops.attention.shared import shared_rows
from triton_ops.e4m3 import E4M3, quantise
from triton_ops.implementation import gpu_of
from triton_ops.kv.view import KVView


@dataclass
class Case:
    """Requests whose whole history lies in scattered slots of a pool that holds NaN and Inf everywhere else.

    `keys[b]` and `values[b]` are request b's, `[seq_lens[b], Hk, D]`; `rows[b]` is its row. Of a pool of e4m3
    they are what it holds times the scales, in float32; else the scales are None. `dtype` is that of queries and
    new tokens.
    """

    k_buffer: Tensor
    v_buffer: Tensor
    req_to_token: Tensor
    rows: Tensor
    seq_lens: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    dtype: torch.dtype
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def kv(self) -> KVView:
        """The pool."""
        return KVView(self.k_buffer, self.v_buffer, self.req_to_token, self.k_scale, self.v_scale)

    def extends(self, prefix_lens: list[int]) -> Extends:
        """Each request as an extend of what comes after its prefix."""
        prefix = torch.tensor(prefix_lens, dtype=torch.int32, device=self.rows.device)
        lens = self.seq_lens - prefix
        return Extends(self.rows, prefix, (lens.cumsum(0) - lens).int(), lens)

    def flat_plan(self, max_item_len: int | None = None, sliding_window: int | None = None) -> AttentionPlan:
        """The plan in which each request is a decode."""
        rows, seq_lens = self.rows.cpu().numpy(), self.seq_lens.cpu().numpy()
        plan = AttentionPlan.flat(rows, seq_lens, max_item_len=max_item_len, sliding_window=sliding_window)
        return plan.to(self.rows.device)

    def plan(self, *columns: list[int]) -> AttentionPlan:
        """The plan of these items: rows, starts, lengths, first query rows, numbers of query rows."""
        return AttentionPlan.of_items(*columns, self.seq_lens.cpu().numpy()).to(self.rows.device)


def make_case(
    seq_lens: list[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    scattered: bool = True,
    interleaved: bool = False,
    e4m3: bool = False,
    seed: int = 0,
) -> Case:
    """`interleaved` makes K and V strided views of one buffer, `[num_slots, 2, Hk, D]`. With `e4m3` the pool is
    that, with another scale for each head of each.
    """
    generator = torch.Generator().manual_seed(seed)
    k_scale = torch.linspace(0.02, 0.05, num_kv_heads) if e4m3 else None
    v_scale = torch.linspace(0.3, 0.01, num_kv_heads) if e4m3 else None
    pool_dtype = E4M3 if e4m3 else dtype
    num_slots = sum(seq_lens) + 40
    shape = (num_slots, num_kv_heads, head_dim)
    if interleaved:
        k_buffer, v_buffer = torch.empty(num_slots, 2, *shape[1:], dtype=pool_dtype).unbind(1)
    else:
        k_buffer, v_buffer = torch.empty(shape, dtype=pool_dtype), torch.empty(shape, dtype=pool_dtype)
    for buffer in (k_buffer, v_buffer):
        buffer.fill_(torch.nan)
        if not e4m3:  # which has no infinities
            buffer[1::3] = torch.inf
            buffer[2::3] = -torch.inf
    slots = torch.arange(1, num_slots)
    if scattered:
        slots = slots[torch.randperm(num_slots - 1, generator=generator)]
    num_rows = len(seq_lens) + 3
    # Beyond a row's end: slots that are not its own, as a reused row would have.
    req_to_token = torch.randint(0, num_slots, (num_rows, max([1, *seq_lens]) + 2), generator=generator)
    rows = torch.randperm(num_rows, generator=generator)[: len(seq_lens)]
    keys, values, start = [], [], 0
    for row, length in zip(rows.tolist(), seq_lens, strict=True):
        own = slots[start : start + length]
        start += length
        req_to_token[row, :length] = own
        for buffer, scale, of_requests in ((k_buffer, k_scale, keys), (v_buffer, v_scale, values)):
            random = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
            if scale is None:
                buffer[own] = random
            else:
                codes = quantise(random, scale)
                buffer[own] = codes
                random = codes.float() * scale[:, None]
            of_requests.append(random)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return Case(k_buffer, v_buffer, req_to_token.int(), rows.int(), lens, keys, values, dtype, k_scale, v_scale)


def packed_qkv(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random float32 q, k and v as strided views of one packed projection."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    q, k, v = packed.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    assert num_tokens < 2 or not q.is_contiguous()
    return q, k, v


# --- requests that share prefixes ---

Edges = list[tuple[int, int]]


def path_of(edges: Edges, node: int) -> list[int]:
    """From the root down to the node."""
    return [] if node < 0 else [*path_of(edges, edges[node][0]), node]


def share(edges: Edges, leaves: list[int], **options: Any) -> Case:
    """A tree of segments: node n has parent and length `edges[n]` (-1: the root's parent), parents first.

    One request a leaf, a node without children, in the order given; its history is its path. Leaves may repeat:
    duplicate prompts.
    """
    case = make_case([sum(edges[n][1] for n in path_of(edges, leaf)) for leaf in leaves], **options)
    first_row: dict[int, int] = {}
    for b, leaf in enumerate(leaves):
        start = 0
        for node in path_of(edges, leaf):
            length = edges[node][1]
            owner = first_row.setdefault(node, b)
            # The followers' slots of a shared segment become the owner's.
            slots = case.req_to_token[case.rows[owner], start : start + length]
            case.req_to_token[case.rows[b], start : start + length] = slots
            case.keys[b][start : start + length] = case.keys[owner][start : start + length]
            case.values[b][start : start + length] = case.values[owner][start : start + length]
            start += length
    return case


def shared_items(
    case: Case,
    edges: Edges,
    leaves: list[int],
    lens: Int32Array,
    counts: Int32Array,
    *,
    group: int,
    piece: int,
    seed: int = 0,
) -> tuple[Int32Array, SharedItems, SharingPlan]:
    """Where tails begin, and the items in which each node but the leaves is shared, of at most `piece` tokens and
    of the query rows that fill a tile of the kernel. A leaf that several requests have is shared, too, as far as
    their `lens` allow, which reach to the leaves at least. Request b has `counts[b]` query rows. Lists of rows are
    in random order, each segment named by any request that has it.
    """
    rng = np.random.default_rng(seed)
    first_rows = np.cumsum(counts) - counts
    holders: dict[int, list[int]] = {}
    for b, leaf in enumerate(leaves):
        for node in path_of(edges, leaf):
            holders.setdefault(node, []).append(b)
    tail_starts = np.zeros(len(leaves), np.int32)
    most = shared_rows(gpu_of(case.rows.device), case.k_buffer.shape[2], group, case.dtype)
    items: list[tuple[int, int, int, list[int]]] = []
    for node, requests in holders.items():
        start = sum(edges[n][1] for n in path_of(edges, node)[:-1])
        end = start + edges[node][1]
        if node in leaves:
            end = min(end, *lens[requests]) if len(requests) > 1 else start
            tail_starts[[b for b in requests if leaves[b] == node]] = end
        queries = [first_rows[b] + n for b in requests for n in range(counts[b])]
        rng.shuffle(queries)
        for first in range(0, len(queries), most):
            rows = queries[first : first + most]
            items += [
                (int(case.rows[rng.choice(requests)]), at, min(piece, end - at), rows)
                for at in range(start, end, piece)
            ]
    lines, starts, item_lens, lists = zip(*items, strict=True) if items else ((), (), (), ())
    query_lens = np.array([len(rows) for rows in lists], np.int32)
    return tail_starts, SharedItems(
        np.array(lines, np.int32),
        np.array(starts, np.int32),
        np.array(item_lens, np.int32),
        np.cumsum(query_lens, dtype=np.int32) - query_lens,
        query_lens,
        np.array([b for rows in lists for b in rows], np.int32),
    )


def tree_plan(
    case: Case,
    edges: Edges,
    leaves: list[int],
    *,
    group: int,
    piece: int,
    max_item_len: int | None = None,
    padding: int = 0,
    seed: int = 0,
) -> AttentionPlan[Int32Array]:
    """The host plan of decodes with these `shared_items` of all but their last tokens, and with `padding`
    items of nothing.
    """
    rows, seq_lens = case.rows.numpy(force=True), case.seq_lens.numpy(force=True)
    tail_starts, shared = shared_items(
        case, edges, leaves, seq_lens - 1, np.ones_like(rows), group=group, piece=piece, seed=seed
    )
    plan = AttentionPlan.tree(rows, seq_lens, tail_starts, shared, max_item_len=max_item_len)
    return replace(plan, **empty_shared_items(plan, padding))


def empty_shared_items(plan: SharingPlan[Int32Array], count: int) -> dict[str, Any]:
    """The fields of shared items, with `count` items of nothing after them."""
    names = [name for name in vars(plan) if name.startswith("shared_") and name != "shared_queries"]
    return {name: np.pad(getattr(plan, name), (0, count)) for name in names}


def shared_plan(case: Case, *tree: Any, **options: Any) -> AttentionPlan:
    """The plan of `tree_plan`, on the device."""
    return tree_plan(case, *tree, **options).to(case.rows.device)


def extend_plan(case: Case, prefix_lens: Int32Array, group: int, **options: Any) -> ExtendPlan[Int32Array]:
    """The host plan of requests that each extend what is after their prefix."""
    counts = case.seq_lens.numpy(force=True) - prefix_lens
    num_kv_heads, head_dim = case.k_buffer.shape[1:]
    shape = KernelShape(gpu_of(case.rows.device), group * num_kv_heads, num_kv_heads, head_dim, case.dtype)
    return plan_extends(shape, prefix_lens, counts, **options)


def plan_extends(
    shape: KernelShape,
    prefix_lens: Int32Array,
    counts: Int32Array,
    *,
    sliding_window: int | None = None,
    tail_starts: Any = 0,
    cut: bool = True,
    **shared: SharedItems,
) -> ExtendPlan[Int32Array]:
    """The host plan of extends one after another, in tiles and, with `cut`, items as the kernels want them."""
    tile_tokens = shape.tile_tokens(counts)
    item_len = shape.extend_item_len(prefix_lens - tail_starts, counts, tile_tokens, sliding_window)
    return ExtendPlan.of_extends(
        prefix_lens,
        np.cumsum(counts, dtype=np.int32) - counts,
        counts,
        tile_tokens=tile_tokens,
        max_item_len=item_len if cut else None,
        sliding_window=sliding_window,
        tail_starts=np.zeros_like(counts) + tail_starts,
        **shared,
    )


def flat_extends(case: Case, prefix_lens: list[int], group: int, sliding_window: int | None) -> ExtendPlan:
    """The plan of extends without sharing, which cuts long prefixes."""
    prefix = np.array(prefix_lens, np.int32)
    return extend_plan(case, prefix, group, sliding_window=sliding_window).to(case.rows.device)


def shared_extends(
    case: Case,
    edges: Edges,
    leaves: list[int],
    prefix_lens: list[int],
    *,
    group: int,
    piece: int,
    padding: int = 0,
    cut: bool = True,
    seed: int = 0,
) -> ExtendPlan:
    """The plan of extends, each of what is behind its prefix, with `shared_items` of the prefixes."""
    prefix = np.array(prefix_lens, np.int32)
    counts = case.seq_lens.numpy(force=True) - prefix
    tail_starts, shared = shared_items(case, edges, leaves, prefix, counts, group=group, piece=piece, seed=seed)
    plan = extend_plan(case, prefix, group, tail_starts=tail_starts, shared=shared, cut=cut)
    return replace(plan, **empty_shared_items(plan, padding)).to(case.rows.device)
