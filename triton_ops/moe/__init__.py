"""Mixtures of experts."""

# Tests: tests/triton_ops/moe/test_kernels.py, tests/triton_ops/moe/test_references.py
