"""Drafts: decodes of a world verify tokens that somebody has guessed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memory_pool.req_to_token_pool import RowChanges
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking
from radixrt.schedule.passes import PassResult
from tests.support.world.model import VOCAB, continuation

if TYPE_CHECKING:
    from tests.support.world.world import World


class Drafts:
    """Gives some decodes of what the scheduler has planned up to `MAX` more positions, as one that drafts would.

    Nothing may be in flight then: the last token of each answer must be known.
    """

    MAX = 3

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random.Random(0)

    def added_to(self, booking: Booking) -> Booking:
        """The same pass with drafts, for which there are slots. The runner is told which rows have some."""
        world, pass_ = self.world, booking.pass_
        firsts = np.cumsum(pass_.seq_lens - pass_.prefix_lens)[:-1]
        ids, slots = np.split(pass_.input_ids, firsts), np.split(pass_.out_cache_loc, firsts)
        num_drafts = np.zeros(pass_.num_rows, dtype=np.int32)
        left = world.runner.max_samples - int(pass_.num_samples.sum())
        for i, answer in enumerate(booking.answers):
            lease = answer.lease
            room = answer.request.max_slots - int(pass_.seq_lens[i])
            count = min(self.random.randint(0, self.MAX), room, left)
            is_decode = pass_.prefix_lens[i] >= answer.extend_len
            more = world.cache.extend(lease, count) if is_decode and count > 0 else None
            if more is not None:
                num_drafts[i] = count
                left -= count
                ids[i] = np.append(ids[i], self._guessed(answer, count))
                slots[i] = np.append(slots[i], more)
                world.runner.ends[lease] += count
                world.runner.tokens_launched[id(answer)] += count
        world.runner.verifies = frozenset(np.flatnonzero(num_drafts).tolist())
        if not world.runner.verifies:
            return booking
        num_samples = pass_.num_samples + num_drafts
        before, after = pass_.row_changes, world.rows.take_changes()
        changes = RowChanges(
            np.concatenate([before.rows, after.rows]),
            np.concatenate([before.positions, after.positions]),
            np.concatenate([before.slots, after.slots]),
        )
        logits_rows = np.repeat(np.arange(pass_.num_rows, dtype=np.int32), num_samples)
        wants_logprobs = np.array([answer.request.params.logprobs is not None for answer in booking.answers])
        logprob_rows = np.flatnonzero(wants_logprobs[logits_rows]).astype(np.int32)
        arrays = {**pass_.sampling.arrays, "logprob_rows": logprob_rows}
        pass_ = replace(
            pass_,
            seq_lens=pass_.seq_lens + num_drafts,
            input_ids=np.concatenate(ids),
            out_cache_loc=np.concatenate(slots),
            num_samples=num_samples,
            row_changes=changes,
            sampling=replace(pass_.sampling, logits_rows=logits_rows, arrays=arrays),
        )
        return replace(booking, pass_=pass_)

    def _guessed(self, answer: Answer, count: int) -> list[int]:
        """What the model will say, or something else from a random place on."""
        request, known = answer.request, answer.tokens()
        weights = self.world.weights[id(answer)]
        guessed = continuation(request.namespace, known, count, frozenset(), answer.sample_index, weights)
        right = self.random.randint(0, count)
        return guessed[:right] + [(token + 1) % VOCAB for token in guessed[right:]]

    def verified(self, booking: Booking, result: PassResult) -> None:
        """Count what was computed in vain as not launched."""
        runner, pass_ = self.world.runner, booking.pass_
        for i, answer in enumerate(booking.answers):
            lease = answer.lease
            count, accepted = int(pass_.num_samples[i]), int(result.accepted[i])
            if i in runner.verifies and lease is not None and result.finite[i]:
                runner.ends[lease] -= count - accepted
                runner.tokens_launched[id(answer)] -= count - accepted
                self.world.computed[lease] = int(pass_.prefix_lens[i]) + accepted
                self.world.events["draft refused"] += accepted < count
                self.world.events["draft accepted"] += accepted > 1
