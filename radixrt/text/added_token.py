"""Tokens that are added to a vocabulary."""

# Tests: tests/text/test_tokenizer.py, tests/text/test_cuts.py

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class AddedToken:
    """A token that texts are searched for before anything else.

    Attributes:
        content: its text.
        special: whether texts without special tokens leave it out.
        lstrip, rstrip: whether it takes the blanks before it, or after it.
        single_word: whether it must not be part of a word.
        normalized: whether the text is searched for it after its normalisation.
    """

    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


FLAGS = tuple(field.name for field in fields(AddedToken) if field.name != "content")
