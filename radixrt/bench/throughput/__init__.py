"""Throughput of the engine on lists of prompts, compared with the bound, goals, ablations and transformers."""

# Tests: tests/bench/test_throughput.py
