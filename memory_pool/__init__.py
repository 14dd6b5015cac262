"""Memory and free lists: rows of slots for requests, slots of KV for tokens. No requests or trees here."""

# Tests: tests/memory_pool/test_pool.py
