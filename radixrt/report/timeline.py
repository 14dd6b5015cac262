"""What a run was doing at some hundred moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

MAX_SAMPLES = 500
FIRST_INTERVAL = 0.05  # seconds between two samples, until there are too many


@dataclass(frozen=True)
class Sample:
    """One moment of a run. Counts of tokens begin at 0 with the run.

    Attributes:
        seconds: since the run began.
        finished: records that there are, those of earlier runs too.
        prompt_tokens, cached_tokens: of all requests that have begun, and those of them that were in the cache.
        computed_tokens: tokens of prompts that were computed.
        sampled_tokens: generated tokens, with those that were thrown away since their request had ended: about one
            an answer.
        running, waiting: requests that the runtime computes, and those that it has not begun.
        pool_tokens: slots of the KV pool that hold something.
        pool_evictable: those of them that no request needs now; they are kept for later ones.
        pool_capacity: slots that there are.
    """

    seconds: float
    finished: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    sampled_tokens: int
    running: int
    waiting: int
    pool_tokens: int
    pool_evictable: int
    pool_capacity: int


class Timeline:
    """Samples of a run of any length: when there are `most`, every other one goes, and they come half as often.

    Args:
        most: an even number.
        interval: seconds.
    """

    def __init__(self, most: int = MAX_SAMPLES, interval: float = FIRST_INTERVAL) -> None:
        self._most = most
        self._interval = interval
        self._samples: list[Sample] = []

    @property
    def samples(self) -> tuple[Sample, ...]:
        """In the order of time, the first and the last one among them."""
        return tuple(self._samples)

    def is_due(self, seconds: float) -> bool:
        """Whether the next sample is wanted."""
        return not self._samples or seconds >= self._samples[-1].seconds + self._interval

    def add(self, sample: Sample) -> None:
        """Take a sample in, later than all others."""
        if len(self._samples) == self._most:
            self._samples = self._samples[::2]
            self._interval *= 2
        self._samples.append(sample)


def columns(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """A list of numbers for each attribute."""
    return {field.name: [getattr(sample, field.name) for sample in samples] for field in fields(Sample)}
