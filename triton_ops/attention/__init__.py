"""Attention over a token-level KV pool."""

# Tests: tests/triton_ops/attention/test_kernels.py
