"""Forms by xgrammar, for what llguidance refuses: https://github.com/mlc-ai/xgrammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.forms.ends import Ends
from radixrt.forms.form_process import XGRAMMAR
from radixrt.forms.matcher import OneByOne, mask_words


class XgrammarMatcher:
    """How far one answer has come."""

    def __init__(self, inner: Any, ends: Ends, vocab_size: int) -> None:
        self.inner = inner  # a GrammarMatcher
        self.ends = ends
        self._vocab_size = vocab_size
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        """See `Matcher`. Where the form may end, it looks for what may follow, which takes a mask."""
        if self._has_ended or self.inner.is_terminated():
            return True
        if not self.inner.is_completed():
            return False
        mask = np.zeros((1, mask_words(self._vocab_size)), np.int32)
        self.inner.fill_next_token_bitmask(mask)
        return self.ends.is_alone(mask[0])

    def push(self, token_id: int) -> None:
        """See `Matcher`."""
        if self._has_ended:
            raise ValueError(f"token {token_id} follows the end of the answer")
        if token_id in self.ends.wanted and self.inner.is_completed():
            self._has_ended = True
        elif not self.inner.accept_token(token_id):
            raise ValueError(f"token {token_id} is not taken by the form")

    def forced(self) -> list[int]:
        """See `Matcher`. It knows text that must come, but any tokens may spell it."""
        return []


class XgrammarForm:
    """A form that xgrammar has compiled, for answers with the same end tokens."""

    engine = XGRAMMAR

    def __init__(self, grammar: Any, ends: Ends, vocab_size: int) -> None:
        self._grammar = grammar  # a CompiledGrammar
        self._ends = ends
        self.vocab_size = vocab_size

    def matcher(self) -> XgrammarMatcher:
        """See `Form`."""
        from xgrammar import GrammarMatcher

        return XgrammarMatcher(GrammarMatcher(self._grammar), self._ends, self.vocab_size)

    def joined(self, matchers: Mapping[int, Any]) -> OneByOne:
        """See `Form`; matchers are of this kind."""
        return OneByOne(matchers, _fill_row)


def _fill_row(matcher: XgrammarMatcher, masks: Int32Array, row: int) -> None:
    if matcher.inner.is_terminated():
        masks[row] = 0
        matcher.ends.leave_out(masks[row])
        return
    matcher.inner.fill_next_token_bitmask(masks, row)
    matcher.ends.put(masks[row])
