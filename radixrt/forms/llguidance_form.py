"""Forms by llguidance: https://github.com/guidance-ai/llguidance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import count, takewhile
from operator import attrgetter
from typing import Any

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.cpu_count import usable_cpus
from radixrt.forms.ends import Ends
from radixrt.forms.form_process import LLGUIDANCE, llguidance_matcher, llguidance_reason
from radixrt.forms.matcher import WORD_BITS, push_one

_MAX_THREADS = 32
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
        """Another LLMatcher, and the id of the beginning that it is copied from; these take turns."""
        beginning = self.made[next(self._turns) % len(self.made)]
        return id(beginning), beginning.deep_copy()


class LlguidanceMatcher:
    """How far one answer has come. After an error, which is one of limits, no further token is taken."""

    def __init__(self, inner: Any, lane: int, ends: Ends) -> None:
        self.inner = inner  # an LLMatcher
        self.lane = lane  # those with the same one wait for one another in threads
        self.ends = ends
        self.has_ended = False  # by a token that ends an answer

    @property
    def is_complete(self) -> bool:
        """See `Matcher`."""
        return self.has_ended or (self.inner.is_stopped() and not self.inner.is_error())

    def push(self, token_id: int) -> None:
        """See `Matcher`."""
        if self.has_ended:
            raise ValueError(f"token {token_id} follows the end of the answer")
        self.has_ended = token_id in self.ends.wanted and self.inner.is_accepting()
        if not self.has_ended and not self.inner.consume_token(token_id):
            raise self.refusal(token_id)

    def refusal(self, token_id: int) -> ValueError:
        """Why a token was not taken."""
        return ValueError(f"token {token_id} is not taken by the form: {llguidance_reason(self.inner)}")

    def mend_ends(self, mask: Int32Array) -> None:
        """Leave in a mask `[W]` of the engine with an end only ends after which the form is complete."""
        if self.inner.is_accepting():
            self.ends.put(mask)
        elif self.inner.is_error() or not any(map(self._is_named_end, self.ends.of(mask))):
            self.ends.leave_out(mask)

    def _is_named_end(self, token_id: int) -> bool:
        """Whether a grammar that names this end is complete with it."""
        copy = self.inner.deep_copy()
        return bool(copy.consume_token(token_id) and copy.is_accepting())

    def forced(self) -> list[int]:
        """See `Matcher`."""
        if self.has_ended or self.inner.is_stopped():
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

    def joined(self, matchers: Mapping[int, Any]) -> LlguidanceMatchers:
        """See `Form`; matchers are of this kind."""
        return LlguidanceMatchers(matchers)


class LlguidanceMatchers:
    """`Matchers` of answers that are drawn together. As many threads work on them as there are cores, up to 32.

    What each pass needs is prepared here: lists for the threads, where those of one lane are neighbours.
    """

    def __init__(self, matchers: Mapping[int, LlguidanceMatcher]) -> None:
        place_of = dict(zip(matchers.values(), matchers, strict=True))
        self._again = []  # other places of a matcher: the n answers to a prompt begin with one
        if len(place_of) < len(matchers):
            self._again = [(place, place_of[one]) for place, one in matchers.items() if place_of[one] != place]
        self._matchers = sorted(place_of, key=attrgetter("lane"))
        self._inners = [matcher.inner for matcher in self._matchers]
        places = [place_of[matcher] for matcher in self._matchers]
        self._places = np.array(places)
        self._given = [*zip(self._inners, places, strict=True)]
        self._ends = frozenset[int]().union(*{matcher.ends.wanted for matcher in self._matchers})
        self._known = self._matchers[0].ends.known  # the same for all forms of a model

    def push(self, token_ids: Int32Array) -> dict[int, Exception | None]:
        """See `Matchers`."""
        ended: dict[int, Exception | None] = {}
        tokens = token_ids.take(self._places)
        alone = np.fromiter((matcher.has_ended for matcher in self._matchers), bool, len(tokens))
        for end in self._ends:
            alone |= tokens == end
        for i in np.flatnonzero(alone & (tokens >= 0)).tolist():
            push_one(self._matchers[i], int(tokens[i]), int(self._places[i]), ended)
        given = np.flatnonzero(~alone & (tokens >= 0)).tolist()
        if not given:
            return ended
        inners, values = [self._inners[i] for i in given], tokens[given].tolist()
        taken = _executor().consume_token_par([*zip(inners, values, strict=True)])
        goes_on = [is_taken and not inner.is_stopped() for is_taken, inner in zip(taken, inners, strict=True)]
        for at in np.flatnonzero(~np.array(goes_on)).tolist():
            matcher, place = self._matchers[given[at]], int(self._places[given[at]])
            if not taken[at]:
                ended[place] = matcher.refusal(values[at])
            elif matcher.is_complete:
                ended[place] = None
        return ended

    def fill(self, masks: Int32Array, ended: Collection[int] = ()) -> None:
        """See `Matchers`."""
        if not masks.flags.c_contiguous or len(masks) <= self._places.max():
            raise ValueError(f"masks are {masks.shape}, {masks.strides}; they must be rows without gaps")
        given = [pair for pair in self._given if pair[1] not in ended] if ended else self._given
        if not given:
            return
        _executor().unsafe_compute_mask_ptr(given, masks.ctypes.data, masks.strides[0], len(masks))
        # Ends are to be looked after where one is allowed; so it is after an error.
        may_end = np.zeros(len(self._places), bool)
        for token in self._known:
            may_end |= masks[self._places, token // WORD_BITS] >> token % WORD_BITS & 1 != 0
        for i in np.flatnonzero(may_end).tolist():
            if self._given[i][1] in ended:
                continue
            self._matchers[i].mend_ends(masks[self._places[i]])
        for place, worked_on in self._again:
            masks[place] = masks[worked_on]


def compiled(tokens: Any, kind: str, text: str, drops_blank: bool) -> Beginnings:
    """A form for tokens of `token_map`. Raises Refusal."""

    def make() -> Any:
        matcher = llguidance_matcher(tokens, kind, text, drops_blank)
        matcher.compute_bitmask()  # which each answer begins with
        return matcher

    return Beginnings(make)


def _num_threads() -> int:
    return min(_MAX_THREADS, usable_cpus())


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=_num_threads())
