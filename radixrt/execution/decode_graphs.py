"""Decode passes as captured CUDA graphs: one for each of a ladder of batch sizes, replayed with other numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layers.input_metadata import InputMetadata, Int32Array
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.attention_planner import AttentionPlanner, PassPlans
from radixrt.execution.sampler import draw_plain
from radixrt.execution.sampling_table import Features
from radixrt.execution.staging import Staging, num_words
from radixrt.models.decoder import Decoder
from radixrt.schedule.batch import ScheduleBatch
from triton_ops.row_tables import known_tokens, write_cells

DRAW_DTYPES: Mapping[str, type[np.generic]] = {
    "temperatures": np.float32,
    "seeds": np.int64,
    "sample_indices": np.int32,
    "draw_positions": np.int32,
    "top_ks": np.int32,
    "top_ps": np.float32,
    "min_ps": np.float32,
}
CAPTURED_DRAWS = (Features(), Features(is_random=True), Features(is_random=True, has_top=True))
MERGES_BELOW = 64  # smaller batches are captured only with the launch that merges partial results


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
        last_token: int32 `[max_requests + 1]`, the token that was sampled last for each row; it is only read.
        planner: plans the decodes.
        max_batch: the top of the ladder.

    Attributes:
        logits: `[max_batch, vocab_size]`, where those of a pass come out.
    """

    def __init__(
        self,
        model: Decoder,
        kv_pool: TokenToKVPool,
        req_to_token: Tensor,
        last_token: Tensor,
        planner: AttentionPlanner,
        max_batch: int,
    ) -> None:
        device = req_to_token.device
        self._model = model
        self._kv_pool = kv_pool
        self._req_to_token = req_to_token
        self._last_token = last_token
        self._planner = planner
        self._impl = model.placement.impl
        self._padding_row = len(last_token) - 1
        self._sizes = ladder(max_batch)
        self._memory: Any = torch.cuda.graph_pool_handle()
        self._forwards: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._draws: dict[tuple[int, Features], torch.cuda.CUDAGraph] = {}
        self.logits = torch.empty((max_batch, model.config.vocab_size), dtype=model.placement.dtype, device=device)
        self._token_ids = torch.empty(max_batch, dtype=torch.int32, device=device)
        self._finite = torch.empty(max_batch, dtype=torch.bool, device=device)
        # It must never move: graphs know its address.
        host, plans = self._plan_idle(max_batch, merges=True)
        self._staging = Staging(device, num_words(self._numbers(host, plans)))

    @property
    def max_batch(self) -> int:
        """Requests that a captured pass holds at most."""
        return self._sizes[-1]

    def capture(self) -> Iterator[int]:
        """Capture the whole ladder, the largest size first: the others fit into its memory. Yields each size."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                for merges in (True, False) if size >= MERGES_BELOW else (True,):
                    host, plans = self._plan_idle(size, merges=merges)
                    arrays = self._staging.upload(self._numbers(host, plans))
                    self._forwards[size, merges] = self.captured(partial(self._forward, host, plans, arrays))
                for features in CAPTURED_DRAWS:
                    self._draws[size, features] = self.captured(partial(self._draw, arrays, features))
                yield size

    def launch(
        self, batch: ScheduleBatch, features: Features, draws: Mapping[str, NDArray[Any]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Start a decode pass of B requests, each of which samples one token.

        The tables on the device lack nothing but the new tokens' slots. `draws` has the arrays that the
        features name, each `[B]`. Returns rows int32 `[B]`, logits `[B, vocab_size]`, token ids int32 `[B]` and
        whether each is finite, bool `[B]`, which are valid until the next launch.
        """
        count = len(batch.requests)
        size = next(size for size in self._sizes if size >= count)
        host = InputMetadata.host_arrays(
            _padded(batch.req_pool_indices, size, self._padding_row),
            _padded(batch.seq_lens, size, 1),
            _padded(batch.prefix_lens, size, 0),
            _padded(batch.out_cache_loc, size, 0),
        )
        plans = self._planner.plan_padded(
            _padded(batch.req_pool_indices, size, 0), _padded(batch.seq_lens, size, 0), merges=size < MERGES_BELOW
        )
        arrays = self._staging.upload(self._numbers(host, plans, batch.input_ids, draws))
        self._forwards[size, plans.merges].replay()
        if features in CAPTURED_DRAWS:
            self._draws[size, features].replay()
        else:  # its kernels are launched one by one
            self._draw(arrays, features)
        rows = arrays["req_pool_indices"][:count]
        return rows, self.logits[:count], self._token_ids[:count], self._finite[:count]

    def _plan_idle(self, size: int, *, merges: bool) -> tuple[dict[str, Int32Array], PassPlans]:
        """A pass of padded decodes alone."""
        rows, zeros = np.full(size, self._padding_row, np.int32), np.zeros(size, np.int32)
        host = InputMetadata.host_arrays(rows, zeros + 1, zeros, zeros)
        return host, self._planner.plan_padded(zeros, zeros, merges=merges)

    def _numbers(
        self,
        host: Mapping[str, Int32Array],
        plans: PassPlans,
        input_ids: Int32Array | None = None,
        draws: Mapping[str, NDArray[Any]] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """All that is copied to the device. Where each array lies depends on the size and, for plans, which come
        last, on whether they merge.
        """
        size = len(host["seq_lens"])
        none = np.zeros(0, np.int32)
        return {
            "input_ids": _padded(none if input_ids is None else input_ids, size, 0),
            **host,
            **{
                name: _padded((draws or {}).get(name, none).astype(dtype, copy=False), size, 0)
                for name, dtype in DRAW_DTYPES.items()
            },
            **plans.arrays,
        }

    def _forward(self, host: Mapping[str, Int32Array], plans: PassPlans, arrays: Mapping[str, Tensor]) -> None:
        """From the numbers of a pass to its logits; of `host` nothing but the shapes has a meaning."""
        rows, positions = arrays["req_pool_indices"], arrays["positions"]
        write_cells(self._req_to_token, rows, positions, arrays["out_cache_loc"], impl=self._impl)
        metadata = InputMetadata.from_host_and_device(
            host,
            arrays,
            logits_indices=arrays["extend_start_loc"],
            req_to_token=self._req_to_token,
            num_extends=0,
            decode_plans=plans.decode(arrays),
        )
        ids = known_tokens(arrays["input_ids"], self._last_token, impl=self._impl)
        hidden = self._model(ids, metadata, self._kv_pool)
        self._model.compute_logits(hidden, None, out=self.logits[: len(rows)])

    def _draw(self, arrays: Mapping[str, Tensor], features: Features) -> None:
        """From logits to tokens."""
        rows = slice(len(arrays["req_pool_indices"]))
        draw_plain(self.logits[rows], arrays, features, self._token_ids[rows], self._finite[rows], impl=self._impl)

    def captured(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what `compute` launches, in the memory of all graphs."""
        compute()  # what is made on first use is made now
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(self._req_to_token.device)
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            compute()
        return graph


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """What all captures on a device run on: cuBLAS keeps a workspace for each stream. torch's own capture stream
    is on the device that was the current one when the first graph of the process was captured.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _padded(array: NDArray[Any], length: int, filler: int) -> NDArray[Any]:
    padded = np.full(length, filler, array.dtype)
    padded[: len(array)] = array
    return padded
