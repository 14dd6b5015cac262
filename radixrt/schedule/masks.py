"""The masks of a pass's draws, by what is booked of its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.forms.matcher import Matcher, mask_words
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking


def masks_of(booking: Booking, memory: Callable[[int, int], Int32Array]) -> Int32Array:
    """The masks `[M, ceil(vocab_size / 32)]` of a pass with masked draws, once all passes before it are booked; in
    `memory` of that shape, which may hold anything.

    Each of the first tokens of a prompt's n answers begins the form. An answer that has ended has no use for its
    draw: that may be anything.
    """
    answers = _masked_answers(booking)
    forms = [answer.request.form for answer in answers]
    vocab_size = max(form.vocab_size for form in forms if form is not None)
    masks = memory(len(answers), mask_words(vocab_size))
    by_kind = defaultdict[type, dict[int, Matcher]](dict)
    for place, (answer, form) in enumerate(zip(answers, forms, strict=True)):
        if answer.finished or (matcher := answer.matcher) is None:
            masks[place] = -1
        else:
            by_kind[type(form)][place] = matcher
    for matchers in by_kind.values():
        form = forms[next(iter(matchers))]
        assert form is not None
        form.fill(matchers, masks)
    return masks


def forced_by(booking: Booking, masks: Int32Array) -> list[Answer]:
    """The answers of a pass for whose draws its `masks` leave one token."""
    answers, forced = _masked_answers(booking), []
    for place in np.flatnonzero(np.count_nonzero(masks, axis=1) == 1).tolist():
        words = masks[place].view(np.uint32)
        if int(words.max()).bit_count() == 1:
            forced.append(answers[place])
    return forced


def _masked_answers(booking: Booking) -> list[Answer]:
    """Of each masked draw of a pass."""
    sampling = booking.pass_.sampling
    assert sampling.masked is not None
    return [booking.answers[row] for row in sampling.logits_rows[sampling.masked].tolist()]
