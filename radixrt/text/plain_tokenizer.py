"""A tokenizer from its JSON, for processes that decode and do nothing else."""

# Tests: tests/server/test_writers.py

from __future__ import annotations

from radixrt.text.codec import JsonCodec
from radixrt.text.tokenizer import Tokenizer


def plain_tokenizer(serialized: str) -> Tokenizer:
    """That of `Tokenizer.serialized`, as it decodes."""
    from tokenizers import Tokenizer as Backend

    return Tokenizer(JsonCodec(Backend.from_str(serialized)))
