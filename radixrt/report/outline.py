"""The largest shared prefixes of a plan, as a tree for readers."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.planning.batch_plan import BatchPlan
from radixrt.text.tokenizer import Tokenizer

FEW_TOKENS, MIN_SHARE = 4, 0.01  # so short a prefix, with so small a share of the largest's savings, is not shown
Show = Callable[[Int32Array], str]  # token ids `[n]` -> text


@dataclass
class Prefix:
    """A shared prefix, without the tokens of its parent in the outline.

    Attributes:
        tokens: `[n]` int32.
        prompts: number of prompts that begin with it.
        ways: number of different continuations.
        saved_tokens: tokens saved by sharing `tokens`.
        children: shared prefixes below it in the outline, the ones that save most first.
        others: number of shared prefixes below it that neither the outline nor a child has.
    """

    tokens: Int32Array
    prompts: int
    ways: int
    saved_tokens: int
    children: list[Prefix] = field(default_factory=list)
    others: int = 0


def outline(plan: BatchPlan, max_prefixes: int) -> Prefix:
    """The `max_prefixes` shared prefixes that save the most tokens, below the empty one of all prompts.

    Those of a few tokens that save less than MIN_SHARE of what the largest one saves are only counted.
    """
    tree = plan.tree
    saved, prompts, ways = tree.saved_tokens, tree.num_sequences, tree.fan_out
    is_shown = (saved > 0) & ((tree.num_tokens > FEW_TOKENS) | (saved >= MIN_SHARE * saved.max()))
    largest = np.argsort(-saved, kind="stable")[:max_prefixes]
    chosen = {int(node) for node in largest if is_shown[node]} | {0}
    listed: dict[int, Prefix] = {}
    above: list[int] = []  # the nearest chosen node at or above each
    for node, parent in enumerate(tree.parent.tolist()):
        if node not in chosen:
            above.append(above[parent])
            listed[above[parent]].others += 1
            continue
        above.append(node)
        start = 0 if parent < 0 else int(tree.depth[above[parent]])
        end = int(tree.depth[node])
        tokens = plan.store[int(plan.order.order[tree.begin[node]])][start:end] if end else _NO_TOKENS
        below = int(prompts[node])
        listed[node] = Prefix(tokens, below, int(ways[node]), len(tokens) * max(0, below - 1))
        if parent >= 0:
            listed[above[parent]].children.append(listed[node])
    for prefix in listed.values():
        prefix.children.sort(key=lambda child: -child.saved_tokens)
    return listed[0]


def shortened(tokens: Int32Array, show: Show, max_tokens: int, max_characters: int) -> str:
    """The beginning of a text in one line, with dots for the omitted rest."""
    shown = show(tokens[:max_tokens])
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)
    if len(tokens) <= max_tokens and len(text) <= max_characters:
        return text
    return text[: max_characters - 3] + "..."


def counted(count: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def decoded_by(tokenizer: Tokenizer | None) -> Show:
    """A function from token ids to text with special tokens; without a tokenizer, to the ids as text."""
    if tokenizer is None:
        return as_ids
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def as_ids(tokens: Int32Array) -> str:
    """Token ids as text."""
    return " ".join(map(str, tokens.tolist()))


_NO_TOKENS = np.zeros(0, dtype=np.int32)
