"""What single tokens spell, for lists of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Spelled:
    """What one token spells in the middle of a text.

    Attributes:
        text: with U+FFFD for what is no whole character.
        bytes: its UTF-8; None where the token is a part of a character and which one is not known.
    """

    text: str
    bytes: bytes | None


class TokenSpelling:
    """What the tokens of a tokenizer spell, special tokens included; each is looked up once.

    Args:
        tokenizer: None if the model has none; its tokens are spelled `token_id:5`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Spelled] = {}

    def of(self, token_id: int) -> Spelled:
        """What a token spells."""
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
    return Spelled(text, None if _REPLACEMENT in text else text.encode())
