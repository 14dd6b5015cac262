"""Computes passes: from a Pass to sampled tokens. It decides nothing."""

from __future__ import annotations

import traceback
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layers.input_metadata import InputMetadata
from memory_pool.host_kv_pool import HostKVPool
from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool, RowChanges
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.errors import DeviceLostError
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.graphs.decode_graphs import DecodeGraphs
from radixrt.execution.graphs.extend_graphs import ExtendGraphs, pass_shapes
from radixrt.execution.graphs.memory import GraphMemory
from radixrt.execution.graphs.results import SampledTokens
from radixrt.execution.kv_mover import KVMover
from radixrt.execution.pass_timer import PassTimer, TimedPass
from radixrt.execution.sampling.sampler import (
    LogprobTensors,
    draw_logprobs,
    sample_plain,
    sample_processed,
)
from radixrt.execution.staging import Staging
from radixrt.models.decoder import Decoder
from radixrt.schedule.passes import Logprobs, Pass, PassResult, SamplingInputs
from triton_ops.row_tables import known_tokens, write_cells
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.sample import finite_rows

# Of a pass: its hidden states `[T, hidden_size]` unless a graph made them, logits `[S, vocab_size]`, whether the
# last hidden state of each request is finite, bool `[B]`, and its arrays on the device.
_Computed = tuple[Tensor | None, Tensor, Tensor, dict[str, Tensor]]

SCORED_AT_ONCE = 512  # rows of logits that are held at a time to score prompt tokens
_PROBE_WORDS = 1024  # that a device has to count up to show that it works


@dataclass
class PassInFlight:
    """A launched pass: tensors that are on the host, and hold its result, once it has ended.

    `borrowed`: the memory of `token_ids` and `finite`, which other passes use after this one.
    """

    token_ids: Tensor
    finite: Tensor
    logprobs: LogprobTensors | None
    prompt_logprobs: LogprobTensors | None
    timed: TimedPass
    borrowed: SampledTokens | None = None
    accepted: NDArray[np.int32] = field(init=False)  # of the result


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
        max_captured_batch: passes of up to that many requests run as captured graphs, once `capture_graphs` has
            been called; 0: none do.
        max_captured_tokens: so do those with up to that many tokens of extends, where a model is small enough to
            gain by it; 0: those with extends do not.
        tree: decodes read what they share once for all of them, where that is cheaper.
    """

    def __init__(
        self,
        model: Decoder,
        rows: ReqToTokenPool,
        kv_pool: TokenToKVPool,
        device: torch.device,
        host_pool: HostKVPool | None = None,
        *,
        max_captured_batch: int = 0,
        max_captured_tokens: int = 0,
        tree: bool = False,
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.device = device
        self._impl = model.placement.impl
        # One line more than there are rows: that of decodes which pad a captured pass.
        self._req_to_token = torch.zeros(
            (rows.max_requests + 1, rows.max_context_len), dtype=torch.int32, device=device
        )
        self._last_token = torch.zeros(rows.max_requests + 1, dtype=torch.int32, device=device)
        self._probe = torch.zeros(_PROBE_WORDS, dtype=torch.int32, device=device)  # each is `_probes`
        self._probes = 0
        self._staging = Staging(device)
        self._timer = PassTimer(device)
        self._planner = AttentionPlanner(
            model.config, model.placement, rows.req_to_token, kv_pool.buffer.dtype, tree=tree
        )
        self._mover = None if host_pool is None else KVMover(kv_pool, host_pool, device, model.placement.impl)
        self._graphs: DecodeGraphs | None = None
        self._extend_graphs: ExtendGraphs | None = None
        if max_captured_batch:
            tables = self._req_to_token, self._last_token, self._planner
            shape = max_captured_batch, model.config.vocab_size
            num_weights = sum(weight.numel() for weight in model.parameters())
            with self._on_device():
                places = torch.empty(shape, dtype=model.placement.dtype, device=device), GraphMemory(device)
                self._graphs = DecodeGraphs(model, kv_pool, *tables, *places)
                if shapes := pass_shapes(max_captured_tokens, max_captured_batch, num_weights):
                    self._extend_graphs = ExtendGraphs(model, kv_pool, *tables, shapes, *places)

    def capture_graphs(self, most: int | None = None) -> None:
        """Capture the graphs of passes, if there are to be any. With `most`, only so many of each kind, the
        largest: to see what memory they take. Passes whose graphs were left out cannot be launched then.
        """
        with self._on_device():
            for graphs in (self._extend_graphs, self._graphs):  # the largest first: others fit into its memory
                if graphs is not None:
                    for _ in islice(graphs.capture(), most):
                        pass

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        """Start transfers between device and host, in order, for the pass that is launched next.

        Each is taken off the left end once it has been started. On a GPU this returns before they have been made.
        """
        assert self._mover is not None  # without a host's pool nothing is booked
        with torch.inference_mode(), self._on_device():
            self._mover.run(transfers)

    def launch(self, batch: Pass) -> PassInFlight:
        """Start a pass. On a GPU this returns before the pass has run."""
        self._timer.begin()
        with torch.inference_mode(), self._on_device():
            try:
                flight = self._launch(batch)
                flight.accepted = batch.num_samples
                return flight
            except BaseException:
                if self._mover is not None:
                    self._mover.wait_for_passes()
                raise

    def _on_device(self) -> AbstractContextManager[object]:
        # Kernels and events go to the current device, whatever their tensors' is.
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _launch(self, batch: Pass) -> PassInFlight:
        draws, sampling = batch.sampling, batch.sampling.logits_rows
        if self._graphs is not None and len(sampling) <= self._graphs.max_batch and _is_decode(batch):
            return self._launch_decode(batch, draws, self._graphs)

        first_samples = np.flatnonzero(np.diff(sampling, prepend=-1)).astype(np.int32)
        own: dict[str, NDArray[Any]] = {
            "sampling": sampling,
            "first_samples": first_samples,
            "first_rows": batch.req_pool_indices[sampling[first_samples]],
            "scored": batch.scored,
            "scored_targets": batch.scored_targets,
            **_row_changes(batch.row_changes),
            **draws.arrays,
        }
        hidden, logits, finite, arrays = self._replay(batch, own) or self._compute(batch, sampling, own)
        token_ids, logprobs = arrays["sampling"], None
        if len(sampling):
            token_ids = torch.empty_like(arrays["sampling"])
            drawn = torch.empty_like(token_ids, dtype=torch.bool)
            sample_plain(logits, arrays, draws.features, token_ids, drawn, impl=self._impl)
            logprobs = self._draw_others(logits, arrays, draws, self._last_token, token_ids, drawn)
            finite[arrays["sampling"]] &= drawn
            # The first answer goes on in its own row; the others get theirs when the host has heard of them.
            self._keep_tokens(arrays["first_rows"], token_ids[arrays["first_samples"]])
        prompt_logprobs = None
        if len(batch.scored):
            assert hidden is not None  # no graph scores
            prompt_logprobs = self._score(hidden, batch, arrays)
        return self._send_back(token_ids, finite, logprobs, prompt_logprobs)

    def _replay(self, batch: Pass, own: dict[str, NDArray[Any]]) -> _Computed | None:
        """Start a pass as a captured graph; None where none fits."""
        graphs = self._extend_graphs
        if graphs is None or len(batch.scored) or batch.num_samples.max() > 1:
            return None
        padded = graphs.fitted(batch)
        if padded is None:
            return None
        self._timer.start()
        arrays = self._staging.upload(own)
        self._write_rows(arrays)
        logits, finite = graphs.launch(padded)
        return None, logits[: len(arrays["sampling"])], finite[: batch.num_rows], arrays

    def _compute(self, batch: Pass, sampling: NDArray[np.int32], own: dict[str, NDArray[Any]]) -> _Computed:
        """Launch a pass kernel by kernel."""
        host = InputMetadata.host_arrays(
            batch.req_pool_indices, batch.seq_lens, batch.prefix_lens, batch.out_cache_loc
        )
        last_tokens = host["extend_start_loc"] + host["extend_seq_lens"] - 1  # [B]
        ids = {
            "input_ids": batch.input_ids,
            "last_tokens": last_tokens,
            "logits_indices": last_tokens[sampling],
        }
        plans = self._planner.plan(host, batch.num_extends)
        self._timer.start()
        arrays = self._staging.upload({**host, **ids, **own, **plans.arrays})
        self._write_rows(arrays)
        metadata = InputMetadata.from_host_and_device(
            host,
            arrays,
            logits_indices=arrays["logits_indices"],
            req_to_token=self._req_to_token,
            num_extends=batch.num_extends,
            decode_plans=plans.decode(arrays),
            extend_plans=plans.extend(arrays),
        )
        input_ids = known_tokens(arrays["input_ids"], self._last_token, impl=self._impl)
        hidden = self.model(input_ids, metadata, self.kv_pool)
        finite = finite_rows(hidden[arrays["last_tokens"]], impl=self._impl)
        return hidden, self.model.compute_logits(hidden, metadata.logits_indices), finite, arrays

    def _launch_decode(self, batch: Pass, draws: SamplingInputs, graphs: DecodeGraphs) -> PassInFlight:
        """A pass of nothing but decodes: captured graphs, and what they do not do."""
        own = {name: array for name, array in draws.arrays.items() if name not in draws.features.array_names}
        changes = batch.row_changes
        if len(changes) > batch.num_rows:  # the new tokens' are written by the graph
            own |= _row_changes(changes)
        form = graphs.filled(batch, draws.features, draws.arrays)
        self._timer.start()
        arrays = self._staging.upload(own) if own else {}
        if "changed_rows" in arrays:
            self._write_rows(arrays)
        # The graph replaces the last tokens by those that it draws; special draws depend on the ones before.
        last_token = self._last_token if draws.processed is None else self._last_token.clone()
        rows, logits = graphs.launch(batch, draws.features, form)
        token_ids, finite = graphs.results.token_ids[: len(rows)], graphs.results.finite[: len(rows)]
        logprobs = self._draw_others(logits, arrays, draws, last_token, token_ids, finite)
        if draws.processed is not None:
            self._keep_tokens(rows, token_ids)
        sampled = graphs.results.to_host()
        return PassInFlight(
            sampled.token_ids[: len(rows)],
            sampled.finite[: len(rows)],
            self._all_to_host(logprobs),
            None,
            self._timer.end(),
            borrowed=sampled,
        )

    def _draw_others(
        self,
        logits: Tensor,
        arrays: dict[str, Tensor],
        draws: SamplingInputs,
        last_token: Tensor,
        token_ids: Tensor,
        finite: Tensor,
    ) -> LogprobTensors | None:
        """What some of the rows of a draw want besides, in place of what is there; the log-probabilities."""
        if draws.processed is not None:
            sample_processed(logits, arrays, draws.processed, last_token, token_ids, finite, impl=self._impl)
        if draws.num_top is None:
            return None
        return draw_logprobs(logits, token_ids, arrays, draws.num_top, impl=self._impl)

    def _write_rows(self, arrays: dict[str, Tensor]) -> None:
        rows, positions, slots = (arrays[f"changed_{name}"] for name in ("rows", "positions", "slots"))
        write_cells(self._req_to_token, rows, positions, slots, impl=self._impl)

    def _keep_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        write_cells(self._last_token.unsqueeze(1), rows, None, token_ids, impl=self._impl)

    def _score(self, hidden: Tensor, batch: Pass, arrays: dict[str, Tensor]) -> LogprobTensors:
        """Log-probabilities of the P scored prompt tokens, some rows of logits at a time."""
        parts = []
        for start in range(0, len(batch.scored), SCORED_AT_ONCE):
            rows = slice(start, start + SCORED_AT_ONCE)
            logits = self.model.compute_logits(hidden, arrays["scored"][rows])
            targets, num_top = arrays["scored_targets"][rows], min(batch.num_top_scored, logits.shape[1])
            parts.append(token_logprobs(logits, targets, num_top, impl=self._impl))
        chosen, ranks, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
        return chosen, ranks, top_ids, top

    def collect(self, handle: object) -> PassResult:
        """Wait for a pass and return what it found."""
        assert isinstance(handle, PassInFlight)
        seconds, launching = self._timer.wait(handle.timed)
        token_ids, finite = handle.token_ids.numpy(), handle.finite.numpy()
        if handle.borrowed is not None:
            assert self._graphs is not None  # it is theirs
            token_ids, finite = token_ids.copy(), finite.copy()
            self._graphs.results.give_back(handle.borrowed)
        logprobs, prompt_logprobs = _to_numpy(handle.logprobs), _to_numpy(handle.prompt_logprobs)
        return PassResult(token_ids, handle.accepted, finite, logprobs, prompt_logprobs, seconds, launching)

    def check_device(self, error: Exception) -> None:
        """Make ready for other passes after one that raised: what it held on the device is free again.

        Raises:
            DeviceLostError: the device does not count right any more. A CPU always does.
        """
        if self.device.type != "cuda":
            return
        try:
            with self._on_device():
                works = self._counts_right()
        except RuntimeError as found:
            raise DeviceLostError(self._lost(found)) from error
        if not works:
            raise DeviceLostError(self._lost(error)) from error
        # The error's frames hold on to what the pass has made; whoever keeps the error would keep that.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()

    def _counts_right(self) -> bool:
        """Whether a kernel does what it should, after all that was launched before. Takes no memory there."""
        torch.cuda.synchronize(self.device)
        with torch.inference_mode():
            self._probe += 1
        self._probes += 1
        return bool((self._probe.cpu() == self._probes).all())

    def _lost(self, error: Exception) -> str:
        said = str(error).partition("\n")[0] or type(error).__name__
        return f"the device {self.device} works no more ({said}); only a new process can use it again"

    def _send_back(
        self,
        token_ids: Tensor,
        finite: Tensor,
        logprobs: LogprobTensors | None,
        prompt_logprobs: LogprobTensors | None,
    ) -> PassInFlight:
        # One by one: what has a name is not freed where the next call raises (`keep_for_good` says why).
        token_ids = self._to_host(token_ids)
        finite = self._to_host(finite)
        logprobs = self._all_to_host(logprobs)
        prompt_logprobs = self._all_to_host(prompt_logprobs)
        return PassInFlight(token_ids, finite, logprobs, prompt_logprobs, self._timer.end())

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy, started; on a CPU, too, where the next passes overwrite what this one has staged."""
        pinned = self.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return host.copy_(tensor, non_blocking=True)

    def _all_to_host(self, tensors: LogprobTensors | None) -> LogprobTensors | None:
        if tensors is None:
            return None
        chosen, ranks, top_ids, top = map(self._to_host, tensors)
        return chosen, ranks, top_ids, top


def _is_decode(batch: Pass) -> bool:
    """Whether each request computes one token and samples one."""
    # Who samples computes the last token of its prompt or of its answer: none that is scored.
    return not batch.num_extends and bool((batch.num_samples == 1).all())


def _row_changes(changes: RowChanges) -> dict[str, NDArray[np.int32]]:
    return {"changed_rows": changes.rows, "changed_positions": changes.positions, "changed_slots": changes.slots}


def _to_numpy(tensors: LogprobTensors | None) -> Logprobs | None:
    return None if tensors is None else Logprobs(*(t.numpy() for t in tensors))
