"""`ChatBlock`: chats for the process that renders them, as a line of JSON that holds what they share once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from radixrt.text.chat import Message

MAX_CHARACTERS = 2**22  # of JSON and places, but for the last chat

_HASHED = {str, bool, int, type(None)}  # where what is equal is written alike


@dataclass(frozen=True)
class Question:
    """A chat to be rendered.

    Attributes:
        template: its name.
        variables: all of the template but messages and tools.
    """

    template: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


class ChatBlock:
    """The chats of a list from one place on: at least one, and as many as a block may have.

    Attributes:
        num_chats: how many they are.
        line: a line of JSON, {"messages": [...], "others": [...], "chats": [[template, variables, tools,
            messages], ...]}. What several chats have is written once: each has the places of its messages in
            `messages`, and those of its variables and tools in `others`.
    """

    def __init__(self, questions: Sequence[Question], first: int, most: int) -> None:
        messages, others = _Table(), _Table()
        chats: list[tuple[str, int, int, list[int]]] = []
        num_places = 0
        for question in islice(questions, first, first + most):
            places = [messages.place(message) for message in question.messages]
            variables, tools = others.place(question.variables), others.place(question.tools)
            chats.append((question.template, variables, tools, places))
            num_places += len(places)
            if messages.num_characters + others.num_characters + num_places >= MAX_CHARACTERS:
                break
        self.num_chats = len(chats)
        self.line = f'{{"messages": {messages}, "others": {others}, "chats": {json.dumps(chats)}}}\n'.encode()


class _Table:
    """Different values as JSON; those that are given must not change or end meanwhile.

    Attributes:
        num_characters: of its JSON, about.
    """

    def __init__(self) -> None:
        self.num_characters = 0
        self._written: list[str] = []
        self._place_of_object: dict[int, int] = {}
        self._place_of_content: dict[object, int] = {}

    def place(self, value: Mapping[str, Any] | list[dict[str, Any]] | None) -> int:
        """Where a value is in the table, which it joins if it is new."""
        if (place := self._place_of_object.get(id(value))) is None:
            place = self._place_of_object[id(value)] = self._joined(value)
        return place

    def _joined(self, value: Mapping[str, Any] | list[dict[str, Any]] | None) -> int:
        written, content = None, _content(value)
        if content is None:
            content = written = json.dumps(value)
        if (place := self._place_of_content.get(content)) is None:
            place = self._place_of_content[content] = len(self._written)
            self._written.append(json.dumps(value) if written is None else written)
            self.num_characters += len(self._written[-1])
        return place

    def __str__(self) -> str:
        return f"[{', '.join(self._written)}]"


def _content(value: object) -> object:
    """What equal dicts of texts and the like have in common, which is made sooner than JSON; None for others."""
    if not isinstance(value, dict):
        return None
    kinds = tuple(map(type, value.values()))  # as True equals 1
    return (*value.items(), kinds) if _HASHED.issuperset(kinds) else None
