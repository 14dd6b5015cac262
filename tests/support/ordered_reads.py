"""What the items of plans for deterministic attention read."""

from __future__ import annotations

from typing import Any

from radixrt.execution.attention.planner import HostArrays
from triton_ops.attention.ordered import MAX_CHAIN
from triton_ops.attention.plan import AttentionPlan, ExtendPlan


def check_ordered_reads(
    plan: AttentionPlan[Any] | ExtendPlan[Any],
    lens: list[int],
    host: HostArrays | None = None,
    *,
    superblock: int,
    window: int | None = None,
) -> None:
    """The items of each row cover its first `lens` positions once, in ascending order, by superblocks; with a
    `window` from the multiple of 16 on before which no row of the tile sees anything.

    `host`: they are those of extends, which may be of more.
    """
    begins = [0] * len(lens)
    states: dict[int, tuple[int, int, int, int]] = {}  # start, end, row, source
    last: dict[int, tuple[int, int, int]] = {}  # start, end, source of an item that writes a row's result

    def add(items: str, i: int, rows: list[int]) -> None:
        start = int(getattr(plan, f"{items}_starts")[i])
        end = start + int(getattr(plan, f"{items}_lens")[i])
        partial, source = (int(getattr(plan, f"{items}_{name}")[i]) for name in ("partials", "sources"))
        assert partial < 0 or end <= (start // superblock + 1) * superblock
        for nth, row in enumerate(rows if end > start else []):
            goes_on_from = source + nth if source >= 0 else -1
            if partial >= 0:
                assert partial + nth not in states
                states[partial + nth] = start, end, row, goes_on_from
            else:
                assert row not in last
                last[row] = start, end, goes_on_from

    for i in range(len(plan.item_lens)):
        if isinstance(plan, AttentionPlan):
            first, count = plan.item_query_starts[i], plan.item_query_lens[i]
        else:
            assert host is not None
            request, nth = plan.item_requests[i], plan.item_query_starts[i]
            first = host["extend_start_loc"][request] + nth
            count = min(plan.tile_tokens, host["extend_seq_lens"][request] - nth)
        if window is not None and first < len(lens):
            begin = max(lens[first] - window, 0) // 16 * 16
            begins[first : first + count] = [begin] * len(begins[first : first + count])
        add("item", i, list(range(first, first + count)))
    for i in range(len(plan.shared_lens)):
        first, count = plan.shared_query_starts[i], plan.shared_query_lens[i]
        add("shared", i, [int(row) for row in plan.shared_queries[first : first + count]])
    for count, level, source in zip(plan.shared_query_lens, plan.shared_levels, plan.shared_sources, strict=True):
        chain = 0
        while count and source >= 0:
            chain, source = chain + 1, states[source][3]
        assert not count or level == chain < MAX_CHAIN

    def covered(row: int, number: int) -> tuple[int, int]:
        """What a state holds, with those that it goes on from."""
        start, end, of, source = states[number]
        assert of == row
        if source < 0:
            assert start % superblock == 0 or start == begins[row]
            return start, end
        begin, until = covered(row, source)
        assert until == start
        assert end - begin <= superblock
        return begin, end

    for row, length in enumerate(lens):
        lists = plan.row_partial_starts if row not in last else getattr(plan, "tail_partial_starts", ())
        position = begins[row]
        for number in plan.row_partials[lists[row] : lists[row + 1]] if len(lists) else ():
            start, end = covered(row, number)
            assert start == position
            position = end
        if row in last:
            start, end, source = last[row]
            assert position == (covered(row, source)[0] if source >= 0 else start)
            assert source < 0 or covered(row, source)[1] == start
            position = end
        assert position >= length
        assert position == length or host
