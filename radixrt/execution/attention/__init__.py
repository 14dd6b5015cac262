"""What the attention of a pass reads: plans, built on the host."""

# Tests: tests/execution/attention/test_pass_plans.py, tests/execution/attention/test_shared_segments.py
