"""Finds texts that are far too long without encoding all of them, which takes minutes and gigabytes."""

from __future__ import annotations

from radixrt.errors import ContextLengthError, TokenizerError
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer
from radixrt.text.traces import told

_CHARACTERS = 8  # for each token that is allowed: shorter texts are encoded whole


def may_exceed(length: int, num_tokens: int) -> bool:
    """Whether a text of so many characters is too long to be encoded before it is known to have fewer tokens."""
    return length > _unlooked(num_tokens)


def _unlooked(num_tokens: int) -> int:
    """Characters of a text that is encoded whole in any case."""
    return _CHARACTERS * (num_tokens + 64)


def exceeds(tokenizer: Tokenizer, text: str, num_tokens: int) -> bool:
    """Whether a text surely has more than `num_tokens` tokens. If not, it is not too long to be encoded.

    A beginning of the text is encoded, and a longer one as long as it has few tokens. All but the last tokens of a
    beginning are also those of the whole text, so one that has a quarter more than allowed settles it.
    """
    length = _unlooked(num_tokens)
    while length < len(text):
        try:
            if len(tokenizer.encode(text[:length], add_special_tokens=False)) > num_tokens + num_tokens // 4 + 16:
                return True
        except TokenizerError:  # whoever encodes the whole text says why
            return False
        length *= 4
    return False


def too_long(num_tokens: int, context_length: int, longest: int) -> ContextLengthError:
    """Why a prompt of so many tokens is refused, of which at most `longest` are taken."""
    return ContextLengthError(
        f"has {num_tokens} tokens, but this model's maximum context length is {context_length} tokens: it may "
        f"have at most {longest}"
    )


def refusal_of_length(
    tokenizer: Tokenizer, text: str, context_length: int, where: str = ""
) -> ContextLengthError | None:
    """Why a prompt is refused without being encoded whole; None if it is not. `where` the text is, for it."""
    if not exceeds(tokenizer, text, context_length):
        return None
    return ContextLengthError(
        f"has {len(text):,} characters{where} and by far more tokens than fit: this model's maximum context "
        f"length is {context_length} tokens, and a prompt may have at most {context_length - 1}"
    )


def refusal_of_chat(tokenizer: Tokenizer, chat: Chat, context_length: int) -> ContextLengthError | None:
    """Why a chat is refused without being rendered; None if it is not.

    The assistant's thoughts do not count: templates leave them out.
    """
    if not tokenizer.has_chat_template:  # whoever renders it says so
        return None
    said = ((message.get("content") or "")[slice(*told(message))] for message in chat.messages)
    return refusal_of_length(tokenizer, "\n".join(said), context_length, " in its messages")
