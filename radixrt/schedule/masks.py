"""The masks of a pass's draws, by what is booked of its answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.forms.matcher import Form, Matcher, mask_words
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking

_FIRST_WORDS = 64  # of a mask: those of a vocabulary's commonest tokens


class PassMasks:
    """The masks of a pass with masked draws, once all passes before it are booked.

    Each of the first tokens of a prompt's n answers begins the form. An answer that has ended has no use for its
    draw: that may be anything.

    Attributes:
        answers: of each masked draw.
        masks: `[M, ceil(vocab_size / 32)]`, in `memory` of that shape, which may hold anything until `fill`.
    """

    def __init__(self, booking: Booking, memory: Callable[[int, int], Int32Array]) -> None:
        sampling = booking.pass_.sampling
        assert sampling.masked is not None
        self.answers = [booking.answers[row] for row in sampling.logits_rows[sampling.masked].tolist()]
        self._by_kind: dict[type, tuple[Form, dict[int, Matcher]]] = {}
        self._unused: list[int] = []
        vocab_size = 0
        for place, answer in enumerate(self.answers):
            form, matcher = answer.request.form, answer.matcher
            assert form is not None
            assert matcher is not None
            vocab_size = max(vocab_size, form.vocab_size)
            if answer.finished:
                self._unused.append(place)
            else:
                self._by_kind.setdefault(type(form), (form, {}))[1][place] = matcher
        self.masks = memory(len(self.answers), mask_words(vocab_size))

    def __len__(self) -> int:
        return len(self.answers)

    def fill(self) -> None:
        """Fill the masks, by what is booked now; another thread may do that while the next pass is planned."""
        self.masks[self._unused] = -1
        for form, matchers in self._by_kind.values():
            form.fill(matchers, self.masks)

    def forced(self) -> list[Answer]:
        """The answers for whose draws the filled masks leave one token."""
        few = np.count_nonzero(self.masks[:, :_FIRST_WORDS], axis=1) <= 1  # of most masks it takes no more to see
        forced = []
        for place in np.flatnonzero(few).tolist():
            words = self.masks[place].view(np.uint32)
            if np.count_nonzero(words) == 1 and int(words.max()).bit_count() == 1:
                forced.append(self.answers[place])
        return forced
