"""Captured passes."""

# Tests: tests/execution/graphs/test_capture.py
