"""Answers to the chats of a batch, taken apart as those to clients are."""

from __future__ import annotations

from typing import Any

from radixrt.frontend.tool_calls import asked_tools, message_of
from radixrt.output import CompletionOutput
from radixrt.parsers.choosing import Parsers
from radixrt.sampling_params import SamplingParams
from radixrt.server.reading import Reading, reading_of, without_tools
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer

_OF_TOOLS = ("tools", "parallel_tool_calls")


class ServedChats:
    """A `ChatReader` with a server's parsers."""

    def __init__(self, parsers: Parsers, tokenizer: Tokenizer | None) -> None:
        self._parsers, self._tokenizer = parsers, tokenizer

    def without_choice(self, given: dict[str, Any]) -> dict[str, Any]:
        """A body for its prompt and its parameters."""
        return without_tools(given)

    def reading(
        self, given: dict[str, Any], chat: Chat, params: SamplingParams
    ) -> tuple[dict[str, Any] | None, SamplingParams]:
        """What of a body tells how its answers are taken apart, if they are; and their parameters.

        Raises ParameterError, PromptError or TokenizerError, by name.
        """
        reading, params = reading_of(given, chat, params, self._parsers, self._tokenizer)
        if reading is None:
            return None, params
        told = {name: given[name] for name in _OF_TOOLS if name in given and reading.tools is not None}
        return {**told, "is_thinking": reading.is_thinking, "said": reading.said}, params

    def message(self, reading: dict[str, Any], answer: CompletionOutput) -> tuple[dict[str, Any], bool]:
        """The message of an answer, and whether it ends with calls."""
        tools = asked_tools({name: value for name, value in reading.items() if name in _OF_TOOLS})
        read = Reading(self._parsers, tools, reading["is_thinking"], reading.get("said", ""))
        return message_of(read.parts(answer))
