"""The device half of a pass: from its words to logits, and from logits to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layers.input_metadata import InputMetadata
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.graphs.capture import CapturedGraphs, GraphRecorder
from radixrt.execution.graphs.ladder import CAPTURED_DRAWS, PassShape
from radixrt.execution.graphs.results import ResultBuffer
from radixrt.execution.packed_pass import PackedPass
from radixrt.execution.sampling.sampler import LogprobTensors, draw_logprobs, sample_plain, sample_processed
from radixrt.execution.staging import Staging
from radixrt.models.decoder import Decoder
from radixrt.schedule.passes import Features
from triton_ops.row_tables import known_tokens, write_cells
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.sample import finite_rows

MAX_SCORED_AT_ONCE = 512  # rows of logits that are held at a time to score prompt tokens
Arrays = Mapping[str, Tensor]


@dataclass(frozen=True)
class Forward:
    """The outputs of a forward pass, on the device. Valid until the next one.

    `finite` tells whether the last hidden state of each row is. None for captured decodes, where each row samples
    from its only hidden state: if that is not finite, the draw finds no token and says so.
    """

    arrays: Arrays  # inputs and extras, by name; of a captured pass no inputs but those that draws read
    logits: Tensor  # `[S, vocab_size]`
    finite: Tensor | None  # bool `[B]`
    hidden: Tensor | None = None  # `[T, hidden_size]`; None for captured passes


@dataclass(frozen=True)
class Drawn:
    """The tokens of a pass, on the device."""

    token_ids: Tensor  # int32 `[S]`
    finite: Tensor  # bool `[B]`, whether a row's last hidden state is, and what its tokens were drawn from
    logprobs: LogprobTensors | None = None  # of the tokens whose requests want them
    is_in_results: bool = False  # both lie in the executor's `results`


class Executor:
    """Computes packed passes in order. Its caller has made `device` the current one, and is in inference mode.

    The device keeps its own copy of `req_to_token` and the last sampled token of each row: the next pass takes its
    input from there, so that tokens go from pass to pass without the host.

    Args:
        rows: the host's table, of which the device keeps a copy.
        device: where the model and the pool are.
        max_scored_at_once: rows of logits that are held at a time to score prompt tokens.

    Attributes:
        req_to_token: int32 `[max_requests + 1, max_context_len]`, on the device. The last row is for padding.
        last_token: int32 `[max_requests + 1]`, the token that was sampled last for each row.
        graphs: what is captured; None: nothing is.
        results: the tokens of the captured decodes that were launched last.
    """

    def __init__(
        self,
        model: Decoder,
        rows: ReqToTokenPool,
        kv_pool: TokenToKVPool,
        device: torch.device,
        max_scored_at_once: int = MAX_SCORED_AT_ONCE,
    ) -> None:
        self._model, self._kv_pool, self._impl = model, kv_pool, model.placement.impl
        self._max_scored_at_once = max_scored_at_once
        size = rows.max_requests + 1, rows.max_context_len
        self.req_to_token = torch.zeros(size, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(rows.max_requests + 1, dtype=torch.int32, device=device)
        self._staging = Staging(device)
        self.graphs: CapturedGraphs | None = None
        self.results = ResultBuffer(0, device)

    def capture(self, idle_passes: Iterable[PackedPass], recorder: GraphRecorder) -> None:
        """Capture the forward passes of idle passes, which have a key each, and the draws of decodes.

        Everything that a graph reads and writes has its own place on the device: words come in at one, logits,
        flags and tokens come out at others.
        """
        passes = list(idle_passes)
        shapes = [packed.key.shape for packed in passes if packed.key is not None]
        device, max_rows = self.last_token.device, max(shape.num_rows for shape in shapes)
        self._logits = torch.empty(
            (max_rows, self._model.config.vocab_size), dtype=self._model.placement.dtype, device=device
        )
        max_requests = max(shape.num_extends + shape.num_rows for shape in shapes)
        self._finite = torch.empty(max_requests, dtype=torch.bool, device=device)
        self.results = ResultBuffer(max_rows, device)
        self._decode_inputs: dict[PassShape, Arrays] = {}
        self._staging.fix(max(len(packed.words) for packed in passes))
        self.graphs = CapturedGraphs(recorder)
        for packed in passes:
            assert packed.key is not None
            shape = packed.key.shape
            inputs = packed.inputs.tensors(self._staging.upload(packed.words))
            forward = partial(self._captured_forward, packed, inputs)
            self.graphs.capture(packed.key, forward, num_blocks=self._model.num_unlike_blocks)
            if shape.is_decode and shape not in self._decode_inputs:
                self._decode_inputs[shape] = inputs
                for features in CAPTURED_DRAWS:
                    self.graphs.capture((shape, features), partial(self._draw_decodes, shape, features))

    def forward(self, packed: PackedPass) -> Forward:
        """Start a pass, up to its logits."""
        words = self._staging.upload(packed.words, 0 if packed.key is None else packed.inputs.num_words)
        arrays = packed.extras.tensors(words)
        if packed.has_row_changes:
            rows, positions, slots = (arrays[f"changed_{name}"] for name in ("rows", "positions", "slots"))
            write_cells(self.req_to_token, rows, positions, slots, impl=self._impl)
        if packed.key is None:
            return self._forward(packed, packed.inputs.tensors(words) | arrays)
        assert self.graphs is not None
        self.graphs.replay(packed.key)
        logits = self._logits[: packed.num_samples]
        if packed.is_captured_decode:
            inputs = self._decode_inputs[packed.key.shape]
            return Forward({**inputs, **arrays} if arrays else inputs, logits, None)
        return Forward(arrays, logits, self._finite[: packed.num_rows])

    def _forward(
        self, packed: PackedPass, arrays: Arrays, *, logits: Tensor | None = None, num_blocks: int | None = None
    ) -> Forward:
        """The one way from the words of a pass to its logits, in `logits` if that is given."""
        is_decode = packed.is_captured_decode
        if is_decode:
            rows, positions = arrays["req_pool_indices"], arrays["positions"]
            write_cells(self.req_to_token, rows, positions, arrays["out_cache_loc"], impl=self._impl)
        # Of these decodes all tokens have logits, in order.
        indices = None if is_decode else arrays["logits_indices"]
        plans = packed.plans.with_arrays(arrays[name] for name in packed.plans.numbered())
        host = packed.host_arrays()
        metadata = InputMetadata(
            **{name: arrays[name] for name in host},
            req_to_token=self.req_to_token,
            decode_plans=plans.decode,
            extend_plans=plans.extend,
            num_extends=packed.num_extends,
            num_extend_tokens=InputMetadata.count_extend_tokens(host["extend_seq_lens"], packed.num_extends),
        )
        ids = known_tokens(arrays["input_ids"], self.last_token, impl=self._impl)
        hidden = self._model(ids, metadata, self._kv_pool, num_blocks=num_blocks)
        finite = None
        if not is_decode:
            finite = finite_rows(hidden.index_select(0, arrays["last_tokens"]), impl=self._impl)
        return Forward(arrays, self._model.compute_logits(hidden, indices, out=logits), finite, hidden)

    def _captured_forward(self, packed: PackedPass, arrays: Arrays, **num_blocks: int) -> None:
        assert packed.key is not None
        logits = self._logits[: packed.key.shape.num_rows]
        finite = self._forward(packed, arrays, logits=logits, **num_blocks).finite
        if finite is not None:
            self._finite[: len(finite)].copy_(finite)

    def draw(self, packed: PackedPass, forward: Forward) -> Drawn:
        """Start the draws of a pass: `last_token` gets the first of each row."""
        if not packed.num_samples:
            assert forward.finite is not None
            return Drawn(forward.arrays["logits_rows"], forward.finite)
        if packed.is_captured_decode:
            return self._draw_captured(packed, forward)
        arrays, finite = forward.arrays, forward.finite
        assert finite is not None
        token_ids = torch.empty_like(arrays["logits_rows"])
        drawn = torch.empty_like(token_ids, dtype=torch.bool)
        sample_plain(forward.logits, arrays, packed.features, token_ids, drawn, impl=self._impl)
        logprobs = self._draw_others(packed, forward, self.last_token, token_ids, drawn)
        finite[arrays["logits_rows"]] &= drawn
        # The first answer goes on in its own row; the others get theirs when the host has heard of them.
        self._keep_tokens(arrays["first_rows"], token_ids[arrays["first_samples"]])
        return Drawn(token_ids, finite, logprobs)

    def _draw_captured(self, packed: PackedPass, forward: Forward) -> Drawn:
        assert packed.key is not None
        assert self.graphs is not None
        count, shape = packed.num_samples, packed.key.shape
        token_ids, finite = self.results.token_ids[:count], self.results.finite[:count]
        # The graph replaces the last tokens; the draws of processed rows depend on those before.
        last_token = self.last_token if packed.processed is None else self.last_token.clone()
        if packed.features in CAPTURED_DRAWS:
            self.graphs.replay((shape, packed.features))
        else:  # its kernels are launched one by one
            self._draw_decodes(shape, packed.features)
        logprobs = self._draw_others(packed, forward, last_token, token_ids, finite)
        if packed.processed is not None:
            self._keep_tokens(forward.arrays["req_pool_indices"][:count], token_ids)
        return Drawn(token_ids, finite, logprobs, is_in_results=True)

    def _draw_decodes(self, shape: PassShape, features: Features) -> None:
        """The plain draws of captured decodes, of padding too."""
        arrays, size = self._decode_inputs[shape], shape.num_rows
        token_ids, finite = self.results.token_ids[:size], self.results.finite[:size]
        sample_plain(self._logits[:size], arrays, features, token_ids, finite, impl=self._impl)
        self._keep_tokens(arrays["req_pool_indices"], token_ids)

    def _draw_others(
        self, packed: PackedPass, forward: Forward, last_token: Tensor, token_ids: Tensor, finite: Tensor
    ) -> LogprobTensors | None:
        """Draw processed rows again, in place; the log-probabilities of all tokens that want them."""
        logits, arrays = forward.logits, forward.arrays
        if packed.processed is not None:
            sample_processed(logits, arrays, packed.processed, last_token, token_ids, finite, impl=self._impl)
        if packed.num_top is None:
            return None
        return draw_logprobs(logits, token_ids, arrays, packed.num_top, impl=self._impl)

    def _keep_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        write_cells(self.last_token.unsqueeze(1), rows, None, token_ids, impl=self._impl)

    def score(self, packed: PackedPass, forward: Forward) -> LogprobTensors | None:
        """Log-probabilities of the P scored prompt tokens, some rows of logits at a time; None: there are none."""
        if not packed.num_scored:
            return None
        assert forward.hidden is not None  # no graph scores
        parts = []
        for start in range(0, packed.num_scored, self._max_scored_at_once):
            rows = slice(start, start + self._max_scored_at_once)
            logits = self._model.compute_logits(forward.hidden, forward.arrays["scored"][rows])
            targets, num_top = forward.arrays["scored_targets"][rows], min(packed.num_top_scored, logits.shape[1])
            parts.append(token_logprobs(logits, targets, num_top, impl=self._impl))
        chosen, ranks, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
        return chosen, ranks, top_ids, top
