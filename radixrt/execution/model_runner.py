"""Computes passes: from a ScheduleBatch to sampled tokens. It decides nothing."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layers.input_metadata import InputMetadata
from memory_pool.host_kv_pool import HostKVPool
from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.attention_planner import AttentionPlanner
from radixrt.execution.kv_mover import KVMover
from radixrt.execution.sampler import LogprobTensors, draw_logprobs, draw_plain, draw_special, plan_draws
from radixrt.execution.sampling_table import SamplingTable
from radixrt.execution.staging import Staging
from radixrt.models.decoder import Decoder
from radixrt.schedule.batch import Logprobs, PassResult, ScheduleBatch
from triton_ops.logprobs import token_logprobs
from triton_ops.sampling import finite_rows

SCORED_AT_ONCE = 512  # rows of logits that are held at a time to score prompt tokens


@dataclass(frozen=True)
class PassInFlight:
    """A launched pass: tensors that are on the host, and hold its result, once `done`."""

    token_ids: Tensor
    finite: Tensor
    logprobs: LogprobTensors | None
    prompt_logprobs: LogprobTensors | None
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
        host_pool: the KV of tokens that have left the device; None: there is no such tier.
    """

    def __init__(
        self,
        model: Decoder,
        rows: ReqToTokenPool,
        kv_pool: TokenToKVPool,
        device: torch.device,
        host_pool: HostKVPool | None = None,
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.device = device
        self._req_to_token = torch.zeros(
            (rows.max_requests, rows.max_context_len), dtype=torch.int32, device=device
        )
        self._last_token = torch.zeros(rows.max_requests, dtype=torch.int32, device=device)
        self._staging = Staging(device)
        self._planner = AttentionPlanner(model.config, model.placement)
        self._sampling = SamplingTable(rows.max_requests)
        self._mover = None if host_pool is None else KVMover(kv_pool, host_pool, device, model.placement.impl)

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        """Start transfers between device and host, in order, for the pass that is launched next.

        Each is taken off the left end once it has been started. On a GPU this returns before they have been made.
        """
        assert self._mover is not None  # without a host's pool nothing is booked
        with torch.inference_mode(), self._on_device():
            self._mover.run(transfers)

    def launch(self, batch: ScheduleBatch) -> PassInFlight:
        """Start a pass. On a GPU this returns before the pass has run."""
        with torch.inference_mode(), self._on_device():
            try:
                return self._launch(batch)
            except BaseException:
                if self._mover is not None:
                    self._mover.wait_for_passes()
                raise

    def _on_device(self) -> AbstractContextManager[object]:
        # Kernels and events go to the current device, whatever their tensors' is.
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _launch(self, batch: ScheduleBatch) -> PassInFlight:
        host = InputMetadata.host_arrays(
            batch.req_pool_indices, batch.seq_lens, batch.prefix_lens, batch.out_cache_loc
        )
        last_tokens = host["extend_start_loc"] + host["extend_seq_lens"] - 1  # [B]
        for row, request in batch.admitted:
            self._sampling.admit(row, request)
        sampling = np.repeat(np.arange(len(batch.requests), dtype=np.int32), batch.num_samples)  # [S]
        first_samples = np.flatnonzero(np.diff(sampling, prepend=-1)).astype(np.int32)
        own: dict[str, NDArray[Any]] = {
            "input_ids": batch.input_ids,
            "last_tokens": last_tokens,
            "logits_indices": last_tokens[sampling],
            "sampling": sampling,
            "first_samples": first_samples,
            "first_rows": batch.req_pool_indices[sampling[first_samples]],
            "scored": batch.scored,
            "scored_targets": batch.scored_targets,
            "changed_rows": batch.row_changes.rows,
            "changed_positions": batch.row_changes.positions,
            "changed_slots": batch.row_changes.slots,
        }
        draws = plan_draws(self._sampling, batch, sampling)
        own |= draws.arrays
        plans = self._planner.plan(host, batch.num_extends)
        arrays = self._staging.upload({**host, **own, **plans.arrays})

        if len(batch.row_changes):
            self._req_to_token[arrays["changed_rows"], arrays["changed_positions"]] = arrays["changed_slots"]
        metadata = InputMetadata.from_host_and_device(
            host,
            arrays,
            logits_indices=arrays["logits_indices"],
            req_to_token=self._req_to_token,
            num_extends=batch.num_extends,
            decode_plans=plans.decode(arrays),
            extend_plans=plans.extend(arrays),
        )
        ids = arrays["input_ids"]
        # A negative id -(row + 1) is the last token sampled for that row.
        ids = torch.where(ids >= 0, ids, self._last_token[(-ids - 1).clamp_min(0)])
        hidden = self.model(ids, metadata, self.kv_pool)

        impl = self.model.placement.impl
        finite = finite_rows(hidden[arrays["last_tokens"]], impl=impl)
        token_ids, logprobs = arrays["sampling"], None
        if len(sampling):
            logits = self.model.compute_logits(hidden, metadata.logits_indices)
            token_ids = torch.empty_like(arrays["sampling"])
            drawn = torch.empty_like(token_ids, dtype=torch.bool)
            draw_plain(logits, arrays, draws.features, token_ids, drawn, impl=impl)
            if draws.special is not None:
                draw_special(logits, arrays, draws.special, self._last_token, token_ids, drawn, impl=impl)
            finite[arrays["sampling"]] &= drawn
            if draws.num_top is not None:
                logprobs = draw_logprobs(logits, token_ids, arrays, draws.num_top, impl=impl)
            # The first answer goes on in its own row; the others get theirs when the host has heard of them.
            self._last_token[arrays["first_rows"]] = token_ids[arrays["first_samples"]]
        prompt_logprobs = self._score(hidden, batch, arrays) if len(batch.scored) else None
        return self._send_back(token_ids, finite, logprobs, prompt_logprobs)

    def _score(self, hidden: Tensor, batch: ScheduleBatch, arrays: dict[str, Tensor]) -> LogprobTensors:
        """Log-probabilities of the P scored prompt tokens, some rows of logits at a time."""
        asked = max(
            r.params.prompt_logprobs or 0 for r, n in zip(batch.requests, batch.num_scored, strict=True) if n
        )
        parts = []
        for start in range(0, len(batch.scored), SCORED_AT_ONCE):
            rows = slice(start, start + SCORED_AT_ONCE)
            logits = self.model.compute_logits(hidden, arrays["scored"][rows])
            targets, num_top = arrays["scored_targets"][rows], min(asked, logits.shape[1])
            parts.append(token_logprobs(logits, targets, num_top, impl=self.model.placement.impl))
        chosen, ranks, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
        return chosen, ranks, top_ids, top

    def collect(self, handle: object) -> PassResult:
        """Wait for a pass and return what it found."""
        assert isinstance(handle, PassInFlight)
        if handle.done is not None:
            handle.done.synchronize()
        return PassResult(
            handle.token_ids.numpy(),
            handle.finite.numpy(),
            _to_numpy(handle.logprobs),
            _to_numpy(handle.prompt_logprobs),
        )

    def _send_back(
        self,
        token_ids: Tensor,
        finite: Tensor,
        logprobs: LogprobTensors | None,
        prompt_logprobs: LogprobTensors | None,
    ) -> PassInFlight:
        if self.device.type != "cuda":
            # A copy: on a CPU the staged arrays are overwritten by the next passes.
            return PassInFlight(token_ids.clone(), finite, logprobs, prompt_logprobs, None)

        def to_host(tensor: Tensor) -> Tensor:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            return host.copy_(tensor, non_blocking=True)

        def all_to_host(tensors: LogprobTensors | None) -> LogprobTensors | None:
            if tensors is None:
                return None
            chosen, ranks, top_ids, top = map(to_host, tensors)
            return chosen, ranks, top_ids, top

        flight = (to_host(token_ids), to_host(finite), all_to_host(logprobs), all_to_host(prompt_logprobs))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return PassInFlight(*flight, done)


def _to_numpy(tensors: LogprobTensors | None) -> Logprobs | None:
    return None if tensors is None else Logprobs(*(t.numpy() for t in tensors))
