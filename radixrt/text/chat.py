"""Chat messages: checked, and rendered by a checkpoint's template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from radixrt.errors import TokenizerError

Message = Mapping[str, str]

_KEYS = ("role", "content")


def is_chat(prompt: object) -> bool:
    """Whether a prompt is a list that begins with a mapping. Its messages are not checked."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes))
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


def checked_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Copy `messages`, each a dict of a role and a content, both strings; the content may be empty.

    Raises:
        TokenizerError: names the first bad message, and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(f"a chat is a list of messages, not {type(messages).__name__}")
    if not messages:
        raise TokenizerError("the chat is empty; give at least one message")
    checked = []
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
        checked.append({key: message[key] for key in _KEYS})
    return checked


def check_unicode(which: str, text: str, part: str = "") -> None:
    """Raise TokenizerError if `text` holds half of a surrogate pair; the message names its position."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{which} holds U+{ord(text[error.start]):04X}, half of a surrogate pair, at character "
            f"{error.start}{part}; it is not valid Unicode"
        ) from None


def render(
    template: Callable[[list[dict[str, str]], bool], str], messages: Sequence[Message], add_generation_prompt: bool
) -> str:
    """Render messages with `template`, which runs in a sandbox and raises Jinja's exceptions.

    Raises:
        TokenizerError: a message is bad, or the template refuses the chat, fails, or tries to leave its sandbox.
    """
    from jinja2.exceptions import SecurityError, TemplateError

    checked = checked_messages(messages)
    try:
        return template(checked, add_generation_prompt)
    except SecurityError as error:
        forbidden = "the chat template of this checkpoint tries to do what its sandbox forbids"
        raise TokenizerError(f"{forbidden}: {error}") from error
    except Exception as error:  # a template is a program: it may raise anything
        # transformers raises a bare TemplateError where a template calls raise_exception
        what = "refuses" if type(error) is TemplateError else "fails on"
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise TokenizerError(f"the chat template {what} these messages: {cause}") from error
