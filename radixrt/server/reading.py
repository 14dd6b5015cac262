"""How the answers to one body are taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from radixrt.errors import ParameterError
from radixrt.frontend.openai import is_cut
from radixrt.frontend.tool_calls import NONE, asked_choice, asked_tools
from radixrt.output import CompletionOutput
from radixrt.parsers.choosing import Parsers
from radixrt.parsers.forcing import forced_grammar
from radixrt.parsers.names import TAGS, THINK
from radixrt.parsers.reader import AnswerReader
from radixrt.parsers.source import Part, Tools
from radixrt.parsers.thinking import is_within_thoughts, opens_thoughts
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
        said: the beginning of the answers, if a message goes on.
    """

    parsers: Parsers
    tools: Tools | None
    is_thinking: bool
    said: str

    def reader(self) -> AnswerReader:
        """Of one answer."""
        return AnswerReader(self.parsers.tools, self.parsers.reasoning, self.tools, self.is_thinking, self.said)

    def parts(self, answer: CompletionOutput) -> list[Part]:
        """Of a whole answer."""
        reader = self.reader()
        return [*reader.push(answer.text), *reader.finish(is_cut=is_cut(answer))]


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
    is_thinking, said = False, ""
    if tokenizer is not None and params.form is None:  # an answer in a form begins with that
        is_thinking, said = _beginning(chat, parsers, tokenizer)
    reading = Reading(parsers, tools, is_thinking, said)
    if not isinstance(choice, str):
        assert tools is not None
        assert parsers.tools is not None
        if reading.reader().has_open_call:
            raise ParameterError(
                "tool_choice asks for a call, and the message that goes on ends within one; leave tool_choice out"
            )
        grammar = forced_grammar(
            parsers.tools,
            parsers.reasoning,
            {name: tools.parameters[name] for name in choice},
            several=given["tool_choice"] == "required" and not tools.only_one,
            is_thinking=parsers.reasoning == THINK and is_within_thoughts(is_thinking, said),
        )
        params = replace(params, grammar=grammar, form_engine="auto")
    if tokenizer is not None and _are_special(reading, tokenizer):
        params = replace(params, skip_special_tokens=False)
    return reading, params


def _beginning(chat: Chat, parsers: Parsers, tokenizer: Tokenizer) -> tuple[bool, str]:
    """Whether the prompt opens thoughts, and with what of the answer it ends. Raises TokenizerError."""
    if not chat.is_continued and parsers.reasoning != THINK:
        return False, ""
    prompt, said = tokenizer.chat_text(chat), ""
    if chat.is_continued:  # templates strip contents
        place = prompt.rindex(chat.messages[-1]["content"].strip())
        prompt, said = prompt[:place], prompt[place:]
    return parsers.reasoning == THINK and opens_thoughts(prompt), said


def _are_special(reading: Reading, tokenizer: Tokenizer) -> bool:
    """Whether a tag that is looked for is lost where special tokens are left out."""
    names = (reading.parsers.reasoning, reading.parsers.tools if reading.tools is not None else None)
    tags = [tag for name in names if name is not None for tag in TAGS[name]]
    texts = (tokenizer.decode(ids) for ids in tokenizer.encode_batch(tags, add_special_tokens=False))
    return any(tag not in text for tag, text in zip(tags, texts, strict=True))
