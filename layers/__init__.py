"""Layer 2: the layers of models, and the metadata of a forward pass."""

# Tests: tests/models/test_kernels.py, tests/models/test_parity.py
