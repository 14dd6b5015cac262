"""Linear products."""

# Tests: tests/triton_ops/linear/test_kernels.py, tests/triton_ops/linear/test_references.py
