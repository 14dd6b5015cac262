"""The text and bytes of single tokens, for lists of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

# Byte-level vocabularies spell bytes as letters: bytes printable in Latin-1 as themselves, the others from U+0100
# on, in order (Radford et al. 2019, GPT-2).
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted(set(range(256)).difference(_PRINTABLE)))
}


@dataclass(frozen=True)
class Spelled:
    """What one token spells in the middle of a text.

    Attributes:
        text: with U+FFFD for part of a character.
        bytes: its UTF-8, also of part of a character; None if unknown.
    """

    text: str
    bytes: bytes | None


class TokenSpelling:
    """Spells the tokens of a tokenizer, special tokens included, and remembers them.

    Without a tokenizer, tokens are spelled `token_id:5`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Spelled] = {}

    def of(self, token_id: int) -> Spelled:
        """Spell a token."""
        spelled = self._known.get(token_id)
        if spelled is None:
            spelled = self._known[token_id] = _spelled(self._tokenizer, token_id)
        return spelled


def _spelled(tokenizer: Tokenizer | None, token_id: int) -> Spelled:
    if tokenizer is None:
        text = f"token_id:{token_id}"
        return Spelled(text, text.encode())
    if token_id in tokenizer.byte_ids:
        byte = bytes([int(tokenizer.piece(token_id)[3:5], 16)])  # of <0xE3>
        return Spelled(byte.decode("utf-8", "replace"), byte)
    # After another token: the first of a text may lose its leading blank.
    before = [] if tokenizer.anchor is None else [tokenizer.anchor]
    prefix = tokenizer.decode(before, skip_special_tokens=False)
    text = tokenizer.decode([*before, token_id], skip_special_tokens=False)
    text = text[len(prefix) :] if text.startswith(prefix) else tokenizer.decode([token_id], False)
    return Spelled(text, _part(tokenizer.piece(token_id), text) if _REPLACEMENT in text else text.encode())


def _part(piece: str, text: str) -> bytes | None:
    """Return the bytes of a token with part of a character, if its vocabulary spells bytes as letters."""
    if any(letter not in _LETTERS for letter in piece):
        return None
    spelled = bytes(_LETTERS[letter] for letter in piece)
    return spelled if spelled.decode("utf-8", "replace") == text else None
