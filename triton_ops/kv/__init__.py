"""Keys and values on their way into the pool, and between pools."""

# Tests: tests/triton_ops/kv/test_kv_store.py, tests/triton_ops/kv/test_qk_norm_rope_store.py
