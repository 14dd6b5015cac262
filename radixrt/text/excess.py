"""Finds texts that are far too long without encoding all of them, which takes minutes and gigabytes."""

from __future__ import annotations

from radixrt.errors import TokenizerError
from radixrt.text.tokenizer import Tokenizer

_CHARACTERS = 8  # for each token that is allowed: shorter texts are encoded whole


def exceeds(tokenizer: Tokenizer, text: str, num_tokens: int) -> bool:
    """Whether a text surely has more than `num_tokens` tokens. If not, it is not too long to be encoded.

    A beginning of the text is encoded, and a longer one as long as it has few tokens. All but the last tokens of a
    beginning are also those of the whole text, so one that has a quarter more than allowed settles it.
    """
    length = _CHARACTERS * (num_tokens + 64)
    while length < len(text):
        try:
            if len(tokenizer.encode(text[:length], add_special_tokens=False)) > num_tokens + num_tokens // 4 + 16:
                return True
        except TokenizerError:  # whoever encodes the whole text says why
            return False
        length *= 4
    return False


def refusal_of_length(tokenizer: Tokenizer, text: str, context_length: int) -> str | None:
    """Why a prompt is refused without being encoded whole; None if it is not."""
    if not exceeds(tokenizer, text, context_length):
        return None
    return (
        f"has {len(text):,} characters and by far more tokens than a context of {context_length} takes: it may "
        f"have at most {context_length - 1}"
    )
