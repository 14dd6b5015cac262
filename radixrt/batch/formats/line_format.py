"""Parses lines and formats records, in radixrt's format or OpenAI's: the rest of a batch knows neither."""

# Tests: tests/batch/formats/test_record.py

from __future__ import annotations

from typing import Any

from radixrt.batch.formats.openai_batch import (
    ChatReader,
    openai_answer,
    openai_error,
    openai_reply,
    openai_tally,
    read_openai,
)
from radixrt.batch.formats.plain_lines import (
    PROMPTS,
    plain_answer,
    plain_error,
    plain_reply,
    plain_tally,
    read_plain,
)
from radixrt.batch.formats.record import Format, InputRecord, LineError, LineErrorType, ParameterReader, Reply
from radixrt.batch.formats.source import BadLine
from radixrt.batch.formats.strict_json import dump_line, loads
from radixrt.batch.tally import Tally
from radixrt.checks import kind
from radixrt.frontend.openai import UNNAMED_MODEL
from radixrt.output import RequestOutput
from radixrt.sampling_params import SamplingParams
from radixrt.text.token_spelling import TokenSpelling


class LineParser:
    """Parses the lines of one file, each in its own format.

    A line with `body`, `url` or `method` is in OpenAI's format, one with a prompt in radixrt's own. The first such
    line sets the format of the file, in which lines of unknown format are answered, such as one that is not JSON.
    Before that line, a guess from the text decides.

    Args:
        default_params: for parameters that a line does not give.
        file_format: of the file, if it is known, so that a part of a file is read like the whole.
        url: with it, each line must be in OpenAI's format, and ask this endpoint.
        chats: takes answers to chats in OpenAI's format apart; None: they stay text.
        model: its name in answers to lines in OpenAI's format that name none.
        chat_max_tokens: of chats in OpenAI's format that give no maximum; None: that of `default_params`.

    Attributes:
        chats: the same.
        file_format: of the file; None until a line has set it.
    """

    def __init__(
        self,
        default_params: SamplingParams,
        file_format: Format | None = None,
        url: str | None = None,
        chats: ChatReader | None = None,
        model: str = UNNAMED_MODEL,
        chat_max_tokens: int | None = None,
    ) -> None:
        self.file_format = file_format if url is None else Format.OPENAI
        self._url, self.chats, self._model, self._chat_max_tokens = url, chats, model, chat_max_tokens
        self._parameters = ParameterReader(default_params)

    def parse(self, line: bytes | BadLine) -> InputRecord:
        """Parse a line that is not blank.

        Raises:
            LineError: it is a bad one.
        """
        if isinstance(line, BadLine):
            raise self._unreadable(line.message, b"")
        try:
            value = loads(line)
        except ValueError as error:
            raise self._unreadable(f"the line {error}", line) from None
        except RecursionError:
            raise self._unreadable("the line nests too deep", line) from None
        if not isinstance(value, dict):
            raise self._unreadable(f"the line is {kind(value)}; it must be a JSON object", line)
        try:
            return self._read(value)
        except RecursionError:  # of a message that shows a value
            raise self._unreadable("the line nests too deep", line) from None

    def _read(self, value: dict[str, Any]) -> InputRecord:
        told = _format(value) if self._url is None else Format.OPENAI
        if self.file_format is None:
            self.file_format = told
        if (told or self.file_format) is Format.OPENAI:
            return read_openai(value, self._parameters, self._url, self.chats, self._model, self._chat_max_tokens)
        return read_plain(value, self._parameters)

    def _unreadable(self, message: str, line: bytes) -> LineError:
        is_openai = self.file_format is Format.OPENAI or (
            self.file_format is None and b'"body"' in line and b'"url"' in line
        )
        return LineError(LineErrorType.INVALID_LINE, message, openai_reply() if is_openai else plain_reply())


def _format(line: dict[str, Any]) -> Format | None:
    """The format of a line; None if its keys do not tell."""
    if "body" in line or "url" in line or "method" in line:
        return Format.OPENAI
    return Format.PLAIN if any(key in line for key in PROMPTS) else None


def output_line(
    index: int,
    reply: Reply,
    output: RequestOutput,
    *,
    created: int,
    spelling: TokenSpelling,
    chats: ChatReader | None = None,
) -> bytes:
    """The record of a line whose request ran, with its newline.

    Args:
        index: place of the line in its file, from 0.
        reply: of its InputRecord.
        created: Unix time in seconds, for OpenAI's format.
        spelling: of the model's tokens; log-probabilities in OpenAI's format name tokens by their texts.
        chats: that of the LineParser.
    """
    if reply["format"] == Format.OPENAI:
        answer = openai_answer(index, reply, output, created=created, spelling=spelling, chats=chats)
        return dump_line(answer)
    return dump_line(plain_answer(index, reply, output))


def error_line(index: int, error: LineError) -> bytes:
    """The record of a bad line, with its newline."""
    is_openai = error.reply["format"] == Format.OPENAI
    return dump_line(openai_error(index, error) if is_openai else plain_error(index, error))


def record_tally(record: dict[str, Any]) -> Tally:
    """The counts of a record of `output_line` or `error_line`, given as a JSON value."""
    return openai_tally(record) if "response" in record else plain_tally(record)


def record_error(record: dict[str, Any]) -> tuple[LineErrorType, str] | None:
    """Kind and message of the error in such a record; None if it has none."""
    error = record["error"]
    return None if error is None else (LineErrorType(error.get("type", error.get("code"))), error["message"])
