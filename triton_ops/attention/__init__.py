"""Attention over a token-level KV pool."""
