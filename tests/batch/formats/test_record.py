"""One line of a batch in radixrt's own format: what is read, what is refused, what is written."""

from __future__ import annotations

import json
import sys
import weakref
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.batch.formats.line_format import LineParser, error_line, output_line, record_tally
from radixrt.batch.formats.record import Format, InputRecord, LineError, LineErrorType, ParameterReader
from radixrt.batch.tally import Tally
from radixrt.errors import ParameterError
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings, TokenLogprob, Usage
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.token_spelling import TokenSpelling

DEFAULTS = SamplingParams(temperature=0.5, max_new_tokens=7)
PROMPT = np.array([5], dtype=np.int32)

# Any character, lone surrogates included: JSON can spell them.
ANY_TEXT = st.text(st.characters(codec=None), max_size=8)
CHATS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": st.text(max_size=8)}),
    min_size=1,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


def parse_line(line: bytes) -> InputRecord:
    return LineParser(DEFAULTS).parse(line)


def answered(index: int, record: InputRecord, output: RequestOutput) -> dict[str, Any]:
    """The record of an answer, written and read again; the reply is kept on disk until then."""
    reply = json.loads(json.dumps(record.reply))
    line = output_line(index, reply, output, created=0, spelling=TokenSpelling(None))
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1
    read: dict[str, Any] = json.loads(line)
    return read


SIMPLE = parse_line(b'{"prompt": "a", "custom_id": "a", "metadata": [1]}')


def refused(line: bytes | str | dict[str, Any]) -> LineError:
    if isinstance(line, dict):
        line = json.dumps(line)
    with pytest.raises(LineError) as caught:
        parse_line(line if isinstance(line, bytes) else line.encode())
    # whatever is wrong with a line, its record can be written and read
    record = json.loads(error_line(3, caught.value))
    assert record["error"] == {"type": caught.value.type.value, "message": caught.value.message}
    assert (record["index"], record["text"], record["token_ids"]) == (3, None, None)
    return caught.value


@given(
    prompt=ANY_TEXT | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4) | CHATS,
    custom_id=st.none() | ANY_TEXT,
    metadata=JSON,
    as_ascii=st.booleans(),
)
def test_round_trip(prompt: Any, custom_id: str | None, metadata: Any, as_ascii: bool) -> None:
    key = "prompt"
    if isinstance(prompt, list):
        key = "messages" if isinstance(prompt[0], dict) else "token_ids" if as_ascii else "prompt"
    text = json.dumps({key: prompt, "custom_id": custom_id, "metadata": metadata}, ensure_ascii=as_ascii)
    line = text.encode("utf-8", "backslashreplace")
    record = parse_line(line + b"\r\n")
    read = Chat(prompt) if key == "messages" else prompt
    assert (record.prompt, record.sampling_params) == (read, DEFAULTS)
    assert (record.custom_id, record.metadata) == (custom_id, metadata)

    output = RequestOutput(
        index=0,
        id=0,
        outputs=(CompletionOutput(0, "\ud800\u2028\u2029\x85\x0b\n\0", (3, 4), FinishReason.STOP),),
        usage=Usage(5, 2, 3, 2, 1),
        timings=Timings(0.1234567, None, 2.0),
        prompt_ids=PROMPT,
    )
    assert answered(9, record, output) == {
        "custom_id": custom_id,
        "index": 9,
        "text": "\ud800\u2028\u2029\x85\x0b\n\0",
        "token_ids": [3, 4],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 5,
            "cached_tokens": 2,
            "computed_tokens": 3,
            "completion_tokens": 2,
            "recomputed_tokens": 1,
        },
        "timings": {"queue": 0.123457, "first_token": None, "total": 2.0},
        "metadata": metadata,
        "error": None,
    }


@given(line=st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_read_or_refused(line: bytes) -> None:
    try:
        parse_line(line)
    except LineError as error:
        json.loads(error_line(0, error))


def test_parameters_go_on_top_of_the_defaults() -> None:
    expected = SamplingParams(temperature=0, max_new_tokens=7, stop_token_ids=(1,))
    for line in (
        b'{"prompt": "a", "sampling_params": {"temperature": 0, "stop_token_ids": [1]}}',
        b'{"prompt": "a", "temperature": 0, "stop_token_ids": [1], "seed": null}',
        b'{"prompt": "a", "temperature": 0, "sampling_params": {"stop_token_ids": [1]}}',
    ):
        assert parse_line(line).sampling_params == expected
    nulls = (
        b'{"prompt": "a", "token_ids": null, "messages": null, "sampling_params": null, "custom_id": null, '
        b'"metadata": null, "temperature": null}'
    )
    assert parse_line(nulls) == parse_line(b'{"prompt": "a"}')
    assert parse_line(nulls).sampling_params == DEFAULTS


def test_lines_with_the_same_parameters_share_them() -> None:
    parser = LineParser(DEFAULTS)
    lines = [b'{"prompt": "%d", "top_k": %s}' % (i, top_k) for i in range(2) for top_k in (b"1", b"2", b"1")]
    params = [parser.parse(line).sampling_params for line in lines]
    assert [p.top_k for p in params] == [1, 2, 1] * 2
    assert len(set(map(id, params))) == 2


def test_what_is_remembered_of_parameters_is_bounded_and_exact() -> None:
    reader = ParameterReader(DEFAULTS)
    assert reader.read({"ignore_eos": True}).ignore_eos
    with pytest.raises(ParameterError, match="ignore_eos is 1"):
        reader.read({"ignore_eos": 1})  # though 1 == True
    alive: weakref.WeakSet[SamplingParams] = weakref.WeakSet()
    for seed in range(3000):
        alive.add(reader.read({"seed": seed}))
        assert len(alive) <= 1024
    assert [params.seed for params in alive if params.seed == 2999]


@pytest.mark.parametrize("lines", [[b"", b"}"], [b"[1]"], [b"{}"], [b'{"custom_id": "a"}']])
def test_a_file_is_in_this_format_unless_a_line_tells_another(lines: list[bytes]) -> None:
    parser = LineParser(DEFAULTS)
    for line in lines:
        with pytest.raises(LineError) as caught:
            parser.parse(line)
        assert json.loads(error_line(0, caught.value))["finish_reason"] == "error"
    assert parser.file_format is None
    parser.parse(b'{"prompt": "a"}')
    assert parser.file_format is Format.PLAIN


def test_a_failed_run_has_an_error_and_no_answer() -> None:
    answer = CompletionOutput(0, "half", (1,), FinishReason.ERROR, error="not finite")
    output = RequestOutput(0, 0, (answer,), Usage(1, 0, 1, 1), Timings(0, None, 1), PROMPT)
    record = answered(0, SIMPLE, output)
    assert record["error"] == {"type": "failed", "message": "not finite"}
    assert (record["text"], record["token_ids"], record["finish_reason"]) == (None, None, "error")
    assert (record["custom_id"], record["metadata"], record["usage"]["completion_tokens"]) == ("a", [1], 1)


def test_one_failed_answer_of_several_makes_the_record_an_error() -> None:
    """Wherever it stands. What the others say is not lost."""
    good = CompletionOutput(0, "a", (1,), FinishReason.STOP)
    failed = CompletionOutput(0, "b", (2,), FinishReason.ERROR, error="not finite")
    for answers in permutations((good, failed, good)):
        output = RequestOutput(0, 0, answers, Usage(2, 1, 1, 3), Timings(0.1, None, 0.2), (1, 2))
        record = answered(0, parse_line(b'{"prompt": "a", "n": 3}'), output)
        assert (record["text"], record["token_ids"], record["finish_reason"]) == (None, None, "error")
        assert record["error"] == {"type": "failed", "message": "not finite"}
        assert [each["text"] for each in record["outputs"]] == [answer.text for answer in answers]


FAILED, ENDED = {FinishReason.ERROR}, {FinishReason.STOP, FinishReason.LENGTH}


@given(
    openai=st.booleans(),
    reasons=st.lists(st.sampled_from(sorted(FAILED | ENDED)), min_size=1, max_size=3),
    usage=st.builds(Usage, *[st.integers(0, 2**40)] * 5),
    text=st.text(max_size=20),
)
def test_a_record_tells_its_numbers(openai: bool, reasons: list[FinishReason], usage: Usage, text: str) -> None:
    prompt = {"prompt": "a", "logprobs": 1, "n": len(reasons)}
    line = {"custom_id": text, "method": "POST", "url": "/v1/completions", "body": prompt} if openai else prompt
    answers = tuple(
        CompletionOutput(index, text, (1,), reason, logprobs=(), error="bad" if reason in FAILED else None)
        for index, reason in enumerate(reasons)
    )
    record = parse_line(json.dumps(line).encode())
    output = RequestOutput(0, 0, answers, usage, Timings(0.1, None, 0.2), (1, 2))
    written = output_line(5, record.reply, output, created=7, spelling=TokenSpelling(None))
    if FAILED & set(reasons):
        assert record_tally(json.loads(written)) == Tally(records=1, errors=1)
    else:
        assert record_tally(json.loads(written)) == Tally(
            1, 0, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        )
    refused = error_line(5, LineError(LineErrorType.INVALID_PROMPT, text, record.reply))
    assert record_tally(json.loads(refused)) == Tally(1, 1)


def test_tallies_add_up() -> None:
    assert Tally(1, 2, 3, 4, 5) + Tally(10, 20, 30, 40, 50) == Tally(11, 22, 33, 44, 55)
    assert (Tally().hit_rate, Tally(1, 0, 8, 2, 1).hit_rate) == (0.0, 0.25)


def test_several_answers_and_their_log_probabilities() -> None:
    token = TokenLogprob(7, -0.5, 1, ((7, -0.5), (8, -1.5)))
    answers = [CompletionOutput(i, f"a{i}", (7,), FinishReason.LENGTH, logprobs=(token,)) for i in range(2)]
    output = RequestOutput(0, 0, tuple(answers), Usage(1, 0, 1, 2), Timings(0, 0, 1), PROMPT, (token,))
    record = answered(0, SIMPLE, output)
    shown = {"token_id": 7, "logprob": -0.5, "rank": 1, "top": [[7, -0.5], [8, -1.5]]}
    assert record["outputs"] == [
        {"text": f"a{i}", "token_ids": [7], "finish_reason": "length", "logprobs": [shown]} for i in range(2)
    ]
    assert (record["text"], record["logprobs"], record["prompt_logprobs"]) == ("a0", [shown], [shown])
    one = answered(0, SIMPLE, output.split()[1])
    assert one["text"] == "a1"
    assert "outputs" not in one


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at position 12"),
        (b"{", "not JSON"),
        (b'{"prompt": "a"} {}', "Extra data at character 16"),
        (b'"a"', "a string; it must be a JSON object"),
        (b"[1]", "a list; it must be"),
        (b"null", "null; it must be"),
        (b"-Infinity", "-Infinity is not a JSON number"),
        (b'{"prompt": "a", "metadata": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "metadata": [-1e400]}', "-1e400 is out of range"),
        (b'{"prompt": "a", "metadata": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "a", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests too deep"),
        (b'{"prompt": "a", "prompt": "b"}', "key 'prompt' appears twice"),
        (b'{"prompt": "a", "metadata": {"k": 1, "k": 1}}', "key 'k' appears twice"),
        (b'{"prompt": "a\0"}', "not JSON: Invalid control character at character 13"),
        (b"\0" * 100, "not JSON: Expecting value at character 0"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not JSON: Expecting value at character 0"),  # not in the first line
        (b'{"prompt": "a", "metadata": ' + b"[" * 101 + b"]" * 101 + b"}", "metadata nests too deep; at most 100"),
        (
            b'{"prompt": "a", "max_token": 1, "x": 2}',
            "unknown keys 'max_token' (did you mean 'max_tokens'?), 'x'; a",
        ),
        (b'{"prompt": "a", "x": null}', "unknown key 'x'; a line may have prompt, messages, token_ids, "),
        (b'{"prompt": "a", "custom_id": 7}', "custom_id is a number; it must be a string"),
    ],
)
def test_bad_lines(line: bytes, message: str) -> None:
    error = refused(line)
    assert error.type is LineErrorType.INVALID_LINE
    assert message in error.message


def test_depths_around_the_limit_of_recursion_are_refused() -> None:
    """Messages that show a value reach the limit before or after the reader does."""
    messages = set()
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 20):
        for key in (b"top_k", b"sampling_params", b"metadata", b"x"):
            line = b'{"prompt": "a", "%s": %s}' % (key, b"[" * depth + b"]" * depth)
            messages.add(refused(line).message[:25])
    assert {"the line nests too deep", "top_k is [[[[[[[[[[[[[[[[", "metadata nests too deep; "} <= messages


def test_messages_are_not_as_long_as_what_they_show() -> None:
    error = refused({"prompt": "a", "temperature": "x" * 100_000})
    assert error.message.startswith("temperature is 'xxx")
    assert len(error.message) <= 1000


def test_what_a_chat_has_besides_messages() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    tools, more = [{"name": "f"}], {"enable_thinking": False}
    given = {"messages": messages, "tools": tools, "chat_template_kwargs": more, "continue_final_message": None}
    assert parse_line(json.dumps(given).encode()).prompt == Chat([{"role": "user", "content": "ab"}], tools, more)
    begun = [{"role": "assistant", "content": "a"}]
    going_on = json.dumps({"messages": begun, "continue_final_message": True}).encode()
    assert parse_line(going_on).prompt == Chat(begun, is_continued=True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "no prompt"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": "a", "token_ids": [1]}, "both prompt and token_ids"),
        ({"messages": [], "token_ids": [1]}, "both messages and token_ids"),
        ({"messages": []}, "the chat is empty"),
        ({"messages": "hello"}, "messages is a string; it must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "chat message 0 has no 'content'"),
        ({"messages": [{"role": "user", "content": "a"}, "b"]}, "chat message 1 is str"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "chat message 0 holds U+D800"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "whose part 0 is no"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": {}}, "tools are of type dict; they must be a"),
        ({"prompt": "a", "tools": []}, "the line has tools, which only a chat may have: give messages"),
        ({"prompt": "a", "continue_final_message": True}, "the line has continue_final_message, which only a cha"),
        ({"prompt": []}, "prompt is empty"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": "1 2"}, "token_ids is a string; it must be a list of token ids"),
        ({"prompt": 5}, "prompt is a number; it must be a string or a list"),
        ({"prompt": {"a": 1}}, "prompt is an object"),
        ({"token_ids": [1, True]}, "token_ids[1] is true"),
        ({"prompt": [1.0]}, "prompt[0] is a number; it must be a token id"),
        ({"prompt": ["1"]}, "prompt[0] is a string"),
        ({"token_ids": [[1]]}, "token_ids[0] is a list"),
        ({"token_ids": [0, -1]}, "token_ids[1] is -1"),
        ({"token_ids": [2**31]}, "token_ids[0] is 2147483648"),
    ],
)
def test_bad_prompts(prompt: dict[str, Any], message: str) -> None:
    error = refused({**prompt, "custom_id": "x", "metadata": 1})
    assert (error.type, error.reply["custom_id"]) == (LineErrorType.INVALID_PROMPT, "x")
    assert error.reply["metadata"] == 1
    assert message in error.message


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "sampling_params is a list; it must be an object"),
        ({"max_tokns": 5}, "unknown sampling parameter 'max_tokns' (did you mean 'max_tokens'?); known are"),
        ({"temperature": -1}, "temperature is -1"),
        ({"max_tokens": -1}, "max_new_tokens is -1"),
        ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"max_new_tokens": 10**400}, "max_new_tokens is 1000"),
    ],
)
def test_bad_parameters(params: Any, message: str) -> None:
    error = refused({"prompt": "a", "sampling_params": params, "custom_id": "x"})
    assert (error.type, error.reply["custom_id"]) == (LineErrorType.INVALID_PARAMETERS, "x")
    assert message in error.message


def test_null_is_the_same_as_leaving_it_out() -> None:
    defaults = SamplingParams(top_p=0.5, seed=3)
    given = {"top_p": None, "seed": None, "max_tokens": None, "n": 2.0}
    for line in ({"prompt": "a", "sampling_params": given}, {"prompt": "a", **given}):
        assert LineParser(defaults).parse(json.dumps(line).encode()).sampling_params == replace(defaults, n=2)


def test_an_empty_text_is_left_to_the_tokenizer() -> None:
    assert parse_line(b'{"prompt": ""}').prompt == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "max_tokens and max_new_tokens are the same parameter"),
        ({"top_k": 1, "sampling_params": {"top_k": 1}}, "top_k is given in sampling_params and beside it"),
        ({"max_tokens": 1, "sampling_params": {"max_new_tokens": 1}}, "are the same parameter; give one of them"),
    ],
)
def test_bad_parameters_in_the_line_itself(given: dict[str, Any], message: str) -> None:
    error = refused({"prompt": "a", **given})
    assert error.type is LineErrorType.INVALID_PARAMETERS
    assert message in error.message
