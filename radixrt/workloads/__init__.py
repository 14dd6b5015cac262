"""Lists and programs of prompts that share prefixes, and what an engine can gain from that at best."""

from radixrt.workloads.statistics import TokenStatistics, best_hit_rate, token_statistics

__all__ = ["TokenStatistics", "best_hit_rate", "token_statistics"]
