"""A prefix cache in a file, from one process to the next."""

# Tests: tests/kept_cache/test_kept_cache.py
