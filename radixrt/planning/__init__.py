"""The order in which known prompts run, and what it will bring, from their tokens alone."""

# Tests: tests/planning/test_batch_plan.py
