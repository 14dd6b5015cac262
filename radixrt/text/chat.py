"""Chat messages and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from radixrt.errors import TokenizerError

Message = Mapping[str, str]

_KEYS = ("role", "content")


def is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is a list that begins with a mapping. Its messages are not checked."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Copy messages, dicts of a role and a content, both strings. Raises TokenizerError, which names a bad one."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise TokenizerError(f"a chat is a list of messages, not {type(messages).__name__}")
    if not messages:
        raise TokenizerError("the chat is empty; give at least one message")
    for place, message in enumerate(messages):
        which = f"chat message {place}"
        if not isinstance(message, Mapping):
            raise TokenizerError(f"{which} is {type(message).__name__}; it must be a dict of role and content")
        if missing := [key for key in _KEYS if key not in message]:
            raise TokenizerError(f"{which} has no {' and no '.join(map(repr, missing))}")
        if unknown := [key for key in message if key not in _KEYS]:
            raise TokenizerError(f"{which} has {', '.join(map(repr, unknown))}; it may have 'role' and 'content'")
        for key in _KEYS:
            value: object = message[key]
            if not isinstance(value, str):
                raise TokenizerError(f"{which} has a {key} of type {type(value).__name__}; it must be a string")
            check_unicode(which, value, f" of its {key}")
        if not message["role"]:
            raise TokenizerError(f"{which} has an empty role")
    return [{key: message[key] for key in _KEYS} for message in messages]


def check_unicode(which: str, text: str, part: str = "") -> None:
    """Raise TokenizerError if `text` holds half of a surrogate pair; the message names its position."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{which} holds U+{ord(text[error.start]):04X}, half of a surrogate pair, at character "
            f"{error.start}{part}; it is not valid Unicode"
        ) from None
