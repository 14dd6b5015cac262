"""A query by deterministic attention in many ways: whole, cut, going on from shared superblocks, as an extend."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import triton_ops.attention.ordered as ordered
from tests.support.attention_cases import Case, make_case
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.plan import AttentionPlan, Int32Array, SharedItems
from triton_ops.implementation import Impl

COPIES = 3  # of a request
HEADS = 4


def copies(length: int, dtype: torch.dtype) -> Case:
    """The same request some times."""
    case = make_case([length] * COPIES, head_dim=16, dtype=dtype)
    case.req_to_token[case.rows.long()] = case.req_to_token[case.rows[0]].clone()
    return case


def all_ways(
    case: Case, q: Tensor, scoring: Scoring, superblock: int, shared_len: int, impl: Impl = "triton"
) -> list[Tensor]:
    """Results and log-sum-exps of `q [HEADS, 16]` at the end of `copies`, which should all have the same bits.

    `shared_len`: tokens that are read once for all copies, or but the first 16 of the last superblock for all but
    one; a multiple of 16.
    """
    rows, length = case.rows.numpy(force=True), int(case.seq_lens[0])

    def decoded(plan: AttentionPlan[Int32Array]) -> list[Tensor]:
        lse = torch.empty(COPIES, HEADS)
        wide = q.expand(COPIES, HEADS, 16).contiguous()
        out = ordered.ordered_decode(wide, case.kv, case.rows, plan.to(q.device), scoring, lse=lse, impl=impl)
        return [torch.cat([out.flatten(1).float(), lse], 1)[row] for row in range(COPIES)]

    lens = [length] * COPIES
    found = decoded(AttentionPlan.flat(rows, lens, superblock=superblock))
    found += decoded(AttentionPlan.flat(rows, lens, max_item_len=1, superblock=superblock))
    last = shared_len // superblock * superblock
    starts = np.array([last + 16, *range(0, shared_len, superblock)], np.int32)  # in the plan the last comes first
    ends = np.array([shared_len, *range(superblock, last + 1, superblock), last + 16], np.int32)
    first, counts = np.zeros_like(starts), np.full_like(starts, COPIES)
    counts[0] -= 1
    items = SharedItems(first + rows[0], starts, ends - starts, first, counts, np.arange(COPIES, dtype=np.int32))
    tails = [shared_len] * (COPIES - 1) + [last + 16]
    found += decoded(AttentionPlan.tree(rows, lens, tails, items, superblock=superblock))
    extends = case.extends([length - 41, length - 1, length - 70])
    wide = torch.zeros(int(extends.extend_seq_lens.sum()), HEADS, 16, dtype=q.dtype)
    ends_at = (extends.extend_start_loc + extends.extend_seq_lens - 1).long()
    wide[ends_at] = q
    lse = torch.empty(wide.shape[:2])
    out = ordered.ordered_extend(wide, case.kv, extends, None, scoring, lse=lse, superblock=superblock, impl=impl)
    return [*found, *torch.cat([out.flatten(1).float(), lse], 1)[ends_at]]


# --- scores that rise along a superblock ---

RISING_SUPERBLOCK, RISING_LEN, RISING_SHARED = 256, 540, 496
_WITHIN = np.arange(RISING_LEN) % RISING_SUPERBLOCK
# Scores in base 2, by position. The first tiles of a superblock, of at most 64 keys, have far lower ones.
RISES = {
    "far": _WITHIN * 0.8 - 50.0,  # weights in units of the first tile's overflow
    "less": _WITHIN * 0.3,
    # In units of the first tile's greatest weight, the second superblock is more than float32 can hold below the
    # first, whose values are zero.
    "from far below": np.where(np.arange(RISING_LEN) < 256, 95.0, np.where(_WITHIN < 64, -60.0, 25.0)),
    "tiny values": _WITHIN * 0.3,
    # What comes before the jump weighs 2^-97, and is to be seen beside tiny values: its own are large.
    "a jump": np.where(_WITHIN < 80, -50.0, 47.5),
}


def rising(name: str, impl: Impl = "triton") -> tuple[list[Tensor], Case, Tensor, Scoring]:
    """`all_ways` of a query whose scores rise, and what they are of."""
    case, scoring = copies(RISING_LEN, torch.bfloat16), Scoring(0.25)
    slots = case.req_to_token[case.rows[0], :RISING_LEN].long()
    levels = torch.tensor(RISES[name], dtype=torch.float32)
    case.k_buffer[slots] *= 0.2
    case.k_buffer[slots, :, 0] = (levels / (8.0 * scoring.scale * math.log2(math.e)))[:, None].to(case.dtype)
    if name == "from far below":
        case.v_buffer[slots[:RISING_SUPERBLOCK]] = 0.0
    if name == "a jump":
        factors = torch.from_numpy(np.where(_WITHIN < 80, 2.0**24, 2.0**-74)).to(case.v_buffer.device)
        case.v_buffer[slots] *= factors[:, None, None]
    if name == "tiny values":
        case.v_buffer[slots] *= 2.0**-79
    q = torch.randn(HEADS, 16, generator=torch.Generator().manual_seed(0)).to(case.dtype)
    q[:, 0] = 8.0
    with np.errstate(over="ignore", invalid="ignore"):  # weights may overflow, and are computed again
        return all_ways(case, q, scoring, RISING_SUPERBLOCK, RISING_SHARED, impl), case, q, scoring
