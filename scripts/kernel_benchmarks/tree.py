"""Cases of decode attention over shared prefixes: trees whose tokens are to be read once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from radixrt.execution.attention.planner import AttentionPlanner
from scripts.kernel_benchmarks.attention import planned_decode
from scripts.kernel_benchmarks.attention_inputs import (
    AttentionInputs,
    AttentionShape,
    attention_inputs,
    expected_attention,
)
from scripts.kernel_benchmarks.case import Call, Case, Contender, PlanFigures
from scripts.kernel_benchmarks.roofline import Work, tree_work
from triton_ops.attention.ordered import SUPERBLOCK

PLANNINGS = 9  # of the same batch; their median is the time
FLAT = "radixrt, flat"


@dataclass(frozen=True)
class TreeShape:
    """A tree of segments, a level after the other from the roots on: `levels` are (nodes, tokens of each). Nodes
    of a level have equally many children; a request is a node of the last level, its own tail.

    `attention` has the heads; its batch and lengths are the tree's.
    """

    levels: tuple[tuple[int, int], ...]
    attention: AttentionShape

    @property
    def words(self) -> str:
        """A prefix that all share is `prefix+tail`; else nodes of the levels, and what they hold."""
        counts, lengths = zip(*self.levels, strict=True)
        words = [f"B={counts[-1]}"]
        if len(counts) == 1 or counts[:-1] == (1,):
            words.append("+".join(map(str, lengths)))
        else:
            held = lengths if len(set(lengths)) > 1 else lengths[:1]
            words.append(f"{_elided(counts)} of {_elided(held)}")
        return " ".join([*words, self.attention.words]).strip()

    @property
    def distinct(self) -> int:
        """Tokens of the tree."""
        return sum(count * length for count, length in self.levels)

    @property
    def sizes(self) -> dict[str, int]:
        """Where all requests share one prefix and nothing else: how many, and the tokens of prefix and tail."""
        if len(self.levels) != 2 or self.levels[0][0] != 1:
            return {}
        (_, shared), (batch, private) = self.levels
        return {"batch": batch, "shared": shared, "private": private}

    def tokens(self) -> Tensor:
        """Which of the tree's tokens, counted level by level, a request has at a position: `[batch, length]`."""
        batch = self.attention.batch
        first, columns = 0, []
        for count, length in self.levels:
            node = torch.arange(batch) * count // batch
            columns.append(first + (node * length)[:, None] + torch.arange(length))
            first += count * length
        return torch.cat(columns, 1)

    def work(self) -> Work:
        """Work that reads every token of the tree once."""
        shape = self.attention
        return tree_work([shape.length] * shape.batch, self.distinct, *shape.heads)


def _elided(numbers: Sequence[int]) -> str:
    """The numbers, without the middle of many."""
    if len(numbers) > 4:
        return f"{numbers[0]}/{numbers[1]}/../{numbers[-1]} ({len(numbers)})"
    return "/".join(map(str, numbers))


def tree_shape(*levels: tuple[int, int], attention: AttentionShape | None = None) -> TreeShape:
    """The tree of these levels; `attention`: its heads, where they are not the usual ones."""
    like = attention or AttentionShape(0, 0, 0)
    batch, length = levels[-1][0], sum(length for _, length in levels)
    heads = (like.num_heads, like.num_kv_heads, like.head_dim, like.dtype)
    return TreeShape(levels, AttentionShape(batch, length - 1, 1, *heads))


def our_decode(inputs: AttentionInputs, shape: TreeShape, *, tree: bool, deterministic: bool = False) -> Call:
    """Our decode by the engine's plan for a captured pass of these requests, made once, as for a steady batch.

    Without `tree` the plan shares nothing, but requests that read the same tokens are neighbours.
    """
    attention = shape.attention
    table = inputs.kv.req_to_token.numpy(force=True)
    superblock = SUPERBLOCK if deterministic else None
    planner = AttentionPlanner(inputs.kernel, (None,), table, attention.dtype, tree=tree, superblock=superblock)
    rows, lens = attention.rows, attention.each(attention.length)
    seconds = []
    for _ in range(PLANNINGS):
        began = time.perf_counter()
        plans = planner.plan_padded_decodes(rows, lens)
        seconds.append(time.perf_counter() - began)
    plan = plans.decode[None]
    read = int(plan.item_lens.sum()) + int(plan.shared_lens.sum())
    shared_items = int(np.count_nonzero(plan.shared_lens))
    figures = PlanFigures(median(seconds), read / shape.distinct, shared_items)
    return replace(planned_decode(inputs, plan, deterministic=deterministic), plan=figures)


def tree_case(shape: TreeShape) -> Case[AttentionInputs]:
    """Tree compared with flat, which must not be faster; "vs" is the speed-up."""

    def inputs(device: torch.device, copies: int) -> list[AttentionInputs]:
        return attention_inputs(shape.attention, device, copies, shape.tokens().to(device))

    return Case(
        "tree",
        shape.words,
        "",
        shape.work(),
        inputs,
        expected_attention,
        (
            Contender("radixrt", partial(our_decode, shape=shape, tree=True)),
            Contender(FLAT, partial(our_decode, shape=shape, tree=False)),
        ),
        never_slower_than=FLAT,
        sizes=shape.sizes,
    )


def ordered_tree_case(shape: TreeShape) -> Case[AttentionInputs]:
    """Deterministic trees beside the others: "vs" is the speed-up, below 1 what equal bits cost."""
    ours = partial(our_decode, shape=shape, tree=True)
    contenders = Contender("radixrt, deterministic", partial(ours, deterministic=True)), Contender("radixrt", ours)
    case = tree_case(shape)
    return replace(case, group="same-bits", contenders=contenders, never_slower_than=None, sizes={})


def tree_cases() -> Iterator[Case[AttentionInputs]]:
    """Two-level trees; a tree of four levels, a wide one, a deep one, a chain; and requests that share one
    token, or nothing.
    """
    for batch, prefix, tail in ((256, 8192, 128), (256, 2048, 128), (256, 32_768, 256), (64, 8192, 128)):
        yield tree_case(tree_shape((1, prefix), (batch, tail)))
    yield tree_case(tree_shape((1, 1024), (4, 256), (16, 128), (512, 32)))
    yield tree_case(tree_shape((64, 1024), (512, 64)))
    yield tree_case(tree_shape(*((2**level, 128) for level in range(9))))
    yield tree_case(tree_shape(*((1, 256) for _ in range(4)), (256, 128)))
    yield tree_case(tree_shape((1, 1), (256, 2048)))
    yield tree_case(tree_shape((256, 2048)))
    for prefix, batch, tail in ((2048, 512, 200), (8192, 256, 128)):
        yield ordered_tree_case(tree_shape((1, prefix), (batch, tail)))
    yield ordered_tree_case(tree_shape((4, 8192), (256, 100)))
    yield ordered_tree_case(tree_shape((1, 1500), (36, 240), (144, 175), (432, 40)))


def tree_sweep() -> Iterator[Case[AttentionInputs]]:
    """Batches and prefixes around them, which make a figure; short prefixes, fan-outs, and batches that share
    nothing.
    """
    for prefix in (512, 2048, 8192, 32_768):
        for batch in (4, 8, 16, 32, 64, 128, 256, 512):
            yield tree_case(tree_shape((1, prefix), (batch, 128)))
    for batch in (16, 64, 256, 512):
        yield tree_case(tree_shape((1, 128), (batch, 128)))
    for fan_out in (2, 8, 32):
        yield tree_case(tree_shape((256 // fan_out, 1024), (256, 128)))
    for batch in (1, 16, 64, 512):
        yield tree_case(tree_shape((batch, 1024)))
