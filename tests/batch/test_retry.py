"""Retries of lines whose pass failed."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from radixrt.batch.retry import Retries


@given(st.data())
def test_retries_end(data: st.DataObject) -> None:
    """Whatever fails, in passes of whatever lines: a line ends, and groups are no more than is promised."""
    count = data.draw(st.integers(1, 40))
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    most = data.draw(st.integers(1, 40))  # lines that a pass can hold
    retries = Retries()
    assert not retries.is_active
    assert retries.book(list(range(count)))
    ended: dict[int, bool] = {}
    again = dict.fromkeys(range(count), 0)
    groups = 0
    while group := retries.take():
        assert retries.is_active
        groups += 1
        assert not set(group) & ended.keys()
        for position in group:
            again[position] += 1
        rest = group
        while rest:  # the passes of a group: some of its lines each
            size = data.draw(st.integers(1, len(rest)))
            together, rest = rest[:size], rest[size:]
            if bad & set(together) or len(together) > most:
                if not retries.book(together):
                    assert group == together
                    ended.update(dict.fromkeys(together, False))
            else:
                ended.update(dict.fromkeys(together, True))
    assert not retries.is_active
    assert ended == {position: position not in bad for position in range(count)}
    assert groups <= max(1, 2 * count - 2)
    assert max(again.values()) <= max(1, math.ceil(math.log2(count)))
