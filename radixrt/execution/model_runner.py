"""Computes passes: from a Pass to sampled tokens. It decides nothing."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from memory_pool.kv_transfers import KVTransfer
from memory_pool.pool import HostPool
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.arrays import Int32Array
from radixrt.errors import DeviceLostError
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.executor import Executor, Forward
from radixrt.execution.graphs import TOKEN_SIZES, GraphRecorder, captured_shapes, largest_shapes
from radixrt.execution.in_flight import HostCopies, HostCopy, PassTimer, TimedPass
from radixrt.execution.kv_mover import KVMover
from radixrt.execution.pass_builder import MAX_PLAN_PASSES, PackedPass, PassBuilder
from radixrt.limits import NO_PASSES, PassLimits
from radixrt.models.decoder import Decoder
from radixrt.schedule.passes import Logprobs, Pass, PassResult
from triton_ops.attention.ordered import SUPERBLOCK
from triton_ops.implementation import gpu_of, runs_triton


@dataclass(frozen=True)
class Tuning:
    """What a test makes smaller, or makes on a CPU."""

    token_sizes: tuple[int, ...] = TOKEN_SIZES  # of captured passes with extends
    max_plan_passes: int = MAX_PLAN_PASSES
    max_scored_at_once: int = 512  # rows of logits that are held at a time to score prompt tokens
    recorder: type[GraphRecorder] = GraphRecorder
    planner: AttentionPlanner | None = None  # plans attention; None: the model's own


@dataclass(frozen=True)
class PassInFlight:
    """A launched pass, and copies on the host that hold its result once it has ended."""

    accepted: Int32Array
    # Of token ids and flags, or, for captured decodes, of the executor's `results`, which has both; of
    # log-probabilities; of those of prompts. The last two are empty where nobody wants them. A stage before the
    # last has none at all.
    copies: list[list[HostCopy]]
    timed: TimedPass
    waited_for_masks: bool = False


_NOTHING_DRAWN = PassResult(*(np.zeros(0, np.int32),) * 2, np.zeros(0, np.bool_))


@dataclass
class PassWithoutDraws:
    """A launched pass whose draws wait for masks; then `drawn`."""

    forward: Forward
    drawn: PassInFlight | None = None


@dataclass(frozen=True)
class _Prepared:
    """A pass that is launched next, packed, or what that raised, and the seconds that it took."""

    pass_: Pass
    packed: PackedPass | Exception
    seconds: float


class ModelRunner:
    """The `Runner` that computes a model's passes, or those of a stage, of which the last one draws.

    Passes of as many requests as `captured` says, or MAX_CAPTURED_BATCH, run as captured graphs; so do those with
    as many tokens of extends, where a model is small enough to gain by it. The first pass of each key captures its
    graph, unless that has been done before. With `tree` requests read what they share once for all of them, where
    that is cheaper.
    """

    def __init__(
        self,
        model: Decoder,
        rows: ReqToTokenPool,
        kv_pool: TokenToKVPool,
        device: torch.device,
        host_pool: HostPool | None = None,  # of tokens that have left the device
        *,
        captured: PassLimits = NO_PASSES,
        tree: bool = False,
        tuning: Tuning = Tuning(),
    ) -> None:
        self.model, self.device, self._tuning = model, device, tuning
        # Words that the device counts up, each to `_probes`, to show that it works.
        self._probe, self._probes = torch.zeros(1024, dtype=torch.int32, device=device), 0
        self._timer, self.copies = PassTimer(device), HostCopies(device)
        config, placement, kv_dtype = model.config, model.placement, kv_pool.dtype
        gpu, windows = gpu_of(device), tuple(dict.fromkeys(kind.window for kind in config.attention))
        shape = KernelShape(gpu, config.num_heads, config.num_kv_heads, config.head_dim, placement.dtype)
        kernels = runs_triton(placement.impl, device)
        self.planner = tuning.planner or AttentionPlanner(
            shape,
            windows,
            rows.req_to_token,
            kv_dtype,
            tree=tree,
            kernels=kernels,
            superblock=SUPERBLOCK if placement.deterministic else None,
        )
        max_batch, max_tokens = captured.max_running_requests, captured.chunked_prefill_size
        shapes = captured_shapes(max_batch, max_tokens, model.num_weights, tuning.token_sizes)
        padding_row, most = rows.max_requests, tuning.max_plan_passes
        self._builder = PassBuilder(
            self.planner, shapes, padding_row, most, model.stage.count, keeps_states=config.keeps_states
        )
        self._prepared: _Prepared | None = None
        self.launched_words: Int32Array = np.zeros(0, np.int32)  # of the pass that was launched last
        self._mover = None if host_pool is None else KVMover(kv_pool, host_pool, device, placement.impl)
        self.executor = Executor(model, rows, kv_pool, tuning.max_scored_at_once)

        # The largest come first, extends before decodes: the others fit into the memory of their graphs.
        self._keys = list(self._builder.keys(reversed(shapes)))
        self._largest = list(self._builder.keys(reversed(largest_shapes(shapes))))
        if shapes:
            with torch.inference_mode(), self._on_device():
                self.executor.reserve(map(self._builder.idle, self._largest), tuning.recorder(device))

    def capture_largest(self) -> None:
        """Capture the graphs that need most memory; best before all others. Raises torch.OutOfMemoryError."""
        with torch.inference_mode(), self._on_device():
            for key in self._largest:
                self.executor.capture(self._builder.idle(key))

    def capture_next(self, *, spares_memory: bool = True) -> bool:
        """Capture the graphs of one more key, between passes whose draws have begun; see `Executor.capture`.
        Returns False if there was none left to do.
        """
        key = next((key for key in self._keys if self.executor.lacks(key)), None)
        if key is None:
            return False
        with torch.inference_mode(), self._on_device():
            self.executor.capture(self._builder.idle(key), spares_memory=spares_memory)
        return True

    @property
    def num_uncaptured(self) -> int:
        """Keys whose first passes capture graphs."""
        return sum(map(self.executor.lacks, self._keys))

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        assert self._mover is not None  # without a host's pool nothing is booked
        with torch.inference_mode(), self._on_device():
            self._mover.run(transfers)

    def prepare(self, pass_: Pass) -> None:
        began = time.perf_counter()
        try:
            packed: PackedPass | Exception = self._builder.build(pass_)
        except Exception as error:
            packed = error
        self._prepared = _Prepared(pass_, packed, time.perf_counter() - began)

    def launch(self, pass_: Pass) -> PassInFlight | PassWithoutDraws:
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.pass_ is not pass_:
            prepared = None
        self._timer.begin(0.0 if prepared is None else prepared.seconds)
        with self._launching():
            packed = self._builder.build(pass_) if prepared is None else prepared.packed
            if isinstance(packed, Exception):
                raise packed
            if packed.key is not None and self.executor.lacks(packed.key, draws := (pass_.sampling.features,)):
                self.executor.capture(self._builder.idle(packed.key), draws, spares_memory=True)
            self._timer.start()
            self.launched_words = packed.words
            forward = self.executor.forward(pass_, packed)
            if not self.model.stage.is_last:  # the last one draws
                return PassInFlight(pass_.num_samples, [], self._timer.end())
            if pass_.sampling.masked is None:
                return self._drawn(forward)
            self._timer.pause()
            return PassWithoutDraws(forward)

    def mask_memory(self, num_masks: int, num_words: int) -> Int32Array:
        return self.executor.mask_memory(num_masks, num_words)

    def draw_masked(self, handle: object, masks: Int32Array) -> None:
        assert isinstance(handle, PassWithoutDraws)
        waited = self._timer.resume()
        with self._launching():
            handle.drawn = replace(self._drawn(handle.forward, masks), waited_for_masks=waited)

    def _drawn(self, forward: Forward, masks: Int32Array | None = None) -> PassInFlight:
        drawn = self.executor.draw(forward, masks)
        sampled = (drawn.token_ids, drawn.finite) if drawn.both is None else (drawn.both,)
        results = (sampled, drawn.logprobs, self.executor.score(forward))
        # On a CPU, too, they are copied: the next passes overwrite some of them.
        copies = [[self.copies.start(tensor) for tensor in tensors] for tensors in results]
        return PassInFlight(forward.pass_.num_samples, copies, self._timer.end())  # nothing is drafted yet

    @contextmanager
    def _launching(self) -> Iterator[None]:
        with torch.inference_mode(), self._on_device():
            try:
                yield
            except BaseException:
                if self._mover is not None:
                    self._mover.wait_for_passes()
                raise

    def collect(self, handle: object) -> PassResult:
        if isinstance(handle, PassWithoutDraws):
            handle = handle.drawn
        assert isinstance(handle, PassInFlight)
        seconds, launching = self._timer.wait(handle.timed)
        if not handle.copies:
            return _NOTHING_DRAWN
        sampled, *others = ([self.copies.take(copy) for copy in copies] for copies in handle.copies)
        accepted, count = handle.accepted, len(handle.accepted)
        if len(sampled) == 1:
            sampled = [sampled[0][0, :count], sampled[0][1].view(np.bool_)[:count]]
        token_ids, finite = sampled
        logprobs, prompt_logprobs = (Logprobs(*arrays) if arrays else None for arrays in others)
        waited = handle.waited_for_masks
        return PassResult(token_ids, accepted, finite, logprobs, prompt_logprobs, seconds, waited, launching)

    def _on_device(self) -> AbstractContextManager[object]:
        # Kernels and events go to the current device, whatever their tensors' is.
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def check_device(self, error: Exception) -> None:
        if self.device.type != "cuda":
            return
        try:
            with self._on_device():
                found = None if self._counts_right() else error
        except RuntimeError as raised:
            found = raised
        if found is not None:
            said = str(found).partition("\n")[0] or type(found).__name__
            raise DeviceLostError(
                f"the device {self.device} works no more ({said}); only a new process can use it again"
            ) from error
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
