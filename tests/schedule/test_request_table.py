"""Lengths and tokens of answers: the columns, one row of them, and a record that stands alone."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request
from radixrt.schedule.request_table import MAX_STOPS, Parked, RequestTable, TableRow


def request(stop_ids: frozenset[int] = frozenset(), **params: int) -> Request:
    prompt_ids = np.array([5, 6, 7], dtype=np.int32)
    return Request(0, prompt_ids, SamplingParams(**params), max_new_tokens=4, seed=0, stop_ids=stop_ids)


def table_with(*requests: Request) -> tuple[RequestTable, list[TableRow]]:
    table = RequestTable(8, 16, np.zeros(8, dtype=np.int32))
    return table, [table.begin(i, one, one.prompt_ids) for i, one in enumerate(requests)]


def test_the_columns_are_those_of_each_row() -> None:
    table, rows = table_with(request(), request(), request())
    table.allocated_lens[:3] = [2, 3, 5]
    table.extended_lens[:3] = [2, 3, 3]
    table.append(np.array([2], np.int32), np.array([9], np.int32))
    index = np.arange(3, dtype=np.int32)
    assert [row.known_len for row in rows] == [3, 3, 4]
    assert [row.allocated_len for row in rows] == [2, 3, 5]
    assert [row.computed_len for row in rows] == [2, 3, 3]  # a decoding one: all but the last token
    assert [row.total_len for row in rows] == table.total_lens(index).tolist() == [3, 4, 6]
    assert [row.tokens().tolist() for row in rows] == [[5, 6, 7], [5, 6, 7], [5, 6, 7, 9]]
    assert rows[2].tokens(2).tolist() == [5, 6]


def test_tokens_end_an_answer() -> None:
    table, rows = table_with(request(frozenset([9])), request(frozenset([1, 2])), request())
    index = np.arange(3, dtype=np.int32)
    assert table.append(index, np.array([9, 9, 9], np.int32)).tolist() == [True, False, False]
    for _ in range(2):
        assert not table.append(index[1:], np.array([8, 8], np.int32)).any()
    assert table.append(index[1:], np.array([8, 8], np.int32)).all()  # max_new_tokens
    assert rows[1].tokens().tolist() == [5, 6, 7, 9, 8, 8, 8]


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
    assert table.wants_logprobs[0] == (asked.params.logprobs is not None)


def test_what_is_parked_outlives_its_row() -> None:
    table, (row,) = table_with(request())
    table.allocated_lens[0] = 3
    parked = row.end()
    assert not table.runs[0]
    table.begin(0, request(), np.array([1, 1, 1, 1], dtype=np.int32))
    assert (parked.tokens().tolist(), parked.known_len, parked.total_len) == ([5, 6, 7], 3, 4)
    assert (parked.allocated_len, parked.computed_len, parked.extend_len) == (0, 0, 0)


def test_tokens_that_come_late_are_parked_too() -> None:
    prompt = np.array([5, 6], dtype=np.int32)
    parked = Parked(prompt, total_len=3)
    for token in (7, 8):
        parked.append(token)
    assert (parked.tokens().tolist(), parked.tokens(3).tolist(), parked.total_len) == ([5, 6, 7, 8], [5, 6, 7], 4)
    assert parked.tokens().dtype == np.int32
    assert prompt.tolist() == [5, 6]
