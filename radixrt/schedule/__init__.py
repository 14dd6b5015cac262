"""What runs in the next pass. Numpy only."""

# Tests: tests/schedule/test_scheduler.py
