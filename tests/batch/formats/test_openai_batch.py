"""Lines and records in the format of OpenAI's Batch API, read back by the types of the openai package."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.batch.formats.line_format import LineParser, error_line, output_line
from radixrt.batch.formats.record import Format, InputRecord, LineError, LineErrorType
from radixrt.batch.formats.source import BadLine
from radixrt.batch.job import run_batch
from radixrt.frontend.openai import CHAT, COMPLETIONS
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings, TokenLogprob, Usage
from radixrt.runtime import Runtime
from radixrt.sampling_params import MAX_NEW_TOKENS, SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.token_spelling import TokenSpelling
from tests.support.fake_runtime import FakeRuntime
from tests.support.small_tokenizers import small_tokenizer

DEFAULTS = SamplingParams(temperature=0.5, max_new_tokens=7)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "Who?"}}
URLS = tuple(PROMPTS)


def line(url: str = CHAT, /, **body: Any) -> dict[str, Any]:
    given = {"model": "m", **PROMPTS[url], **body}
    return {"custom_id": "a", "method": "POST", "url": url, "body": given}


def parse(value: dict[str, Any] | bytes, file_format: Format | None = None) -> InputRecord:
    parser = LineParser(DEFAULTS, file_format)
    return parser.parse(value if isinstance(value, bytes) else json.dumps(value).encode())


def params(url: str = CHAT, /, **body: Any) -> SamplingParams:
    return parse(line(url, **body)).sampling_params


def refused(value: dict[str, Any] | bytes) -> LineError:
    with pytest.raises(LineError) as caught:
        parse(value)
    check_error(json.loads(error_line(3, caught.value)), caught.value)
    return caught.value


def check_error(record: dict[str, Any], error: LineError) -> None:
    """That the record of an error is one in OpenAI's form."""
    types = pytest.importorskip("openai.types", reason="the openai package is not installed")
    assert list(record) == ["id", "custom_id", "response", "error"]
    assert list(record["response"]) == ["status_code", "request_id", "body"]
    told = types.BatchError.model_validate(record["error"])
    assert (told.code, told.message, told.line) == (error.type.value, error.message, 4)
    assert not told.model_extra
    failed = error.type is LineErrorType.FAILED
    assert record["response"]["status_code"] == (500 if failed else 400)
    shared = pytest.importorskip("openai.types.shared", reason="the openai package is not installed")
    over_http = shared.ErrorObject.model_validate(record["response"]["body"]["error"])
    assert (over_http.code, over_http.message) == (error.type.value, error.message)
    assert over_http.type == ("server_error" if failed else "invalid_request_error")


def answered(record: InputRecord, output: RequestOutput, spelling: TokenSpelling | None = None) -> Any:
    """The response body of an answer as the openai package reads it."""
    reply = json.loads(json.dumps(record.reply))  # kept on disk until then
    written = output_line(3, reply, output, created=1700000000, spelling=spelling or TokenSpelling(None))
    assert written.endswith(b"\n")
    assert len(written.decode().splitlines()) == 1
    read = json.loads(written)
    assert list(read) == ["id", "custom_id", "response", "error"]
    assert (read["custom_id"], read["error"]) == (record.custom_id, None)
    assert list(read["response"]) == ["status_code", "request_id", "body"]
    assert read["response"]["status_code"] == 200
    return read_by_openai(read["response"]["body"])


def read_by_openai(body: dict[str, Any]) -> Any:
    types = pytest.importorskip("openai.types", reason="the openai package is not installed")
    chat = pytest.importorskip("openai.types.chat", reason="the openai package is not installed")
    kind = chat.ChatCompletion if body["object"] == "chat.completion" else types.Completion
    completion = kind.model_validate(body)
    assert completion.model_dump(exclude_unset=True) == body  # no key that it does not know, none changed
    return completion


ANY_TEXT = st.text(st.characters(codec=None), max_size=8)
LOGPROBS = st.builds(
    TokenLogprob,
    st.integers(0, 400),
    st.floats(-1e5, 0),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 400), st.floats(-1e5, 0)), max_size=3).map(tuple),
)
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


@given(
    url=st.sampled_from(URLS),
    custom_id=ANY_TEXT,
    model=ANY_TEXT,
    answers=st.lists(
        st.tuples(st.text(max_size=8), REASONS, st.none() | st.lists(LOGPROBS, max_size=3)), min_size=1, max_size=3
    ),
    tokenizer=st.sampled_from(["byte level", "bare"]),
)
def test_every_answer_is_read_by_the_openai_package(
    url: str, custom_id: str, model: str, answers: list[Any], tokenizer: str
) -> None:
    record = parse({**line(url, model=model), "custom_id": custom_id})
    outputs = tuple(
        CompletionOutput(i, text, (1, 2), reason, logprobs=None if logprobs is None else tuple(logprobs))
        for i, (text, reason, logprobs) in enumerate(answers)
    )
    output = RequestOutput(0, 0, outputs, Usage(5, 2, 3, 4), Timings(0, 0, 1), ())
    completion = answered(record, output, TokenSpelling(small_tokenizer(tokenizer)))
    assert (completion.model, completion.created) == (model, 1700000000)
    assert [choice.index for choice in completion.choices] == list(range(len(answers)))
    texts = [choice.message.content if url == CHAT else choice.text for choice in completion.choices]
    assert texts == [text for text, _, _ in answers]
    assert [choice.finish_reason for choice in completion.choices] == [reason.value for _, reason, _ in answers]
    assert [choice.logprobs is None for choice in completion.choices] == [own is None for _, _, own in answers]
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 4, 9)
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_a_text_may_hold_anything() -> None:
    text = "\ud800\u2028\u2029\x85\x0b\n\0"
    output = output_of(CompletionOutput(0, text, (1,), FinishReason.STOP))
    written = output_line(0, parse(line()).reply, output, created=0, spelling=TokenSpelling(None))
    assert len(written.decode().splitlines()) == 1
    assert json.loads(written)["response"]["body"]["choices"][0]["message"]["content"] == text


def output_of(*answers: CompletionOutput) -> RequestOutput:
    return RequestOutput(0, 0, answers, Usage(5, 2, 3, 4), Timings(0, 0, 1), np.array([5], dtype=np.int32))


def test_log_probabilities_of_a_chat() -> None:
    tokenizer = small_tokenizer("byte level")
    ids = tokenizer.encode(" é").tolist()
    tokens = [TokenLogprob(token, -0.5, 1, ((token, -0.5), (0, -math.inf))) for token in ids]
    answer = CompletionOutput(0, " é", tuple(ids), FinishReason.LENGTH, logprobs=tuple(tokens))
    completion = answered(parse(line()), output_of(answer), TokenSpelling(tokenizer))
    content = completion.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == " é"
    assert [token.logprob for token in content] == [-0.5] * len(ids)
    assert [top.token for top in content[0].top_logprobs] == [content[0].token, "<s>"]
    assert content[0].top_logprobs[1].logprob == -9999.0
    assert completion.choices[0].logprobs.refusal is None


def test_log_probabilities_of_a_completion() -> None:
    tokens = (
        TokenLogprob(7, -0.5, 1, ((7, -0.5), (8, -1.5))),
        TokenLogprob(9, -3.0, 3, ((7, -0.5), (8, -1.5))),  # the drawn token is not among the likeliest
        TokenLogprob(2, -0.1, 1, ()),
    )
    answer = CompletionOutput(0, "ab", (7, 9, 2), FinishReason.STOP, matched=2, logprobs=tokens)
    logprobs = answered(parse(line(COMPLETIONS)), output_of(answer)).choices[0].logprobs
    assert logprobs.tokens == ["token_id:7", "token_id:9"]  # the end token is no part of the text
    assert logprobs.token_logprobs == [-0.5, -3.0]
    with_stop = parse(line(COMPLETIONS, include_stop_str_in_output=True))
    assert answered(with_stop, output_of(answer)).choices[0].logprobs.tokens[2:] == ["token_id:2"]
    assert logprobs.text_offset == [0, 10]
    assert logprobs.top_logprobs == [
        {"token_id:7": -0.5, "token_id:8": -1.5},
        {"token_id:7": -0.5, "token_id:8": -1.5, "token_id:9": -3.0},
    ]
    by_string = CompletionOutput(0, "ab", (7, 9, 2), FinishReason.STOP, matched="x", logprobs=tokens)
    logprobs = answered(parse(line(COMPLETIONS)), output_of(by_string)).choices[0].logprobs
    assert len(logprobs.tokens) == 3
    assert logprobs.text_offset == [0, 10, 20]
    by_length = CompletionOutput(0, "ab", (7, 9, 2), FinishReason.LENGTH, logprobs=tokens)
    assert len(answered(parse(line(COMPLETIONS)), output_of(by_length)).choices[0].logprobs.tokens) == 3


def test_tokens_that_spell_the_same_and_tokens_next_to_impossible() -> None:
    token = TokenLogprob(7, -math.inf, 9, ((5, -0.5), (5, -2.5)))
    answer = CompletionOutput(0, "a", (7,), FinishReason.LENGTH, logprobs=(token,))
    logprobs = answered(parse(line(COMPLETIONS)), output_of(answer)).choices[0].logprobs
    assert logprobs.top_logprobs == [{"token_id:5": -0.5, "token_id:7": -9999.0}]
    assert logprobs.token_logprobs == [-9999.0]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_failed_run_is_an_error_of_the_server(reason: FinishReason) -> None:
    good = CompletionOutput(0, "a", (1,), FinishReason.STOP)
    error = "not finite" if reason is FinishReason.ERROR else None
    output = output_of(good, CompletionOutput(1, "", (), reason, error=error))
    written = output_line(3, parse(line()).reply, output, created=0, spelling=TokenSpelling(None))
    message = error or "the request was ended before its answer was whole"
    check_error(json.loads(written), LineError(LineErrorType.FAILED, message, {}))


def test_ids_follow_from_the_line() -> None:
    def ids(index: int, custom_id: str, created: int = 0) -> tuple[str, str, str]:
        reply = parse({**line(), "custom_id": custom_id}).reply
        output = output_of(CompletionOutput(0, "a", (1,), FinishReason.STOP))
        record = json.loads(output_line(index, reply, output, created=created, spelling=TokenSpelling(None)))
        return record["id"], record["response"]["request_id"], record["response"]["body"]["id"]

    assert ids(0, "a") == ids(0, "a", 5)
    assert [one.rpartition("_")[0] for one in ids(0, "a")[:2]] == ["batch_req", "req"]
    assert ids(0, "a")[2].startswith("chatcmpl-")
    different = [one for index in range(3) for custom_id in ("a", "b", "\ud800") for one in ids(index, custom_id)]
    assert len(set(different)) == len(different)


# -- what is read ------------------------------------------------------------------------------------------


def test_a_line_is_read() -> None:
    chat = parse(line())
    assert (chat.prompt, chat.sampling_params, chat.custom_id) == (Chat(MESSAGES), DEFAULTS, "a")
    assert chat.metadata is None
    assert parse(line(COMPLETIONS)).prompt == "Who?"
    assert parse(line(COMPLETIONS, prompt=["Who?"])).prompt == "Who?"
    assert parse(line(COMPLETIONS, prompt=[5, 6])).prompt == [5, 6]
    assert parse(line(COMPLETIONS, prompt=[[5, 6]])).prompt == [5, 6]


@pytest.mark.parametrize("url", URLS)
def test_parameters(url: str) -> None:
    given = params(
        url,
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        n=2,
        stop=["a", "b"],
        seed=3,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100},
        top_k=4,
        min_p=0.25,
        repetition_penalty=1.5,
        ignore_eos=True,
        stop_token_ids=[7],
        min_tokens=1,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        bad_words=["x"],
        allowed_token_ids=[5, 6],
    )
    assert given == SamplingParams(
        max_new_tokens=9,
        temperature=0,
        top_p=0.5,
        n=2,
        stop=("a", "b"),
        seed=3,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias=((5, -100.0),),
        top_k=4,
        min_p=0.25,
        repetition_penalty=1.5,
        ignore_eos=True,
        stop_token_ids=(7,),
        min_new_tokens=1,
        skip_special_tokens=False,
        include_stop_str=True,
        bad_words=("x",),
        allowed_token_ids=(5, 6),
    )


def test_log_probabilities_are_asked_for_in_each_endpoints_way() -> None:
    assert params(CHAT, logprobs=True).logprobs == 0
    assert params(CHAT, logprobs=True, top_logprobs=3).logprobs == 3
    assert params(CHAT, logprobs=False).logprobs is None
    assert params(CHAT, logprobs=False, top_logprobs=0).logprobs is None
    assert params(COMPLETIONS, logprobs=3).logprobs == 3
    assert params(COMPLETIONS, logprobs=0).logprobs == 0
    assert params(CHAT, logprobs=True, logprobs_mode="processed_logprobs").wants_processed_logprobs
    assert params(COMPLETIONS).logprobs is None


def test_lengths() -> None:
    assert params(CHAT, max_completion_tokens=5).max_new_tokens == 5
    assert params(CHAT, max_completion_tokens=5, max_tokens=5).max_new_tokens == 5
    assert params(CHAT, max_completion_tokens=None, max_tokens=None).max_new_tokens == 7  # the run's default
    for most in (5, MAX_NEW_TOKENS):
        parser = LineParser(DEFAULTS, chat_max_tokens=most)
        bodies = [(CHAT, {}, most), (COMPLETIONS, {}, 7)]
        bodies += [(CHAT, {name: 3}, 3) for name in ("max_tokens", "max_completion_tokens", "max_new_tokens")]
        for url, body, expected in bodies:
            read = parser.parse(json.dumps(line(url, **body)).encode())
            assert read.sampling_params.max_new_tokens == expected


@pytest.mark.parametrize("url", URLS)
def test_what_asks_for_nothing_is_taken(url: str) -> None:
    assert (
        params(
            url,
            stream=False,
            tools=[],
            tool_choice="none",
            parallel_tool_calls=True,
            response_format={"type": "text"},
            modalities=["text"],
            echo=False,
            suffix=None,
            user="u",
            metadata={"page": "7"},
            store=True,
            service_tier="flex",
            seed=None,
            stop=None,
            prompt_logprobs=None,
        )
        == DEFAULTS
    )
    assert params(COMPLETIONS, best_of=3, n=3).n == 3


def test_a_model_is_echoed() -> None:
    output = output_of(CompletionOutput(0, "a", (1,), FinishReason.STOP))
    assert answered(parse(line(model="gpt-x")), output).model == "gpt-x"
    assert answered(parse(line(model=None)), output).model == "radixrt"


def test_contents_in_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    former = {"role": "assistant", "content": "I", "refusal": None, "tool_calls": None, "annotations": []}
    record = parse(line(messages=[former, {"role": "user", "content": parts}]))
    joined = [{"role": "assistant", "content": "I"}, {"role": "user", "content": "Who are you?"}]
    assert record.prompt == Chat(joined)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_tools_and_calls_are_for_the_template() -> None:
    called = [
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "yes", "tool_call_id": "a"},
    ]
    record = parse(line(messages=called, tools=TOOLS, chat_template_kwargs={"enable_thinking": False}))
    as_object = {**CALL, "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [as_object]}, called[1]]
    assert record.prompt == Chat(messages, TOOLS, {"enable_thinking": False})
    assert refused(line(COMPLETIONS, tools=TOOLS)).message.startswith("tools is [")
    for choice, shown in (("auto", TOOLS), ("none", [])):
        chat = parse(line(messages=called, tools=TOOLS, tool_choice=choice)).prompt
        assert isinstance(chat, Chat)
        assert chat.tools == shown
        refusal = refused(line(messages=called, tools="weather", tool_choice=choice))
        assert refusal.message == "tools are of type str; they must be a list"


def test_a_message_that_goes_on() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    for more in ({}, {"add_generation_prompt": False}):
        record = parse(line(messages=begun, continue_final_message=True, **more))
        assert record.prompt == Chat(begun, is_continued=True)
    assert parse(line(continue_final_message=False, add_generation_prompt=True)).prompt == Chat(MESSAGES)
    for bad in ({"add_generation_prompt": False}, {"add_generation_prompt": True, "continue_final_message": True}):
        assert "add_generation_prompt is " in refused(line(messages=begun, **bad)).message
    message = refused(line(continue_final_message=True)).message
    assert message == "continue_final_message needs a last message of the assistant that has a content"


@given(messages=st.lists(st.tuples(st.sampled_from(["system", "user", "x"]), st.text(max_size=8)), min_size=1))
def test_chats_come_through(messages: list[tuple[str, str]]) -> None:
    chat = [{"role": role, "content": content} for role, content in messages]
    in_parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in messages]
    assert parse(line(messages=chat)).prompt == parse(line(messages=in_parts)).prompt == Chat(chat)


# -- what is refused ---------------------------------------------------------------------------------------

BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream is true, which cannot be honoured; give false, or leave it out"),
    ({"stream": 0}, "stream is 0, which"),
    ({"tool_choice": "required"}, 'tool_choice is "required", which'),
    ({"response_format": {"type": "xml"}}, "response_format is {'type': 'xml'}; it must be"),
    ({"modalities": ["text", "audio"]}, "modalities is"),
    ({"prompt_logprobs": 1}, "prompt_logprobs is 1, which"),
    ({"echo": True}, "echo is true"),
    ({"suffix": "x"}, 'suffix is "x"'),
    ({"stream_options": {}}, "stream_options is {}"),
    ({"xyzzy": "{}"}, "unknown parameter 'xyzzy' for /v1/"),
    ({"max_token": 5}, "unknown parameter 'max_token' (did you mean 'max_tokens'?)"),
    ({"temperature": 101}, "temperature is 101"),
    ({"seed": -1}, "seed is -1"),
    ({"n": 0}, "n is 0"),
    ({"max_tokens": 5, "max_new_tokens": 5}, "are the same parameter"),
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(("body", "message"), BAD_PARAMETERS)
def test_bad_parameters(url: str, body: dict[str, Any], message: str) -> None:
    error = refused(line(url, **body))
    assert error.type is LineErrorType.INVALID_PARAMETERS
    assert message in error.message
    assert (error.reply["custom_id"], error.reply["url"]) == ("a", url)


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (CHAT, {"logprobs": 3}, "logprobs is 3; it must be true or false"),
        (CHAT, {"top_logprobs": 3}, 'top_logprobs is 3; that needs "logprobs": true'),
        (CHAT, {"logprobs": True, "top_logprobs": 500}, "top_logprobs is 500; it must be a whole number"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens and max_completion_tokens are the same"),
        (CHAT, {"prompt": "a"}, "unknown parameter 'prompt' for /v1/chat/completions"),
        (CHAT, {"best_of": 2}, "unknown parameter 'best_of'"),
        (COMPLETIONS, {"logprobs": True}, "logprobs is True"),
        (COMPLETIONS, {"top_logprobs": 3}, "unknown parameter 'top_logprobs'"),
        (COMPLETIONS, {"best_of": 3}, "best_of is 3, which is not n"),
        (COMPLETIONS, {"messages": MESSAGES}, "unknown parameter 'messages'"),
        (COMPLETIONS, {"max_completion_tokens": 3}, "unknown parameter 'max_completion_tokens'"),
    ],
)
def test_bad_parameters_of_one_endpoint(url: str, body: dict[str, Any], message: str) -> None:
    error = refused(line(url, **body))
    assert error.type is LineErrorType.INVALID_PARAMETERS
    assert message in error.message


@pytest.mark.parametrize("url", URLS)
def test_no_parameter_of_the_openai_package_is_passed_over(url: str) -> None:
    """What its requests may hold is honoured, is a label, or is refused by name where it asks for something."""
    types = pytest.importorskip("openai.types", reason="the openai package is not installed")
    chat = pytest.importorskip("openai.types.chat", reason="the openai package is not installed")
    request = chat.completion_create_params if url == CHAT else types.completion_create_params
    names = set(request.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert {"temperature", "logit_bias", "user", "stream_options"} <= names
    labels = {"user", "metadata", "store", "service_tier", "safety_identifier"}
    labels |= {name for name in names if name.startswith("prompt_cache_")}
    for name in names - labels:
        named = "max_new_tokens" if name in ("max_tokens", "max_completion_tokens") else name
        assert named in refused(line(url, **{name: {"what": "is this"}})).message
    for name in labels:
        assert params(url, **{name: "x"}) == DEFAULTS


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        (CHAT, {"messages": None}, "messages is null"),
        (CHAT, {"messages": []}, "the chat is empty"),
        (CHAT, {"messages": ["a"]}, "chat message 0 is str; it must be a dict"),
        (CHAT, {"messages": [{"content": "a"}]}, "chat message 0 has no 'role'"),
        (CHAT, {"messages": [{"role": "user"}]}, "chat message 0 has no 'content'"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "chat message 0 has a content of type int"),
        (CHAT, {"messages": [{"role": 5, "content": "a"}]}, "role"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "audio": {"id": "b"}}]}, "0 has 'audio', which"),
        (CHAT, {"reasoning_effort": ["low"]}, "reasoning_effort is ['low']; it must be a string"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "chat message 0 has a tool call 0 without a function that has a name",
        ),
        (
            CHAT,
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "chat message 2 has a content whose part 0 is of type 'image_url'; only text is taken",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "0 has a content whose part 0 is no",
        ),
        (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "0 has a content whose part 0 is no"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "U+D800"),
        (COMPLETIONS, {"prompt": None}, "prompt is null"),
        (COMPLETIONS, {"prompt": []}, "prompt is empty"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt is empty"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt holds 2 prompts; give each a line of its own"),
        (COMPLETIONS, {"prompt": [[5], [6]]}, "prompt holds 2 prompts"),
        (COMPLETIONS, {"prompt": [5, "a"]}, "prompt[1] is a string"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0] is -1"),
        (COMPLETIONS, {"prompt": {}}, "prompt is an object"),
    ],
)
def test_bad_prompts(url: str, body: dict[str, Any], message: str) -> None:
    error = refused(line(url, **body))
    assert error.type is LineErrorType.INVALID_PROMPT
    assert message in error.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": None}, "custom_id is null; it must be a string"),
        ({"custom_id": 5}, "custom_id is a number"),
        ({"method": "GET"}, 'method is "GET"; it must be "POST"'),
        ({"method": None}, "method is null"),
        ({"url": "/v1/embeddings"}, 'url is "/v1/embeddings"; it must be /v1/chat/completions or /v1/completions'),
        ({"url": ["a"]}, 'url is ["a"]'),
        ({"body": None}, "body is null"),
        ({"body": "{}"}, "body is a string"),
        ({"prompt": "a"}, "unknown key 'prompt'"),
        ({"body": {"model": 5, "messages": MESSAGES}}, "model is a number"),
    ],
)
def test_bad_lines(change: dict[str, Any], message: str) -> None:
    error = refused({**line(), **change})
    assert error.type is LineErrorType.INVALID_LINE
    assert message in error.message
    assert error.reply["custom_id"] == (change.get("custom_id") if "custom_id" in change else "a") or (
        change["custom_id"] == 5 and error.reply["custom_id"] is None
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (line(CHAT, messages=MESSAGES), f'url is "{CHAT}"; it must be {COMPLETIONS}'),
        ({"prompt": "a"}, "unknown key 'prompt'; a line in OpenAI's format has"),
        ({"custom_id": "a"}, 'method is null; it must be "POST"'),
    ],
)
def test_lines_of_one_endpoint_alone(given: dict[str, Any], message: str) -> None:
    parser = LineParser(SamplingParams(), url=COMPLETIONS)
    with pytest.raises(LineError) as caught:
        parser.parse(json.dumps(given).encode())
    assert caught.value.type is LineErrorType.INVALID_LINE
    assert message in caught.value.message
    with pytest.raises(LineError) as caught:
        parser.parse(b"{")
    assert caught.value.reply["format"] == Format.OPENAI
    assert parser.parse(json.dumps(line(COMPLETIONS, prompt="a")).encode()).prompt == "a"


def test_depths_around_the_limit_of_recursion_are_refused() -> None:
    messages = set()
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 20):
        deep = b"[" * depth + b"]" * depth
        for key in ("body", "url", "method", "x"):
            value = {**line(), key: None}
            text = (
                json.dumps(value)
                .encode()
                .replace(b'"%s": null' % key.encode(), b'"%s": %s' % (key.encode(), deep))
            )
            messages.add(refused(text).message[:20])
    assert {"the line nests too d", "url is [[[[[[[[[[[[[", "unknown key 'x'; a l"} <= messages


# -- which format a line is in -----------------------------------------------------------------------------

UNREADABLE: list[bytes | BadLine] = [b"{", b"\xff", b"[]", b"{}", b'{"custom_id": "a"}', BadLine("too long")]


@pytest.mark.parametrize("bad", UNREADABLE)
def test_what_does_not_tell_is_in_the_format_of_the_file(bad: bytes | BadLine) -> None:
    def told(parser: LineParser) -> str:
        with pytest.raises(LineError) as caught:
            parser.parse(bad)
        error_line(0, caught.value)
        return str(caught.value.reply["format"])

    sound = {Format.OPENAI: json.dumps(line()).encode(), Format.PLAIN: b'{"prompt": "a"}'}
    for file_format, other in ((Format.OPENAI, Format.PLAIN), (Format.PLAIN, Format.OPENAI)):
        parser = LineParser(DEFAULTS)
        parser.parse(sound[file_format])
        assert told(parser) == file_format.value
        assert parser.parse(sound[other]).reply["format"] == other.value  # each line that tells by itself
        assert told(parser) == file_format.value
        assert told(LineParser(DEFAULTS, file_format)) == file_format.value
    assert told(LineParser(DEFAULTS)) == Format.PLAIN.value


def test_a_first_line_that_is_cut_short_is_told_by_its_text() -> None:
    whole = json.dumps(line()).encode()
    assert refused(whole[:-1]).reply["format"] == "openai"
    assert refused(whole.replace(b'"Who?"', b"NaN")).reply["format"] == "openai"


# -- from file to file -------------------------------------------------------------------------------------


def run(tmp_path: Path, runtime: Any, lines: list[Any], **more: Any) -> list[dict[str, Any]]:
    written = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(written))
    run_batch(runtime, tmp_path / "in.jsonl", tmp_path / "out.jsonl", overwrite=True, **more)
    return [json.loads(one) for one in (tmp_path / "out.jsonl").read_bytes().splitlines()]


def test_a_file_of_both_formats(tmp_path: Path) -> None:
    lines = [
        line(max_tokens=5),
        b"{",
        {**line(COMPLETIONS, prompt=[1, 2]), "custom_id": "b"},
        {"prompt": [3], "custom_id": "c"},
        {**line(), "custom_id": "c"},
        {**line(COMPLETIONS, prompt=[5000]), "custom_id": "d"},
    ]
    records = run(tmp_path, FakeRuntime(), lines, created=5)
    assert [record["custom_id"] for record in records] == ["a", None, "b", "c", "c", "d"]
    codes = [record["error"] and record["error"].get("code") for record in records]
    assert codes == [None, "invalid_line", None, None, "duplicate_custom_id", "invalid_prompt"]
    assert records[3]["token_ids"] == [3, 128]
    for record in (records[0], records[2]):
        assert read_by_openai(record["response"]["body"]).created == 5
    assert run(tmp_path, FakeRuntime(), lines, created=5) == records


@pytest.mark.whole_gpu
def test_the_built_in_model_answers_completions(tmp_path: Path) -> None:
    prompt = "Mira likes Oslo.\nQ: Mira likes?\nA:"
    drawn_from = {"logprobs": 5, "logprobs_mode": "processed_logprobs", "top_k": 1}
    lines = [
        line(COMPLETIONS, prompt=prompt, temperature=0, logprobs=2, max_tokens=8),
        line(CHAT),
        line(COMPLETIONS, prompt=prompt, max_tokens=8, **drawn_from),
    ]
    for place, name in ((1, "chat"), (2, "drawn from")):
        lines[place]["custom_id"] = name
    with Runtime(max_total_tokens=2000) as runtime:
        answer, chat, certain = run(tmp_path, runtime, lines)
    sure = read_by_openai(certain["response"]["body"]).choices[0]
    assert (sure.text, set(sure.logprobs.token_logprobs)) == ("Oslo", {0.0})
    assert [len(top) for top in sure.logprobs.top_logprobs] == [1] * len(sure.logprobs.tokens)
    completion = read_by_openai(answer["response"]["body"])
    choice = completion.choices[0]
    assert (choice.text, choice.finish_reason) == ("Oslo", "stop")
    assert "".join(choice.logprobs.tokens).strip() == "Oslo"
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * len(choice.logprobs.tokens)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert "has no chat template" in chat["error"]["message"]
