"""The masks of a pass's draws, by what is booked of its answers."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.forms.matcher import Matcher, mask_words
from radixrt.schedule.booking import Booking


def masks_of(booking: Booking) -> Int32Array:
    """The masks `[M, ceil(vocab_size / 32)]` of a pass with masked draws, once all passes before it are booked.

    Each of the first tokens of a prompt's n answers begins the form. An answer that has ended has no use for its
    draw: that may be anything.
    """
    sampling = booking.pass_.sampling
    assert sampling.masked is not None
    answers = [booking.answers[row] for row in sampling.logits_rows[sampling.masked].tolist()]
    forms = [answer.request.form for answer in answers]
    by_kind = defaultdict[type, list[tuple[int, Matcher]]](list)
    for place, (answer, form) in enumerate(zip(answers, forms, strict=True)):
        if not answer.finished and (matcher := answer.matcher) is not None:
            by_kind[type(form)].append((place, matcher))
    vocab_size = max(form.vocab_size for form in forms if form is not None)
    masks = np.full((len(answers), mask_words(vocab_size)), -1, dtype=np.int32)
    for of_kind in by_kind.values():
        places, matchers = zip(*of_kind, strict=True)
        form = forms[places[0]]
        assert form is not None
        own = masks if len(places) == len(answers) else masks[[*places]]
        form.fill(matchers, own)
        if own is not masks:
            masks[[*places]] = own
    return masks
