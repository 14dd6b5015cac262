"""Chats as prompts, and their checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

from radixrt.checks import short
from radixrt.errors import TokenizerError

Message = Mapping[str, Any]

_TEXTS = ("reasoning_content", "tool_call_id", "name")  # fields of messages
# Fields that would tell the model something, in ways that are not taken.
_NOT_TAKEN = ("audio", "function_call", "images", "videos", "files", "prefix", "partial")
_HINTS = ("cache_control",)  # of tools' functions
_GIVEN = ("messages", "tools", "chat_template_kwargs", "continue_final_message", "reasoning_effort")
_LONGEST_EFFORT = 64  # characters
_RESERVED = ("messages", "tools", "add_generation_prompt")  # what a template gets anyway


_T = TypeVar("_T")


class SharedParts:
    """Copies of parts of the chats of one list: an object that many of them hold is checked and copied once.

    Nobody may change the objects while the list is read, nor the copies ever.
    """

    def __init__(self) -> None:
        # By identity, with the objects: while they are here, no other one gets their identity.
        self._copies: dict[tuple[object, int], tuple[object, Any]] = {}

    def copy(self, given: object, checked: Callable[..., _T], *named: str) -> _T:
        """What `checked` makes of an object, or has made of it before; errors say how it is `named`."""
        if (known := self._copies.get((checked, id(given)))) is None:
            known = self._copies[checked, id(given)] = given, checked(given, *named)
        copy: _T = known[1]
        return copy


@dataclass(frozen=True)
class Chat:
    """A conversation as a prompt; `of` makes and checks it.

    Attributes:
        messages: at least one.
        tools: descriptions of functions, as the template wants: mostly {"type": "function", "function": {...}}.
        template_kwargs: further variables of the template.
        is_continued: the last message is the beginning of the answer, which goes on where it ends.
        reasoning_effort: a further variable of templates that use it; others have no use for it.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    is_continued: bool = False
    reasoning_effort: str | None = None

    @classmethod
    def of(cls, given: Chat | Mapping[str, Any] | Sequence[Message], shared: SharedParts | None = None) -> Chat:
        """Copy messages, or a dict with `messages` and, if need be, `tools`, `chat_template_kwargs`,
        `continue_final_message` and `reasoning_effort`; None is the same as none. Raises TokenizerError, which
        names what is bad.

        `shared` parts are those of a list of chats, to which this one belongs.
        """
        shared = shared or SharedParts()
        if isinstance(given, Chat):
            return given
        if not isinstance(given, Mapping) or "messages" not in given:
            return cls(checked_messages(given, shared))  # type: ignore[arg-type]  # it says what is wrong
        if unknown := [key for key in given if key not in _GIVEN and given[key] is not None]:
            raise TokenizerError(f"a chat has {', '.join(map(repr, unknown))}; it may have {', '.join(_GIVEN)}")
        messages = checked_messages(given["messages"], shared)
        continued = given.get("continue_final_message")
        if not isinstance(continued, (bool, type(None))):
            raise TokenizerError(f"continue_final_message is {continued!r}; it must be True or False")
        if continued and (messages[-1]["role"] != "assistant" or not messages[-1].get("content")):
            raise TokenizerError("continue_final_message needs a last message of the assistant that has a content")
        effort = given.get("reasoning_effort")
        if effort is not None and (not isinstance(effort, str) or len(effort) > _LONGEST_EFFORT):
            raise TokenizerError(
                f"reasoning_effort is {short(repr(effort))}; it must be a string of at most {_LONGEST_EFFORT} "
                "characters"
            )
        return cls(
            messages,
            shared.copy(given.get("tools"), checked_tools),
            shared.copy(given.get("chat_template_kwargs"), checked_kwargs),
            bool(continued),
            effort,
        )


def is_chat(prompt: object) -> TypeGuard[Chat | Mapping[str, Any] | Sequence[Message]]:
    """Whether a prompt is a Chat, a dict with messages, or a list that begins with a message, good or bad."""
    if isinstance(prompt, Sequence):
        return len(prompt) > 0 and isinstance(prompt[0], Mapping) and not is_chat(prompt[0])
    return isinstance(prompt, Chat) or (isinstance(prompt, Mapping) and "messages" in prompt)


def checked_messages(messages: Sequence[Message], shared: SharedParts | None = None) -> list[dict[str, Any]]:
    """Copy messages; of those that are `shared` there is one copy. Raises TokenizerError, which names a bad one.

    Each is a dict of a role and a content: a string, or a list of {"type": "text", "text"}, which are joined. The
    assistant's may have `tool_calls`, then without a content if there is none: arguments become objects where they
    are JSON as a string, and stay what they are otherwise. Other fields are kept for templates that use them, such
    as `name`; those that would tell the model more, such as `audio`, are refused unless they are empty.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise TokenizerError(f"a chat is a list of messages, not {type(messages).__name__}")
    if not messages:
        raise TokenizerError("the chat is empty; give at least one message")
    shared = shared or SharedParts()
    named = ((f"chat message {place}", message) for place, message in enumerate(messages))
    return [shared.copy(message, _checked_message, which) for which, message in named]


def _checked_message(message: object, which: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TokenizerError(f"{which} is {type(message).__name__}; it must be a dict of role and content")
    # As OpenAI's client gives an answer's message: with fields that are not of its role, None or [].
    given = {key: value for key, value in message.items() if key in ("role", "content") or not _is_empty(value)}
    is_answer = given.get("role") == "assistant"
    calls, content = given.get("tool_calls"), given.get("content")
    if is_answer and not content and (given.get("refusal") or (not calls and given.get("reasoning_content"))):
        content = given["content"] = given.get("refusal") or ""  # all that was said
    if missing := [key for key in (("role",) if calls else ("role", "content")) if key not in given]:
        raise TokenizerError(f"{which} has no {' and no '.join(map(repr, missing))}")
    role = _checked_text(f"{which} has a role", which, given["role"], " of its role")
    if not role:
        raise TokenizerError(f"{which} has an empty role")
    if calls and not is_answer:
        raise TokenizerError(f"{which} has 'tool_calls'; with the role {role!r} it may have none")
    if unknown := [key for key in _NOT_TAKEN if given.get(key)]:
        named = ", ".join(map(repr, unknown))
        raise TokenizerError(f"{which} has {named}, which cannot be honoured; leave it out")
    checked: dict[str, Any] = {"role": role}
    if content is not None or not calls:
        content = _joined(which, content)
        checked["content"] = _checked_text(f"{which} has a content", which, content, " of its content")
    elif "content" in given:
        checked["content"] = None  # templates tell it from an empty one
    if calls:
        checked["tool_calls"] = _checked_calls(which, calls)
    for key, value in given.items():
        if key in _TEXTS:
            checked[key] = _checked_text(f"{which} has a {key}", which, value, f" of its {key}")
        elif key not in checked and key not in _NOT_TAKEN:
            checked[key] = _copied(f"{which} has a field {key!r}", value)
    return checked


def _joined(which: str, content: object) -> object:
    """A content whose parts are one text."""
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        return "".join(_part(which, place, part) for place, part in enumerate(content))
    return content


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, list) and not value)


def _checked_text(has: str, which: str, value: object, part: str) -> str:
    if not isinstance(value, str):
        raise TokenizerError(f"{has} of type {type(value).__name__}; it must be a string")
    check_unicode(which, value, part)
    return value


def _part(which: str, place: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal" and isinstance(part, Mapping) and isinstance(part.get("refusal"), str):
        return str(part["refusal"])  # what the assistant has said
    if isinstance(kind, str) and kind != "text":
        raise TokenizerError(f"{which} has a content whose part {place} is of type {kind!r}; only text is taken")
    if not isinstance(part, Mapping) or kind is None or not isinstance(part.get("text"), str):
        raise TokenizerError(
            f'{which} has a content whose part {place} is no {{"type": "text", "text": "..."}}; only text is taken'
        )
    return str(part["text"])


def _checked_calls(which: str, calls: object) -> list[dict[str, Any]]:
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise TokenizerError(f"{which} has tool_calls of type {type(calls).__name__}; they must be a list")
    checked = []
    for place, call in enumerate(_as_json(f"{which} has tool_calls", calls)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise TokenizerError(f"{which} has a tool call {place} without a function that has a name")
        checked.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return checked


def _arguments(given: Any) -> dict[str, Any] | str:
    """Arguments as an object, as templates want them; or what was said in their place, if that is none."""
    if given is None or isinstance(given, dict):
        return given or {}
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        read = json.loads(text or "{}", strict=False)  # models write new lines as they are
        json.dumps(read, ensure_ascii=False).encode()  # it may name halves of surrogate pairs
    except (ValueError, RecursionError):
        return text
    return read if isinstance(read, dict) else text


def checked_tools(tools: object) -> list[dict[str, Any]]:
    """Copy descriptions of tools, [] for None, without hints to servers. Raises TokenizerError."""
    if tools is None:
        return []
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise TokenizerError(f"tools are of type {type(tools).__name__}; they must be a list")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise TokenizerError("tools hold what is no object; each must be a dict that describes a function")
    checked: list[dict[str, Any]] = _as_json("tools", tools)
    return [*map(_without_hints, checked)]


def _without_hints(tool: dict[str, Any]) -> dict[str, Any]:
    """A function without what is not for the model: templates write all that there is."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        return tool
    return {"type": "function", "function": {key: function[key] for key in function if key not in _HINTS}}


def checked_kwargs(given: object) -> dict[str, Any]:
    """Copy variables for a chat template, {} for None. Raises TokenizerError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TokenizerError(f"chat_template_kwargs are {given!r}; they must map names to values")
    if reserved := [name for name in _RESERVED if name in given]:
        raise TokenizerError(f"chat_template_kwargs have {reserved[0]!r}, which the template gets anyway")
    checked: dict[str, Any] = _as_json("chat_template_kwargs", given)
    return checked


def _as_json(which: str, value: Any) -> Any:
    """A copy of a mapping or of a sequence."""
    return _copied(which, dict(value) if isinstance(value, Mapping) else list(value))


def _copied(which: str, value: Any) -> Any:
    """A copy, as templates in another process get it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{which} that cannot be written as JSON: {error}") from None


def check_unicode(which: str, text: str, part: str = "") -> None:
    """Raise TokenizerError if `text` holds half of a surrogate pair; the message names its position."""
    if text.isascii():  # known at once
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{which} holds U+{ord(text[error.start]):04X}, half of a surrogate pair, at character "
            f"{error.start}{part}; it is not valid Unicode"
        ) from None
