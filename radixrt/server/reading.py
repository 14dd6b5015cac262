"""How the answers to one body are taken apart."""

# Tests: tests/server/test_tools.py

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from radixrt.errors import ParameterError
from radixrt.frontend.tool_calls import NONE, asked_choice, asked_tools
from radixrt.parsers.choosing import Parsers
from radixrt.parsers.forcing import forced_grammar
from radixrt.parsers.names import HARMONY, THINK
from radixrt.parsers.reader import AnswerReader
from radixrt.parsers.source import Part, Tools
from radixrt.parsers.thinking import opens_thoughts
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """What is to be found in an answer.

    Attributes:
        parsers: that find it.
        tools: what may be called, if anything.
        is_thinking: whether the prompt has opened the thoughts.
    """

    parsers: Parsers
    tools: Tools | None
    is_thinking: bool

    def reader(self) -> AnswerReader:
        """Of one answer."""
        return AnswerReader(self.parsers.tools, self.parsers.reasoning, self.tools, self.is_thinking)

    def parts(self, text: str) -> list[Part]:
        """Of a whole answer."""
        reader = self.reader()
        return [*reader.push(text), *reader.finish()]


def without_tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """A body for its prompt and its parameters: without the choice among tools, which is for `reading_of`, and
    without tools where none is to be called, so that the model sees none.
    """
    left_out = ("tool_choice", "tools") if given.get("tool_choice") == NONE else ("tool_choice",)
    return {name: value for name, value in given.items() if name not in left_out}


def reading_of(
    given: Mapping[str, Any], chat: Chat, params: SamplingParams, parsers: Parsers, tokenizer: Tokenizer | None
) -> tuple[Reading | None, SamplingParams]:
    """How answers to a chat are read, None where text stays as it is; and with which parameters they are made.

    Raises ParameterError or PromptError by name, TokenizerError where the chat cannot be rendered.
    """
    tools = asked_tools(given)
    choice = asked_choice(given, tools)
    if choice == NONE:
        tools = None
    is_read = params.skip_special_tokens and parsers != Parsers()  # else somebody wants the text as it is
    if not isinstance(choice, str):
        if parsers.tools is None:
            raise ParameterError(
                "tool_choice asks for a call, and no parser of this model's calls is chosen (--tool-parser)"
            )
        if not is_read:
            raise ParameterError(
                "tool_choice asks for a call, but skip_special_tokens is false: text stays as it is"
            )
        if params.form is not None:
            raise ParameterError(
                "tool_choice asks for a call, which has a form of its own; leave the other one out"
            )
    if not is_read or (tools is None and parsers.reasoning is None):  # nothing is looked for
        return None, params
    is_thinking = False
    if parsers.reasoning == THINK and tokenizer is not None and params.form is None:  # which thoughts have not
        continued = chat.messages[-1]["content"] if chat.is_continued else None
        is_thinking = opens_thoughts(tokenizer.chat_text(chat), continued)
    if not isinstance(choice, str):
        assert tools is not None
        assert parsers.tools is not None
        grammar = forced_grammar(
            parsers.tools,
            parsers.reasoning,
            {name: tools.parameters[name] for name in choice},
            several=given["tool_choice"] == "required" and not tools.only_one,
            is_thinking=is_thinking,
        )
        params = replace(params, grammar=grammar, form_engine="auto")
    if parsers.reasoning == HARMONY or (tools is not None and parsers.tools is not None):
        params = replace(params, skip_special_tokens=False)  # tags may be special tokens
    return Reading(parsers, tools, is_thinking), params
