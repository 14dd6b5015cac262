"""Activations, element by element."""

# Tests: tests/triton_ops/activations/test_kernels.py, tests/triton_ops/activations/test_references.py
