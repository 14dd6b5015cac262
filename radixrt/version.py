"""The version of radixrt."""

# Tests: tests/cli/test_cli.py

__version__ = "0.1.0"
