"""Answers made by seeds: what was meant is told, whole and in pieces; arguments are JSON, and no text is lost."""

from __future__ import annotations

import json
import re
from itertools import pairwise, takewhile
from random import Random
from typing import Any

import pytest

from radixrt.checks import nests_deeper, refuse_constant
from radixrt.frontend.tool_calls import Deltas, message_of
from radixrt.parsers.answer_parser import AnswerParser
from radixrt.parsers.json_value import MOST_DEEP
from radixrt.parsers.source import Kind, Part
from tests.support.written_answers import PARAMETERS, SYNTAXES, Told, Written, written

COUNT = 2500  # answers of a syntax; `make test-long` has a hundred times as many
_TAGS = re.compile(
    r"(?:\s|</?think>|</tool_call>|\}|,\s*\"name\"\s*:\s*\"[^\"]+\"|<\|\w+\|>|\w+(?: \w+)? ?(?=<\|)|<\|\w*\|?"
    r"|<(?:/(?:t(?:o(?:o(?:l(?:_(?:c(?:a(?:l(?:l)?)?)?)?)?)?)?)?)?)?)*"
)
_HALF_ESCAPE = re.compile(r"(?:\\u?[0-9a-fA-F]{0,4}){1,2}$")


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in range(1, 100))])
def test_answers(syntax: str, block: int) -> None:
    for number in range(block * COUNT, (block + 1) * COUNT):
        made = written(syntax, str(number))
        try:
            _check(made, Random(number))
        except Exception as error:
            raise AssertionError(f"answer {number} of {syntax}: {made!r}") from error


def _check(made: Written, random: Random) -> None:
    text = made.text
    parts = _parts(made, [text])
    told, wholes = _told(parts)
    cuts = sorted(random.choices(range(len(text) + 1), k=random.randrange(8)))
    pieces = text if random.random() < 0.1 else [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert _told(_parts(made, pieces)) == (told, wholes)
    assert "".join(part.raw for part in parts) == text
    assert all(_TAGS.fullmatch(part.raw) for part in parts if part.kind is Kind.SYNTAX)
    if random.random() < 0.1:
        _check_messages(made, parts, pieces)
    if made.meant is None:
        return
    if made.is_cut:
        _check_beginning(made, [*told], wholes)
    else:
        assert told == made.meant
        assert all(wholes)
    if random.random() < 0.1:  # an answer that goes on
        place = random.randrange(len(text) + 1)
        rest, _ = _told(_parts(made, [text[place:]], said=text[:place]))
        assert rest[1:] == told[len(told) - len(rest) + 1 :] if rest else True
        assert not rest or _is_end_of(rest[0], told[len(told) - len(rest)])


def _parts(made: Written, pieces: Any, said: str = "") -> list[Part]:
    reader = AnswerParser(made.tool_parser, made.reasoning_parser, made.tools, made.is_thinking, said)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return [*parts, *reader.finish(is_cut=made.is_cut)]


def _told(parts: list[Part]) -> tuple[Told, list[bool]]:
    """What clients are told, texts that follow one another joined, and of each call whether it is whole."""
    told: list[tuple[str, list[str]]] = []
    wholes: list[bool] = []
    last = None
    for part in parts:
        if part.kind is Kind.NAME:
            told.append((part.text, []))
            wholes.append(False)
        elif part.kind is Kind.ARGUMENTS:
            assert last in (Kind.NAME, Kind.ARGUMENTS)
            told[-1][1].append(part.text)
        elif part.kind is Kind.END:
            assert last is Kind.ARGUMENTS
            wholes[-1] = True
        elif part.text:
            assert part.raw in ("", part.text)
            if last is part.kind:
                told[-1][1].append(part.text)
            else:
                told.append((part.kind.value, [part.text]))
        last = last if part.kind is Kind.SYNTAX else part.kind
    return [
        (name, "".join(texts) if name in ("content", "reasoning") else _arguments("".join(texts)))
        for name, texts in told
    ], wholes


def _arguments(text: str) -> dict[str, Any]:
    value = json.loads(text, parse_constant=refuse_constant)
    assert isinstance(value, dict)
    assert "Infinity" not in json.dumps(value)
    assert not nests_deeper(value, MOST_DEEP)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_messages(made: Written, parts: list[Part], pieces: Any) -> None:
    """A stream's deltas join to the message of the whole."""
    message, has_called = message_of(parts)
    deltas, joined, calls = Deltas(), {"content": "", "reasoning_content": ""}, list[list[str]]()
    for part in _parts(made, pieces):
        for delta in deltas.of([part]):
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                assert call["index"] == len(calls) - 1
                calls[-1][1] += call["function"]["arguments"]
            for kind, text in delta.items():
                joined[kind] += text
    assert deltas.has_called == has_called
    assert [(message.get("content") or ""), message.get("reasoning_content", "")] == [*joined.values()]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert [[one["name"], one["arguments"]] for one in functions] == calls


def _check_beginning(made: Written, told: Told, wholes: list[bool]) -> None:
    """What is told of an answer that is cut is the beginning of what was meant; the text of a tag may follow."""
    meant = made.meant
    assert meant is not None
    if told and told[-1][0] in ("content", "reasoning"):  # it may end with half a tag, or the head of half a call
        kind, said = told.pop()
        known = meant[len(told)][1] if len(told) < len(meant) and meant[len(told)][0] == kind else ""
        same = (one == other for one, other in zip(known, said, strict=False))
        assert made.text.endswith(said[sum(takewhile(bool, same)) :])
    assert len(told) <= len(meant)
    calls = [one for one in told if one[0] in PARAMETERS]
    assert all(wholes[:-1])
    assert told[:-1] == meant[: len(told[:-1])]
    if told and told[-1] in calls:
        (name, value), (meant_name, meant_value) = told[-1], meant[len(told) - 1]
        assert name == meant_name
        assert _is_beginning(value, meant_value, made.text)
        # A text that is cut behind what looks like a tag ends there for all that is known.
        assert (
            value == meant_value or not wholes[-1] or made.text.rstrip().endswith(("</function>", "</tool_call>"))
        )


def _is_beginning(value: Any, meant: Any, text: str) -> bool:
    if isinstance(value, str):
        if meant is None:
            return any(one.startswith(value.removesuffix("<").strip()) for one in ("null", "None"))
        if not isinstance(meant, str):
            return False
        more = value[len(meant) :]
        is_same = meant.startswith((_HALF_ESCAPE.sub("", value), value))
        return is_same or (value.startswith(meant) and text.endswith(more))
    if isinstance(value, dict) and isinstance(meant, dict):
        keys = [*meant][: len(value)]
        others = keys[:-1]
        return [*value] == keys and (
            not keys
            or (
                all(value[key] == meant[key] for key in others)
                and _is_beginning(value[keys[-1]], meant[keys[-1]], text)
            )
        )
    if isinstance(value, list) and isinstance(meant, list):
        last = len(value) - 1
        return last < len(meant) and (
            not value or (value[:last] == meant[:last] and _is_beginning(value[last], meant[last], text))
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return isinstance(meant, (int, float))
    return bool(value == meant)


def _is_end_of(rest: tuple[str, Any], whole: tuple[str, Any]) -> bool:
    name, value = rest
    return name == whole[0] and (whole[1].endswith(value) if isinstance(value, str) else value == whole[1])
