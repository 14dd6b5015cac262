"""The forms of a pass's masked draws: their masks before it is drawn, and what follows from its tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.forms.matcher import Matchers, mask_words
from radixrt.schedule.answer import Answer
from radixrt.schedule.passes import SamplingInputs

_FIRST_WORDS = 64  # of a mask: those of a vocabulary's commonest tokens


class PassForms:
    """The forms of a pass with masked draws, which may serve the next pass of the same answers, too.

    Each of the first tokens of a prompt's n answers begins the form. An answer that has ended has no use for its
    draw: that may be anything.

    Attributes:
        answers: of the pass, a row each.
        drawn: the answer of each masked draw.
        masks_shape: `(M, ceil(vocab_size / 32))`.
    """

    def __init__(self, answers: Sequence[Answer], sampling: SamplingInputs) -> None:
        assert sampling.masked is not None
        self.answers = answers
        self._rows: list[int] = sampling.logits_rows[sampling.masked].tolist()
        self.drawn = [answers[row] for row in self._rows]
        self._forms = [form for answer in self.drawn if (form := answer.request.form) is not None]
        assert len(self._forms) == len(self.drawn)
        self.masks_shape = len(self.drawn), mask_words(self._forms[0].vocab_size)  # all are of one model
        self._joined: list[tuple[list[int], Matchers]] = []

    def join(self) -> list[tuple[list[int], Matchers]]:
        """The matchers of each kind of form, and their places; made once, by the thread that steps."""
        if not self._joined:
            matchers = [matcher for answer in self.drawn if (matcher := answer.matcher) is not None]
            joined = []
            for kind in dict.fromkeys(map(type, self._forms)):  # mostly one
                places = [place for place, form in enumerate(self._forms) if type(form) is kind]
                own = dict(zip(places, map(matchers.__getitem__, places), strict=True))
                joined.append((places, self._forms[places[0]].joined(own)))
            self._joined = joined
        return self._joined

    def fill(self, masks: Int32Array, ending: Collection[Answer] = ()) -> None:
        """Fill `masks` of that shape, by what is pushed now; another thread may do that while the next pass is
        planned. `ending` are about to be ended.
        """
        ended = {place for place, answer in enumerate(self.drawn) if answer.finished or answer in ending}
        for places, matchers in self.join():
            if not ended.issuperset(places):
                matchers.fill(masks, ended)
        if ended:
            masks[[*ended]] = -1

    def forced(self, masks: Int32Array) -> list[Answer]:
        """The answers for whose draws the filled masks leave one token."""
        few = np.count_nonzero(masks[:, :_FIRST_WORDS], axis=1) <= 1  # of most masks it takes no more to see
        forced = []
        for place in np.flatnonzero(few).tolist():
            words = masks[place].view(np.uint32)
            if np.count_nonzero(words) == 1 and int(words.max()).bit_count() == 1:
                forced.append(self.drawn[place])
        return forced

    def suffice(self, token_ids: Int32Array) -> bool:
        """Whether all answers that go on are among those with tokens `[M]` to be pushed, not negative ones."""
        left = np.flatnonzero(token_ids < 0).tolist()
        return all(self.drawn[place].finished for place in left)

    def push(self, token_ids: Int32Array) -> dict[int, Exception | None]:
        """Push the tokens of the masked draws `[M]`, but negative ones. Returns the rows of the pass whose answers
        end with it: by an error, or because their form is complete.
        """
        ended: dict[int, Exception | None] = {}
        for places, matchers in self.join():
            try:
                found = matchers.push(token_ids)
            except Exception as error:  # how far they have come is not known
                found = {place: error for place in places if token_ids[place] >= 0}
            ended |= {self._rows[place]: error for place, error in found.items()}
        return ended
