"""Objects that Python's garbage collector leaves alone: those that are older than the calls in progress."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CALLS_PER_COLLECTION = 1000  # calls that left none in progress
# After so many, new ones are looked through; Python's default is 700. A prompt takes some ten until its output is
# told: of a list of thousands, none of which is garbage, each look would take milliseconds.
NEW_OBJECTS = 100_000
# Python 3.12 starts with 375 frozen objects of its own; `gc.freeze` freezes thousands, all that there are.
FROZEN_BY_PYTHON = 1000

_lock = threading.RLock()  # the collector may end a forgotten call here
_calls = 0  # in progress, of all threads
_thresholds = gc.get_threshold()  # without calls
_is_own = False  # whether what is frozen is what this has frozen
_thaws = itertools.count(1)


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Have the collector skip what was there when the first of the calls in progress began.

    A full collection walks over all objects of torch: a tenth of a second, as long as many a list of prompts
    takes. Garbage of the calls is collected as ever, but less often: what requests leave goes without the
    collector, and most of it before there are so many new objects. `gc.freeze` sets the collector's counters to 0,
    so short calls would put off full collections for ever: now and then one is made between calls.
    What somebody else had frozen before them stays so, and nothing more is.
    """
    global _calls, _thresholds, _is_own
    with _lock:
        _calls += 1
        if _calls == 1:
            if _is_own := gc.get_freeze_count() < FROZEN_BY_PYTHON:
                gc.freeze()
            _thresholds = first, *others = gc.get_threshold()
            if first:  # it is not switched off
                gc.set_threshold(max(first, NEW_OBJECTS), *others)
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if is_last := _calls == 0:
                if _is_own:
                    gc.unfreeze()
                gc.set_threshold(*_thresholds)
        if is_last and next(_thaws) % CALLS_PER_COLLECTION == 0:
            gc.collect()
