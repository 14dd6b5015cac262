"""Norms of rows."""

# Tests: tests/triton_ops/norms/test_kernels.py, tests/triton_ops/norms/test_references.py
