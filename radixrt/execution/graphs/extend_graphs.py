"""Passes with extends as captured CUDA graphs, for models so small that launching a pass takes the host as long as
computing it takes the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layers.input_metadata import InputMetadata, Int32Array
from memory_pool.req_to_token_pool import NO_CHANGES
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.attention.pass_plans import PassPlans, PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.graphs.memory import GraphMemory
from radixrt.execution.staging import Staging, packed, padded
from radixrt.models.decoder import Decoder
from radixrt.schedule.passes import Features, Pass, SamplingInputs
from triton_ops.row_tables import known_tokens
from triton_ops.sampling.sample import finite_rows

TOKEN_STEPS = (256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 14336, 16384)
# Tokens times weights. A pass of more keeps an H200 busy for longer than launching its kernels one by one takes.
MOST_WORK = 1.2e13


@dataclass(frozen=True)
class PassShape:
    """`num_tokens` of extends, padding included; room for `num_rows` decodes, and for as many rows of logits.

    `num_extends` are as many as have two tokens or more each and run at once, and one of the padding.
    """

    num_tokens: int
    num_rows: int
    num_extends: int


def pass_shapes(max_tokens: int, max_requests: int, num_weights: int) -> list[PassShape]:
    """The shapes that are captured, the smallest first: with at most `max_tokens`, which is among them unless it
    is greater than all steps. There are none for a large model.
    """
    steps = {*(step for step in TOKEN_STEPS if step <= max_tokens), min(max_tokens, TOKEN_STEPS[-1])}
    return [
        PassShape(num_tokens, num_rows, min(num_tokens // 2, max_requests) + 1)
        for num_tokens in sorted(steps)
        for num_rows in sorted({-(-max_requests // 4), max_requests})
        if num_tokens and (num_tokens + num_rows) * num_weights <= MOST_WORK
    ]


@dataclass(frozen=True)
class PaddedPass:
    """A pass in the places of a shape and of plans: what it uploads, with `host` and `plans` in it."""

    shape: PassShape
    host: dict[str, Int32Array]
    plans: PassPlans[Int32Array]
    own: dict[str, NDArray[Any]]

    @property
    def numbers(self) -> dict[str, NDArray[Any]]:
        """All that is copied to the device. Where each array lies depends on the two shapes alone."""
        return {**self.own, **self.host, **self.plans.numbered()}


class ExtendGraphs:
    """Passes from input ids to logits, with extends among them, padded to one of few shapes.

    Padding tokens are those of an extend of their own, which reads nothing; they and padded decodes write their KV
    to slot 0.

    Args:
        model, kv_pool, req_to_token, last_token, planner: as in DecodeGraphs.
        shapes: of `pass_shapes`, not empty.
        logits: `[rows, vocab_size]`, where they come out; as many rows as a shape has at most.
        memory: of the graphs.
    """

    def __init__(
        self,
        model: Decoder,
        kv_pool: TokenToKVPool,
        req_to_token: Tensor,
        last_token: Tensor,
        planner: AttentionPlanner,
        shapes: list[PassShape],
        logits: Tensor,
        memory: GraphMemory,
    ) -> None:
        self._model = model
        self._kv_pool = kv_pool
        self._req_to_token = req_to_token
        self._last_token = last_token
        self._planner = planner
        self._shapes = shapes
        self._logits = logits
        self._memory = memory
        self._impl = model.placement.impl
        self._padding_row = len(last_token) - 1
        self._graphs: dict[tuple[PassShape, PlanShape], torch.cuda.CUDAGraph] = {}
        device = req_to_token.device
        most = max(shape.num_extends + shape.num_rows for shape in shapes)
        self._finite = torch.empty(most, dtype=torch.bool, device=device)
        # It must never move: graphs know its address.
        idle = (self._idle(shape, self._plan_shapes(shape)[-1]) for shape in shapes)
        self._staging = Staging(device, max(len(packed(padded.numbers)[0]) for padded in idle))

    def capture(self) -> Iterator[PassShape]:
        """Capture all shapes, the largest first: the others fit into its memory. Yields each."""
        with torch.inference_mode():
            for shape in reversed(self._shapes):
                for kind in reversed(self._plan_shapes(shape)):
                    idle = self._idle(shape, kind)
                    compute = partial(self._compute, idle, self._staging.upload(idle.numbers))
                    warm_up = partial(compute, num_blocks=self._model.num_unlike_blocks)
                    self._graphs[shape, kind] = self._memory.captured(compute, warm_up)
                yield shape

    def fitted(self, batch: Pass) -> PaddedPass | None:
        """A pass, whose requests sample at most a token each, in the smallest shape that fits; None: none does."""
        num_decodes = batch.num_rows - batch.num_extends
        num_tokens = len(batch.input_ids) - num_decodes
        num_rows = max(num_decodes, int(batch.num_samples.sum()))
        for shape in self._shapes:
            if (
                shape.num_tokens >= num_tokens
                and shape.num_rows >= num_rows
                and shape.num_extends > batch.num_extends
            ):
                return self._padded(batch, shape, self._plan_shapes(shape))
        return None

    def launch(self, padded: PaddedPass) -> tuple[Tensor, Tensor]:
        """Start a pass. The tables on the device are up to date.

        Returns logits `[num_rows, vocab_size]`, of those that sample first, and whether the last hidden state of
        each request is finite, bool `[num_extends + num_rows]`, of the pass's own first. They are valid until the
        next launch.
        """
        shape = padded.shape
        self._staging.upload(padded.numbers)
        self._graphs[shape, padded.plans.shape].replay()
        return self._logits[: shape.num_rows], self._finite[: shape.num_extends + shape.num_rows]

    def _plan_shapes(self, shape: PassShape) -> tuple[PlanShape, ...]:
        return self._planner.extend_shapes(shape.num_tokens, shape.num_rows)

    def _idle(self, shape: PassShape, kind: PlanShape) -> PaddedPass:
        """A pass of nothing but padding, with plans of that shape."""
        none = np.zeros(0, np.int32)
        batch = Pass(
            num_extends=0,
            req_pool_indices=none,
            prefix_lens=none,
            seq_lens=none,
            input_ids=none,
            out_cache_loc=none,
            num_samples=none,
            scored=none,
            scored_targets=none,
            num_scored=none,
            row_changes=NO_CHANGES,
            sampling=SamplingInputs(none, Features(), None, None, {}),
        )
        idle = self._padded(batch, shape, [kind])
        assert idle is not None  # nothing is out of balance
        return idle

    def _padded(self, batch: Pass, shape: PassShape, plan_shapes: Sequence[PlanShape]) -> PaddedPass | None:
        num_live, num_decodes = batch.num_extends, batch.num_rows - batch.num_extends
        num_tokens = len(batch.input_ids) - num_decodes
        empty, spare = shape.num_extends - num_live, shape.num_tokens - num_tokens

        def by_request(array: Int32Array, filler: int, decode_filler: int) -> Int32Array:
            fillers = (
                np.full(empty, filler, np.int32),
                np.full(shape.num_rows - num_decodes, decode_filler, np.int32),
            )
            return np.concatenate([array[:num_live], fillers[0], array[num_live:], fillers[1]])

        def by_token(array: Int32Array) -> Int32Array:
            fillers = np.zeros(spare, np.int32), np.zeros(shape.num_rows - num_decodes, np.int32)
            return np.concatenate([array[:num_tokens], fillers[0], array[num_tokens:], fillers[1]])

        seq_lens = by_request(batch.seq_lens, 0, 1)
        seq_lens[shape.num_extends - 1] = spare
        host = InputMetadata.host_arrays(
            by_request(batch.req_pool_indices, self._padding_row, self._padding_row),
            seq_lens,
            by_request(batch.prefix_lens, 0, 0),
            by_token(batch.out_cache_loc),
        )
        host["positions"][num_tokens : shape.num_tokens] = 0  # there may be none so great
        lens = padded(batch.seq_lens[num_live:], shape.num_rows)
        plans = self._planner.plan_padded_extends(host, shape.num_extends, num_live, lens, plan_shapes)
        if plans is None:
            return None
        last = host["extend_start_loc"] + host["extend_seq_lens"] - 1
        last = np.concatenate([last[:num_live], last[shape.num_extends : shape.num_extends + num_decodes]])
        return PaddedPass(
            shape,
            host,
            plans,
            {
                "input_ids": by_token(batch.input_ids),
                "last_tokens": padded(last, shape.num_extends + shape.num_rows),
                "logits_indices": padded(last[batch.num_samples > 0], shape.num_rows),
            },
        )

    def _compute(self, padded: PaddedPass, arrays: Mapping[str, Tensor], *, num_blocks: int | None = None) -> None:
        """From the numbers of a pass on the device to its logits; of `padded` only the shapes have a meaning."""
        device_plans = padded.plans.with_arrays(arrays[name] for name in padded.plans.numbered())
        metadata = InputMetadata.from_host_and_device(
            padded.host,
            arrays,
            logits_indices=arrays["logits_indices"],
            req_to_token=self._req_to_token,
            num_extends=padded.shape.num_extends,
            decode_plans=device_plans.decode,
            extend_plans=device_plans.extend,
        )
        ids = known_tokens(arrays["input_ids"], self._last_token, impl=self._impl)
        hidden = self._model(ids, metadata, self._kv_pool, num_blocks=num_blocks)
        last = arrays["last_tokens"]
        self._finite[: len(last)].copy_(finite_rows(hidden.index_select(0, last), impl=self._impl))
        rows = padded.shape.num_rows
        self._model.compute_logits(hidden, metadata.logits_indices, out=self._logits[:rows])
