"""One answer: what it may take from the cache, and what is told of it."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer, RequestLog
from radixrt.schedule.request import Request


def answer(**params: int) -> Answer:
    prompt_ids = np.arange(10, dtype=np.int32)
    request = Request(3, prompt_ids, SamplingParams(**params), max_new_tokens=4, seed=0)
    return Answer(request, arrival=0, log=RequestLog(submitted_at=100.0))


@pytest.mark.parametrize(("start", "limit"), [(None, 9), (0, 0), (1, 0), (4, 3), (9, 8)])
def test_tokens_whose_logits_are_wanted_are_computed(start: int | None, limit: int) -> None:
    params = {} if start is None else {"prompt_logprobs": 0, "prompt_logprobs_start": start}
    assert answer(**params).match_limit == limit


def test_its_other_answers_are_not_scored_and_not_counted() -> None:
    first = answer(n=3, prompt_logprobs=0)
    assert first.num_answers == 3
    first.children = (first.fork(1), first.fork(2))
    first.append(7)
    assert [one.sample_index for one in first.children[1].family] == [0, 1, 2]
    assert [one.num_answers for one in first.family] == [1, 1, 1]
    assert [one.next_scored for one in first.family] == [1, None, None]
    first.children[0].log.recomputed_tokens = 1
    first.log.cached_tokens = 6
    usage = first.usage()
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens)
    assert (*counts, usage.completion_tokens, usage.recomputed_tokens) == (10, 6, 4, 1, 1)


def test_times_are_since_submission_until_the_last_answer_ends() -> None:
    first = answer(n=2)
    first.children = (first.fork(1),)
    first.log.launched_at, first.log.first_token_at = 100.5, 101.0
    first.log.finished_at, first.children[0].log.finished_at = 102.0, 103.0
    timings = first.timings()
    assert (timings.queue, timings.first_token, timings.total) == (0.5, 1.0, 3.0)


def test_one_that_never_ran_was_in_the_queue_to_its_end() -> None:
    waiting = answer()
    waiting.log.finished_at = 104.0
    timings = waiting.timings()
    assert (timings.queue, timings.first_token, timings.total) == (4.0, None, 4.0)


def test_a_token_changes_what_it_would_find() -> None:
    one = answer()
    one.pending_match = object()  # type: ignore[assignment]
    one.append(3)
    assert one.pending_match is None
    assert one.output_ids().tolist() == [3]


def test_its_tokens_are_its_own_though_its_row_is_left_to_another_meanwhile() -> None:
    """As when one thread reads them while another one retracts it, and admits the next."""
    one = answer()
    one.append(7)
    own = one.tokens().tolist()

    class Row(np.ndarray):
        def __getitem__(self, key: object) -> object:
            one._tokens = np.array(own, np.int32)  # it stops
            self.fill(99)  # the next one begins
            return super().__getitem__(key)  # type: ignore[index]

    row = np.zeros(20, np.int32)
    row[: len(own)] = own
    one._tokens = row.view(Row)
    assert one.tokens_between(8, 11).tolist() == own[8:11]
