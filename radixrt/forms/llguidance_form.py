"""Forms by llguidance: https://github.com/guidance-ai/llguidance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from typing import Any

from radixrt.arrays import Int32Array
from radixrt.forms.ends import Ends
from radixrt.forms.form_process import LLGUIDANCE, llguidance_matcher

_MAX_THREADS = 16


class LlguidanceMatcher:
    """How far one answer has come. After an error, which is one of limits, no further token is taken."""

    def __init__(self, inner: Any, ends: Ends) -> None:
        self.inner = inner  # an LLMatcher
        self.ends = ends
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        """See `Matcher`."""
        return self._has_ended or (self.inner.is_stopped() and not self.inner.is_error())

    def push(self, token_id: int) -> None:
        """See `Matcher`."""
        if self._has_ended:
            raise ValueError(f"token {token_id} follows the end of the answer")
        if token_id in self.ends.wanted and self.inner.is_accepting():
            self._has_ended = True
        elif not self.inner.consume_token(token_id):
            raise ValueError(f"token {token_id} is not taken by the form: {self.inner.get_error()}")

    def forced(self) -> list[int]:
        """See `Matcher`."""
        if self._has_ended or self.inner.is_stopped():
            return []
        found: list[int] = self.inner.compute_ff_tokens()
        ends = self.ends.wanted | self.ends.known
        return [*takewhile(lambda token_id: token_id not in ends, found)]


class LlguidanceForm:
    """A form that llguidance has compiled, for answers with the same end tokens."""

    engine = LLGUIDANCE

    def __init__(self, beginning: Any, ends: Ends, vocab_size: int) -> None:
        self._beginning = beginning  # an LLMatcher, which knows its first mask
        self._ends = ends
        self.vocab_size = vocab_size

    def matcher(self) -> LlguidanceMatcher:
        """See `Form`."""
        return LlguidanceMatcher(self._beginning.deep_copy(), self._ends)

    def fill(self, matchers: Mapping[int, Any], masks: Int32Array) -> None:
        """See `Form`; matchers are of this kind. As many threads make masks as there are cores, up to 16."""
        if not masks.flags.c_contiguous or len(masks) <= max(matchers):
            raise ValueError(f"masks are {masks.shape}, {masks.strides}; they must be rows without gaps")
        rows: dict[int, int] = {}  # of each matcher, which the n answers to a prompt begin with together
        inner = [
            (matcher.inner, row) for row, matcher in matchers.items() if rows.setdefault(id(matcher), row) == row
        ]
        _executor().unsafe_compute_mask_ptr(inner, masks.ctypes.data, masks.strides[0], len(masks))
        for row, matcher in matchers.items():
            if (first := rows[id(matcher)]) != row:
                masks[row] = masks[first]
            elif matcher.inner.is_error():
                matcher.ends.leave_out(masks[row])
            elif matcher.ends.wanted != matcher.ends.known:
                matcher.ends.put(masks[row])


def compiled(tokens: Any, kind: str, text: str, drops_blank: bool) -> Any:
    """An LLMatcher at the beginning of a form, for tokens of `token_map`. Raises Refusal."""
    matcher = llguidance_matcher(tokens, kind, text, drops_blank)
    matcher.compute_bitmask()  # which each answer begins with
    return matcher


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))
