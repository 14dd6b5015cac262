"""radixrt's own format of lines and records.

An input line is a JSON object with

    prompt            a string, or a list of token ids;
    messages          a chat, in place of `prompt`: a list of {"role", "content"} (see `radixrt.text.chat`);
                      beside it may be `tools`, `chat_template_kwargs` and `continue_final_message`;
    token_ids         a list of token ids, in place of `prompt`;
    sampling_params   fields of `SamplingParams`, in the spelling of SGLang or vLLM if you like; those not given
                      keep the run's defaults (optional). The line itself may have them as well, as in
                      {"prompt": "...", "max_tokens": 8};
    custom_id         a string of the user's, no two lines the same (optional);
    metadata          any JSON value, returned as it came (optional).

`null` for any of them is the same as leaving it out. Another key, a key that appears twice, or a number that is
not finite makes the line a bad one.

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
                      first one's are also the record's own. If one of them failed, the record is an error, and
                      the others are only here;
    logprobs          if asked for: for each token {"token_id", "logprob", "rank", "top": [[id, logprob], ...]};
                      of what `logprobs_mode` says, the model's by default;
    prompt_logprobs   if asked for: the same for tokens of the prompt, always the model's;
    form_engine       if a form was asked for: what has compiled it, "llguidance" or "xgrammar".
"""

# Tests: tests/batch/formats/test_record.py

from __future__ import annotations

from typing import Any, NoReturn

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
from radixrt.checks import check_kind, check_prompt, kind, nests_deeper, short
from radixrt.errors import ParameterError, PromptError, TokenizerError
from radixrt.frontend.sampling_aliases import known_parameters, with_nearest
from radixrt.output import FinishReason, RequestOutput, TokenLogprob
from radixrt.text.chat import Chat

PROMPTS = ("prompt", "messages", "token_ids")
MAX_DEPTH = 100  # of metadata, which is written again in processes with other recursion limits
_OF_CHATS = ("tools", "chat_template_kwargs", "continue_final_message")
_KEYS = (*PROMPTS, *_OF_CHATS, "sampling_params", "custom_id", "metadata")
_PARAMETERS = known_parameters().keys()
_ALLOWED = dict.fromkeys((*_KEYS, *_PARAMETERS)).keys()


def plain_reply(custom_id: str | None = None, metadata: Any = None) -> Reply:
    """The reply of a line of this format."""
    return {"format": Format.PLAIN.value, "custom_id": custom_id, "metadata": metadata}


def read_plain(line: dict[str, Any], parameters: ParameterReader) -> InputRecord:
    """Read a line. Raises LineError."""
    custom_id, metadata = line.get("custom_id"), line.get("metadata")
    too_deep = nests_deeper(metadata, MAX_DEPTH)
    reply = plain_reply(custom_id if isinstance(custom_id, str) else None, None if too_deep else metadata)

    def bad(type: LineErrorType, message: str) -> NoReturn:
        raise LineError(type, message, reply)

    if too_deep:
        bad(LineErrorType.INVALID_LINE, f"metadata nests too deep; at most {MAX_DEPTH} levels are taken")
    if custom_id is not None and not isinstance(custom_id, str):
        bad(LineErrorType.INVALID_LINE, f"custom_id is {kind(custom_id)}; it must be a string")
    if not line.keys() <= _ALLOWED:
        unknown = [with_nearest(short(key), _ALLOWED) for key in line if key not in _ALLOWED]
        keys = "key" if len(unknown) == 1 else "keys"
        bad(
            LineErrorType.INVALID_LINE,
            f"unknown {keys} {', '.join(unknown[:5])}; a line may have {', '.join(_KEYS)} and parameters",
        )
    given = [key for key in PROMPTS if line.get(key) is not None]
    if len(given) > 1:
        bad(LineErrorType.INVALID_PROMPT, f"the line has both {' and '.join(given)}; give one of them")
    if not given:
        bad(
            LineErrorType.INVALID_PROMPT,
            f"the line has no prompt; give {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}",
        )
    try:
        prompt = _prompt(given[0], line)
    except (PromptError, TokenizerError) as error:
        bad(LineErrorType.INVALID_PROMPT, str(error))
    try:
        params = parameters.read(_given(line))
    except ParameterError as error:
        bad(LineErrorType.INVALID_PARAMETERS, str(error))
    return InputRecord(prompt, params, reply)


def _prompt(name: str, line: dict[str, Any]) -> str | list[int] | Chat:
    """The prompt under a key. Raises PromptError or TokenizerError."""
    value, more = line[name], {key: line[key] for key in _OF_CHATS if line.get(key) is not None}
    if name == "messages":
        return Chat.of({name: check_kind(name, value, list, "a list of messages"), **more})
    if more:
        raise PromptError(f"the line has {next(iter(more))}, which only a chat may have: give messages")
    if name == "token_ids":
        check_kind(name, value, list, "a list of token ids")
    return check_prompt(name, value)


def _given(line: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a line, from the line itself and its sampling_params. Raises ParameterError."""
    own = line.get("sampling_params")
    own = {} if own is None else own
    if not isinstance(own, dict):
        raise ParameterError(f"sampling_params is {kind(own)}; it must be an object")
    own = {key: value for key, value in own.items() if value is not None}
    beside = {key: value for key, value in line.items() if key in _PARAMETERS and value is not None}
    if twice := [key for key in beside if key in own]:
        raise ParameterError(f"{twice[0]} is given in sampling_params and beside it; give it once")
    return own | beside if beside else own


def plain_answer(index: int, reply: Reply, output: RequestOutput) -> dict[str, object]:
    """The record of a line whose request ran."""
    first = output.outputs[0]
    failed = output.failed
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
    if FORM_ENGINE in reply:
        more[FORM_ENGINE] = reply[FORM_ENGINE]
    more |= _logprobs("logprobs", output.logprobs) | _logprobs("prompt_logprobs", output.prompt_logprobs)
    return {
        "custom_id": reply["custom_id"],
        "index": index,
        "text": None if failed else first.text,
        "token_ids": None if failed else first.token_ids,
        "finish_reason": (failed or first).finish_reason,
        "usage": vars(output.usage),
        "timings": {
            name: None if seconds is None else round(seconds, 6) for name, seconds in vars(output.timings).items()
        },
        "metadata": reply["metadata"],
        "error": {"type": LineErrorType.FAILED, "message": output.failure} if failed else None,
        **more,
    }


def _logprobs(name: str, logprobs: tuple[TokenLogprob, ...] | None) -> dict[str, object]:
    return {} if logprobs is None else {name: [vars(token) for token in logprobs]}


def plain_error(index: int, error: LineError) -> dict[str, object]:
    """The record of a bad line."""
    return {
        "custom_id": error.reply["custom_id"],
        "index": index,
        "text": None,
        "token_ids": None,
        "finish_reason": FinishReason.ERROR,
        "usage": None,
        "timings": None,
        "metadata": error.reply["metadata"],
        "error": {"type": error.type, "message": error.message},
    }


def plain_tally(record: dict[str, Any]) -> Tally:
    """The counts of a record of this format."""
    if record["error"] is not None:
        return ERROR_RECORD
    usage = record["usage"]
    return Tally(1, 0, usage["prompt_tokens"], usage["cached_tokens"], usage["completion_tokens"])
