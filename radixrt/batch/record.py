"""One line of a batch: the prompt that it asks for, and the record that answers it.

An input line is a JSON object with

    prompt            a string, or a list of token ids;
    token_ids         a list of token ids, in place of `prompt`;
    sampling_params   fields of `SamplingParams`, in the spelling of SGLang or vLLM if you like; those not given
                      keep the run's defaults (optional);
    custom_id         a string of the user's, no two lines the same (optional);
    metadata          any JSON value, returned as it came (optional).

`null` for any of them is the same as leaving it out. Another key, a key that appears twice, or a number that is
not finite makes the line a bad one. Lines that are blank are skipped.

An output line is a JSON object with

    custom_id         as given, or null;
    index             place of the line in the input file, from 0, blank lines counted;
    text              the generated text, or null;
    token_ids         the generated token ids, or null;
    finish_reason     "stop", "length", "abort" or "error";
    usage             token counts (`Usage`), or null if the request never ran;
    timings           seconds (`Timings`), or null if the request never ran;
    metadata          as given, or null;
    error             null, or {"type": see `LineErrorType`, "message"}; then text and token_ids are null;
    outputs           with n > 1: text, token_ids, finish_reason and, if asked for, logprobs of each answer; the
                      first one's are also those of the record;
    logprobs          if asked for: for each token {"token_id", "logprob", "rank", "top": [[id, logprob], ...]};
    prompt_logprobs   if asked for: the same for tokens of the prompt.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, NoReturn

from radixrt.errors import ParameterError
from radixrt.output import FinishReason, RequestOutput, TokenLogprob
from radixrt.parameter_names import sampling_params_from_dict
from radixrt.sampling_params import SamplingParams

_KEYS = ("prompt", "token_ids", "sampling_params", "custom_id", "metadata")
_MAX_TOKEN_ID = 2**31 - 1
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class LineErrorType(str, Enum):
    """What is wrong with a line."""

    INVALID_LINE = "invalid_line"  # not UTF-8, not JSON, not an object, or a key that is wrong
    INVALID_PROMPT = "invalid_prompt"  # none, empty, too long, or tokens that the model does not have
    INVALID_PARAMETERS = "invalid_parameters"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"  # of a line before it that is sound
    FAILED = "failed"  # the line is sound; its run failed


class LineError(Exception):
    """A line that cannot be answered.

    Attributes:
        type: what is wrong.
        message: the same for people.
        custom_id, metadata: those of the line, as far as they could be read.
    """

    def __init__(
        self, type: LineErrorType, message: str, custom_id: str | None = None, metadata: object = None
    ) -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.custom_id = custom_id
        self.metadata = metadata


@dataclass(frozen=True)
class InputRecord:
    """What one sound input line asks for.

    Attributes:
        prompt: text or token ids, not empty. Its length and vocabulary are the model's to check.
        sampling_params: the run's defaults with the line's own on top.
        custom_id: the user's name for the line, or None.
        metadata: any JSON value.
    """

    prompt: str | list[int]
    sampling_params: SamplingParams
    custom_id: str | None = None
    metadata: Any = None


def parse_line(line: bytes, default_params: SamplingParams) -> InputRecord:
    """Read one input line that is not blank.

    Raises:
        LineError: the line is a bad one.
    """
    value = _load(line)
    if not isinstance(value, dict):
        raise LineError(LineErrorType.INVALID_LINE, f"the line is {_kind(value)}; it must be a JSON object")
    custom_id, metadata = value.get("custom_id"), value.get("metadata")
    try:
        json.dumps([[metadata]])  # as deep as it will stand in its record, or deeper
    except RecursionError:
        raise LineError(LineErrorType.INVALID_LINE, "metadata nests too deep") from None

    def bad(type: LineErrorType, message: str) -> NoReturn:
        raise LineError(type, message, custom_id if isinstance(custom_id, str) else None, metadata)

    if custom_id is not None and not isinstance(custom_id, str):
        bad(LineErrorType.INVALID_LINE, f"custom_id is {_kind(custom_id)}; it must be a string")
    if unknown := [key for key in value if key not in _KEYS]:
        bad(LineErrorType.INVALID_LINE, f"unknown key {_names(unknown)}; a line may have {', '.join(_KEYS)}")

    text, ids = value.get("prompt"), value.get("token_ids")
    if text is not None and ids is not None:
        bad(LineErrorType.INVALID_PROMPT, "the line has both prompt and token_ids; give one of them")
    if text is None and ids is None:
        bad(LineErrorType.INVALID_PROMPT, "the line has no prompt; give prompt or token_ids")
    name, prompt = ("token_ids", ids) if text is None else ("prompt", text)
    if isinstance(prompt, list):
        for position, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int):
                bad(LineErrorType.INVALID_PROMPT, f"{name}[{position}] is {_kind(token)}; it must be a token id")
            if not 0 <= token <= _MAX_TOKEN_ID:
                bad(
                    LineErrorType.INVALID_PROMPT,
                    f"{name}[{position}] is {_short(str(token))}; that is no token id",
                )
    elif not isinstance(prompt, str) or name == "token_ids":
        wanted = "a list of token ids" if name == "token_ids" else "a string or a list of token ids"
        bad(LineErrorType.INVALID_PROMPT, f"{name} is {_kind(prompt)}; it must be {wanted}")
    if not prompt:
        bad(LineErrorType.INVALID_PROMPT, f"{name} is empty")

    given = value.get("sampling_params")
    given = {} if given is None else given
    if not isinstance(given, dict):
        bad(LineErrorType.INVALID_PARAMETERS, f"sampling_params is {_kind(given)}; it must be an object")
    try:
        params = sampling_params_from_dict(given, default_params)
    except ParameterError as error:
        bad(LineErrorType.INVALID_PARAMETERS, str(error))
    return InputRecord(prompt, params, custom_id, metadata)


def output_line(index: int, custom_id: str | None, metadata: object, output: RequestOutput) -> bytes:
    """The record of a line whose request ran, with its newline."""
    failed = output.finish_reason is FinishReason.ERROR
    more: dict[str, object] = {}
    if len(output.outputs) > 1:
        more["outputs"] = [
            {
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                **_logprobs("logprobs", answer.logprobs),
            }
            for answer in output.outputs
        ]
    more |= _logprobs("logprobs", output.logprobs) | _logprobs("prompt_logprobs", output.prompt_logprobs)
    return _dump(
        {
            "custom_id": custom_id,
            "index": index,
            "text": None if failed else output.text,
            "token_ids": None if failed else output.token_ids,
            "finish_reason": output.finish_reason,
            "usage": asdict(output.usage),
            "timings": {
                name: None if seconds is None else round(seconds, 6)
                for name, seconds in asdict(output.timings).items()
            },
            "metadata": metadata,
            "error": {"type": LineErrorType.FAILED, "message": output.error} if failed else None,
            **more,
        }
    )


def _logprobs(name: str, logprobs: tuple[TokenLogprob, ...] | None) -> dict[str, object]:
    return {} if logprobs is None else {name: [asdict(token) for token in logprobs]}


def error_line(index: int, error: LineError) -> bytes:
    """The record of a bad line, with its newline."""
    return _dump(
        {
            "custom_id": error.custom_id,
            "index": index,
            "text": None,
            "token_ids": None,
            "finish_reason": FinishReason.ERROR,
            "usage": None,
            "timings": None,
            "metadata": error.metadata,
            "error": {"type": error.type, "message": error.message},
        }
    )


def _load(line: bytes) -> object:
    try:
        value: object = json.loads(
            line.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_object,
        )
        return value
    except UnicodeDecodeError as error:
        message = f"the line is not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}"
    except RecursionError:
        message = "the line nests too deep"
    except json.JSONDecodeError as error:
        message = f"the line is not JSON: {error.msg} at character {error.pos}"
    except ValueError as error:
        message = f"the line is not JSON: {error}"
    raise LineError(LineErrorType.INVALID_LINE, message)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{_short(text)} is out of range")
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {_short(repr(max(keys, key=keys.count)))} appears twice")
    return value


def _dump(record: dict[str, object]) -> bytes:
    # What is escaped here can stand only inside strings. str.splitlines would break a line at some of them;
    # halves of surrogate pairs have no UTF-8, and Python's escape of them is JSON's.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return kinds[type(value)]


def _names(keys: list[str]) -> str:
    return ", ".join(_short(repr(key)) for key in keys[:5])


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
