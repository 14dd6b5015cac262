"""The groups of kernels that are measured. Nothing heavy is imported."""

from __future__ import annotations

GROUPS = {
    "decode": "one new token a request over its KV, slots scattered and consecutive (bound by bytes)",
    "decode-fp8": "the same over KV in e4m3, beside bf16 (bound by bytes)",
    "tree": "decode over shared prefixes, read once, beside the flat plan (bound by bytes, or by products)",
    "extend": "causal attention of new tokens over a prefix and themselves (bound by products, or by exp)",
    "short-extend": "16 new tokens on a prefix of 32,768 (bound by bytes)",
    "elementwise": "norms, gated activations, rotary embedding and KV store (bound by bytes)",
    "sampling": "draws, greedy choices and log-probabilities (bound by bytes: those of the logits, once)",
    "linear": "output projections of small batches, with the norm that follows (bound by bytes, or by products)",
    "kv_copy": "KV to and from pinned host memory (bound by the link) and within the pool",
}
"""By name: a line for people, in the order in which they run."""
