"""Decode passes as captured CUDA graphs: one for each of a ladder of batch sizes, replayed with other numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from layers.input_metadata import InputMetadata
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.attention.pass_plans import PlanShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.graphs.decode_numbers import DecodeForm, DecodeNumbers
from radixrt.execution.graphs.memory import GraphMemory
from radixrt.execution.graphs.results import ResultBuffer
from radixrt.execution.sampling.sampler import sample_plain
from radixrt.execution.staging import Staging
from radixrt.models.decoder import Decoder
from radixrt.schedule.passes import Features, Pass
from triton_ops.row_tables import known_tokens, write_cells

MOST_CAPTURED = 512  # requests: more have enough to compute in a pass to launch it kernel by kernel
CAPTURED_DRAWS = (Features(), Features(is_random=True), Features(is_random=True, has_top=True))


def ladder(most: int) -> list[int]:
    """Batch sizes up to `most` that are captured, ascending: a batch is padded to the next of them."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most, 32)]
    return [*(size for size in steps if size < most), most]


class DecodeGraphs:
    """Decode passes of up to `max_batch` requests: from ids to logits in one graph, the draw in another.

    Everything that a graph reads and writes has its own place on the device: the numbers of a pass are copied to
    one buffer; logits, tokens and flags come out in others. Padded decodes belong to no request: they read
    nothing, and write their KV to slot 0 and their slots to the last line of the table.

    Args:
        model: on the device.
        kv_pool: the KV of all tokens.
        req_to_token: int32 `[max_requests + 1, max_context_len]`, on the device.
        last_token: int32 `[max_requests + 1]`, the token that was sampled last for each row: read, then written.
        planner: plans the decodes.
        logits: `[max_batch, vocab_size]`, where they come out; `max_batch` is the top of the ladder.
        memory: of the graphs.

    Attributes:
        results: the tokens of the pass that was launched last, in the order of its requests, and their flags.
    """

    def __init__(
        self,
        model: Decoder,
        kv_pool: TokenToKVPool,
        req_to_token: Tensor,
        last_token: Tensor,
        planner: AttentionPlanner,
        logits: Tensor,
        memory: GraphMemory,
    ) -> None:
        device, max_batch = req_to_token.device, len(logits)
        self._model = model
        self._kv_pool = kv_pool
        self._req_to_token = req_to_token
        self._last_token = last_token
        self._impl = model.placement.impl
        self._sizes = ladder(max_batch)
        self._logits = logits
        self._memory = memory
        self._forwards: dict[tuple[int, PlanShape], torch.cuda.CUDAGraph] = {}
        self._draws: dict[tuple[int, Features], torch.cuda.CUDAGraph] = {}
        self._arrays: dict[int, dict[str, Tensor]] = {}  # on the device, of each size; plans are not asked for
        self.results = ResultBuffer(max_batch, device)
        self._numbers = DecodeNumbers(planner, padding_row=len(last_token) - 1)
        forms = (
            self._numbers.idle(size, kind) for size in self._sizes for kind in self._numbers.plan_shapes(size)
        )
        # It must never move: graphs know its address.
        self._staging = Staging(device, max(len(form.words) for form in forms))

    @property
    def max_batch(self) -> int:
        """Requests that a captured pass holds at most."""
        return self._sizes[-1]

    def capture(self) -> Iterator[int]:
        """Capture the whole ladder, the largest size first: the others fit into its memory. Yields each size."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                for kind in reversed(self._numbers.plan_shapes(size)):
                    form = self._numbers.idle(size, kind)
                    arrays = self._staging.upload(form.arrays)
                    forward = partial(self._forward, form, arrays)
                    warm_up = partial(forward, num_blocks=self._model.num_unlike_blocks)
                    self._forwards[size, kind] = self._memory.captured(forward, warm_up)
                self._arrays[size] = arrays
                for features in CAPTURED_DRAWS:
                    draw = partial(self._draw, arrays, features)
                    self._draws[size, features] = self._memory.captured(draw, warm_up=draw)
                yield size

    def filled(self, batch: Pass, features: Features, draws: Mapping[str, NDArray[Any]]) -> DecodeForm:
        """The numbers of a pass of B decodes, as `launch` wants them next.

        `draws` has the arrays that the features name, each `[B]`.
        """
        size = self._sizes[bisect_left(self._sizes, batch.num_rows)]
        return self._numbers.of(batch, size, features, draws)

    def launch(self, batch: Pass, features: Features, form: DecodeForm) -> tuple[Tensor, Tensor]:
        """Start a decode pass of B requests, each of which samples one token: `results` and `last_token` get it.

        The tables on the device lack nothing but the new tokens' slots. Returns rows int32 `[B]` and logits
        `[B, vocab_size]`, which are valid until the next launch.
        """
        count, size = batch.num_rows, form.size
        self._staging.send(form.words)
        self._forwards[size, form.plan_shape].replay()
        if features in CAPTURED_DRAWS:
            self._draws[size, features].replay()
        else:  # its kernels are launched one by one
            self._draw(self._arrays[size], features)
        return self._arrays[size]["req_pool_indices"][:count], self._logits[:count]

    def _forward(self, form: DecodeForm, arrays: Mapping[str, Tensor], *, num_blocks: int | None = None) -> None:
        """From the numbers of a pass to its logits; of the form nothing but the shapes has a meaning."""
        rows, positions = arrays["req_pool_indices"], arrays["positions"]
        write_cells(self._req_to_token, rows, positions, arrays["out_cache_loc"], impl=self._impl)
        device_plans = form.plans.with_arrays(arrays[name] for name in form.plans.numbered())
        metadata = InputMetadata.from_host_and_device(
            form.host,
            arrays,
            logits_indices=arrays["extend_start_loc"],
            req_to_token=self._req_to_token,
            num_extends=0,
            decode_plans=device_plans.decode,
        )
        ids = known_tokens(arrays["input_ids"], self._last_token, impl=self._impl)
        hidden = self._model(ids, metadata, self._kv_pool, num_blocks=num_blocks)
        self._model.compute_logits(hidden, None, out=self._logits[: len(rows)])

    def _draw(self, arrays: Mapping[str, Tensor], features: Features) -> None:
        """From logits to tokens, which the next pass finds in `last_token`."""
        rows = arrays["req_pool_indices"]
        token_ids, finite = self.results.token_ids[: len(rows)], self.results.finite[: len(rows)]
        sample_plain(self._logits[: len(rows)], arrays, features, token_ids, finite, impl=self._impl)
        write_cells(self._last_token.unsqueeze(1), rows, None, token_ids, impl=self._impl)
