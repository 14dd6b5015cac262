"""Computes passes: from a ScheduleBatch to sampled tokens. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layers.input_metadata import InputMetadata
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.sampler import draw, sampling_arrays
from radixrt.execution.staging import Staging
from radixrt.models.decoder import Decoder
from radixrt.schedule.batch import PassResult, ScheduleBatch
from triton_ops.sampling import finite_rows


@dataclass(frozen=True)
class PassInFlight:
    """A launched pass: `result` `[2, B]` int32 on the host holds token ids and finiteness once `done`."""

    result: Tensor
    done: torch.cuda.Event | None


class ModelRunner:
    """Runs a model over batches, in the order of the launches.

    The device keeps its own copy of `req_to_token` and the last sampled token of each row: the next pass takes
    its input from there, so that tokens go from pass to pass without the host.

    Args:
        model: on the device.
        rows: the host's table, of which the device keeps a copy.
        kv_pool: the KV of all tokens, on the device.
        device: where everything is.
    """

    def __init__(self, model: Decoder, rows: ReqToTokenPool, kv_pool: TokenToKVPool, device: torch.device) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.device = device
        self._req_to_token = torch.zeros(
            (rows.max_requests, rows.max_context_len), dtype=torch.int32, device=device
        )
        self._last_token = torch.zeros(rows.max_requests, dtype=torch.int32, device=device)
        self._staging = Staging(device)

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch) -> PassInFlight:
        """Start a pass. On a GPU this returns before the pass has run."""
        host = InputMetadata.host_arrays(
            batch.req_pool_indices, batch.seq_lens, batch.prefix_lens, batch.out_cache_loc
        )
        last_tokens = host["extend_start_loc"] + host["extend_seq_lens"] - 1  # [B]
        sampling = np.flatnonzero(batch.samples)  # [S]
        own: dict[str, NDArray[Any]] = {
            "input_ids": batch.input_ids,
            "last_tokens": last_tokens,
            "logits_indices": last_tokens[sampling],
            "sampling": sampling.astype(np.int32),
            "sampling_rows": batch.req_pool_indices[sampling],
            "changed_rows": batch.row_changes.rows,
            "changed_positions": batch.row_changes.positions,
            "changed_slots": batch.row_changes.slots,
        }
        own |= sampling_arrays([batch.requests[i] for i in sampling], batch.seq_lens[sampling])
        arrays = self._staging.upload({**host, **own})

        if len(batch.row_changes):
            self._req_to_token[arrays["changed_rows"], arrays["changed_positions"]] = arrays["changed_slots"]
        metadata = InputMetadata.from_host_and_device(
            host,
            arrays,
            logits_indices=arrays["logits_indices"],
            req_to_token=self._req_to_token,
            num_extends=batch.num_extends,
        )
        ids = arrays["input_ids"]
        # A negative id -(row + 1) is the last token sampled for that row.
        ids = torch.where(ids >= 0, ids, self._last_token[(-ids - 1).clamp_min(0)])
        hidden = self.model(ids, metadata, self.kv_pool)

        result = torch.zeros((2, len(batch.requests)), dtype=torch.int32, device=self.device)
        result[1] = finite_rows(hidden[arrays["last_tokens"]])
        if len(sampling):
            logits = self.model.compute_logits(hidden, metadata.logits_indices)
            token_ids = draw(logits, arrays)
            self._last_token[arrays["sampling_rows"]] = token_ids
            result[0, arrays["sampling"]] = token_ids
            result[1, arrays["sampling"]] *= finite_rows(logits)
        return self._send_back(result)

    def collect(self, handle: object) -> PassResult:
        """Wait for a pass and return what it found."""
        assert isinstance(handle, PassInFlight)
        if handle.done is not None:
            handle.done.synchronize()
        token_ids, finite = handle.result.numpy()
        return PassResult(token_ids, finite != 0)

    def _send_back(self, result: Tensor) -> PassInFlight:
        if self.device.type != "cuda":
            return PassInFlight(result, None)
        host = torch.empty(result.shape, dtype=result.dtype, device="cpu", pin_memory=True)
        host.copy_(result, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return PassInFlight(host, done)
