"""A tokenizer without transformers, for processes that decode and do nothing else."""

# Tests: tests/server/test_writers.py

from __future__ import annotations

from typing import Any

from radixrt.text.tokenizer import Tokenizer, byte_ids_of


def plain_tokenizer(serialized: str) -> Tokenizer:
    """That of `Tokenizer.plain`, as it decodes."""
    from tokenizers import Tokenizer as Backend

    backend: Any = Backend.from_str(serialized)
    vocabulary: dict[str, int] = backend.get_vocab()
    return Tokenizer(
        vocab_size=max(vocabulary.values()) + 1,
        bos_token_id=None,
        eos_token_id=None,
        byte_ids=byte_ids_of(vocabulary),
        _encode=lambda texts, special: [
            one.ids for one in backend.encode_batch(texts, add_special_tokens=special)
        ],
        _decode=lambda ids, skip: str(backend.decode(ids, skip_special_tokens=skip)),
        _piece=backend.id_to_token,
    )
