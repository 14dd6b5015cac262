"""The loop that runs passes, and the threads that wait for it."""

# Tests: tests/engine/test_engine.py, tests/engine/test_driver.py
