"""What decodes share: every position is read once for each, the same slots for all, and never dearer than flat."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from radixrt.execution.attention.pass_plans import Capacity
from radixrt.execution.attention.shared_segments import SharedSegments
from radixrt.execution.attention.slot_tree import MAX_LEVELS
from radixrt.execution.attention.tuning import PlanTuning, TreeCosts
from radixrt.schedule.passes import Pass
from tests.support.planned_reads import TiledShape
from tests.support.world.runner import SimulatedPass, SimulatedRunner
from tests.support.world.walk import Walk, random_sizes
from tests.support.world.world import World
from triton_ops.attention.plan import SharedItems
from triton_ops.implementation import GPU

SHAPE: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "kv_bytes": 2,
    "num_programs": 2,  # one item at a time: nothing is cut to fill a wave
    "rows_at_once": 3,
}
FREE = TreeCosts(operations=np.inf, item=0.0, partial_crossings=0.0, launches=0.0)
CHEAP = TreeCosts(reread_bandwidth=4.2e12, operations=2e15, item=1e-9, partial_crossings=0.1, launches=1e-9)


@dataclass(frozen=True)
class Tree:
    """Rows of `req_to_token` as a radix tree makes them: `paths[i]` are the nodes, each of `tokens[n]` slots, on
    the way to row i, which has `own[i]` tokens more; without any it is padded.
    """

    tokens: list[int]
    paths: list[list[int]]
    own: list[int]

    def table(self, seed: int = 0) -> tuple[Any, Any, Any]:
        """`req_to_token`, the rows' lines in any order, and their lengths. Other cells hold anyone's slots."""
        random = np.random.default_rng(seed)
        pool = iter(
            random.permutation(np.arange(1, 1 + sum(self.tokens) + sum(self.own), dtype=np.int32)).tolist()
        )
        node_slots = [[next(pool) for _ in range(count)] for count in self.tokens]
        lengths = [
            sum(self.tokens[node] for node in path) + own if own else 0
            for path, own in zip(self.paths, self.own, strict=True)
        ]
        table = random.integers(1, 50, (len(self.paths) + 2, max(lengths, default=0) + 3), np.int32)
        lines = random.permutation(len(table))[: len(self.paths)].astype(np.int32)
        for line, path, own in zip(lines, self.paths, self.own, strict=True):
            if own:
                slots = [
                    *chain.from_iterable(node_slots[node] for node in path),
                    *(next(pool) for _ in range(own)),
                ]
                table[line, : len(slots)] = slots
        return table, lines, np.array(lengths, np.int32)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, max_rows: int = 14) -> Tree:
    """Of any depth and fan-out; rows end at nodes within, some twice, some are padded."""
    count = draw(st.integers(1, max_nodes))
    paths: list[list[int]] = []
    for node in range(count):
        # Chains are as frequent as all else together.
        above = draw(st.one_of(st.just(node - 1), st.integers(-1, node - 1)))
        paths.append([*(paths[above] if above >= 0 else []), node])
    size = st.one_of(st.just(1), st.integers(1, 9), st.integers(60, 700))
    tokens = draw(st.lists(size, min_size=count, max_size=count))
    ends = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=max_rows))
    own = [draw(st.one_of(st.just(1), st.integers(0, 200))) for _ in ends]
    return Tree(tokens, [paths[end] for end in ends], own)


def segments(costs: TreeCosts = CHEAP, *, max_stops: int = PlanTuning.max_stops, **changed: Any) -> SharedSegments:
    of = SHAPE | changed
    one_sm = GPU(capability=90, num_sms=1)
    heads = of["num_heads"], of["num_kv_heads"], of["head_dim"]
    shape = TiledShape(one_sm, *heads, torch.float16, rows_at_once=of["rows_at_once"])
    tuning = PlanTuning(costs=costs, max_stops=max_stops, shared_programs_per_sm=of["num_programs"])
    return SharedSegments(shape, of["kv_bytes"], tuning)


def find(
    of: SharedSegments,
    table: Any,
    lines: Any,
    seq_lens: Any,
    *,
    max_items: int = 1 << 20,
    max_partials: int = 1 << 20,
) -> tuple[Any, SharedItems]:
    """What decodes of `seq_lens` share, without limits where none are told."""
    lens = np.maximum(seq_lens - 1, 0)
    return of.find(table, lines, lens, capacity=Capacity(max_items, max_partials))


def check(table: Any, lines: Any, seq_lens: Any, tail_starts: Any, items: SharedItems) -> None:
    """Each row reads each of its positions once, in its own slots; its last one by itself."""
    assert all(array.dtype == np.int32 for array in (tail_starts, *vars(items).values()))
    reads = np.zeros((len(lines), table.shape[1]), int)
    for row, (start, end) in enumerate(zip(tail_starts, seq_lens, strict=True)):
        assert start < end or start == end == 0
        reads[row, start:end] += 1
    for line, start, length, rows in each_item(items):
        assert length > 0
        assert len(rows)
        for row in rows:
            reads[row, start : start + length] += 1
            own = table[lines[row], start : start + length]
            assert (own == table[line, start : start + length]).all()
    assert (reads == (np.arange(table.shape[1]) < seq_lens[:, None])).all()


def each_item(items: SharedItems) -> list[tuple[int, int, int, list[int]]]:
    """Line, start, length and rows of each."""
    return [
        (line, start, length, items.queries[first : first + count].tolist())
        for line, start, length, first, count in zip(
            items.req_pool_indices.tolist(),
            items.starts.tolist(),
            items.lens.tolist(),
            items.query_starts.tolist(),
            items.query_lens.tolist(),
            strict=True,
        )
    ]


def readers(table: Any, lines: Any, items: SharedItems) -> dict[int, set[int]]:
    """The lines that read each shared slot together."""
    found = defaultdict(set)
    for line, start, length, rows in each_item(items):
        for slot in table[line, start : start + length].tolist():
            found[slot] |= {int(lines[row]) for row in rows}
    return found


def prices(costs: TreeCosts, **changed: Any) -> dict[str, float]:
    """Seconds of a token, of one that others read, too, of a tile's products with one, of a partial result and of
    an item.
    """
    shape = SHAPE | changed
    size = 2 * shape["num_kv_heads"] * shape["head_dim"] * shape["kv_bytes"]
    return {
        "token": size / costs.bandwidth,
        "reread": size / costs.reread_bandwidth,
        "tile": 4 * shape["num_heads"] * shape["head_dim"] * shape["rows_at_once"] / costs.operations,
        "partial": costs.partial_crossings * 4 * shape["num_heads"] * (shape["head_dim"] + 1) / costs.bandwidth,
        "item": costs.item * shape["num_kv_heads"] / shape["num_programs"],
    }


def model_cost(
    costs: TreeCosts, tails: int, rows_with_tails: int, nodes: list[tuple[int, int, int]], **changed: Any
) -> float:
    """Seconds of a plan by the model: `nodes` are tokens, rows and items of each segment."""
    of = prices(costs, **changed)
    total = costs.launches * bool(nodes) + tails * of["reread"] + rows_with_tails * of["partial"]
    for tokens, rows, items in nodes:
        total += tokens * max(of["token"], items * of["tile"]) + rows * of["partial"] + items * of["item"]
    return total


def cost_of(table: Any, seq_lens: Any, tail_starts: Any, items: SharedItems, costs: TreeCosts, **of: Any) -> float:
    """Seconds of a plan by the model, of which the items of the same tokens are one segment."""
    pieces: dict[int, list[int]] = {}
    for line, start, length, rows in each_item(items):
        piece = pieces.setdefault(int(table[line, start]), [length, 0, 0])
        piece[1] += len(rows)
        piece[2] += 1
    nodes = [(length, rows, count) for length, rows, count in pieces.values()]
    return model_cost(costs, int((seq_lens - tail_starts).sum()), int((tail_starts > 0).sum()), nodes, **of)


COSTS = st.builds(
    TreeCosts,
    reread_bandwidth=st.sampled_from([4.2e12, 7.5e12]),
    operations=st.sampled_from([1e13, 2e14, np.inf]),
    item=st.sampled_from([0.0, 1e-9, 1e-7]),
    partial_crossings=st.sampled_from([0.0, 0.1, 2.0]),
    launches=st.sampled_from([0.0, 1e-9, 1e-7]),
)


@given(trees(), COSTS, st.integers(1, 5), st.sampled_from([2, 16, 132]), st.integers(0, 3))
def test_every_position_is_read_once_and_no_plan_is_dearer_than_flat(
    tree: Tree, costs: TreeCosts, rows_at_once: int, num_programs: int, seed: int
) -> None:
    table, lines, seq_lens = tree.table(seed)
    of = {"rows_at_once": rows_at_once, "num_programs": num_programs}
    tail_starts, items = find(segments(costs, **of), table, lines, seq_lens)
    check(table, lines, seq_lens, tail_starts, items)
    assert (items.query_lens <= rows_at_once).all()
    flat = model_cost(costs, int(seq_lens.sum()), 0, [])
    assert cost_of(table, seq_lens, tail_starts, items, costs, **of) <= flat * (1 + 1e-9)


@given(trees(), COSTS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_requests_of_several_rows_read_every_position_once_for_each(
    tree: Tree, costs: TreeCosts, rows_at_once: int, random: Any
) -> None:
    """Query rows stand in any order, with gaps; plans are no dearer than tiles that read by themselves."""
    table, lines, seq_lens = tree.table()
    lens = np.maximum(seq_lens - 1, 0)
    counts = np.array([random.randint(1, 9) if length else 0 for length in lens], np.int32)
    first_rows, at = np.zeros_like(counts), random.randint(0, 3)
    for request in random.sample(range(len(lens)), len(lens)):
        first_rows[request], at = at, at + counts[request] + random.randint(0, 2)
    of = segments(costs, rows_at_once=rows_at_once)
    tail_starts, items = of.find(
        table, lines, lens, query_rows=(first_rows, counts), capacity=Capacity(1 << 20, 1 << 20)
    )
    assert (items.query_lens <= rows_at_once).all()
    # Every query row as a request of one row, whose last token is its own.
    request = np.repeat(np.arange(len(lens)), counts)
    nth = np.arange(len(request)) - (np.cumsum(counts) - counts)[request]
    number = np.full(at + 1, -1)
    number[first_rows[request] + nth] = np.arange(len(request))
    queries = number[items.queries].astype(np.int32)
    assert (queries >= 0).all()
    every = replace(items, queries=queries)
    check(table, lines[request], (lens + 1)[request], tail_starts[request], every)

    of_all = prices(costs, rows_at_once=rows_at_once)
    apiece = np.maximum(of_all["reread"], -(-counts // rows_at_once) * of_all["tile"])  # [R], tiles of its own
    shared = cost_of(table, tail_starts[request], tail_starts[request], every, costs, rows_at_once=rows_at_once)
    assert shared + (lens - tail_starts) @ apiece <= lens @ apiece * (1 + 1e-9)


@given(trees(), st.integers(0, 3), st.sampled_from([1, 3, PlanTuning.max_stops]))
def test_where_nothing_else_costs_each_token_is_read_once(tree: Tree, seed: int, max_stops: int) -> None:
    """Whether rows are sorted by all stops at once or in rounds."""
    table, lines, seq_lens = tree.table(seed)
    tail_starts, items = find(segments(FREE, max_stops=max_stops), table, lines, seq_lens)
    expected = defaultdict(set)
    for line, length in zip(lines.tolist(), seq_lens.tolist(), strict=True):
        for slot in table[line, : max(length - 1, 0)].tolist():
            expected[slot].add(line)
    shared = {slot: members for slot, members in expected.items() if len(members) > 1}
    assert readers(table, lines, items) == shared
    check(table, lines, seq_lens, tail_starts, items)


@given(trees(max_nodes=6), COSTS, st.integers(1, 5))
@example(  # a second partial result, of its tail, makes the short node too dear
    Tree([600, 25], [[0], [0], [1], [1]], [5] * 4),
    replace(FREE, partial_crossings=2.0, reread_bandwidth=4.2e12),
    3,
)
def test_no_other_choice_of_nodes_is_cheaper(tree: Tree, costs: TreeCosts, rows_at_once: int) -> None:
    table, lines, seq_lens = tree.table()
    of = {"rows_at_once": rows_at_once}
    tail_starts, items = find(segments(costs, **of), table, lines, seq_lens)
    found = cost_of(table, seq_lens, tail_starts, items, costs, **of)

    rows = [row for row in range(len(lines)) if seq_lens[row]]
    prefixes: dict[bytes, list[int]] = defaultdict(list)  # of all that rows share
    for a, b in combinations(rows, 2):
        least = min(seq_lens[a], seq_lens[b]) - 1
        differ = table[lines[a], :least] != table[lines[b], :least]
        stop = int(differ.argmax()) if differ.any() else least
        prefixes[table[lines[a], :stop].tobytes()] = []
    nodes = []
    for prefix in prefixes:
        stop = len(prefix) // 4
        members = [r for r in rows if seq_lens[r] > stop and table[lines[r], :stop].tobytes() == prefix]
        nodes.append((stop, frozenset(members)))
    nodes = sorted((node for node in nodes if node[0]), key=lambda node: node[0])
    for chosen in chain.from_iterable(combinations(nodes, count) for count in range(len(nodes) + 1)):
        tails = dict.fromkeys(rows, 0)
        read = []
        for stop, members in chosen:
            some = next(iter(members))
            read.append((stop - tails[some], len(members), -(-len(members) // rows_at_once)))
            tails |= dict.fromkeys(members, stop)
        left = sum(int(seq_lens[row]) - tails[row] for row in rows)
        other = model_cost(costs, left, sum(start > 0 for start in tails.values()), read, **of)
        assert found <= other * (1 + 1e-9)


@given(trees(), st.integers(0, 3), st.integers(0, 8), st.integers(0, 20))
@example(Tree([6400], [[0]] * 6, [9] * 6), 0, 7, 100)
@example(Tree([6400], [[0]] * 6, [9] * 6), 0, 100, 19)
def test_limits_are_kept(tree: Tree, seed: int, max_items: int, max_partials: int) -> None:
    table, lines, seq_lens = tree.table(seed)
    wide = segments(FREE, num_programs=40)
    found = find(wide, table, lines, seq_lens, max_items=max_items, max_partials=max_partials)
    check(table, lines, seq_lens, *found)
    assert len(found[1].lens) <= max_items
    assert found[1].query_lens.sum() <= max_partials


def test_the_least_saving_is_given_up_first() -> None:
    table, lines, seq_lens = Tree([100, 300, 200], [[node] for node in (0, 1, 2, 2, 1, 0)], [5] * 6).table()
    tail_starts, items = find(segments(), table, lines, seq_lens, max_items=1)
    assert tail_starts.tolist() == [0, 300, 0, 0, 300, 0]
    tail_starts, items = find(segments(), table, lines, seq_lens, max_partials=5)
    assert tail_starts.tolist() == [0, 300, 200, 200, 300, 0]
    check(table, lines, seq_lens, tail_starts, items)

    # Its rows but one read most of the node above together anyway.
    table, lines, seq_lens = Tree([100, 90], [[0]] + [[0, 1]] * 5, [5] * 6).table()
    tail_starts, items = find(segments(rows_at_once=9), table, lines, seq_lens, max_items=1)
    assert tail_starts.tolist() == [0] + [190] * 5
    check(table, lines, seq_lens, tail_starts, items)


@given(trees(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_change_what_is_shared(tree: Tree, seed: int, random: Any) -> None:
    table, lines, seq_lens = tree.table(seed)
    tail_starts, items = find(segments(), table, lines, seq_lens)
    again, same = find(segments(), table, lines, seq_lens)
    assert (again == tail_starts).all()
    assert all((array == vars(same)[name]).all() for name, array in vars(items).items())
    order = list(range(len(lines)))
    random.shuffle(order)
    other_starts, other = find(segments(), table, lines[order], seq_lens[order])
    assert (other_starts == tail_starts[order]).all()
    assert readers(table, lines[order], other) == readers(table, lines, items)


@given(st.integers(2, 300), st.integers(300, 3000), st.integers(0, 9))
def test_a_prefix_of_all_is_one_segment(num_rows: int, prefix: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    tree = Tree([prefix], [[0]] * num_rows, random.integers(1, 90, num_rows).tolist())
    table, lines, seq_lens = tree.table(seed)
    tail_starts, items = find(segments(rows_at_once=32), table, lines, seq_lens)
    check(table, lines, seq_lens, tail_starts, items)
    assert (tail_starts == prefix).all()
    assert set(map(len, readers(table, lines, items).values())) == {num_rows}


def test_levels_of_a_large_batch_are_all_found_in_any_order() -> None:
    paths = [[0, 1 + row // 128, 5 + row // 32] for row in range(512)]
    tree = Tree([1024] + [256] * 4 + [128] * 16, paths, [32] * 512)
    table, lines, seq_lens = tree.table()
    for order in (np.arange(512), np.random.default_rng(1).permutation(512)):
        tail_starts, items = find(segments(FREE, rows_at_once=512), table, lines[order], seq_lens[order])
        check(table, lines[order], seq_lens[order], tail_starts, items)
        assert int(items.lens.sum()) == 1024 + 4 * 256 + 16 * 128
        assert (tail_starts == 1408).all()


def test_deep_trees_are_shared_but_for_a_little() -> None:
    depth = 20 * MAX_LEVELS
    table, lines, seq_lens = Tree([1] * depth, [list(range(row)) for row in range(depth)], [9] * depth).table()
    tail_starts, items = find(segments(FREE), table, lines, seq_lens)
    check(table, lines, seq_lens, tail_starts, items)
    assert (seq_lens - tail_starts).sum() < seq_lens.sum() / 5


def test_pieces_fill_a_wave_and_the_dearest_come_first() -> None:
    table, lines, seq_lens = Tree([640, 6400], [[0]] * 2 + [[1]] * 64, [30] * 66).table()
    costs = replace(CHEAP, item=1e-7, operations=4e14)
    tail_starts, items = find(segments(costs, num_programs=40, rows_at_once=32), table, lines, seq_lens)
    check(table, lines, seq_lens, tail_starts, items)
    assert 18 <= len(items.lens) <= 20, "items of two heads each on 40 programs"
    assert items.query_lens.tolist() == [32] * (len(items.lens) - 1) + [2]
    assert (items.lens % 64 == 0).all()
    for (_, start, _, rows), (_, next_start, _, next_rows) in list(pairwise(each_item(items)))[:-1:2]:
        assert start == next_start, "tiles of the same tokens stand together"
        assert not set(rows) & set(next_rows)


def test_what_others_have_read_is_cheap_to_read_again() -> None:
    """Two requests share what comes from memory, not what the L2 cache has for the second, nearly for nothing."""
    table, lines, seq_lens = Tree([4000], [[0]] * 2, [30] * 2).table()
    for reread, sharing in ((4.2e12, True), (8.4e12, False)):
        costs = replace(FREE, partial_crossings=1.0, reread_bandwidth=reread)
        assert bool(len(find(segments(costs), table, lines, seq_lens)[1].lens)) == sharing


def test_nothing_is_shared_where_that_is_dearer() -> None:
    table, lines, seq_lens = Tree([200], [[0]] * 9, [30] * 9).table()
    dear_tails = replace(
        CHEAP, partial_crossings=10.0, launches=30e-9
    )  # without their partial results it were less
    for costs, sharing in ((CHEAP, True), (replace(CHEAP, launches=1e-3), False), (dear_tails, False)):
        tail_starts, items = find(segments(costs), table, lines, seq_lens)
        assert bool(len(items.lens)) == bool(len(items.queries)) == bool(tail_starts.any()) == sharing
    for empty in (
        Tree([], [], []),
        Tree([100], [[0]], [1]),
        Tree([7], [[0]] * 2, [0, 0]),
        Tree([], [[]] * 3, [1] * 3),
    ):
        assert not len(find(segments(FREE), *empty.table())[1].lens)


def test_the_last_token_is_not_shared_even_by_rows_of_one_line() -> None:
    table, lines, _ = Tree([200], [[0]], [9]).table()
    twice = np.repeat(lines, 3)
    tail_starts, items = find(segments(FREE), table, twice, np.array([205, 205, 150], np.int32))
    assert tail_starts.tolist() == [204, 204, 149]
    check(table, twice, np.array([205, 205, 150], np.int32), tail_starts, items)


def test_a_slot_may_stand_at_two_positions() -> None:
    table = np.array([[1, 2, 0, 7], [1, 3, 1, 7], [1, 3, 2, 7]], np.int32)
    rows, seq_lens = np.arange(3, dtype=np.int32), np.full(3, 4, np.int32)
    tail_starts, items = find(segments(FREE), table, rows, seq_lens)
    assert tail_starts.tolist() == [1, 2, 2]
    check(table, rows, seq_lens, tail_starts, items)

    table = np.array([[1, 5, 0, 0, 0], [1, 5, 5, 8, 0], [1, 5, 5, 9, 0]], np.int32)
    seq_lens = np.array([3, 5, 5], np.int32)
    tail_starts, items = find(segments(FREE), table, rows, seq_lens)
    assert tail_starts.tolist() == [2, 3, 3]
    check(table, rows, seq_lens, tail_starts, items)


def test_who_would_multiply_tiles_of_few_rows_shares_one() -> None:
    """Though reading is cheap: by itself each of the extends multiplies a whole tile."""
    table, lines, seq_lens = Tree([4000], [[0]] * 2, [30] * 2).table()
    of, two = segments(replace(CHEAP, operations=1e13), rows_at_once=4), np.full(2, 2, np.int32)
    tail_starts, items = of.find(
        table, lines, seq_lens - 1, query_rows=(two * np.arange(2), two), capacity=Capacity(99, 99)
    )
    assert tail_starts.tolist() == [4000] * 2
    assert (items.query_lens == 4).all()
    assert not len(find(of, table, lines, seq_lens)[1].lens), "decodes would not"


def test_what_is_shared_stays_so_while_the_same_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else ends, is retracted, evicted, or turned to other slots; no table contradicts itself."""
    plans: list[Any] = [None]
    old_plans = 0  # that share something
    launch = SimulatedRunner.launch

    def checked(runner: SimulatedRunner, batch: Pass) -> SimulatedPass:
        nonlocal old_plans
        rows, seq_lens = batch.req_pool_indices, batch.seq_lens.astype(np.int32)
        table = runner.host_rows.req_to_token
        if plans[0] is None or plans[0][0] is not rows:
            plans[0] = rows, *find(segments(FREE), table, rows, seq_lens)
        else:
            old_plans += bool(len(plans[0][2].lens))
        check(table, rows, seq_lens, *plans[0][1:])
        return launch(runner, batch)

    monkeypatch.setattr(SimulatedRunner, "launch", checked)
    for seed in (3, 6):  # with a cache
        world = World(random_sizes(seed))
        walk = Walk(world, seed)
        for _ in range(100):
            walk.act()
        world.drain()
    assert old_plans > 20
