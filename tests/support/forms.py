"""Forms by rules over token ids, without a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from radixrt.forms.matcher import WORD_BITS, Matcher, Matchers, OneByOne

Rule = Callable[[Sequence[int]], set[int]]  # from an answer's tokens to those that may come next


@dataclass
class RuleMatcher:
    form: RuleForm
    tokens: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not self.form.allowed(self.tokens)

    def push(self, token_id: int) -> None:
        if token_id not in self.form.allowed(self.tokens):
            raise ValueError(f"{token_id} must not follow {self.tokens}")
        self.tokens.append(token_id)

    def forced(self) -> list[int]:
        found: list[int] = []
        while len(allowed := self.form.allowed([*self.tokens, *found])) == 1:
            found += allowed
        return found


@dataclass(frozen=True)
class RuleForm:
    """Complete where the rule allows nothing."""

    vocab_size: int
    allowed: Rule

    def matcher(self) -> RuleMatcher:
        return RuleMatcher(self)

    def joined(self, matchers: Mapping[int, Matcher]) -> Matchers:
        return OneByOne(matchers, fill_row)


def fill_row(matcher: RuleMatcher, masks: np.ndarray, row: int) -> None:
    bits = np.zeros(masks.shape[1] * WORD_BITS, dtype=np.uint8)
    bits[sorted(matcher.form.allowed(matcher.tokens))] = 1
    masks[row] = np.packbits(bits, bitorder="little").view(np.int32)


def allowed_by(mask: np.ndarray, vocab_size: int) -> list[int]:
    """The tokens of a mask."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size]).tolist()
