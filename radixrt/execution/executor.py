"""The device half of a pass: from its words to logits, and from logits to tokens."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layers.input_metadata import InputMetadata
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.arrays import Int32Array
from radixrt.execution.graphs import CAPTURED_DRAWS, GraphRecorder, Launch, PassShape
from radixrt.execution.pass_builder import PackedPass, PassKey
from radixrt.execution.sampling.sampler import Arrays, draw_logprobs, sample_plain, sample_processed
from radixrt.execution.staging import Staging
from radixrt.models.decoder import Decoder
from radixrt.schedule.passes import Features, Pass
from triton_ops.recurrent.rows import StateRows
from triton_ops.row_tables import known_tokens, write_cells
from triton_ops.sampling.logit_masks import mask_rows
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.sample import finite_rows

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forward:
    """A pass up to its logits, on the device. Valid until the next one."""

    pass_: Pass
    arrays: Arrays  # inputs and extras, by name; of a captured pass no inputs but those that draws read
    logits: Tensor  # `[S, vocab_size]`; nothing in a stage before the last
    # Bool `[B]`, whether each row's last hidden state is. None for captured decodes, where each row samples from
    # its only one: if that is not finite, the draw finds no token and says so.
    finite: Tensor | None = None
    hidden: Tensor | None = None  # `[T, hidden_size]`; None for captured passes
    decodes: PassShape | None = None  # of captured decodes


@dataclass(frozen=True)
class Drawn:
    """The tokens of a pass, on the device."""

    token_ids: Tensor  # int32 `[S]`
    finite: Tensor  # bool `[B]`, whether a row's last hidden state is, and what its tokens were drawn from
    logprobs: tuple[Tensor, ...] = ()  # of the tokens whose requests want them, as `token_logprobs` returns them
    both: Tensor | None = None  # the executor's `results`, in which captured decodes have them


class Executor:
    """Computes packed passes in order. Callers make the model's device the current one, in inference mode.

    The device keeps its own copy of `req_to_token` and the last sampled token of each row: the next pass takes its
    input from there, so that tokens go from pass to pass without the host.

    A stage before the last hands its hidden states on, and has no logits. No graph sends or receives: that is done
    before and after it; of captured passes at fixed places.
    """

    def __init__(
        self, model: Decoder, rows: ReqToTokenPool, kv_pool: TokenToKVPool, max_scored_at_once: int
    ) -> None:
        self._model, self._kv_pool = model, kv_pool
        self._impl, device, self._stage = model.placement.impl, model.placement.device, model.placement.stage
        self._max_scored_at_once = max_scored_at_once
        size = rows.max_requests + 1, rows.max_context_len
        self.req_to_token = torch.zeros(size, dtype=torch.int32, device=device)  # the last row is for padding
        self.last_token = torch.zeros(size[0], dtype=torch.int32, device=device)  # sampled for each row
        self._drawn_in = np.full(size[0], -1)  # of each row, as the first of several stages counts passes
        # A stage that computes an old pass does not keep the first one from beginning a new one.
        self._staging = Staging(device, num_buffers=max(2, self._stage.count))
        # Masks are sent while logits are computed. Once they are filled, all passes before have ended, and nobody
        # reads other masks.
        self._mask_stream = None
        if device.type == "cuda":
            self._mask_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with self._beside():
            self._masks = Staging(device, 1)
        self.graphs: dict[Hashable, Launch] = {}  # forward passes by PassKey, draws by shape and features

    def reserve(self, largest: Iterable[PackedPass], recorder: GraphRecorder) -> None:
        """Make the places of captured passes, of which these are the largest, idle ones with a key. Words come in
        at one fixed place on the device; logits, flags and tokens come out at others.
        """
        self._recorder, passes = recorder, {packed.key: packed for packed in largest if packed.key is not None}
        shapes = [key.shape for key in passes]
        device, max_rows = self.last_token.device, max(shape.num_rows for shape in shapes)
        if not self._stage.is_whole:
            most = max(packed.num_tokens for packed in passes.values())
            self._handed, self._handed_on = self._hidden_states(most), self._hidden_states(most)
        size = max_rows if self._stage.is_last else 0, self._model.config.vocab_size
        self._logits = torch.empty(size, dtype=self._model.placement.dtype, device=device)
        max_requests = max(shape.num_extends + shape.num_rows for shape in shapes)
        self._finite = torch.empty(max_requests, dtype=torch.bool, device=device)
        # Of captured decodes, token ids and byte flags: one copy fetches both.
        self.results = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
        self._token_ids, self._has_token = self.results[0], self.results[1].view(torch.bool)
        self._decode_inputs: dict[PassShape, Arrays] = {}
        self._staging.fix(max(len(packed.words) for packed in passes.values()))

    def lacks(self, key: PassKey, draws: Iterable[Features] = CAPTURED_DRAWS) -> bool:
        """Whether `capture` has something to do: for the passes of a key, or of decodes for draws that are
        captured.
        """
        if key not in self.graphs:
            return True
        if not key.shape.is_decode or not self._stage.is_last:
            return False
        return any((key.shape, each) not in self.graphs for each in draws if each in CAPTURED_DRAWS)

    def capture(
        self, idle: PackedPass, draws: Iterable[Features] = CAPTURED_DRAWS, *, spares_memory: bool = False
    ) -> None:
        """Capture the forward passes of an idle pass's key, and these draws of decodes, as far as that has not
        been done. Raises torch.OutOfMemoryError where there is no memory for a graph; or, if it `spares_memory`,
        has the kernels launched one by one.

        Passes may be in flight. What runs here comes after all that has been launched, and so after their results
        have been copied out of the fixed places. It writes there and, like all padding, to what belongs to no
        request; the words of the next pass are sent after it. What is captured does not run.
        """
        assert idle.key is not None
        key, shape = idle.key, idle.key.shape
        self._staging.upload(idle.words, idle.inputs.num_words)
        inputs = idle.inputs.tensors(self._staging.fixed)
        launch = partial(self._recorded, shape, spares_memory=spares_memory)
        if key not in self.graphs:
            handed = None if self._stage.is_first else self._handed[: idle.num_tokens]
            compute = partial(self._compute, idle, inputs, handed)
            self.graphs[key] = launch(compute, partial(compute, num_blocks=self._model.num_unlike_blocks))
        if shape.is_decode and self._stage.is_last:
            self._decode_inputs[shape] = inputs
            for features in draws:
                if features in CAPTURED_DRAWS and (shape, features) not in self.graphs:
                    draw = partial(self._draw_decodes, shape, features)
                    self.graphs[shape, features] = launch(draw, draw)

    def _recorded(self, shape: PassShape, compute: Launch, warm_up: Launch, *, spares_memory: bool) -> Launch:
        try:
            return self._recorder.captured(compute, warm_up)
        except torch.OutOfMemoryError as error:
            if not spares_memory:
                raise
            _log.warning(
                "there is no memory for a graph of passes with %d prompt tokens and %d decodes, whose kernels are "
                "launched one by one from now on: %s",
                *(shape.num_tokens, shape.num_rows, str(error).partition("\n")[0]),
            )
        return compute

    def forward(self, pass_: Pass, packed: PackedPass) -> Forward:
        """Start a pass, up to its logits."""
        key = packed.key
        words = self._staging.upload(packed.words, 0 if key is None else packed.inputs.num_words)
        arrays = packed.extras.tensors(words)
        if "changed_rows" in arrays:
            rows, positions, slots = (arrays[f"changed_{name}"] for name in ("rows", "positions", "slots"))
            write_cells(self.req_to_token, rows, positions, slots, impl=self._impl)
        handed = self._taken_over(pass_, packed)
        if key is None:
            arrays = packed.inputs.tensors(words) | arrays
            computed = Forward(pass_, arrays, *self._compute(packed, arrays, handed))
            if not self._stage.is_last:
                assert computed.hidden is not None
                self._hand_on(pass_, computed.hidden)
            return computed
        self.graphs[key]()
        if not self._stage.is_last:
            self._hand_on(pass_, self._handed_on[: packed.num_tokens])
            return Forward(pass_, arrays, self._logits)
        logits = self._logits[: len(pass_.sampling.logits_rows)]
        if not key.shape.is_decode:
            return Forward(pass_, arrays, logits, self._finite[: pass_.num_rows])
        inputs = self._decode_inputs[key.shape]
        return Forward(pass_, {**inputs, **arrays} if arrays else inputs, logits, decodes=key.shape)

    def _taken_over(self, pass_: Pass, packed: PackedPass) -> Tensor | None:
        """What this stage gets from others for a pass: hidden states, or None in the first stage, which gets the
        tokens that it does not know.
        """
        if self._stage.receiver is not None:
            rows = ~pass_.input_ids[pass_.input_ids < 0]
            self._stage.receiver.take(int(self._drawn_in[rows].max(initial=-1)), self.last_token)
        if self._stage.before is None:
            return None
        count = packed.num_tokens
        place = self._hidden_states(count) if packed.key is None else self._handed[:count]
        return self._stage.before.receive(place)

    def _hand_on(self, pass_: Pass, hidden: Tensor) -> None:
        """Send the hidden states of a pass to the next stage; the first stage awaits the tokens drawn from it."""
        if self._stage.after is not None:
            self._stage.after.send(hidden)
        if self._stage.receiver is not None and len(pass_.sampling.logits_rows):
            self._drawn_in[pass_.req_pool_indices[pass_.num_samples > 0]] = self._stage.receiver.expect(
                self.last_token
            )

    def _hidden_states(self, num_tokens: int) -> Tensor:
        """A place for so many."""
        placement = self._model.placement
        size = num_tokens, self._model.config.hidden_size
        return torch.empty(size, dtype=placement.dtype, device=placement.device)

    def _compute(
        self,
        packed: PackedPass,
        arrays: Arrays,
        handed: Tensor | None,
        num_blocks: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The one way from the words of a pass to its logits, flags and hidden states. Those of a pass with a key
        are left in their places: logits and flags, or hidden states to be handed on.
        """
        if packed.is_decode:
            rows, positions = arrays["req_pool_indices"], arrays["positions"]
            write_cells(self.req_to_token, rows, positions, arrays["out_cache_loc"], impl=self._impl)
        num_extends = packed.num_extends
        plans = packed.plans.with_arrays(arrays[name] for name in packed.plans.numbered())
        host = packed.host_arrays()
        of_rows: dict[str, Any] = {name: arrays[name] for name in host}
        metadata = InputMetadata(
            **of_rows,
            req_to_token=self.req_to_token,
            decode_plans=plans.decode,
            extend_plans=plans.extend,
            num_extends=num_extends,
            num_extend_tokens=InputMetadata.count_extend_tokens(host["extend_seq_lens"], num_extends),
            kv_pool=self._kv_pool,
            states=_state_rows(arrays, num_extends),
            state_pool=self._kv_pool.states,
        )
        ids = arrays["input_ids"]
        if self._stage.is_first:
            ids = known_tokens(ids, self.last_token, impl=self._impl)
        hidden = self._model(ids, metadata, handed=handed, num_blocks=num_blocks)
        if not self._stage.is_last:
            if packed.key is not None:
                self._handed_on[: len(hidden)].copy_(hidden)
            return hidden[:0], None, hidden
        finite, indices = None, None  # of decodes all tokens have logits, in order
        if not packed.is_decode:
            indices = arrays["logits_indices"]
            finite = finite_rows(hidden.index_select(0, arrays["last_tokens"]), impl=self._impl)
        out = None if packed.key is None else self._logits[: packed.key.shape.num_rows]
        logits = self._model.compute_logits(hidden, indices, out=out)
        if out is not None and finite is not None:
            self._finite[: len(finite)].copy_(finite)
        return logits, finite, hidden

    def mask_memory(self, num_masks: int, num_words: int) -> Int32Array:
        """Memory `[num_masks, num_words]` from which `draw` sends the masks of one pass: pinned, for CUDA."""
        with self._beside():  # their place on the device belongs to that stream
            return self._masks.begin(num_masks * num_words).reshape(num_masks, num_words)

    def _beside(self) -> AbstractContextManager[object]:
        """On the stream of masks."""
        return nullcontext() if self._mask_stream is None else torch.cuda.stream(self._mask_stream)

    def _masked(self, logits: Tensor, rows: Tensor, masks: Int32Array) -> None:
        """Put masks on these rows of logits, in place."""
        with self._beside():
            sent = self._masks.send(masks.reshape(-1))[: masks.size].view(masks.shape)
        if self._mask_stream is not None:
            torch.cuda.current_stream(logits.device).wait_stream(self._mask_stream)
        mask_rows(logits, rows, sent, impl=self._impl)

    def draw(self, forward: Forward, masks: Int32Array | None = None) -> Drawn:
        """Start the draws of a pass, with the masks, in `mask_memory`, of those that are masked: `last_token` gets
        the first token of each row. Masked logits are no more what the model made of them.
        """
        drawn = self._draw(forward, masks)
        if self._stage.sender is not None and len(forward.pass_.sampling.logits_rows):
            self._stage.sender.send(self.last_token)
        return drawn

    def _draw(self, forward: Forward, masks: Int32Array | None) -> Drawn:
        arrays, sampling, logits = forward.arrays, forward.pass_.sampling, forward.logits
        processed, last_token = sampling.processed, self.last_token
        unmasked = logits  # log-probabilities are of these
        if masks is not None:
            if sampling.num_top is not None:
                unmasked = logits.clone()
            self._masked(logits, arrays["masked_rows"], masks)
        if forward.finite is not None and not len(logits):
            return Drawn(arrays["logits_rows"], forward.finite)
        if forward.decodes is None:
            token_ids = torch.empty_like(arrays["logits_rows"])
            out = token_ids, torch.empty_like(token_ids, dtype=torch.bool)
            sample_plain(logits, arrays, sampling.features, out, impl=self._impl)
        else:
            out = self._token_ids[: len(logits)], self._has_token[: len(logits)]
            if processed is not None:  # its draws depend on the last tokens, which the graph replaces
                last_token = last_token.clone()
            key = forward.decodes, sampling.features
            launch = self.graphs.get(key) or partial(self._draw_decodes, *key)
            launch()
        filtered = None
        if processed is not None:
            filtered = sample_processed(logits, arrays, processed, last_token, out, impl=self._impl)
        token_ids, drawn = out
        logprobs: tuple[Tensor, ...] = ()
        if sampling.num_top is not None:
            logprobs = draw_logprobs(unmasked, token_ids, arrays, sampling.num_top, filtered, impl=self._impl)
        if forward.finite is None:
            if processed is not None:
                self._keep_tokens(arrays["req_pool_indices"][: len(logits)], token_ids)
            return Drawn(token_ids, drawn, logprobs, self.results)
        forward.finite[arrays["logits_rows"]] &= drawn
        # The first answer goes on in its own row; the others get theirs when the host has heard of them.
        self._keep_tokens(arrays["first_rows"], token_ids[arrays["first_samples"]])
        return Drawn(token_ids, forward.finite, logprobs)

    def _draw_decodes(self, shape: PassShape, features: Features) -> None:
        """The plain draws of captured decodes, of padding too."""
        arrays, count = self._decode_inputs[shape], shape.num_rows
        out = self._token_ids[:count], self._has_token[:count]
        sample_plain(self._logits[:count], arrays, features, out, impl=self._impl)
        self._keep_tokens(arrays["req_pool_indices"], out[0])

    def _keep_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        write_cells(self.last_token.unsqueeze(1), rows, None, token_ids, impl=self._impl)

    def score(self, forward: Forward) -> tuple[Tensor, ...]:
        """Log-probabilities of the P scored prompt tokens, as `token_logprobs` returns them; () for none."""
        pass_, parts = forward.pass_, []
        if not len(pass_.scored):
            return ()
        assert forward.hidden is not None  # no graph scores
        for start in range(0, len(pass_.scored), self._max_scored_at_once):
            rows = slice(start, start + self._max_scored_at_once)
            logits = self._model.compute_logits(forward.hidden, forward.arrays["scored"][rows])
            targets, num_top = forward.arrays["scored_targets"][rows], min(pass_.num_top_scored, logits.shape[1])
            parts.append(token_logprobs(logits, targets, num_top, impl=self._impl))
        return tuple(map(torch.cat, zip(*parts, strict=True)))


def _state_rows(arrays: Arrays, num_extends: int) -> StateRows | None:
    """The states of a pass's rows; None for a model that keeps none."""
    if "state_reads" not in arrays:
        return None
    starts, lens = arrays["extend_start_loc"], arrays["extend_seq_lens"]
    return StateRows(starts, lens, arrays["state_reads"], arrays["state_writes"], num_extends)
