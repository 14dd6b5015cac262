"""Texts and chats of many prompts as token ids, encoded together: what they share is encoded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixrt.arrays import Int32Array
from radixrt.errors import PromptError, TokenizerError
from radixrt.text.chat import Chat
from radixrt.text.excess import refusal_of_chat, refusal_of_length
from radixrt.text.tokenizer import Tokenizer


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str | Chat], limits: Sequence[int | None]
) -> list[Int32Array | PromptError]:
    """The token ids of each prompt, `[n]`, or why it has none.

    A text begins with the tokenizer's special tokens, and a chat with what its template writes. Those that have by
    far more tokens than their limit are refused before each step that takes time and memory; None: there is none.
    """
    found: dict[int, Int32Array | PromptError] = {}
    chats = {place: prompt for place, prompt in enumerate(prompts) if isinstance(prompt, Chat)}
    texts = {place: prompt for place, prompt in enumerate(prompts) if isinstance(prompt, str)}
    for place, chat in [*chats.items()]:
        limit = limits[place]
        if limit is not None and (refusal := refusal_of_chat(tokenizer, chat, limit)) is not None:
            del chats[place]
            found[place] = refusal
    rendered: dict[int, str] = {}
    for place, text in zip(chats, _rendered(tokenizer, list(chats.values())), strict=True):
        if isinstance(text, str):
            rendered[place] = text
        else:
            found[place] = _not_encoded(text)
    for by_place, special in ((texts, True), (rendered, False)):
        for place, text in [*by_place.items()]:
            limit = limits[place]
            if limit is not None and (refusal := refusal_of_length(tokenizer, text, limit)) is not None:
                del by_place[place]
                found[place] = refusal
        found.update(zip(by_place, _encoded(tokenizer, list(by_place.values()), special), strict=True))
    return [found[place] for place in range(len(prompts))]


def _not_encoded(error: TokenizerError) -> PromptError:
    refusal = PromptError(f"cannot be encoded: {error}")
    refusal.__cause__ = error
    return refusal


def _rendered(tokenizer: Tokenizer, chats: list[Chat]) -> Iterable[str | TokenizerError]:
    if not chats:
        return []
    try:
        return tokenizer.chat_texts(chats)
    except TokenizerError as error:  # there is no template
        return [error] * len(chats)


def _encoded(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[Int32Array | PromptError]:
    """The ids of all texts at once, or of each half by itself if one of them cannot be encoded."""
    try:
        return [*tokenizer.encode_batch(texts, add_special_tokens=special)]
    except TokenizerError as error:
        if len(texts) == 1:
            return [_not_encoded(error)]
    half = len(texts) // 2
    return _encoded(tokenizer, texts[:half], special) + _encoded(tokenizer, texts[half:], special)
