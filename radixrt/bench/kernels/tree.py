"""Decode attention of requests that share prefixes: trees of which each token is to be read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from radixrt.bench.kernels.attention import planned_decode
from radixrt.bench.kernels.attention_inputs import (
    AttentionInputs,
    AttentionShape,
    attention_inputs,
    expected_attention,
)
from radixrt.bench.kernels.case import Call, Case, Contender
from radixrt.bench.kernels.roofline import Work, tree_work
from triton_ops.attention_plan import AttentionPlan, Int32Array, SharedItems
from triton_ops.decode_attention import decode_item_len
from triton_ops.implementation import GPU, gpu_of
from triton_ops.shared_attention import shared_rows

PROGRAMS_PER_SM = 2  # of the kernel for shared items that run side by side


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
        counts, lengths = zip(*self.levels, strict=True)
        words = [f"B={counts[-1]}", "+".join(map(str, lengths))]
        if len(counts) > 2:
            words.append(f"nodes {'/'.join(map(str, counts))}")
        return " ".join([*words, self.attention.words]).strip()

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
        """With every token of the tree read once."""
        distinct = sum(count * length for count, length in self.levels)
        shape = self.attention
        return tree_work([shape.length] * shape.batch, distinct, *shape.heads)


def tree_shape(*levels: tuple[int, int], attention: AttentionShape | None = None) -> TreeShape:
    """The tree of these levels; `attention`: its heads, where they are not the usual ones."""
    like = attention or AttentionShape(0, 0, 0)
    batch, length = levels[-1][0], sum(length for _, length in levels)
    heads = (like.num_heads, like.num_kv_heads, like.head_dim, like.dtype)
    return TreeShape(levels, AttentionShape(batch, length - 1, 1, *heads))


def shared_items(shape: TreeShape, gpu: GPU) -> SharedItems:
    """All levels but the last, each node cut to the rows of a tile and to pieces of about a fair share for each of
    the programs that run side by side. Tiles that read the same stand together.
    """
    attention = shape.attention
    most = shared_rows(gpu, attention.head_dim, attention.num_heads // attention.num_kv_heads, attention.dtype)
    widths = [attention.batch // count for count, _ in shape.levels[:-1]]  # requests below a node
    total = sum(
        count * length * -(-width // most)
        for (count, length), width in zip(shape.levels[:-1], widths, strict=True)
    )
    fair = total * attention.num_kv_heads // (PROGRAMS_PER_SM * gpu.num_sms)
    piece = 64 * max(1, -(-fair // 64))
    items, begin = [], 0
    for (count, length), width in zip(shape.levels[:-1], widths, strict=True):
        items += [
            (node * width, begin + start, min(piece, length - start), row, min(most, (node + 1) * width - row))
            for node in range(count)
            for start in range(0, length, piece)
            for row in range(node * width, (node + 1) * width, most)
        ]
        begin += length
    lines, starts, lens, query_starts, query_lens = np.array(items, np.int32).reshape(-1, 5).T
    queries = np.arange(attention.batch, dtype=np.int32)
    return SharedItems(lines, starts, lens, query_starts, query_lens, queries)


def our_tree(inputs: AttentionInputs, shape: TreeShape) -> Call:
    """The plan is made once, as for a steady batch."""
    gpu, num_kv_heads = gpu_of(inputs.q.device), shape.attention.num_kv_heads
    rows, lens, tail = _requests(inputs), inputs.seq_lens.numpy(force=True), shape.levels[-1][1]
    arrays = AttentionPlan.tree_arrays(
        rows,
        lens,
        lens - tail,
        shared_items(shape, gpu),
        max_item_len=decode_item_len(gpu, num_kv_heads, np.full_like(lens, tail)),
    )
    return planned_decode(inputs, arrays)


def our_flat(inputs: AttentionInputs) -> Call:
    """As if the requests shared nothing, but with those that read the same side by side."""
    lens = inputs.seq_lens.numpy(force=True)
    arrays = AttentionPlan.flat_arrays(
        _requests(inputs),
        lens,
        max_item_len=decode_item_len(gpu_of(inputs.q.device), inputs.shape.num_kv_heads, lens),
        req_to_token=inputs.req_to_token.numpy(force=True),
    )
    return planned_decode(inputs, arrays)


def _requests(inputs: AttentionInputs) -> Int32Array:
    rows: Int32Array = inputs.rows.numpy(force=True)
    return rows


def tree_case(shape: TreeShape) -> Case[AttentionInputs]:
    """Tree beside flat: "vs" is the speed-up."""

    def inputs(device: torch.device, copies: int) -> list[AttentionInputs]:
        return attention_inputs(shape.attention, device, copies, shape.tokens().to(device))

    return Case(
        "tree",
        shape.words,
        "",
        shape.work(),
        inputs,
        expected_attention,
        (Contender("radixrt", partial(our_tree, shape=shape)), Contender("radixrt, flat", our_flat)),
    )


def tree_cases() -> Iterator[Case[AttentionInputs]]:
    """The shapes of the goals, a tree of four levels, and requests that share nothing."""
    for batch, prefix, tail in ((256, 8192, 128), (256, 2048, 128), (256, 32_768, 256), (64, 8192, 128)):
        yield tree_case(tree_shape((1, prefix), (batch, tail)))
    yield tree_case(tree_shape((1, 1024), (4, 256), (16, 128), (512, 32)))
    yield tree_case(tree_shape((256, 2048)))


def tree_sweep() -> Iterator[Case[AttentionInputs]]:
    """Batches and prefixes around them; wide, deep and degenerate trees."""
    for batch in (4, 16, 64, 256, 512):
        for prefix in (128, 512, 2048, 8192):
            yield tree_case(tree_shape((1, prefix), (batch, 128)))
    for fan_out in (2, 8, 32):
        yield tree_case(tree_shape((256 // fan_out, 1024), (256, 128)))
    yield tree_case(tree_shape((1, 256), (1, 256), (1, 256), (1, 256), (256, 128)))
    yield tree_case(tree_shape(*((2**level, 128) for level in range(9))))
    yield tree_case(tree_shape((1, 1), (256, 2048)))
