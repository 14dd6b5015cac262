"""Who is admitted: order, demand, what is promised to others, and who waits for a leader."""

from __future__ import annotations

import numpy as np

from radixrt.cache.prefix_cache import PrefixCache
from radixrt.schedule.answer import Answer
from radixrt.schedule.composer import ExtendChunk
from radixrt.schedule.policy import OutputEstimate, SchedulerConfig, admission_order
from radixrt.schedule.roster import Roster


class Admission:
    """Lets waiting answers run while memory lasts that is not promised to others.

    An answer that runs alone is never refused memory: its request was checked to fit into the pool.
    """

    def __init__(
        self, cache: PrefixCache, roster: Roster, config: SchedulerConfig, estimate: OutputEstimate
    ) -> None:
        self._cache = cache
        self._roster = roster
        self._config = config
        self._estimate = estimate

    def admit(self, budget: int, active: int) -> list[ExtendChunk]:
        """Admit answers and return their first chunks, up to `budget` tokens and max_running_requests answers.

        `active` of the running ones are in this pass or in one to come.
        """
        chunks: list[ExtendChunk] = []
        config, waiting = self._config, self._roster.waiting
        if not waiting or budget <= 0 or active >= config.max_running_requests:
            return chunks
        promised = self._promised()
        loads = config.max_loaded_chunks * config.chunked_prefill_size
        for answer in admission_order(config, waiting, lambda one: one.match_in(self._cache).length()):
            if budget <= 0 or active >= config.max_running_requests or loads <= 0:
                break
            oldest = waiting[0]
            if answer is not oldest and config.is_overdue(oldest):
                break
            if answer.resumable_after > self._cache.passes_ended:
                continue  # just retracted: its tokens in flight are still to come
            match = answer.match_in(self._cache)
            if match.has_leader():
                # A follower: its leader is computing what it needs next. Room is kept for the rest of it, or
                # leaders of other prefixes would take that, and evict this prefix before it comes.
                promised += max(0, self._demand(answer) - match.leader_match_len())
                continue
            namespace, tokens = answer.request.namespace, answer.progress.tokens()
            reserve = promised + self._demand(answer) - len(tokens) if self._roster.running else 0
            lease = self._cache.acquire(namespace, tokens, match.match(), reserve)
            if lease is None:
                break
            loads -= lease.loaded
            self._roster.admit(answer, lease)
            chunk = ExtendChunk.next_of(answer, self._cache, budget)
            if chunk is None:
                self._roster.release(answer)
                self._roster.enqueue(answer)
                break
            if answer is not oldest:
                oldest.times_skipped += 1
            if answer.log.cached_tokens is None:  # hits are counted once, at the first admission
                answer.log.cached_tokens = lease.matched
                self._cache.count(prompt=answer.request.prompt_len, cached=lease.matched)
            chunks.append(chunk)
            active += 1
            budget -= len(chunk.slots)
            promised += self._demand(answer)
        return chunks

    def _demand(self, answer: Answer) -> int:
        """Slots that an answer is still expected to ask for; its last token never wants one."""
        progress, ahead = answer.progress, max(0, self._estimate.expected(answer) - 1)
        return min(progress.total_len + ahead, answer.request.max_slots) - progress.allocated_len

    def _promised(self) -> int:
        """The sum of the demands of all running answers."""
        table, rows = self._roster.table, self._roster.running_rows()
        total_lens, max_lens, prompt_lens = table.total_lens(rows), table.max_lens[rows], table.prompt_lens[rows]
        num_output = table.known_lens[rows] - prompt_lens
        expected = self._estimate.expected_each(max_lens - total_lens, num_output, table.may_stop[rows])
        max_slots = np.maximum(max_lens - 1, prompt_lens)
        demands = np.minimum(total_lens + np.maximum(0, expected - 1), max_slots) - table.allocated_lens[rows]
        return int(demands.sum())
