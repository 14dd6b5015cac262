"""The bars of a batch."""

from __future__ import annotations

import sys

from tqdm import tqdm  # not tqdm.auto: a notebook's bar needs more packages

LOG_INTERVAL = 30.0  # seconds between two states of a bar where stderr is not a terminal


def progress_bar(what: str, unit: str, total: int | None, shown: bool, *, done: int = 0) -> tqdm:
    """A bar on stderr, with so much `done`; without a `total` it comes after a second, and goes at its end."""
    interval = 0.1 if sys.stderr.isatty() else LOG_INTERVAL
    return tqdm(
        desc=what,
        unit=unit,
        total=total,
        initial=done,
        disable=not shown,
        mininterval=interval,
        maxinterval=max(10.0, interval),
        delay=1.0 if total is None else 0.0,
        leave=total is not None,
    )
