"""Answers to the chats of a batch, taken apart as those to clients are."""

from __future__ import annotations

from typing import Any

from radixrt.frontend.tool_calls import asked_tools, message_of
from radixrt.output import CompletionOutput
from radixrt.parsers.choosing import Parsers
from radixrt.sampling_params import SamplingParams
from radixrt.server.answer_parsing import AnswerParsing, FormRefusal, parsing_of, without_tools
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer

_OF_TOOLS = ("tools", "parallel_tool_calls")


class ServedChats:
    """A `ChatReader` with a server's parsers."""

    def __init__(self, parsers: Parsers, tokenizer: Tokenizer | None, refusal: FormRefusal) -> None:
        self._parsers, self._tokenizer, self._refusal = parsers, tokenizer, refusal

    def without_choice(self, given: dict[str, Any]) -> dict[str, Any]:
        """A body for its prompt and its parameters."""
        return without_tools(given)

    def reading(
        self, given: dict[str, Any], chat: Chat, params: SamplingParams
    ) -> tuple[dict[str, Any] | None, SamplingParams]:
        """What of a body tells how its answers are taken apart, if they are; and their parameters.

        Raises ParameterError, PromptError or TokenizerError, by name.
        """
        reading, params = parsing_of(given, chat, params, self._parsers, self._tokenizer, self._refusal)
        if reading is None:
            return None, params
        told = {name: given[name] for name in _OF_TOOLS if name in given and reading.tools is not None}
        told |= {"is_thinking": reading.is_thinking, "has_form": reading.has_form, "said": reading.said}
        return told, params

    def message(self, reading: dict[str, Any], answer: CompletionOutput) -> tuple[dict[str, Any], bool]:
        """The message of an answer, and whether it ends with calls."""
        tools = asked_tools({name: value for name, value in reading.items() if name in _OF_TOOLS})
        has_form, said = reading.get("has_form", False), reading.get("said", "")  # earlier versions had neither
        read = AnswerParsing(self._parsers, tools, reading["is_thinking"], said, has_form)
        return message_of(read.parts(answer))
