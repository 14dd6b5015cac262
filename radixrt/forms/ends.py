"""Where a form may end: the bits of the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from radixrt.arrays import Int32Array
from radixrt.forms.matcher import WORD_BITS


@dataclass(frozen=True)
class Ends:
    """Tokens that end an answer, and those that an engine sets where a form may end."""

    wanted: frozenset[int]
    known: frozenset[int]  # to the engine, not empty

    @cached_property
    def is_known(self) -> bool:
        """Whether the engine sets what is wanted."""
        return self.wanted == self.known

    def allows(self, mask: Int32Array) -> bool:
        """Whether a mask `[W]` of the engine lets the answer end."""
        return _has(mask, min(self.known))

    def is_alone(self, mask: Int32Array) -> bool:
        """Whether a mask of the engine allows nothing else."""
        rest = mask.copy()
        _clear(rest, self.known)
        return not rest.any()

    def put(self, mask: Int32Array) -> None:
        """Allow `wanted` where the engine lets the answer end.

        Without any, what the engine knows stays where nothing else may follow, so that there is a token to draw.
        """
        if self.is_known or not self.allows(mask) or (not self.wanted and self.is_alone(mask)):
            return
        _clear(mask, self.known)
        for token in self.wanted:
            mask.view("uint32")[token // WORD_BITS] |= 1 << token % WORD_BITS

    def of(self, mask: Int32Array) -> list[int]:
        """Those that a mask of the engine allows."""
        return [token for token in self.known if _has(mask, token)]

    def leave_out(self, mask: Int32Array) -> None:
        """Allow no end; where nothing else may come, everything else, so that the next token meets the error of a
        matcher.
        """
        _clear(mask, self.wanted | self.known)
        if not mask.any():
            mask.fill(-1)
            _clear(mask, self.wanted | self.known)


def _has(mask: Int32Array, token: int) -> bool:
    return bool(mask.view("uint32")[token // WORD_BITS] >> token % WORD_BITS & 1)


def _clear(mask: Int32Array, tokens: Iterable[int]) -> None:
    words = mask.view("uint32")
    for token in tokens:
        words[token // WORD_BITS] &= ~(1 << token % WORD_BITS) & 0xFFFFFFFF
