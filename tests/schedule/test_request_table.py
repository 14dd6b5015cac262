"""Lengths and tokens of running answers, in columns and one by one, and of those that run no more."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.cache.lease import Lease
from radixrt.cache.radix_tree import EMPTY, NO_MATCH
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer, RequestLog, rows_of
from radixrt.schedule.request import Request
from radixrt.schedule.request_table import MAX_STOPS, RequestTable


def request(stop_ids: frozenset[int] = frozenset(), **params: int) -> Request:
    prompt_ids = np.array([5, 6, 7], dtype=np.int32)
    return Request(0, prompt_ids, SamplingParams(**params), max_new_tokens=4, seed=0, stop_ids=stop_ids)


def table_with(*requests: Request) -> tuple[RequestTable, list[Answer]]:
    table = RequestTable(8, 16, np.zeros(8, dtype=np.int32))
    answers = [Answer(one, arrival=0, log=RequestLog(submitted_at=0.0)) for one in requests]
    table.begin(range(len(answers)), requests, [answer.tokens() for answer in answers])
    for row, answer in enumerate(answers):
        answer.run(lease(table, row), table)
    return table, answers


def lease(table: RequestTable, row: int) -> Lease:
    return Lease(
        row,
        NO_MATCH.node,
        committed=0,
        matched=0,
        loaded=0,
        tokens=EMPTY,
        allocated_lens=table.allocated_lens,
        begun=0,
    )


def test_the_columns_are_those_of_each_answer() -> None:
    table, answers = table_with(request(), request(), request())
    table.allocated_lens[:3] = [2, 3, 5]
    for answer, extended_len in zip(answers, [2, 3, 3], strict=True):
        answer.extended_len = extended_len
    table.append(np.array([2], np.int32), np.array([9], np.int32))
    assert [answer.known_len for answer in answers] == [3, 3, 4]
    assert [answer.extend_len for answer in answers] == [3, 3, 3]
    assert [answer.computed_len for answer in answers] == [2, 3, 3]  # a decoding one: all but the last token
    assert table.total_lens(rows_of(answers)).tolist() == [3, 4, 6]
    assert [answer.tokens().tolist() for answer in answers] == [[5, 6, 7], [5, 6, 7], [5, 6, 7, 9]]
    assert answers[2].tokens(2).tolist() == [5, 6]
    answers[1].append(4)
    assert (answers[1].tokens().tolist(), table.known_lens[1]) == ([5, 6, 7, 4], 4)


def test_tokens_end_an_answer() -> None:
    table, answers = table_with(request(frozenset([9])), request(frozenset([1, 2])), request())
    index = np.arange(3, dtype=np.int32)
    assert table.append(index, np.array([9, 9, 9], np.int32)).tolist() == [True, False, False]
    for _ in range(2):
        assert not table.append(index[1:], np.array([8, 8], np.int32)).any()
    assert table.append(index[1:], np.array([8, 8], np.int32)).all()  # max_new_tokens
    assert answers[1].tokens().tolist() == [5, 6, 7, 9, 8, 8, 8]


@pytest.mark.parametrize(
    ("asked", "is_special"),
    [
        (request(frozenset(range(MAX_STOPS))), False),
        (request(frozenset(range(MAX_STOPS + 1))), True),
        (request(logprobs=0), True),
    ],
)
def test_what_is_booked_on_its_own(asked: Request, is_special: bool) -> None:
    table, _ = table_with(asked)
    assert table.is_special[0] == is_special


@pytest.mark.parametrize(
    ("asked", "begins_alone"), [(request(), False), (request(n=2), True), (request(logprobs=0), True)]
)
def test_whose_first_tokens_are_booked_on_their_own(asked: Request, begins_alone: bool) -> None:
    table, _ = table_with(asked)
    assert table.begins_alone[0] == begins_alone


def test_what_runs_no_more_outlives_its_row() -> None:
    table, (answer, other) = table_with(request(), request())
    table.allocated_lens[0] = 3
    answer.stop()
    assert not table.runs[0]
    other.stop()
    other.run(lease(table, 0), table)
    table.tokens[0] = 1
    assert (answer.tokens().tolist(), answer.known_len, answer.extend_len) == ([5, 6, 7], 3, 0)
    assert answer.launched_len == 3


def test_tokens_that_come_late_are_kept_too() -> None:
    _, (answer,) = table_with(request())
    answer.stop()
    for token in (8, 9):
        answer.append(token)
    assert (answer.tokens().tolist(), answer.tokens(4).tolist()) == ([5, 6, 7, 8, 9], [5, 6, 7, 8])
    assert answer.tokens().dtype == np.int32
    assert answer.request.prompt_ids.tolist() == [5, 6, 7]
