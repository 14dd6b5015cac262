"""Forms by llguidance: https://github.com/guidance-ai/llguidance."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count, takewhile
from typing import Any

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.forms.ends import Ends
from radixrt.forms.form_process import LLGUIDANCE, llguidance_matcher

_MAX_THREADS = 16
ANSWERS_EACH = 8  # of a form's answers for each `Beginnings.made`
_MAX_EACH_THREAD = 4  # of these: with more, threads seldom wait for one another, and more is learned once more


class Beginnings:
    """LLMatchers at the beginning of a form, from which those of answers are copied.

    Copies of one share its lexer, which has learned what others needed, and a lock: threads wait for one another.
    A form of many answers has therefore several.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.made = [make()]
        self._make = make
        self._num_answers, self._turns = 0, count()

    def expect(self, num_answers: int, most: int) -> None:
        """So many answers more are to have the form: make what they need, up to `most` in all."""
        self._num_answers += num_answers
        while len(self.made) < min(most, _MAX_EACH_THREAD * _num_threads(), self._num_answers // ANSWERS_EACH):
            self.made.append(self._make())

    def copy(self) -> tuple[int, Any]:
        """Another LLMatcher, and the number of the beginning that it is copied from; these take turns."""
        lane = next(self._turns) % len(self.made)
        return lane, self.made[lane].deep_copy()


class LlguidanceMatcher:
    """How far one answer has come. After an error, which is one of limits, no further token is taken."""

    def __init__(self, inner: Any, lane: int, ends: Ends) -> None:
        self.inner = inner  # an LLMatcher
        self.lane = lane  # neighbours in a list for threads should have the same
        self.ends = ends
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        """See `Matcher`."""
        return self._has_ended or (self.inner.is_stopped() and not self.inner.is_error())

    def push(self, token_id: int) -> None:
        """See `Matcher`."""
        if not self.ends_with(token_id) and not self.inner.consume_token(token_id):
            raise self.refusal(token_id)

    def ends_with(self, token_id: int) -> bool:
        """Whether a token ends the answer, which then has ended. Raises ValueError where it had."""
        if self._has_ended:
            raise ValueError(f"token {token_id} follows the end of the answer")
        self._has_ended = token_id in self.ends.wanted and self.inner.is_accepting()
        return self._has_ended

    def refusal(self, token_id: int) -> ValueError:
        """Why a token was not taken."""
        return ValueError(f"token {token_id} is not taken by the form: {self.inner.get_error()}")

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

    def __init__(self, beginnings: Beginnings, ends: Ends, vocab_size: int) -> None:
        self._beginnings, self._ends = beginnings, ends
        self.vocab_size = vocab_size

    def matcher(self) -> LlguidanceMatcher:
        """See `Form`."""
        lane, inner = self._beginnings.copy()
        return LlguidanceMatcher(inner, lane, self._ends)

    def push_each(self, matchers: Sequence[Any], token_ids: Sequence[int]) -> list[Exception | None]:
        """See `Form`; matchers are of this kind. In threads, as `fill`."""
        raised: list[Exception | None] = [None] * len(matchers)
        places = []  # of those whose token goes to the grammar
        for place in _by_lane(matchers):
            matcher, token_id = matchers[place], token_ids[place]
            try:
                if not matcher.ends_with(token_id):
                    places.append(place)
            except ValueError as error:
                raised[place] = error
        given = [(matchers[place].inner, token_ids[place]) for place in places]
        taken = _executor().consume_token_par(given) if given else ()
        for place, is_taken in zip(places, taken, strict=True):
            if not is_taken:
                raised[place] = matchers[place].refusal(token_ids[place])
        return raised

    def fill(self, matchers: Mapping[int, Any], masks: Int32Array) -> None:
        """See `Form`; matchers are of this kind. As many threads make masks as there are cores, up to 16."""
        if not masks.flags.c_contiguous or len(masks) <= max(matchers):
            raise ValueError(f"masks are {masks.shape}, {masks.strides}; they must be rows without gaps")
        rows, own = list(matchers), list(matchers.values())
        firsts = {id(matcher): row for matcher, row in zip(reversed(own), reversed(rows), strict=True)}
        places = _by_lane(own)
        if len(firsts) < len(own):  # the n answers to a prompt begin with one
            places = [place for place in places if firsts[id(own[place])] == rows[place]]
        given = [(own[place].inner, rows[place]) for place in places]
        _executor().unsafe_compute_mask_ptr(given, masks.ctypes.data, masks.strides[0], len(masks))
        for matcher, row in zip(own, rows, strict=True):
            if (first := firsts[id(matcher)]) != row:
                masks[row] = masks[first]
            elif matcher.inner.is_error():
                matcher.ends.leave_out(masks[row])
            elif not matcher.ends.is_known:
                matcher.ends.put(masks[row])


def _by_lane(matchers: Sequence[LlguidanceMatcher]) -> list[int]:
    """Their places, in the order in which threads get in each other's way the least."""
    places: list[int] = np.argsort([matcher.lane for matcher in matchers], kind="stable").tolist()
    return places


def compiled(tokens: Any, kind: str, text: str, drops_blank: bool) -> Beginnings:
    """A form for tokens of `token_map`. Raises Refusal."""

    def make() -> Any:
        matcher = llguidance_matcher(tokens, kind, text, drops_blank)
        matcher.compute_bitmask()  # which each answer begins with
        return matcher

    return Beginnings(make)


def _num_threads() -> int:
    return min(_MAX_THREADS, os.cpu_count() or 1)


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=_num_threads())
