"""The parts of a pass, chunks of extends and a group of decodes, and how they become plain numbers. Numpy only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memory_pool.req_to_token_pool import RowChanges
from memory_pool.slot_allocator import Slots
from radixrt.cache.prefix_cache import Lease, PrefixCache
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking
from radixrt.schedule.passes import Int32Array, Pass
from radixrt.schedule.request_table import RequestTable
from radixrt.schedule.sampling_table import SamplingTable

_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class ExtendChunk:
    """Known tokens [start, start + len(slots)), one at least, of an answer's extend that one pass computes."""

    answer: Answer
    lease: Lease
    start: int
    slots: Slots
    num_samples: int  # after the last token

    @property
    def end(self) -> int:
        return self.start + len(self.slots)

    @classmethod
    def next_of(cls, answer: Answer, cache: PrefixCache, budget: int) -> ExtendChunk | None:
        """The next tokens of an extend, as many as the budget allows; None if there are no slots for them."""
        progress, log, lease = answer.progress, answer.log, answer.lease
        assert lease is not None  # it runs
        start = progress.allocated_len
        end = min(start + budget, progress.extend_len)
        slots = cache.extend(lease, end - start)
        if slots is None:
            return None
        recomputed = max(0, min(end, answer.launched_len) - start)  # lost to a retraction
        log.recomputed_tokens += recomputed
        cache.recomputed_tokens += recomputed
        if log.launched_at is None:
            log.launched_at = time.perf_counter()
        samples = end == progress.extend_len and progress.known_len < answer.request.max_len
        return cls(answer, lease, start, slots, answer.num_answers if samples else 0)

    def scored_positions(self) -> Int32Array:
        """Positions after which the prompt's next token is to be scored, ascending."""
        scored = self.answer.next_scored
        if scored is None:
            return _NONE
        # A pass before this one, still in flight, may score some of them: positions are launched once, in order.
        first, end = max(self.start, scored - 1), min(self.end, self.answer.request.prompt_len - 1)
        return np.arange(first, end, dtype=np.int32)


@dataclass(frozen=True)
class DecodeGroup:
    """N answers, in order of admission, of which a pass computes one token each, with their leases and rows `[N]`.

    `last_tokens` `[N]` are -(row + 1), for the last token that was sampled for the row. Passes share the tuples
    and arrays: nobody changes them.
    """

    answers: tuple[Answer, ...]
    leases: tuple[Lease, ...]
    rows: Int32Array
    last_tokens: Int32Array
    ones: Int32Array
    zeros: Int32Array

    @staticmethod
    def of(answers: tuple[Answer, ...]) -> DecodeGroup:
        """Of running answers."""
        leases = tuple(answer.lease for answer in answers if answer.lease is not None)
        count = len(answers)
        rows = np.fromiter((lease.row for lease in leases), np.int32, count)
        return DecodeGroup(answers, leases, rows, -(rows + 1), np.ones(count, np.int32), np.zeros(count, np.int32))

    def __len__(self) -> int:
        return len(self.answers)


class _Rows(NamedTuple):
    """Columns of a `Pass`, of some of its rows."""

    req_pool_indices: Int32Array
    prefix_lens: Int32Array
    seq_lens: Int32Array
    input_ids: Int32Array
    out_cache_loc: Int32Array
    num_samples: Int32Array
    num_scored: Int32Array


def compose(
    chunks: Sequence[ExtendChunk],
    decodes: DecodeGroup,
    slots: Slots,
    table: RequestTable,
    sampling: SamplingTable,
    row_changes: RowChanges,
) -> Booking:
    """A pass of chunks, the longer ones first, then of decodes with their slots `[N]`."""
    answers, leases, rows = decodes.answers, decodes.leases, _decode_rows(decodes, slots, table)
    scored = scored_targets = _NONE
    if chunks:
        chunks = sorted(chunks, key=lambda chunk: len(chunk.slots) == 1)  # stable
        answers = (*(chunk.answer for chunk in chunks), *answers)
        leases = (*(chunk.lease for chunk in chunks), *leases)
        positions = [chunk.scored_positions() for chunk in chunks]
        scored, scored_targets = _scored(chunks, positions)
        rows = _Rows(*map(np.concatenate, zip(_chunk_rows(chunks, positions), rows, strict=True)))
    pass_ = Pass(
        num_extends=sum(len(chunk.slots) > 1 for chunk in chunks),
        scored=scored,
        scored_targets=scored_targets,
        num_top_scored=max((chunk.answer.request.params.prompt_logprobs or 0 for chunk in chunks), default=0),
        row_changes=row_changes,
        sampling=sampling.prepare(answers, rows.req_pool_indices, rows.seq_lens, rows.num_samples),
        extended_tokens=sum(len(chunk.slots) for chunk in chunks),
        **rows._asdict(),
    )
    return Booking(pass_, answers, leases)


def _decode_rows(decodes: DecodeGroup, slots: Slots, table: RequestTable) -> _Rows:
    rows = decodes.rows
    ends = table.allocated_lens.take(rows)
    starts = ends - 1
    # The token at a decode's end may be known to the device alone.
    are_unknown = starts >= table.known_lens.take(rows)
    ids = decodes.last_tokens
    if not are_unknown.all():
        ids = np.where(are_unknown, ids, table.tokens[rows, starts])
    return _Rows(rows, starts, ends, ids, slots, decodes.ones, decodes.zeros)


def _chunk_rows(chunks: Sequence[ExtendChunk], positions: Sequence[Int32Array]) -> _Rows:
    def column(values: Iterable[int]) -> Int32Array:
        return np.fromiter(values, np.int32, len(chunks))

    return _Rows(
        req_pool_indices=column(chunk.lease.row for chunk in chunks),
        prefix_lens=column(chunk.start for chunk in chunks),
        seq_lens=column(chunk.end for chunk in chunks),
        input_ids=np.concatenate([chunk.answer.progress.tokens(chunk.end)[chunk.start :] for chunk in chunks]),
        out_cache_loc=np.concatenate([chunk.slots for chunk in chunks]),
        num_samples=column(chunk.num_samples for chunk in chunks),
        num_scored=column(map(len, positions)),
    )


def _scored(chunks: Sequence[ExtendChunk], positions: Sequence[Int32Array]) -> tuple[Int32Array, Int32Array]:
    """`Pass.scored` and `scored_targets` of a pass that begins with `chunks`."""
    scored, targets, first = [_NONE], [_NONE], 0
    for chunk, at in zip(chunks, positions, strict=True):
        if len(at):
            scored.append(at + np.int32(first - chunk.start))
            targets.append(chunk.answer.request.prompt_ids[at + 1])
        first += len(chunk.slots)
    return np.concatenate(scored), np.concatenate(targets)
