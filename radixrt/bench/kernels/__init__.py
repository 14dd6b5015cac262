"""Times of every kernel on a GPU, compared with the roofline and with other libraries."""

# Tests: tests/bench/test_kernels.py
