"""Whether prompts get the same bits whatever is cached, chunked and batched, and which layer differs if not.

    from radixrt.verify import verify

    result = verify(["Mira likes Oslo.\\nQ: Mira likes?\\nA:"], SamplingParams(max_new_tokens=8))
    assert result.same_bits, result.outcomes

A list's way, in the order of the modules:

    values          what a Runtime says to a prompt, position by position, and where two of them differ
    questions       the prompts, and the requests for them
    situations      the matrix: what is cached, and what runs beside a prompt
    layer_watch     fingerprints of what enters each layer, to name the first one that differs
    verification    the result, as a table and as JSON
    matrix          `verify`: makes the Runtimes, asks, compares
"""

# Tests: tests/verify/test_matrix.py

from radixrt.verify.matrix import verify

__all__ = ["verify"]
