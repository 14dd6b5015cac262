"""The groups of kernels that are measured, and which of their cases are meant. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from radixrt.errors import ParameterError

GROUPS = {
    "decode": "one new token a request over its KV, slots scattered and consecutive (bound by bytes)",
    "decode-fp8": "the same over KV in e4m3, beside bf16 (bound by bytes)",
    "tree": "decode over shared prefixes, read once, beside flat attention (bound by bytes, or by products)",
    "extend": "causal attention of new tokens over a prefix and themselves (bound by products, or by exp)",
    "short-extend": "16 new tokens on a prefix of 32,768 (bound by bytes)",
    "elementwise": "norms, gated activations, rotary embedding and KV store (bound by bytes)",
    "sampling": "draws, greedy choices and log-probabilities (bound by bytes: those of the logits, once)",
    "linear": "output projections of small batches, with the norm that follows (bound by bytes, or by products)",
    "kv_copy": "KV to and from pinned host memory (bound by the link) and within the pool",
}
"""By name: a line for people, in the order in which they run."""


def chosen(only: Sequence[str], cases: Sequence[tuple[str, str]]) -> list[int]:
    """Which of the (group, name) match one of the patterns GROUP or GROUP/NAME with * and ?, in order; without a
    pattern, all. Raises ParameterError where one matches none.
    """
    if not only:
        return list(range(len(cases)))
    found: set[int] = set()
    for pattern in only:
        group, _, name = pattern.partition("/")
        if group not in GROUPS:
            raise ParameterError(f"only is {pattern!r}; its group must be one of: {', '.join(GROUPS)}")
        members = [i for i, case in enumerate(cases) if case[0] == group]
        matching = [i for i in members if fnmatchcase(cases[i][1], name or "*")]
        if not matching:
            names = ", ".join(repr(cases[i][1]) for i in members)
            raise ParameterError(f"only is {pattern!r}, which is none of {group}'s: {names}")
        found.update(matching)
    return sorted(found)
