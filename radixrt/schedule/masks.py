"""The masks of a pass's draws, by what is booked of its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from radixrt.arrays import Int32Array
from radixrt.forms.matcher import Matcher, mask_words
from radixrt.schedule.booking import Booking


def masks_of(booking: Booking, memory: Callable[[int, int], Int32Array]) -> Int32Array:
    """The masks `[M, ceil(vocab_size / 32)]` of a pass with masked draws, once all passes before it are booked; in
    `memory` of that shape, which may hold anything.

    Each of the first tokens of a prompt's n answers begins the form. An answer that has ended has no use for its
    draw: that may be anything.
    """
    sampling = booking.pass_.sampling
    assert sampling.masked is not None
    answers = [booking.answers[row] for row in sampling.logits_rows[sampling.masked].tolist()]
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
