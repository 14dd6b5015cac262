"""The order of many prompts and their tree against brute force, and tokens on disk."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixrt.batch.token_store import TokenStore, TokenWriter
from radixrt.errors import BatchFileError
from radixrt.planning import prefix_order as prefix_order_module
from radixrt.planning.prefix_order import PrefixOrder, prefix_order
from radixrt.planning.prefix_tree import prefix_tree
from radixrt.planning.run_order import run_order
from radixrt.workloads import best_hit_rate

# Few tokens, so that much is shared; lengths about the windows' in which they are compared.
PROMPTS = st.lists(
    st.lists(st.integers(0, 1), max_size=6)
    | st.builds(
        lambda head, n, tail: [head] * n + tail,
        st.integers(0, 1),
        st.integers(25, 200),
        st.lists(st.integers(0, 2), max_size=3),
    ),
    max_size=25,
)


def ordered(prompts: list[list[int]]) -> PrefixOrder:
    store = TokenStore.of(prompts)
    return prefix_order(store.tokens, store.offsets[:-1], store.offsets[1:])


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(PROMPTS)
@example([])
@example([[]])
@example([[], []])
@example([[1] * 32, [1] * 33, [1] * 31, [1] * 32])
@example([[0] * 161 + [1], [0] * 160, [0] * 161])
def test_lexicographic_order(prompts: list[list[int]]) -> None:
    found = ordered(prompts)
    expected = sorted(range(len(prompts)), key=lambda i: (prompts[i], i))
    assert found.order.tolist() == expected
    pairs = pairwise(expected)
    assert found.shared.tolist() == [0][: len(prompts)] + [common(prompts[a], prompts[b]) for a, b in pairs]


@given(PROMPTS, st.sampled_from([(1, 1), (7, 2), (100, 5)]))
def test_however_little_is_compared_at_once(prompts: list[list[int]], limits: tuple[int, int]) -> None:
    whole = ordered(prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_order_module, "CELLS", limits[0])
        patch.setattr(prefix_order_module, "ROWS", limits[1])
        patch.setattr(prefix_order_module, "REGION", 3 * limits[0])
        found = ordered(prompts)
    assert found.order.tolist() == whole.order.tolist()
    assert found.shared.tolist() == whole.shared.tolist()


@given(PROMPTS)
def test_the_tree_is_of_what_two_or_more_share(prompts: list[list[int]]) -> None:
    if not prompts:
        return
    order = ordered(prompts)
    tree = prefix_tree(order)
    listed = [tuple(prompts[i]) for i in order.order]
    shared = {
        prompt[:n]
        for prompt in listed
        for n in range(len(prompt) + 1)
        if sum(o[:n] == prompt[:n] for o in listed) > 1
    }
    below = {
        prefix: [i for i, prompt in enumerate(listed) if prompt[: len(prefix)] == prefix]
        for prefix in shared | {()}
    }
    nodes = {(own[0], own[-1] + 1, max(len(p) for p in below if below[p] == own)) for own in below.values()}
    found = set(zip(tree.begin.tolist(), tree.end.tolist(), tree.depth.tolist(), strict=True))
    assert found == nodes | {(0, len(prompts), 0)}, "the root is always there"
    distinct = len({prompt[: n + 1] for prompt in listed for n in range(len(prompt))})
    assert tree.saved_tokens.sum() == sum(map(len, listed)) - distinct
    for node in range(1, len(tree)):
        parent = tree.parent[node]
        assert parent < node
        assert tree.begin[parent] <= tree.begin[node] < tree.end[node] <= tree.end[parent]


@given(PROMPTS.filter(bool), st.integers(0, 2**32 - 1))
def test_the_order_that_runs(prompts: list[list[int]], seed: int) -> None:
    """A depth-first order still: all that share a prefix come one after the other, so that nothing is lost."""
    prompts = [[7, *prompt] for prompt in prompts]
    new_tokens = np.random.default_rng(seed).integers(1, 9, len(prompts))
    order = ordered(prompts)
    tree = prefix_tree(order)
    run = run_order(order, tree, np.array(list(map(len, prompts))), new_tokens)
    listed = [tuple(prompts[i]) for i in run.order]
    assert sorted(run.order.tolist()) == list(range(len(prompts)))
    for place, (prompt, shared, keep) in enumerate(zip(listed, run.shared, run.keep, strict=True)):
        before, after = listed[:place], listed[place + 1 :]
        assert shared == max((common(list(prompt), list(other)) for other in before), default=0)
        assert keep == max((common(list(prompt), list(other)) for other in after), default=0)
    lengths = np.array(list(map(len, listed)))
    hits = np.minimum(run.shared, lengths - 1).sum() / lengths.sum()
    assert hits == pytest.approx(best_hit_rate([np.array(prompt) for prompt in prompts]))
    # Of subtrees side by side, those with the longest answer below them come first.
    depth = min(common(list(listed[0]), list(prompt)) for prompt in listed)
    longest: dict[int, int] = {}
    for number, prompt in zip(run.order.tolist(), listed, strict=True):
        if len(prompt) > depth:
            longest[prompt[depth]] = max(longest.get(prompt[depth], 0), int(new_tokens[number]))
    assert list(longest.values()) == sorted(longest.values(), reverse=True)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8), st.integers(1, 4))
def test_tokens_come_back_from_the_disk(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]], at_once: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    with TokenWriter(folder) as writer:
        for start in range(0, len(prompts), at_once):
            writer.append([np.array(prompt, dtype=np.int64) for prompt in prompts[start : start + at_once]])
        store = writer.finish()
    assert [store[i].tolist() for i in range(len(store))] == prompts
    store.forget()
    assert [TokenStore.open(folder)[i].tolist() for i in range(len(store))] == prompts


def test_a_store_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="cannot read the tokens"):
        TokenStore.open(tmp_path)
    with TokenWriter(tmp_path) as writer:
        writer.append([np.arange(5)])
    assert list(tmp_path.iterdir()) == []
    with TokenWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="not all in"):
            writer.append([np.array([-1])])
        writer.append([np.arange(5)])
        writer.finish()
    tokens = tmp_path / "tokens.i32"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(BatchFileError, match="not whole"):
        TokenStore.open(tmp_path)
