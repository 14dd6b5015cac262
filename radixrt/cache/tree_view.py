"""A printable view of the radix tree."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from rich.tree import Tree

from radixrt.cache.radix_tree import DEVICE, HOST, Node, RadixTree, Tokens


def view_tree(tree: RadixTree, show: Callable[[Tokens], str], *, max_nodes: int = 200) -> Tree:
    """Draw the cached prefixes as a rich Tree: for each node its number of tokens, tier, locks and text.

    `show` turns tokens `[n]` int32 into text. `max_nodes` nodes are shown, the rest is counted.
    """
    on_host = f" ({tree.host_only_tokens:,} on the host alone)" if tree.host_only_tokens else ""
    view = Tree(f"{tree.total_tokens:,} cached tokens{on_host}, {tree.locked_tokens:,} in use")
    num_nodes = 0
    stack: list[tuple[Node, Tree]] = [(root, view) for root in tree.roots.values()]
    while stack:
        node, above = stack.pop()
        num_nodes += 1
        below = above.add(_label(node, show)) if num_nodes <= max_nodes else view
        children = sorted(node.children.values(), key=lambda child: child.last_access)  # popped: latest first
        stack.extend((child, below) for child in children)
    if num_nodes > max_nodes:
        view.add(f"... and {num_nodes - max_nodes:,} more nodes")
    return view


def _label(node: Node, show: Callable[[Tokens], str]) -> Text:
    if node.parent is None:
        space = node.namespace
        names = {"adapter": space.adapter, "tenant": space.tenant}
        given = [f"{name} {value}" for name, value in names.items() if value]
        return Text(", ".join([f"weights {space.weights_version}", *given]), "bold")
    text = repr(show(node.tokens[:40]))
    if len(node.tokens) > 40 or len(text) > 70:
        text = text[:67] + "..."
    lock = f", {node.lock} in use" if node.lock else ""
    tier = ""
    if node.slots[HOST] is not None:
        tier = ", on the host" if node.slots[DEVICE] is None else ", on device and host"
    return Text.assemble(f"{len(node.tokens):,} tokens{tier}{lock}: ", (text, "dim"))
