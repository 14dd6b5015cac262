# Tests: tests/layers/test_weight.py, tests/layers/test_int4.py, tests/models/test_quantization.py
