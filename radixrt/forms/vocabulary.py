"""The tokens of a model, for engines that look into their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    """What a text is made of.

    Attributes:
        size: of the model's logits, at least that of the tokenizer.
        end_ids: tokens that end an answer by themselves.
        serialized: the tokenizer as JSON of the package tokenizers, or None.
        tokens: without that, the bytes of each token.
        special_ids: and those that spell nothing.
        drops_blank: decoding drops a blank that an answer begins with, as Llama's sentencepiece does.
    """

    size: int
    end_ids: tuple[int, ...]
    serialized: str | None = None
    tokens: tuple[bytes, ...] = ()
    special_ids: tuple[int, ...] = ()
    drops_blank: bool = False

    def as_json(self) -> dict[str, Any]:
        """As `form_process` reads it."""
        return {
            "size": self.size,
            "end_ids": self.end_ids,
            "serialized": self.serialized,
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "special_ids": self.special_ids,
            "drops_blank": self.drops_blank,
        }
