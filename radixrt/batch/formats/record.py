"""What a line of a batch asks for, in whatever format it is written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from radixrt.batch.formats.strict_json import short
from radixrt.frontend.sampling_aliases import sampling_params_from_dict
from radixrt.sampling_params import SamplingParams

_MAX_REMEMBERED = 1024
_MAX_MESSAGE = 1000  # characters: a message may show a value of any length

Reply = dict[str, Any]
"""How the record that answers a line is written: JSON, made when the line is read, which `line_format` alone
looks into, and which holds the line's custom_id and metadata. A run may keep it on disk until the answer is there.
"""


class Format(str, Enum):
    """How a line is written."""

    PLAIN = "plain"  # radixrt's own: `plain_lines`
    OPENAI = "openai"  # OpenAI's batches: `openai_batch`


class LineErrorType(str, Enum):
    """What is wrong with a line."""

    INVALID_LINE = "invalid_line"  # not UTF-8, not JSON, too long, not an object, or a key that is wrong
    INVALID_PROMPT = "invalid_prompt"  # none, empty, too long, or tokens that the model does not have
    INVALID_PARAMETERS = "invalid_parameters"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"  # of a line before it that is sound
    FAILED = "failed"  # the line is sound; its run failed


class LineError(Exception):
    """A line that cannot be answered.

    Attributes:
        type: what is wrong.
        message: the same for people.
        reply: how its record is written, with custom_id and metadata as far as they could be read.
    """

    def __init__(self, type: LineErrorType, message: str, reply: Reply) -> None:
        super().__init__(message)
        self.type = type
        self.message = short(message, _MAX_MESSAGE)
        self.reply = reply


@dataclass(frozen=True)
class InputRecord:
    """What one sound line asks for.

    Attributes:
        prompt: text, token ids, or chat messages, not empty. Its length and vocabulary are the model's to check.
        sampling_params: the run's defaults with the line's own on top.
        reply: how its record is written.
    """

    prompt: str | list[int] | list[dict[str, str]]
    sampling_params: SamplingParams
    reply: Reply

    @property
    def custom_id(self) -> str | None:
        """The user's name for the line."""
        custom_id: str | None = self.reply["custom_id"]
        return custom_id

    @property
    def metadata(self) -> Any:
        """What the user wants back with the answer; None in OpenAI's format."""
        return self.reply.get("metadata")


class ParameterReader:
    """Makes SamplingParams from what lines give, the same object for the same parameters.

    Args:
        defaults: for what a line does not give.
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
