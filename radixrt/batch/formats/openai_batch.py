"""Lines in the format of OpenAI's Batch API: requests for chat completions and completions, and their responses.

An input line is {"custom_id", "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body"};
`radixrt.frontend.openai` reads the body. Parameters that it leaves out are the run's defaults; chats
without max_tokens may have one of their own.

An output line is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, its body a
`chat.completion` or a `text_completion`. Where the line was bad (status 400) or its run failed (500), the body
is {"error": ...} as over HTTP, and `error` is set beside it: a program that looks at either of them notices. Ids
follow from the line's place and custom_id, so that a run that is resumed writes what it would have written.

https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import Any, Protocol

from radixrt.batch.formats.record import (
    FORM_ENGINE,
    Format,
    InputRecord,
    LineError,
    LineErrorType,
    ParameterReader,
    Reply,
)
from radixrt.batch.tally import ERROR_RECORD, Tally
from radixrt.checks import kind, short
from radixrt.errors import ParameterError, PromptError, TokenizerError
from radixrt.frontend.openai import (
    CHAT,
    COMPLETIONS,
    UNNAMED_MODEL,
    answer_body,
    as_json,
    asked_model,
    asked_prompt,
    error_body,
    sampling_values,
)
from radixrt.frontend.sampling_aliases import with_nearest
from radixrt.output import CompletionOutput, RequestOutput
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.token_spelling import TokenSpelling

READING = "reading"  # key of a reply whose answer is to be taken apart: how, as JSON
_INCLUDES_STOP = "includes_stop"  # key of a reply whose answer's text has what stopped it

_KEYS = ("custom_id", "method", "url", "body")


class ChatReader(Protocol):
    """Takes the answers to chats apart, such as for calls of tools; without one they stay text."""

    def without_choice(self, given: dict[str, Any]) -> dict[str, Any]:
        """A body for its prompt and its parameters."""

    def reading(
        self, given: dict[str, Any], chat: Chat, params: SamplingParams
    ) -> tuple[dict[str, Any] | None, SamplingParams]:
        """How answers to a body's chat are taken apart, as JSON, None where they stay text; and with which
        parameters they are made. Raises ParameterError, PromptError or TokenizerError.
        """

    def message(self, reading: dict[str, Any], answer: CompletionOutput) -> tuple[dict[str, Any], bool]:
        """The message of an answer, and whether it ends with calls."""


def openai_reply(custom_id: str | None = None, url: str | None = None, model: str = UNNAMED_MODEL) -> Reply:
    """The reply of a line of this format."""
    return {"format": Format.OPENAI.value, "custom_id": custom_id, "url": url, "model": model}


def read_openai(
    line: dict[str, Any],
    parameters: ParameterReader,
    only_url: str | None = None,
    chats: ChatReader | None = None,
    model: str = UNNAMED_MODEL,
    chat_max_tokens: int | None = None,
) -> InputRecord:
    """What a line asks for, if need be of one endpoint alone; `model` where it names none. A chat that gives no
    maximum has `chat_max_tokens`, if there is such a default. Raises LineError.
    """
    custom_id, url, body = line.get("custom_id"), line.get("url"), line.get("body")
    reply = openai_reply(custom_id if isinstance(custom_id, str) else None)
    try:
        _check_line(line, (CHAT, COMPLETIONS) if only_url is None else (only_url,))
        assert isinstance(url, str)  # it is one of two
        assert isinstance(body, dict)
        given = {name: value for name, value in body.items() if value is not None}
        reply = openai_reply(custom_id, url, asked_model(given, model))
    except ValueError as error:
        raise LineError(LineErrorType.INVALID_LINE, str(error), reply) from None
    try:
        asked = given if chats is None or url != CHAT else chats.without_choice(given)
        params = parameters.read(sampling_values(url, asked, chat_max_tokens))
        prompt = asked_prompt(url, asked)
        if chats is not None and isinstance(prompt, Chat):
            reading, params = chats.reading(given, prompt, params)
            reply = reply if reading is None else {**reply, READING: reading}
        if params.include_stop_str:
            reply = {**reply, _INCLUDES_STOP: True}
    except ParameterError as error:
        raise LineError(LineErrorType.INVALID_PARAMETERS, str(error), reply) from None
    except (PromptError, TokenizerError) as error:
        raise LineError(LineErrorType.INVALID_PROMPT, str(error), reply) from None
    return InputRecord(prompt, params, reply)


def _check_line(line: dict[str, Any], urls: tuple[str, ...]) -> None:
    """Raise ValueError unless a line has its keys, and each is what it must be."""
    if unknown := [with_nearest(short(key), _KEYS) for key in line if key not in _KEYS]:
        keys = "key" if len(unknown) == 1 else "keys"
        raise ValueError(
            f"unknown {keys} {', '.join(unknown[:5])}; a line in OpenAI's format has {', '.join(_KEYS)}"
        )
    custom_id, method, url, body = (line.get(key) for key in _KEYS)
    if not isinstance(custom_id, str):
        raise ValueError(f"custom_id is {kind(custom_id)}; it must be a string")
    if method != "POST":
        raise ValueError(f'method is {as_json(method)}; it must be "POST"')
    if url not in urls:
        raise ValueError(f"url is {as_json(url)}; it must be {' or '.join(urls)}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {kind(body)}; it must be an object")


def openai_answer(
    index: int,
    reply: Reply,
    output: RequestOutput,
    *,
    created: int,
    spelling: TokenSpelling,
    chats: ChatReader | None = None,
) -> dict[str, object]:
    """The record of a line whose request ran; of a failed one an error record."""
    if output.failure is not None:
        return openai_error(index, LineError(LineErrorType.FAILED, output.failure, reply))
    digest, model = _digest(index, reply), reply["model"]
    reading = reply.get(READING)
    body = answer_body(
        reply["url"],
        [output],
        message_of=None if chats is None or reading is None else partial(chats.message, reading),
        includes_stop=reply.get(_INCLUDES_STOP, False),
        id_digest=digest,
        model=model,
        created=created,
        spelling=spelling,
    )
    if FORM_ENGINE in reply:
        body[FORM_ENGINE] = reply[FORM_ENGINE]
    return _record(digest, reply, 200, body, None)


def openai_error(index: int, error: LineError) -> dict[str, object]:
    """The record of a bad line, or of one whose run failed."""
    failed = error.type is LineErrorType.FAILED
    body = error_body(error.message, error.type, is_ours=failed)
    # Its line, counted from 1, is the only way back to a line without a custom_id.
    beside: dict[str, object] = {"code": error.type, "message": error.message, "param": None, "line": index + 1}
    return _record(_digest(index, error.reply), error.reply, 500 if failed else 400, body, beside)


def openai_unanswered(index: int, reply: Reply, code: str, message: str) -> dict[str, object]:
    """The record of a sound line that nobody will answer: it has no response."""
    error = {"code": code, "message": message, "param": None, "line": index + 1}
    own = {"id": f"batch_req_{_digest(index, reply)}", "custom_id": reply["custom_id"]}
    return {**own, "response": None, "error": error}


def openai_tally(record: dict[str, Any]) -> Tally:
    """The numbers of a record of this format."""
    if record["error"] is not None:
        return ERROR_RECORD
    usage = record["response"]["body"]["usage"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return Tally(1, 0, usage["prompt_tokens"], cached_tokens, usage["completion_tokens"])


def _record(
    digest: str, reply: Reply, status: int, body: dict[str, object], error: dict[str, object] | None
) -> dict[str, object]:
    return {
        "id": f"batch_req_{digest}",
        "custom_id": reply["custom_id"],
        "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
        "error": error,
    }


def _digest(index: int, reply: Reply) -> str:
    name = f"{index}/{json.dumps(reply['custom_id'])}"
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
