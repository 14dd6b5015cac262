"""How a pass is computed."""

# Tests: tests/execution/test_model_runner.py, tests/execution/test_pass_builder.py
