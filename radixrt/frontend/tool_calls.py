"""OpenAI's tools: what a body may call, and calls and thoughts in its answers."""

# Tests: tests/server/test_tools.py

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from radixrt.checks import check_kind
from radixrt.errors import ParameterError, PromptError
from radixrt.frontend.openai import as_json
from radixrt.parsers.source import Kind, Part, Tools

AUTO, NONE, REQUIRED = "auto", "none", "required"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MOST = 1024  # functions of one body


def asked_tools(given: Mapping[str, Any]) -> Tools | None:
    """The functions of a body without what is null; None if there are none, or none is to be called.

    Raises PromptError or ParameterError, by name.
    """
    listed = check_kind("tools", given.get("tools", []), list, "a list of tools")
    only_one = not given.get("parallel_tool_calls", True)
    if len(listed) > _MOST:
        raise PromptError(f"tools are {len(listed)}; {_MOST} are the most")
    parameters: dict[str, Mapping[str, Any]] = {}
    for place, tool in enumerate(listed):
        name, schema = _function(f"tools[{place}]", tool)
        if name in parameters:
            raise PromptError(f"tools[{place}] is the second function called {name!r}")
        parameters[name] = schema
    return Tools(parameters, only_one) if parameters else None


def _function(which: str, given: object) -> tuple[str, Mapping[str, Any]]:
    tool = check_kind(which, given, dict, "an object")
    if tool.get("type") != "function":
        raise PromptError(
            f'{which} must be {{"type": "function", "function": {{...}}}}; other tools are not taken'
        )
    function = check_kind(f"{which}.function", tool.get("function"), dict, "an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PromptError(
            f"{which}.function.name is {as_json(name)}; it must be 1 to 64 of a-z, A-Z, 0-9, _, . and -"
        )
    schema = function.get("parameters")
    return name, {} if schema is None else check_kind(
        f"{which}.function.parameters", schema, dict, "a JSON schema"
    )


def asked_choice(given: Mapping[str, Any], tools: Tools | None) -> str | list[str]:
    """AUTO, NONE, or the functions of which one must be called. Raises ParameterError."""
    choice = given.get("tool_choice", AUTO)
    if choice in (AUTO, NONE):
        return str(choice)
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) and named.keys() == {"name"} else None
    if choice != REQUIRED and name is None:
        raise ParameterError(
            f'tool_choice is {as_json(choice)}; it must be "auto", "none", "required" or '
            '{"type": "function", "function": {"name": ...}}'
        )
    known = [] if tools is None else [*tools.parameters]
    if choice == REQUIRED and known:
        return known
    if name not in known:
        told = "that needs tools" if name is None else f"there is no function {as_json(name)} among tools"
        raise ParameterError(f"tool_choice is {as_json(choice)}; {told}")
    return [str(name)]


class Deltas:
    """One answer's parts as OpenAI's deltas, each call with an id of its own."""

    def __init__(self) -> None:
        self._num_calls = self._num_whole = 0

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and all are whole."""
        return self._num_calls == self._num_whole > 0

    def of(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Of parts that have come, those that follow one another as one."""
        deltas: list[dict[str, Any]] = []
        last = None
        for part in parts:
            self._num_whole += part.kind is Kind.END
            if not part.text:
                continue
            if part.kind is last:
                _add(deltas[-1], part.text)
            else:
                deltas.append(self._delta(part))
            last = None if part.kind is Kind.NAME else part.kind
        return deltas

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.kind is Kind.CONTENT:
            return {"content": part.text}
        if part.kind is Kind.REASONING:
            return {"reasoning_content": part.text}
        if part.kind is Kind.ARGUMENTS:
            return {"tool_calls": [{"index": self._num_calls - 1, "function": {"arguments": part.text}}]}
        call = {"index": self._num_calls, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
        self._num_calls += 1
        return {"tool_calls": [{**call, "function": {"name": part.text, "arguments": ""}}]}


def _add(delta: dict[str, Any], text: str) -> None:
    if "tool_calls" in delta:
        delta["tool_calls"][0]["function"]["arguments"] += text
    else:
        (kind,) = delta
        delta[kind] += text


def message_of(parts: Iterable[Part]) -> tuple[dict[str, Any], bool]:
    """A whole answer's message, and whether it has calls that are all whole. It has reasoning_content and
    tool_calls only if there are any.
    """
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    deltas = Deltas()
    for delta in deltas.of(parts):
        for kind, value in delta.items():
            if kind != "tool_calls":
                message[kind] = (message.get(kind) or "") + value
            elif "id" in value[0]:
                call = {key: one for key, one in value[0].items() if key != "index"}
                message.setdefault("tool_calls", []).append(call)
            else:
                message["tool_calls"][-1]["function"]["arguments"] += value[0]["function"]["arguments"]
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return message, deltas.has_called
