"""From logits to tokens and log-probabilities."""

# Tests: tests/triton_ops/sampling/test_sample.py
