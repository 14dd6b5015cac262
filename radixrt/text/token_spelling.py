"""The text and bytes of single tokens, for lists of log-probabilities."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

from radixrt.text.byte_level import BYTES
from radixrt.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Spelled(NamedTuple):
    """What one token spells in the middle of a text."""

    text: str  # with U+FFFD for part of a character
    bytes: bytes | None  # its UTF-8, also of part of a character; None if unknown


class TokenSpelling:
    """Spells a tokenizer's tokens, special ones too, and remembers them; without one it spells `token_id:5`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.of = cache(partial(_spelled, tokenizer))


def _spelled(tokenizer: Tokenizer | None, token_id: int) -> Spelled:
    if tokenizer is None:
        text = f"token_id:{token_id}"
        return Spelled(text, text.encode())
    if token_id in tokenizer.byte_ids:
        byte = bytes([int(tokenizer.piece(token_id)[3:5], 16)])  # of <0xE3>
        return Spelled(byte.decode("utf-8", "replace"), byte)
    inside = tokenizer.decode_inside([token_id], skip_special_tokens=False)
    text = tokenizer.decode([token_id], skip_special_tokens=False) if inside is None else inside
    return Spelled(text, _part(tokenizer.piece(token_id), text) if _REPLACEMENT in text else text.encode())


def _part(piece: str, text: str) -> bytes | None:
    """Return the bytes of a token with part of a character, if its vocabulary spells bytes as letters."""
    if any(letter not in BYTES for letter in piece):
        return None
    spelled = bytes(BYTES[letter] for letter in piece)
    return spelled if spelled.decode("utf-8", "replace") == text else None
