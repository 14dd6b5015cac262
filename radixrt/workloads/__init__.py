"""Lists and programs of prompts that share prefixes, and the best possible gain from sharing."""

# Tests: tests/workloads/test_workloads.py

from radixrt.workloads.statistics import TokenStatistics, best_hit_rate, token_statistics

__all__ = ["TokenStatistics", "best_hit_rate", "token_statistics"]
