"""The tokens of a model, for engines that look into their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from radixrt.forms.spelling import for_forms


@dataclass(frozen=True)
class Vocabulary:
    """What a text is made of.

    Attributes:
        size: of the model's logits; the tokenizer may have fewer tokens, or more, which are never drawn.
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

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """As `form_process` reads it. Raises FormError where tokens do not spell bytes."""
        end_ids = [token for token in self.end_ids if token < self.size]
        return {
            "size": self.size,
            "end_ids": end_ids,
            "serialized": None if self.serialized is None else for_forms(self.serialized, self.size, end_ids),
            "tokens": [token.decode("latin-1") for token in self.tokens[: self.size]],
            "special_ids": sorted({token for token in self.special_ids if token < self.size}.union(end_ids)),
            "drops_blank": self.drops_blank,
        }
