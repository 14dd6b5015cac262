"""Answers of given texts taken apart: streams join to the whole, however they end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixrt.errors import ParameterError
from radixrt.frontend.openai import CHAT
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, StreamChunk, Timings, Usage
from radixrt.parsers.choosing import Parsers
from radixrt.sampling_params import SamplingParams
from radixrt.server.answering import Answering
from radixrt.server.batches.chats import ServedChats
from radixrt.server.limits import Limits
from radixrt.server.openai_request import OpenAIRequest, read_request
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.model_templates import MODEL_TEMPLATES
from tests.support.small_tokenizers import CHATML, byte_level, chat_tokenizer
from tests.support.transcripts import CODER, HERMES, LLAMA, OSLO, WEATHER, coder

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
USER = {"role": "user", "content": "Oslo?"}
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
OPENING = WITH_TOOLS.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
END, STOP, LENGTH = (FinishReason.STOP, 2), (FinishReason.STOP, "x"), (FinishReason.LENGTH, None)
Ending = tuple[FinishReason, int | str | None]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Whose template opens thoughts."""
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), OPENING)


def asked_of(tokenizer: Tokenizer, parsers: Parsers, said: str | None = None, **more: Any) -> OpenAIRequest:
    """What a body asks for whose message goes on, if one is `said`."""
    body = {"messages": [USER], "tools": TOOLS, **more}
    if said is not None:
        body |= {"messages": [USER, {"role": "assistant", "content": said}], "continue_final_message": True}
    return read_request(CHAT, body, SamplingParams(), Limits(), parsers, tokenizer, "served")


def whole(asked: OpenAIRequest, tokenizer: Tokenizer, text: str, ending: Ending) -> dict[str, Any]:
    """The choice of a whole answer."""
    answering: Any = Answering(SimpleNamespace(tokenizer=tokenizer))  # type: ignore[arg-type]
    _, body = answering.body(asked, [_output(text, ending)])
    return json.loads(json.dumps(body["choices"][0]))  # type: ignore[no-any-return]


def _output(text: str, ending: Ending) -> RequestOutput:
    answer = CompletionOutput(0, text, (1,), *ending)
    return RequestOutput(0, 0, (answer,), Usage(1, 0, 1, 1), Timings(0.0, 0.0, 0.0), ())


def streamed(asked: OpenAIRequest, tokenizer: Tokenizer, pieces: list[str], ending: Ending) -> dict[str, Any]:
    """The choice that the events of a stream join to."""
    answering: Any = Answering(SimpleNamespace(tokenizer=tokenizer))  # type: ignore[arg-type]
    events = answering.events(asked, lambda *_: None)
    chunks = [StreamChunk(piece, (1,)) for piece in pieces]
    last = StreamChunk("", (2,), _output("".join(pieces), ending), finish_reason=ending[0], matched=ending[1])
    told = b"".join(events.of([chunk]) for chunk in (*chunks, last)).decode()
    assert len(told.splitlines()) == told.count("\n")
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    reason = None
    for line in told.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        assert reason is None
        reason = choice["finish_reason"]
        for kind in ("content", "reasoning_content"):
            if more := choice["delta"].get(kind):
                message[kind] = (message.get(kind) or "") + more
        for call in choice["delta"].get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            assert call["index"] == len(calls) - 1
            for key, value in call["function"].items():
                calls[-1]["function"][key] += value
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice["message"].get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return choice


def choice_of(asked: OpenAIRequest, tokenizer: Tokenizer, text: str, ending: Ending) -> dict[str, Any]:
    """The choice of an answer, whole and in all pieces."""
    found = without_ids(whole(asked, tokenizer, text, ending))
    assert without_ids(streamed(asked, tokenizer, [*text], ending)) == found
    for cut in range(0, len(text), 7):
        assert without_ids(streamed(asked, tokenizer, [text[:cut], text[cut:]], ending)) == found
    return found


def calls_of(choice: dict[str, Any]) -> list[Any]:
    return [json.loads(call["function"]["arguments"]) for call in choice["message"].get("tool_calls", ())]


@pytest.mark.parametrize(
    ("text", "parser", "ending", "arguments", "reason"),
    [
        (HERMES, "hermes", END, {"city": "Oslo", "days": 3}, "tool_calls"),
        (HERMES.removesuffix("</tool_call>"), "hermes", STOP, {"city": "Oslo", "days": 3}, "tool_calls"),
        (HERMES[: HERMES.index("days")], "hermes", STOP, {"city": "Oslo"}, "stop"),
        (HERMES[: HERMES.index("lo")], "hermes", STOP, {"city": "Os"}, "stop"),
        (HERMES[: HERMES.index("lo")], "hermes", LENGTH, {"city": "Os"}, "length"),
        (HERMES[: HERMES.index("lo")], "hermes", END, {"city": "Os"}, "stop"),
        (LLAMA[: LLAMA.index("days")], "llama3_json", STOP, {"city": "Oslo"}, "stop"),
        (CODER[: CODER.index("3")], "qwen3_coder", STOP, {"city": "Oslo"}, "stop"),
        (CODER[: CODER.index("3")], "qwen3_coder", LENGTH, {"city": "Oslo"}, "length"),
        (CODER[: CODER.index("3") + 1], "qwen3_coder", END, {"city": "Oslo", "days": 3}, "tool_calls"),
        (coder("city", "a\n\u2028\x85b"), "qwen3_coder", END, {"city": "a\n\u2028\x85b"}, "tool_calls"),
    ],
)
def test_calls_end(
    text: str, parser: str, ending: Ending, arguments: dict[str, Any], reason: str, tokenizer: Tokenizer
) -> None:
    """Arguments are JSON in any case; an answer ends with its calls only if they are whole."""
    choice = choice_of(asked_of(tokenizer, Parsers(parser)), tokenizer, text, ending)
    assert (calls_of(choice), choice["finish_reason"]) == ([arguments], reason)
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("text", "ending", "thought", "content"),
    [
        ("a</think>b", END, "a", "b"),
        ("\nOslo is in Norway.", END, "Oslo is in Norway.", "Oslo is in Norway."),
        ("Oslo is", LENGTH, "Oslo is", ""),
        ("Oslo is", STOP, "Oslo is", ""),
        ("", END, None, ""),
        ("a</think>", END, "a", ""),
    ],
)
def test_thoughts_that_are_not_closed(
    text: str, ending: Ending, thought: str | None, content: str, tokenizer: Tokenizer
) -> None:
    """An answer that the model has ended is content, too."""
    for tools in (TOOLS, []):
        asked = asked_of(tokenizer, Parsers("hermes", "think"), tools=tools)
        message = choice_of(asked, tokenizer, text, ending)["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thought, content)
    called = choice_of(asked_of(tokenizer, Parsers("hermes", "think")), tokenizer, HERMES, END)
    assert (calls_of(called), called["finish_reason"]) == ([json.loads(OSLO)], "tool_calls")


@pytest.mark.parametrize("names_tools", [False, True])
def test_tags_of_thoughts_that_are_special_tokens(names_tools: bool, tmp_path: Path) -> None:
    """They are seen, with tools and without; where they are none, other special tokens stay left out."""
    own = byte_level(("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    own.chat_template = OPENING
    own.save_pretrained(tmp_path / "special")
    special = load_tokenizer(tmp_path / "special")
    plain = chat_tokenizer(tmp_path / "plain", OPENING)
    tools = TOOLS if names_tools else []
    for tokenizer, skips in ((special, False), (plain, True)):
        asked = asked_of(tokenizer, Parsers("hermes", "think"), tools=tools)
        assert asked.params.skip_special_tokens == skips
        ids = tokenizer.encode("a</think>b", add_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=asked.params.skip_special_tokens)
        message = whole(asked, tokenizer, text, END)["message"]
        assert (message["reasoning_content"], message["content"]) == ("a", "b")


@pytest.mark.parametrize(("text", "parser"), [(HERMES, "hermes"), (CODER, "qwen3_coder"), (LLAMA, "llama3_json")])
def test_calls_that_go_on(text: str, parser: str, tmp_path: Path) -> None:
    """A call in which the message ends is told whole; what was said before is not told again."""
    tokenizer = chat_tokenizer(tmp_path, WITH_TOOLS)
    for cut in range(1, len(text)):
        asked = asked_of(tokenizer, Parsers(parser), said=text[:cut])
        if not text[:cut].endswith(("\n", " ")):
            assert asked.reading is not None
            assert asked.reading.said == text[:cut]
        choice = (
            choice_of(asked, tokenizer, text[cut:], END)
            if cut % 5 == 0
            else whole(asked, tokenizer, text[cut:], END)
        )
        assert choice["message"]["content"] in (None, "")
        if cut < text.index("3"):
            assert (calls_of(choice), choice["finish_reason"]) == ([json.loads(OSLO)], "tool_calls")
    said = f"Well. {HERMES} And"
    choice = choice_of(asked_of(tokenizer, Parsers("hermes"), said=said), tokenizer, f" so {HERMES}", END)
    assert (choice["message"]["content"], len(calls_of(choice))) == (" so ", 1)


def test_calls_that_go_on_in_batches(tokenizer: Tokenizer) -> None:
    chats = ServedChats(Parsers("hermes"), tokenizer, lambda form: None)
    messages = [USER, {"role": "assistant", "content": HERMES[:50]}]
    given = {"messages": messages, "continue_final_message": True}
    reading, _ = chats.reading({**given, "tools": TOOLS}, Chat.of(given), SamplingParams())
    assert reading is not None
    message, has_called = chats.message(
        json.loads(json.dumps(reading)), CompletionOutput(0, HERMES[50:], (1,), *END)
    )
    assert (has_called, message["tool_calls"][0]["function"]["arguments"]) == (True, OSLO)
    del reading["said"]  # of a batch that an earlier version has begun
    assert chats.message(reading, CompletionOutput(0, "a", (1,), *END)) == (
        {"role": "assistant", "content": "a", "refusal": None},
        False,
    )


def test_a_call_cannot_begin_within_another(tokenizer: Tokenizer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for parser, said in (("hermes", HERMES[:50]), ("hermes", HERMES[:-12]), ("qwen3_coder", CODER[:50])):
        for what, more in (("tool_choice", {"tool_choice": "required"}), ("a form", {"response_format": form})):
            with pytest.raises(ParameterError, match=f"^{what} cannot begin where .* ends: within a call"):
                asked_of(tokenizer, Parsers(parser), said=said, **more)
    asked_of(tokenizer, Parsers("hermes"), said=HERMES, tool_choice="required")
    with pytest.raises(ParameterError, match=r"^tool_choice cannot begin .* ends: within a message of this model"):
        asked_of(tokenizer, Parsers("harmony", "harmony"), said="Well", tool_choice="required")


def test_a_tag_that_a_message_mentions_opens_no_thoughts(tokenizer: Tokenizer) -> None:
    for said in ("The tag <think> is", "<think>a</think> then <think> b"):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        asked = asked_of(tokenizer, Parsers("hermes", "think"), said=said, response_format=form)
        assert asked.reading is not None
        assert not asked.reading.is_thinking


def test_a_form_keeps_the_blanks_that_it_begins_with(tokenizer: Tokenizer) -> None:
    for tools in (TOOLS, []):
        asked = asked_of(tokenizer, Parsers("hermes", "think"), tools=tools, choice=[" yes", " no"])
        message = choice_of(asked, tokenizer, "hm\n</think>\n\n yes", END)["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", " yes")


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek R1", "Llama 3", "Gemma 3"])
@pytest.mark.parametrize("said", ["<think>a</think>b", "Oslo is", " Oslo", "<think>\na\n</think>\n\nb"])
def test_messages_that_go_on_in_the_templates_of_models(name: str, said: str, tmp_path: Path) -> None:
    """These rewrite contents: what of the answer is there is not found by its text."""
    model = chat_tokenizer(tmp_path, MODEL_TEMPLATES[name])
    asked = asked_of(model, Parsers("hermes", "think"), said=said, tools=[])
    assert asked.reading is not None
    message = choice_of(asked, model, " the capital", END)["message"]
    assert message["content"].strip() == "the capital"


def test_thoughts_that_go_on(tokenizer: Tokenizer) -> None:
    for said, text, thought, content in (
        ("<think>a", " b</think>c", " b", "c"),
        ("<think>a</think>", "c", None, "c"),
        ("<think>a</th", "ink>c", None, "c"),
        ("a", "c", None, "c"),
        ("<think>a", "b", "b", ""),
    ):
        asked = asked_of(tokenizer, Parsers("hermes", "think"), said=said)
        message = choice_of(asked, tokenizer, text, END)["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thought, content), said
