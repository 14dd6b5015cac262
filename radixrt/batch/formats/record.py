"""A line of a batch and its errors, independent of the line's format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from radixrt.checks import short
from radixrt.errors import ContextLengthError
from radixrt.frontend.sampling_aliases import sampling_params_from_dict
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat

_MAX_REMEMBERED = 1024
_MAX_MESSAGE = 1000  # characters: a message may show a value of any length

FORM_ENGINE = "form_engine"  # key of a reply whose answer has a form: the engine that has compiled it

Reply = dict[str, Any]
"""Values of a line that its record repeats: format, custom_id, metadata and the like, as JSON. Only `line_format`
reads them. A run keeps them on disk until the line has its answer.
"""


class Format(str, Enum):
    """The format of a line."""

    PLAIN = "plain"  # radixrt's own: `plain_lines`
    OPENAI = "openai"  # OpenAI's batches: `openai_batch`


class LineErrorType(str, Enum):
    """Kinds of errors of a line."""

    INVALID_LINE = "invalid_line"  # not UTF-8, not JSON, too long, not an object, or with a wrong key
    INVALID_PROMPT = "invalid_prompt"  # none, empty, or tokens that the model does not have
    CONTEXT_LENGTH = "context_length_exceeded"  # more tokens than the context takes: OpenAI's name
    INVALID_PARAMETERS = "invalid_parameters"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"  # of a line before it that is sound
    FAILED = "failed"  # the line is sound; its run failed
    INCOMPLETE_FORM = "incomplete_form"  # with `strict_form`: the answer ended before its form was complete


def type_of_prompt_error(error: Exception) -> LineErrorType:
    """The kind of a prompt that cannot run."""
    return LineErrorType.CONTEXT_LENGTH if isinstance(error, ContextLengthError) else LineErrorType.INVALID_PROMPT


class LineError(Exception):
    """A line that cannot be answered.

    Attributes:
        type: kind of error.
        message: for people.
        reply: with custom_id and metadata as far as they could be read.
    """

    def __init__(self, type: LineErrorType, message: str, reply: Reply) -> None:
        super().__init__(message)
        self.type = type
        self.message = short(message, _MAX_MESSAGE)
        self.reply = reply


@dataclass(frozen=True)
class InputRecord:
    """A sound line.

    Attributes:
        prompt: text, token ids, or a chat, not empty. Its length and vocabulary are not checked yet.
        sampling_params: the run's defaults with the line's own on top.
        reply: see `Reply`.
    """

    prompt: str | list[int] | Chat
    sampling_params: SamplingParams
    reply: Reply

    @property
    def custom_id(self) -> str | None:
        """The user's name for the line."""
        custom_id: str | None = self.reply["custom_id"]
        return custom_id

    @property
    def metadata(self) -> Any:
        """The user's metadata, returned with the answer; None in OpenAI's format."""
        return self.reply.get("metadata")


class ParameterReader:
    """Makes SamplingParams of the parameters in lines, the same object for equal parameters.

    Args:
        defaults: for parameters that a line does not give.
    """

    def __init__(self, defaults: SamplingParams) -> None:
        self._defaults = defaults
        self._known: dict[str, SamplingParams] = {}

    def read(self, given: dict[str, Any]) -> SamplingParams:
        """The defaults with `given` on top. Raises ParameterError."""
        if not given:
            return self._defaults
        text = repr(given)  # tells 1, 1.0 and True apart
        params = self._known.get(text)
        if params is None:
            params = sampling_params_from_dict(given, self._defaults)
            if len(self._known) == _MAX_REMEMBERED:
                self._known.clear()
            self._known[text] = params
        return params
