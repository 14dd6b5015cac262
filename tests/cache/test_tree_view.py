"""The radix tree as something to look at."""

from __future__ import annotations

import io

from rich.console import Console

from radixrt.cache.radix_tree import DEVICE, HOST, Namespace, RadixTree
from radixrt.cache.tree_view import view_tree
from tests.support.cache_machine import ids


def shown(tree: RadixTree, **options: int) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(view_tree(tree, lambda tokens: " ".join(map(str, tokens.tolist())), **options))
    return console.export_text()


def test_the_tree_shows_where_tokens_are() -> None:
    tree = RadixTree()
    tree.insert(tree.root(Namespace(2, tenant="blue")), ids(1, 2, 3), ids(1, 2, 3))
    tree.insert(tree.root(Namespace(2, tenant="blue")), ids(1, 2, 4), ids(1, 2, 4))
    tree.lock(tree.match(Namespace(2, tenant="blue"), ids(1, 2, 4)).node)
    text = shown(tree)
    assert "4 cached tokens, 3 in use" in text
    assert "weights 2, tenant blue" in text
    assert "2 tokens, 1 in use: '1 2'" in text
    assert "1 tokens: '3'" in text
    leaf = tree.match(Namespace(2, tenant="blue"), ids(1, 2, 3)).node
    tree.attach(leaf, HOST, ids(7))
    assert "1 tokens, on device and host: '3'" in shown(tree)
    tree.detach(leaf, DEVICE)
    text = shown(tree)
    assert "4 cached tokens (1 on the host alone), 3 in use" in text
    assert "1 tokens, on the host: '3'" in text


def test_a_large_tree_is_cut() -> None:
    tree = RadixTree()
    for first in range(9):
        tree.insert(tree.root(Namespace()), ids(first), ids(first + 1))
    text = shown(tree, max_nodes=4)
    assert "... and 6 more nodes" in text
    assert "'8'" in text  # used last, shown first
    assert "'0'" not in text
