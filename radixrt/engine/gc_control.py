"""Python's garbage collector, kept from what was there before a call, and from what must never be freed."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_calls = 0  # in progress, of all threads


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """While calls are in progress, the collector looks at nothing that was there when the first of them began.

    A full collection walks over all objects that torch and transformers have made, which takes it some tenths of a
    second: as long as many a list of prompts. Garbage of the calls is collected as ever, older garbage after them.
    """
    global _calls
    with _lock:
        _calls += 1
        if _calls == 1:
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if _calls == 0:
                gc.unfreeze()


def keep_for_good(*objects: object) -> None:
    """Keep objects, and what they refer to, as long as the process lives.

    For what is on a device that was lost: freeing page-locked memory that it has used records an event there, and
    the error of that, raised where C++ destroys an object, would end the process at once.
    """
    for kept in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
