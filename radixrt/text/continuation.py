"""Token ids that continue others, which stay unchanged."""

# Tests: tests/test_conversation.py

from __future__ import annotations

from collections.abc import Sequence

from radixrt.text.builder import Detokenizer
from radixrt.text.tokenizer import Tokenizer

_LEADS = ("1", ".", "a")


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode `text` as a continuation of other tokens: without BOS or the blank that some tokenizers prepend."""
    direct: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
    if tokenizer.decode_inside(direct, skip_special_tokens=False) == text:
        return direct
    # After another character the text is no beginning: encode both, and drop that character's tokens.
    for lead in _LEADS:
        ids: list[int] = tokenizer.encode(lead + text, add_special_tokens=False).tolist()
        spelled, boundaries = _boundaries(tokenizer, ids)
        if spelled.startswith(lead) and len(lead) in boundaries:
            return ids[boundaries[len(lead)] :]
    return direct


def splice(tokenizer: Tokenizer, known: Sequence[int], full: Sequence[int]) -> list[int]:
    """Return ids that spell the text of `full`, and begin with as many of `known` as possible.

    A text can be cut into tokens in several ways. `full` is the tokenizer's way, `known` the way in which the text
    was generated, whose KV may be cached. The result changes over from `known` to `full` at the last boundary
    between tokens that both share.
    """
    if list(full[: len(known)]) == list(known):
        return list(full)
    known_text, known_boundaries = _boundaries(tokenizer, known)
    full_text, full_boundaries = _boundaries(tokenizer, full)
    differing = (place for place, (a, b) in enumerate(zip(known_text, full_text, strict=False)) if a != b)
    same = next(differing, min(len(known_text), len(full_text)))
    at = max(end for end in known_boundaries.keys() & full_boundaries.keys() if end <= same)
    return [*known[: known_boundaries[at]], *full[full_boundaries[at] :]]


def _boundaries(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, dict[int, int]]:
    """Return the text of `ids`, and the boundaries between tokens: characters before -> tokens before."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    text = ""
    boundaries = {0: 0}
    for count, token_id in enumerate(ids, 1):
        text += detokenizer.push(token_id)
        if detokenizer.at_boundary:
            boundaries[len(text)] = count
    return text + detokenizer.finish(), boundaries
