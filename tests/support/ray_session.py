"""A Ray session of a test, after which signals do what they did before."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ray_session(*address: str, **options: Any) -> Iterator[Any]:
    """A session with these options of `ray.init`. Ray's own handler of SIGTERM, which would end the process of all
    later tests, does not stay.
    """
    import ray

    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        context = ray.init(*address, include_dashboard=False, log_to_driver=False, **options)
        restore()
        yield context
    finally:
        ray.shutdown()
        restore()
