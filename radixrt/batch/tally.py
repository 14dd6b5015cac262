"""Counts of records and their tokens."""

# Tests: tests/batch/formats/test_record.py

from __future__ import annotations

from dataclasses import dataclass

from radixrt.hit_rate import CountsHits
from radixrt.output import RequestOutput


@dataclass(frozen=True)
class Tally(CountsHits):
    """Counts of some records. Only records without an error count tokens.

    Attributes:
        records: number of records.
        errors: records with an error, at least in one of several answers.
        prompt_tokens: tokens of the prompts.
        cached_tokens: prompt tokens found in the cache.
        completion_tokens: generated tokens, of all answers.
    """

    records: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.records + other.records,
            self.errors + other.errors,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
        )


ERROR_RECORD = Tally(records=1, errors=1)


def output_tally(output: RequestOutput) -> Tally:
    """The counts of an output's record."""
    if output.failure is not None:
        return ERROR_RECORD
    usage = output.usage
    return Tally(1, 0, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
