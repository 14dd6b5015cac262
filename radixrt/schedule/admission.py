"""Who is admitted: order, demand, what is promised to others, and who waits for a leader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.cache.prefix_cache import PrefixCache
from radixrt.schedule.answer import Answer
from radixrt.schedule.composer import ExtendChunk
from radixrt.schedule.policy import OutputEstimate, SchedulerConfig, admission_order
from radixrt.schedule.roster import Roster


@dataclass(frozen=True)
class Admission:
    """Lets waiting answers run while memory lasts that is not promised to others.

    An answer that runs alone is never refused memory: its request was checked to fit into the pool.
    """

    cache: PrefixCache
    roster: Roster
    config: SchedulerConfig
    estimate: OutputEstimate

    def admit(self, budget: int, places: int) -> list[ExtendChunk]:
        """Admit at most `places` answers and return their first chunks, of at most `budget` tokens in all."""
        chunks: list[ExtendChunk] = []
        config, waiting = self.config, self.roster.waiting
        if not waiting or budget <= 0 or places <= 0:
            return chunks
        promised = self._promised()
        loads = config.max_loaded_chunks * config.chunked_prefill_size
        for answer in admission_order(config, waiting, lambda one: one.match_in(self.cache).length()):
            if budget <= 0 or places <= 0 or loads <= 0:
                break
            oldest = waiting[0]
            if answer is not oldest and config.is_overdue(oldest):
                break
            if answer.resumable_after > self.cache.passes_ended:
                continue  # just retracted: its tokens in flight are still to come
            match = answer.match_in(self.cache)
            if match.has_leader():
                # A follower: its leader is computing what it needs next. Room is kept for the rest of it, or
                # leaders of other prefixes would take that, and evict this prefix before it comes.
                promised += max(0, self._demand(answer) - match.leader_match_len)
                continue
            namespace, tokens = answer.request.namespace, answer.progress.tokens()
            reserve = promised + self._demand(answer) - len(tokens) if self.roster.running else 0
            lease = self.cache.acquire(namespace, tokens, match.match(), reserve)
            if lease is None:
                break
            loads -= lease.loaded
            self.roster.admit(answer, lease)
            chunk = ExtendChunk.next_of(answer, self.cache, budget)
            if chunk is None:
                self.roster.release(answer)
                self.roster.enqueue(answer)
                break
            if answer is not oldest:
                oldest.times_skipped += 1
            if answer.log.cached_tokens is None:  # hits are counted once, at the first admission
                answer.log.cached_tokens = lease.matched
                self.cache.prompt_tokens += answer.request.prompt_len
                self.cache.cached_tokens += lease.matched
            chunks.append(chunk)
            places -= 1
            budget -= len(chunk.slots)
            promised += self._demand(answer)
        return chunks

    def _demand(self, answer: Answer) -> int:
        """Slots that an answer is still expected to ask for; its last token never wants one."""
        progress, ahead = answer.progress, max(0, self.estimate.expected(answer) - 1)
        return min(progress.total_len + ahead, answer.request.max_slots) - progress.allocated_len

    def _promised(self) -> int:
        """The sum of the demands of all running answers."""
        table, rows = self.roster.table, self.roster.running_rows()
        total_lens, max_lens, prompt_lens = table.total_lens(rows), table.max_lens[rows], table.prompt_lens[rows]
        num_output = table.known_lens[rows] - prompt_lens
        expected = self.estimate.expected_each(max_lens - total_lens, num_output, table.may_stop[rows])
        max_slots = np.maximum(max_lens - 1, prompt_lens)
        demands = np.minimum(total_lens + np.maximum(0, expected - 1), max_slots) - table.allocated_lens[rows]
        return int(demands.sum())
