"""How byte-level vocabularies spell bytes: as letters (Radford et al. 2019, GPT-2)."""

# Tests: tests/text/test_token_spelling.py

from __future__ import annotations

# Bytes printable in Latin-1 stand for themselves, the others for the letters from U+0100 on, in order.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + place) for place, byte in enumerate(sorted(set(range(256)).difference(_PRINTABLE)))
}
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def spelled(text: bytes) -> str:
    """Bytes as such a vocabulary spells them."""
    return text.decode("latin-1").translate(LETTERS)
