"""Who waits and who runs, and how an answer goes from one to the other."""

from __future__ import annotations

import bisect

import numpy as np

from radixrt.cache.prefix_cache import Lease, PrefixCache
from radixrt.schedule.answer import Answer, AnswerState
from radixrt.schedule.passes import Int32Array
from radixrt.schedule.request_table import RequestTable
from radixrt.schedule.sampling_table import SamplingTable


class Roster:
    """The answers that have not ended.

    Attributes:
        waiting, running: in order of arrival, and of admission.
        table, sampling: lengths, tokens and sampling parameters of the running ones.
        changes: times that an answer has begun or stopped running.
        num_retractions: running answers that were taken back to the queue.
    """

    def __init__(self, cache: PrefixCache) -> None:
        rows = cache.rows
        self.waiting, self.running = list[Answer](), list[Answer]()
        self.table = RequestTable(rows.max_requests, rows.max_context_len, cache.allocated_lens)
        self.sampling = SamplingTable(rows.max_requests)
        self.changes = self.num_retractions = 0
        self._cache = cache

    def running_rows(self) -> Int32Array:
        """`[len(running)]`"""
        leases = [answer.lease for answer in self.running]
        return np.fromiter((lease.row for lease in leases if lease is not None), np.int32, len(leases))

    def enqueue(self, answer: Answer) -> None:
        """Put an answer in its place in the queue, after those of the same arrival."""
        answer.state = AnswerState.WAITING
        bisect.insort(self.waiting, answer, key=lambda other: other.arrival)

    def leave_queue(self, answer: Answer) -> None:
        at = bisect.bisect_left(self.waiting, answer.arrival, key=lambda other: other.arrival)
        while self.waiting[at] is not answer:  # the answers to one prompt arrive together
            at += 1
        del self.waiting[at]

    def admit(self, answer: Answer, lease: Lease) -> None:
        """Let a waiting answer run with what it holds."""
        self.leave_queue(answer)
        answer.run(lease, self.table)
        self.sampling.admit(lease.row, answer)
        self.running.append(answer)
        self.changes += 1

    def retract(self, answer: Answer) -> None:
        """Take a running answer back to the queue. Its output stays, its KV becomes evictable."""
        self.release(answer)
        self.enqueue(answer)
        answer.log.retractions += 1
        self.num_retractions += 1

    def release(self, answer: Answer, reusable_len: int | None = None) -> None:
        """Stop running an answer; publish what it has computed, at most `reusable_len` tokens."""
        lease, progress = answer.lease, answer.progress
        assert lease is not None  # it runs
        published = progress.computed_len if reusable_len is None else min(progress.computed_len, reusable_len)
        self._cache.commit(lease, progress.tokens(published), published)
        self._cache.release(lease, reusable_len)
        answer.stop()
        answer.resumable_after = self._cache.passes_launched
        self.running.remove(answer)
        self.changes += 1
