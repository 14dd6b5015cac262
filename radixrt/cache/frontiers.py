"""Who computes which token next: a request waits for another one that is computing a prefix of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixrt.cache.radix_tree import Match, Node, Tokens


@dataclass(eq=False)
class Frontier:
    """How far a live lease has come: its next token follows `node`, the end of its `committed` tokens.

    `tokens` `[n > committed]` are all that it computes. It is open until the lease comes further or is released.
    """

    node: Node
    committed: int
    tokens: Tokens
    is_open: bool = True

    @property
    def key(self) -> tuple[Node, int]:
        """What is looked up: the node, and the token after it."""
        return self.node, int(self.tokens[self.committed])


class Frontiers:
    """The open frontiers of a tree, found by their place."""

    def __init__(self) -> None:
        self._open: dict[tuple[Node, int], list[Frontier]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def announce(self, frontier: Frontier) -> None:
        """Let others find a frontier."""
        self._open.setdefault(frontier.key, []).append(frontier)

    def unannounce(self, frontier: Frontier) -> None:
        """Close a frontier that was announced."""
        frontier.is_open = False
        others = self._open[frontier.key]
        others.remove(frontier)
        if not others:
            del self._open[frontier.key]

    def leader(self, match: Match, tokens: Tokens) -> Frontier | None:
        """The frontier of a lease that is computing the token after `match`, the longest match of `tokens`."""
        # It is at the match, or before it where others have published the tokens between.
        node: Node | None = match.node
        length = end = match.length
        if not match.at_boundary:
            node, end = match.node.parent, length - match.inside
        while node is not None:
            for frontier in self._open.get((node, int(tokens[end])), ()):
                if np.array_equal(frontier.tokens[end : length + 1], tokens[end : length + 1]):
                    return frontier
            end -= len(node.tokens)
            node = node.parent
        return None
