"""The hit rate of a prefix cache."""

# Tests: tests/planning/test_batch_plan.py, tests/report/test_batch_report.py

from __future__ import annotations


class CountsHits:
    """A base of what counts prompt tokens, and those of them that were found in the cache."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def hit_rate(self) -> float:
        """cached_tokens over prompt_tokens, 0 to 1; 0 if there are no tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
