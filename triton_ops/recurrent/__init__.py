"""Operations of layers that keep a state of fixed size instead of keys and values."""

# Tests: tests/triton_ops/recurrent/test_kernels.py, tests/triton_ops/recurrent/test_references.py
