"""Samples of a run at some hundred moments."""

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
        finished: records, including those of earlier runs.
        prompt_tokens: of all requests that have begun.
        cached_tokens: of these, tokens found in the cache.
        computed_tokens: computed prompt tokens.
        sampled_tokens: generated tokens, including about one an answer that was discarded because its request had
            ended.
        running: requests in the runtime that have begun.
        waiting: requests in the runtime that have not.
        pool_tokens: used slots of the KV pool.
        pool_evictable: of these, slots that no request needs now, kept for later ones.
        pool_capacity: slots of the KV pool.
        states: used states of sequences.
        states_kept: of these, those that are kept for later requests.
        state_capacity: states of the pool; 0 of a model that keeps none.
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
    states: int = 0
    states_kept: int = 0
    state_capacity: int = 0


class Timeline:
    """Samples of a run of any length: beyond `max_samples` every other one is dropped, and the interval doubles.

    Args:
        max_samples: an even number.
        interval: seconds.
    """

    def __init__(self, max_samples: int = MAX_SAMPLES, interval: float = FIRST_INTERVAL) -> None:
        self._max_samples = max_samples
        self._interval = interval
        self._samples: list[Sample] = []

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples in the order of time, including the first and the last."""
        return tuple(self._samples)

    def is_due(self, seconds: float) -> bool:
        """Whether the next sample is due."""
        return not self._samples or seconds >= self._samples[-1].seconds + self._interval

    def add(self, sample: Sample) -> None:
        """Add a sample, later than all others."""
        if len(self._samples) == self._max_samples:
            self._samples = self._samples[::2]
            self._interval *= 2
        self._samples.append(sample)


def columns(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """A list of numbers for each attribute, for those of states only where there are some."""
    has_states = any(sample.state_capacity for sample in samples)
    names = [field.name for field in fields(Sample) if has_states or not field.name.startswith("state")]
    return {name: [getattr(sample, name) for sample in samples] for name in names}
