"""From what a caller gives to requests that can run."""

# Tests: tests/batch/formats/test_openai_batch.py
