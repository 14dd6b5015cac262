"""Fingerprints of what enters each layer, for every token of every pass: to name the first layer that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layers.input_metadata import InputMetadata
from radixrt.arrays import Int32Array, Int64Array
from radixrt.models.decoder import Block, Decoder, MixerBlock
from radixrt.schedule.answer import Answer
from radixrt.schedule.passes import Pass, Runner
from radixrt.schedule.scheduler import Scheduler

_Column = tuple[Int64Array, int]  # the fingerprints of a token, and the tokens of the pass that computed it
_ROWS = 1024  # that are fingerprinted at a time
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by the size of a number


@dataclass(frozen=True)
class Origin:
    """Where two computations of the same tokens first differ.

    Attributes:
        layer: its number, from 0; None where the part belongs to none.
        part: "embedding", "attention", "feed-forward" or "logits".
        position: of the first token that differs there.
        pass_tokens, alone_tokens: tokens of the passes that computed it, in the situation and alone.
    """

    layer: int | None
    part: str
    position: int
    pass_tokens: int
    alone_tokens: int

    def __str__(self) -> str:
        where = self.part if self.layer is None else f"layer {self.layer}, {self.part}"
        passes = f"in a pass of {self.pass_tokens:,} tokens, alone of {self.alone_tokens:,}"
        return f"{where}, at position {self.position:,} ({passes})"


@dataclass(frozen=True)
class _Seen:
    """Positions [start, start + n) of an answer's tokens, as one pass computed them: `[parts, n]`."""

    answer: Answer
    start: int
    prints: Int64Array
    pass_tokens: int


class LayerWatch:
    """Hooks on a decoder, that fingerprint the states of each token before each part of each layer and at the end.

    It is to be entered before passes are captured: what the hooks do is captured, too. A fingerprint is a sum of
    the bits of a state, each number times an odd one of its own, modulo 2^64.

    Args:
        max_tokens: of a pass; more are not looked at.
    """

    def __init__(self, decoder: Decoder, max_tokens: int) -> None:
        self._decoder, device, size = decoder, decoder.placement.device, decoder.config.hidden_size
        self._prints = torch.zeros((2 * len(decoder.blocks) + 1, max_tokens), dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        odd = np.random.default_rng(0).integers(-(2**62), 2**62, size, dtype=np.int64) * 2 + 1
        self._factors = torch.from_numpy(odd).to(device)
        self._wanted, self._seen = np.zeros(0, np.int32), list[_Seen]()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """The hooks are there meanwhile."""
        handles: list[Any] = [self._decoder.register_forward_hook(self._leave)]
        for layer, block in enumerate(self._decoder.blocks):
            assert isinstance(block, MixerBlock)
            handles.append(block.attention.register_forward_pre_hook(partial(self._enter, 2 * layer)))
            if isinstance(block, Block):
                enter = partial(self._enter, 2 * layer + 1)
                handles.append(block.feed_forward.register_forward_pre_hook(enter))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, place: int, module: Any, arguments: tuple[Any, ...]) -> None:
        self._keep(place, arguments[0])

    def _leave(self, module: Any, arguments: tuple[Any, ...], hidden: Tensor) -> None:
        metadata: InputMetadata = arguments[1]
        self._keep(-1, hidden)
        self._slots.zero_()
        count = min(len(metadata.out_cache_loc), len(self._slots))
        self._slots[:count].copy_(metadata.out_cache_loc[:count])

    def _keep(self, place: int, states: Tensor) -> None:
        bits = states.contiguous().view(_INTEGERS[states.element_size()])
        for start in range(0, min(len(bits), len(self._slots)), _ROWS):
            rows = bits[start : min(start + _ROWS, len(self._slots))]
            self._prints[place, start : start + len(rows)].copy_((rows.to(torch.int64) * self._factors).sum(1))

    def look_for(self, tokens: Int32Array) -> None:
        """Note passes over requests that begin with these tokens from now on, and forget all others."""
        self._wanted = tokens
        self.forget()

    def saw(self, pass_: Pass, owners: Mapping[int, Answer]) -> None:
        """Note what the pass that was launched last has computed, of the owners of its rows; waits for it."""
        slots, known = pass_.out_cache_loc, self._slots.cpu().numpy()
        order = np.argsort(known, kind="stable")
        places = order[np.searchsorted(known, slots, sorter=order).clip(max=len(known) - 1)]
        assert (known[places] == slots).all(), "a pass has more tokens than the watch was made for"
        prints, ends = self._prints.cpu().numpy()[:, places], np.cumsum(pass_.seq_lens - pass_.prefix_lens)
        starts, rows = pass_.prefix_lens.tolist(), pass_.req_pool_indices.tolist()
        for row, start, own in zip(rows, starts, np.split(prints, ends[:-1], axis=1), strict=True):
            if start < self._common_len(owners[row], so_far=True):
                self._seen.append(_Seen(owners[row], start, own, len(slots)))

    def forget(self) -> None:
        """Forget all passes."""
        self._seen.clear()

    def _common_len(self, answer: Answer, *, so_far: bool = False) -> int:
        """How many of the tokens that are looked for an answer begins with. `so_far`: its next ones are not known
        yet, and may be those.
        """
        known, wanted = answer.tokens(), self._wanted
        count = min(len(known), len(wanted))
        differs = known[:count] != wanted[:count]
        return int(differs.argmax()) if differs.any() else len(wanted) if so_far else count

    def trace(self, request_id: int | str) -> Trace:
        """What was computed for the tokens that are looked for: by a request, and, where it found them in the
        cache, by others.
        """
        own, others = dict[int, list[_Column]](), dict[int, list[_Column]]()
        for seen in self._seen:
            found = own if seen.answer.request.id == request_id else others
            end = min(seen.start + seen.prints.shape[1], self._common_len(seen.answer))
            for position in range(seen.start, end):
                column = seen.prints[:, position - seen.start]
                found.setdefault(position, []).append((column, seen.pass_tokens))
        return Trace(others | own)


class WatchingRunner:
    """A `Runner` whose passes are watched. Whoever keeps it keeps the pool."""

    def __init__(self, runner: Runner, scheduler: Scheduler, watch: LayerWatch) -> None:
        self._runner, self._scheduler, self._watch = runner, scheduler, watch
        self.transfer, self.collect, self.check_device = runner.transfer, runner.collect, runner.check_device
        self.prepare, self.mask_memory, self.draw_masked = runner.prepare, runner.mask_memory, runner.draw_masked

    def launch(self, pass_: Pass) -> object:
        # It was planned just now: no row has changed hands since.
        owners = {answer.lease.row: answer for answer in self._scheduler.running if answer.lease is not None}
        handle = self._runner.launch(pass_)
        self._watch.saw(pass_, owners)
        return handle


@dataclass(frozen=True)
class Trace:
    """Fingerprints `[parts]` of each position of some tokens, and the size of the pass, once for each time that it
    was computed.
    """

    columns: Mapping[int, list[_Column]]

    def origin(self, alone: Trace) -> Origin | None:
        """Where this first differs from what was computed alone; None where nothing is known of both."""
        positions = sorted(self.columns.keys() & alone.columns.keys())
        if not positions:
            return None
        first: tuple[int, int, int, int] | None = None
        for position in positions:
            column, alone_tokens = alone.columns[position][0]
            for own, pass_tokens in self.columns[position]:
                differs: NDArray[np.bool_] = own != column
                if differs.any() and (first is None or int(differs.argmax()) < first[0]):
                    first = int(differs.argmax()), position, pass_tokens, alone_tokens
        if first is None:
            last = positions[-1]
            return Origin(None, "logits", last, self.columns[last][-1][1], alone.columns[last][-1][1])
        place, position, pass_tokens, alone_tokens = first
        if not place:
            return Origin(None, "embedding", position, pass_tokens, alone_tokens)
        part = "attention" if place % 2 else "feed-forward"
        return Origin((place - 1) // 2, part, position, pass_tokens, alone_tokens)
