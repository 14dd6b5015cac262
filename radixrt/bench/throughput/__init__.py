"""Throughput of the engine on lists of prompts, compared with the bound, ablations and other engines."""

# Tests: tests/bench/test_throughput.py
