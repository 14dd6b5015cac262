"""Models: configs, weights and decoders in Hugging Face format."""

# Tests: tests/models/test_parity.py, tests/models/test_loader.py
