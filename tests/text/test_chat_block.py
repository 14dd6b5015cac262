"""Chats as a line of JSON that holds once what they share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixrt.text import chat_block
from radixrt.text.chat_block import ChatBlock, Question

SYSTEM = {"role": "system", "content": "Be brief."}


def asked(*contents: str, system: dict[str, Any] = SYSTEM, **variables: Any) -> Question:
    messages = [system, *({"role": "user", "content": content} for content in contents)]
    return Question("plain", messages, None, {"documents": None, **variables})


def read(block: ChatBlock) -> dict[str, Any]:
    assert block.line.index(b"\n") == len(block.line) - 1
    found: dict[str, Any] = json.loads(block.line)
    return found


def test_what_is_shared_is_there_once() -> None:
    """Be it the same object or an equal one."""
    questions = [asked("a", "b"), asked("b"), asked("a", system=dict(SYSTEM))]
    assert read(ChatBlock(questions, 0, 512)) == {
        "messages": [SYSTEM, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        "others": [{"documents": None}, None],
        "chats": [["plain", 0, 1, [0, 1, 2]], ["plain", 0, 1, [0, 2]], ["plain", 0, 1, [0, 1]]],
    }


VALUES = [1, True, 1.0, 0, False, 0.0, -0.0, None, "1", [1], [True], {"a": 1}, {"a": True}]


def test_values_of_different_types_differ() -> None:
    read_block = read(ChatBlock([asked("a", n=value) for value in VALUES], 0, 512))
    found = [read_block["others"][chat[1]]["n"] for chat in read_block["chats"]]
    assert list(map(repr, found)) == list(map(repr, VALUES))


def test_the_order_of_names_is_kept() -> None:
    ordered = [{"role": "a", "content": "b"}, {"content": "b", "role": "a"}]
    read_block = read(ChatBlock([asked(system=message) for message in ordered], 0, 512))
    assert [list(message) for message in read_block["messages"]] == [list(message) for message in ordered]


def test_a_block_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its chats and by what they have of their own; one chat may always be in it."""
    questions = [asked("a" * 100), asked("a" * 100), asked("b" * 100), asked("c" * 100)]
    assert [ChatBlock(questions, *given).num_chats for given in ((0, 2), (1, 2), (3, 2), (0, 512))] == [2, 2, 1, 4]
    monkeypatch.setattr(chat_block, "MAX_CHARACTERS", 250)
    assert ChatBlock(questions, 0, 512).num_chats == 2 + 1
    assert read(ChatBlock(questions, 1, 512))["chats"][0][3] == [0, 1]
    monkeypatch.setattr(chat_block, "MAX_CHARACTERS", 1)
    assert ChatBlock(questions, 2, 512).num_chats == 1
