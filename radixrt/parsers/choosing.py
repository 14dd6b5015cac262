"""Which parsers are for a model's answers, by its chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from radixrt.errors import ParameterError, TokenizerError
from radixrt.parsers.answer_parser import AnswerParser
from radixrt.parsers.names import AUTO, HARMONY, NONE, REASONING_PARSERS, THINK, TOOL_PARSERS
from radixrt.parsers.source import Kind, Tools
from radixrt.text.tokenizer import Tokenizer

_USER = {"role": "user", "content": "a"}
_ARGUMENTS = {"place": "Oslo"}
_CALL = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": _ARGUMENTS}}
_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "b", "parameters": _SCHEMA}}


@dataclass(frozen=True)
class Parsers:
    """Names of parsers; None: text stays as it is.

    Attributes:
        tools: one of TOOL_PARSERS.
        reasoning: one of REASONING_PARSERS.
    """

    tools: str | None = None
    reasoning: str | None = None


def chosen(tokenizer: Tokenizer | None, tools: str = AUTO, reasoning: str = AUTO) -> Parsers:
    """Those of these names; AUTO is what the chat template tells, NONE is none. Raises ParameterError where two do
    not go together.

    For tools that is the parser that reads a call in what the template writes of one; for reasoning, what the
    template's text names.
    """
    for option, value, known in (("tool", tools, TOOL_PARSERS), ("reasoning", reasoning, REASONING_PARSERS)):
        if value not in (AUTO, NONE, *known):
            raise ParameterError(f"{option}_parser is {value!r}; it must be {AUTO}, {NONE}, {', '.join(known)}")
    if reasoning == AUTO and tools == HARMONY:
        reasoning = HARMONY
    for_reasoning = _reasoning_of(tokenizer) if reasoning == AUTO else reasoning
    for_tools = _tools_of(tokenizer) if tools == AUTO else tools
    if tools == AUTO and (for_tools == HARMONY) != (for_reasoning == HARMONY):
        for_tools = NONE
    if for_tools != NONE and (for_tools == HARMONY) != (for_reasoning == HARMONY):
        raise ParameterError(
            f"tool_parser is {for_tools!r} and reasoning_parser is {for_reasoning!r}; {HARMONY} is for both, or "
            "for reasoning alone"
        )
    return Parsers(*(None if name == NONE else name for name in (for_tools, for_reasoning)))


def _reasoning_of(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return NONE
    if tokenizer.template_names("<|channel|>analysis"):
        return HARMONY
    return THINK if tokenizer.template_names("</think>") else NONE


def _tools_of(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None or not tokenizer.has_chat_template:
        return NONE
    asked: dict[str, Any] = {"messages": [_USER], "tools": [_TOOL]}
    called = {**asked, "messages": [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]}
    try:
        prompt = tokenizer.chat_text(asked)
        text = tokenizer.chat_text(called, add_generation_prompt=False)
    except TokenizerError:  # it has no use for tools, or no calls
        return NONE
    same = (one == other for one, other in zip(prompt, text, strict=False))
    start = sum(takewhile(bool, same))
    tag = text.rfind("<", 0, start)
    if tag >= 0 and ">" not in text[tag:start]:
        start = tag  # "<think>" in the prompt and "<tool_call>" begin alike
    answer = text[start:]
    return next((name for name in TOOL_PARSERS if _reads(name, answer)), NONE)


def _reads(name: str, answer: str) -> bool:
    reader = AnswerParser(name, HARMONY if name == HARMONY else None, Tools({"probe": _SCHEMA}))
    parts = [*reader.push(answer), *reader.finish(is_cut=False)]
    names = [part.text for part in parts if part.kind is Kind.NAME]
    arguments = "".join(part.text for part in parts if part.kind is Kind.ARGUMENTS)
    try:
        return names == ["probe"] and bool(json.loads(arguments) == _ARGUMENTS)
    except ValueError:
        return False
