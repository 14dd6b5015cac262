"""Tools and thoughts, by OpenAI's client: answers of given text, and answers that must call."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'radixrt[grammar]'")

from radixrt.errors import TokenizerError
from radixrt.frontend.openai import CHAT
from radixrt.parsers.choosing import Parsers, chosen
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from radixrt.server.openai_request import read_request
from radixrt.text.tokenizer import load_tokenizer
from tests.support.chat_templates import GPT_OSS
from tests.support.checkpoints import gpt_oss, write
from tests.support.serving import Serving, client_of
from tests.support.small_tokenizers import CHATML, HARMONY_TOKENS, byte_level, chat_tokenizer
from tests.support.transcripts import CODER, HARMONY, HERMES, LLAMA, OSLO, WEATHER

STRICT = {**WEATHER, "required": ["city", "days"], "additionalProperties": False}
STRICT["properties"] = {"city": {"type": "string", "enum": ["Oslo", "Lima"]}, "days": {"enum": [1, 2, 3]}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "it", "parameters": STRICT}},
    {"type": "function", "function": {"name": "now", "parameters": None}},
]
ASK: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Oslo?"}], "temperature": 0}
HARMONY_PARSERS = Parsers("harmony", "harmony")


def saying(text: str, **more: Any) -> dict[str, Any]:
    """What asks for an answer of this text alone, with its tags: a grammar is of the whole answer."""
    return {**ASK, "max_tokens": 500, "extra_body": {"grammar": f"start: {json.dumps(text)}", **more}}


def joined(chunks: Any) -> list[dict[str, Any]]:
    """The choices that a stream tells, each as its message with its finish_reason."""
    told: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = told.setdefault(choice.index, {"calls": [], "reason": None, "logprobs": []})
            assert one["reason"] is None
            one["reason"] = choice.finish_reason
            one["logprobs"] += [] if choice.logprobs is None else choice.logprobs.content
            delta = choice.delta
            for kind in ("content", "reasoning_content"):
                if getattr(delta, kind, None):
                    one[kind] = one.get(kind, "") + getattr(delta, kind)
            for call in delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(one["calls"])
                    assert call.type == "function"
                    one["calls"].append([call.id, call.function.name, ""])
                one["calls"][call.index][2] += call.function.arguments
    return [told[index] for index in sorted(told)]


@pytest.mark.parametrize(
    ("text", "parsers", "thought", "said", "count"),
    [
        (f"Well.\n{HERMES}\n{HERMES}", None, None, "Well.\n", 2),
        (f"<think>\na\n</think>\n\n{HERMES}", Parsers("hermes", "think"), "a", None, 1),
        pytest.param(LLAMA, Parsers("llama3_json"), None, None, 1, marks=pytest.mark.long),
        pytest.param(CODER, Parsers("qwen3_coder"), None, None, 1, marks=pytest.mark.long),
        (HARMONY, HARMONY_PARSERS, "Need Oslo.", None, 1),
        ("Hello <tool_call>", None, None, "Hello <tool_call>", 0),
        (HERMES, Parsers(), None, HERMES, 0),
    ],
)
def test_calls_and_thoughts(
    text: str,
    parsers: Parsers | None,
    thought: str | None,
    said: str | None,
    count: int,
    serving: Serving,
    runtime: Runtime,
) -> None:
    """Streams join to the whole answer."""
    client = client_of(serving(Server(runtime, "built-in", parsers=parsers)))
    asked = {**saying(text), "tools": TOOLS, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    streamed = joined(client.chat.completions.create(stream=True, **asked))
    ids = [call[0] for one in streamed for call in one["calls"]]
    for choice, one in zip(whole.choices, streamed, strict=True):
        message = choice.message
        assert (message.content, getattr(message, "reasoning_content", None)) == (said, thought)
        assert (one.get("content"), one.get("reasoning_content")) == (said, thought)
        assert [call.function.name for call in message.tool_calls or ()] == ["weather"] * count  # type: ignore[union-attr]
        written = [call.function.arguments for call in message.tool_calls or ()]  # type: ignore[union-attr]
        assert [json.loads(arguments) for arguments in written] == [json.loads(OSLO)] * count
        assert [call[1:] for call in one["calls"]] == [["weather", arguments] for arguments in written]
        assert choice.finish_reason == one["reason"] == ("tool_calls" if count else "stop")
        assert choice.logprobs is not None
        assert [token.token for token in one["logprobs"]] == [
            token.token for token in choice.logprobs.content or ()
        ]
        ids += [call.id for call in message.tool_calls or ()]
    assert len(set(ids)) == len(ids) == 4 * count


def test_what_is_cut_has_its_length_as_reason(serving: Serving) -> None:
    client = client_of(serving())
    asked = {**saying(HERMES), "tools": TOOLS, "max_tokens": 42}
    (choice,) = client.chat.completions.create(**asked).choices
    (one,) = joined(client.chat.completions.create(stream=True, **asked))
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": ""}
    assert (choice.finish_reason, one["calls"][0][2]) == ("length", call.function.arguments)
    assert one["reason"] == "length"


@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [("days", {"city": "Oslo"}, "stop"), ("</tool_call>", json.loads(OSLO), "tool_calls")],
)
def test_a_stop_string_within_a_call(stop: str, arguments: Any, reason: str, serving: Serving) -> None:
    client = client_of(serving())
    asked = {**saying(HERMES), "tools": TOOLS, "stop": stop}
    (choice,) = client.chat.completions.create(**asked).choices
    (one,) = joined(client.chat.completions.create(stream=True, **asked))
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (json.loads(call.function.arguments), choice.finish_reason) == (arguments, reason)
    assert (one["calls"][0][2], one["reason"]) == (call.function.arguments, reason)


@pytest.mark.parametrize(
    ("parsers", "more"),
    [
        (Parsers("hermes"), {}),
        (Parsers("llama3_json"), {}),
        (Parsers("qwen3_coder"), {}),
        (Parsers("hermes"), {"parallel_tool_calls": False}),
        (Parsers("hermes"), {"stream": True}),
    ],
)
def test_a_call_that_must_be(parsers: Parsers, more: dict[str, Any], serving: Serving, runtime: Runtime) -> None:
    """The model would never write one by itself."""
    client = client_of(serving(Server(runtime, "built-in", parsers=parsers)))
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        asked: dict[str, Any] = {
            **ASK,
            "tools": TOOLS,
            "tool_choice": choice,
            "max_tokens": 300,
            "seed": 1,
            **more,
        }
        made = client.chat.completions.create(**asked)
        if "stream" in more:
            (one,) = joined(made)
            calls, reason = [call[1:] for call in one["calls"]], one["reason"]
        else:
            message = made.choices[0].message
            assert message.content is None
            calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
            reason = made.choices[0].finish_reason
        assert reason == "tool_calls"
        assert len(calls) == 1 or (choice == "required" and not more and len(calls) > 1)
        for name, written in calls:
            arguments = json.loads(written)
            assert name == "weather" or (choice == "required" and (name, arguments) == ("now", {}))
            assert name == "now" or (arguments["city"] in ("Oslo", "Lima") and arguments["days"] in (1, 2, 3))


@pytest.mark.parametrize(
    ("more", "are_several"),
    [
        ({"tool_choice": "required"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, False),
    ],
)
def test_one_call_that_must_be_or_several(more: dict[str, Any], are_several: bool) -> None:
    """A named function is called once."""
    asked = read_request(
        CHAT, {**ASK, "tools": TOOLS, **more}, SamplingParams(), Limits(), Parsers("hermes"), None, "served"
    )
    assert asked.params.grammar is not None
    assert (" (/\\n/ call)*" in asked.params.grammar) == are_several
    assert asked.params.grammar.count("<tool_call>") == (2 if more["tool_choice"] == "required" else 1)


def test_tools_and_the_prompt(serving: Serving) -> None:
    """The template gets tools, calls and what they have returned; without a choice among tools it gets none."""
    client = client_of(serving())

    def count(**more: Any) -> int:
        usage = client.chat.completions.create(**{**ASK, "max_tokens": 1, **more}).usage
        assert usage is not None
        return usage.prompt_tokens

    assert count(tools=TOOLS) > count()
    assert count(tools=TOOLS, tool_choice="none") == count()
    answer = client.chat.completions.create(**saying(HERMES), tools=TOOLS)
    message = answer.choices[0].message
    history = [*ASK["messages"], message, {"role": "tool", "tool_call_id": "a", "content": "It rains."}]
    assert count(messages=history) > count() + 20


def test_without_a_choice_nothing_is_taken_apart(serving: Serving) -> None:
    client = client_of(serving())
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "skip_special_tokens": False}):
        body = {name: value for name, value in more.items() if name != "skip_special_tokens"}
        raw = {name: value for name, value in more.items() if name == "skip_special_tokens"}
        message = client.chat.completions.create(**saying(HERMES, **raw), **body).choices[0].message
        assert (message.content, message.tool_calls) == (HERMES, None)


def test_classes_as_tools(serving: Serving) -> None:
    class weather(pydantic.BaseModel):  # its name is the function's
        city: str
        days: int

    client, tools = client_of(serving()), [openai.pydantic_function_tool(weather)]
    parsed = client.chat.completions.parse(**saying(HERMES), tools=tools)
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == weather(city="Oslo", days=3)
    with client.chat.completions.stream(**saying(HERMES), tools=tools) as events:
        kinds = [event.type for event in events]
        (call,) = events.get_final_completion().choices[0].message.tool_calls or ()
    assert "tool_calls.function.arguments.done" in kinds
    assert call.function.parsed_arguments == weather(city="Oslo", days=3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools are of type dict; they must be a list"),
    ({"tools": [1]}, "tools hold what is no object"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "other tools are not taken"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name is"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "parameters is a number"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1] is the second function called 'weather'"),
    ({"tools": TOOLS, "tool_choice": "any"}, 'tool_choice is "any"; it must be "auto"'),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "it must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, 'there is no function "x"'),
    ({"tool_choice": "required"}, "that needs tools"),
    ({"tools": TOOLS, "tool_choice": 1}, "tool_choice is 1; it must be"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls is 1"),
    ({"tools": TOOLS, "tool_choice": "required", "skip_special_tokens": False}, "skip_special_tokens is false"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        'Unimplemented keys: ["not"]',
    ),
]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_refusals(is_streamed: bool, serving: Serving, runtime: Runtime) -> None:
    url = serving()
    for more, told in REFUSED:
        response = httpx.post(f"{url}/v1/chat/completions", json={**ASK, **more, "stream": is_streamed})
        assert response.status_code == 400, (more, response.text)
        assert told in response.json()["error"]["message"], more


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    """gpt-oss' are no text otherwise; a forced call is made of them."""
    byte = byte_level(("<s>", "</s>", *HARMONY_TOKENS, "<|constrain|>"))
    byte.chat_template = GPT_OSS
    byte.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = {name: int(tokenizer.encode(name, add_special_tokens=False)[0]) for name in HARMONY_TOKENS}
    write(
        gpt_oss(vocab_size=tokenizer.vocab_size, max_position_embeddings=1024),
        tmp_path,
        eos=[ids["<|call|>"], ids["<|return|>"]],
    )

    async def ask(runtime: Runtime) -> list[dict[str, Any]]:
        transport = httpx.ASGITransport(Server(runtime, "tiny").app())
        async with httpx.AsyncClient(transport=transport, base_url="http://a", timeout=60) as client:
            body = {**ASK, "tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 200}
            bias = {str(ids["<|end|>"]): 100}  # or its thoughts have no end
            answers = [
                await client.post(CHAT, json={**body, "logit_bias": bias, "seed": seed, "temperature": 1.5})
                for seed in range(4)
            ]
        assert [one.status_code for one in answers] == [200] * 4, answers[0].text
        return [answer.json()["choices"][0] for answer in answers]

    with Runtime(tmp_path, device="cpu", max_total_tokens=20_000) as runtime:
        for choice in asyncio.run(ask(runtime)):
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Lima")


@pytest.mark.parametrize(
    ("more", "is_thinking"),
    [
        ({}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"response_format": {"type": "json_object"}}, True),  # the form is that of the content
        ({"grammar": 'start: "a"'}, False),  # of the whole answer, from its beginning
        (
            {
                "messages": [*ASK["messages"], {"role": "assistant", "content": "<think>a"}],
                "continue_final_message": True,
            },
            False,  # the message itself has
        ),
        (
            {
                "messages": [*ASK["messages"], {"role": "assistant", "content": "a"}],
                "continue_final_message": True,
            },
            False,
        ),
    ],
)
def test_thoughts_that_the_template_has_opened(more: dict[str, Any], is_thinking: bool, tmp_path: Path) -> None:
    template = CHATML.replace(
        "assistant\n{% endif",
        "assistant\n<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif",
    )
    tokenizer = chat_tokenizer(tmp_path, template)
    parsers = chosen(tokenizer)
    assert parsers == Parsers(None, "think")
    body = {"messages": ASK["messages"], **more}
    asked = read_request(CHAT, body, SamplingParams(), Limits(), parsers, tokenizer, "served")
    assert asked.reading is not None
    assert asked.reading.is_thinking == is_thinking
    assert asked.params.skip_special_tokens


def test_models_that_have_no_tools(serving: Serving, runtime: Runtime, tmp_path: Path) -> None:
    """A template without tools cannot show them; without a parser no call can be asked for."""
    url = serving(Server(runtime, "built-in", parsers=Parsers()))
    response = httpx.post(f"{url}/v1/chat/completions", json={**ASK, "tools": TOOLS, "tool_choice": "required"})
    assert "no parser of this model's calls is chosen (--tool-parser)" in response.json()["error"]["message"]
    tokenizer = chat_tokenizer(tmp_path, CHATML)
    asked = read_request(
        CHAT, {**ASK, "tools": TOOLS}, SamplingParams(), Limits(), chosen(tokenizer), tokenizer, "served"
    )
    with pytest.raises(
        TokenizerError, match="the chat has 'tools', which the chat template of this checkpoint does"
    ):
        tokenizer.encode_chat(asked.prompts[0])  # type: ignore[arg-type]


PLAN: dict[str, Any] = {
    "type": "object",
    "properties": {"plan": {"enum": ["stay", "go"]}, "name": {"enum": ["weather", "x"]}},
    "required": ["plan", "name"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN}}


def calls_and_contents(choices: Any) -> tuple[list[Any], list[str]]:
    """What answers called, with checked arguments, and what the others said."""
    calls, contents = [], []
    for choice in choices:
        message = choice.message
        assert (message.content is None) == (choice.finish_reason == "tool_calls") == bool(message.tool_calls)
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            calls.append(call.function.name)
            assert call.function.name in ("now", "odd") or arguments["city"] in ("Oslo", "Lima")
        if message.content is not None:
            contents.append(message.content)
    return calls, contents


@pytest.mark.parametrize(
    "parsers",
    [Parsers("hermes"), Parsers("llama3_json"), Parsers("qwen3_coder"), Parsers("hermes", "think")],
    ids=str,
)
def test_calls_beside_a_form(parsers: Parsers, serving: Serving, runtime: Runtime) -> None:
    """As agents ask: of many answers some call, all others have the form. A schema that cannot be kept is not."""
    client = client_of(serving(Server(runtime, "built-in", parsers=parsers)))
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}
    asked: dict[str, Any] = {**ASK, "max_tokens": 120, "response_format": RESPONSE_FORMAT, "tools": [*TOOLS, odd]}
    seen = client.chat.completions.create(**asked | {"n": 12, "temperature": 2.0, "seed": 3})
    ended = [choice for choice in seen.choices if choice.finish_reason != "length"]
    calls, contents = calls_and_contents(ended)
    assert contents
    assert calls
    for content in contents:
        assert json.loads(content).keys() == {"plan", "name"}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        made = client.chat.completions.create(**asked | {"tools": TOOLS}, tool_choice=choice, seed=1).choices
        assert made[0].message.tool_calls or made[0].finish_reason == "length"
    (none,) = client.chat.completions.create(**asked, tool_choice="none").choices
    assert none.message.tool_calls is None
    assert none.finish_reason == "length" or json.loads(none.message.content or "")["plan"] in ("stay", "go")


def test_calls_beside_other_forms(serving: Serving, runtime: Runtime) -> None:
    client = client_of(serving())
    assert runtime.tokenizer is not None
    likely = {str(runtime.tokenizer.encode("a<", add_special_tokens=False)[-1]): 8}  # how calls begin
    for form, allowed in (({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[0-3]/::=x"}, "[0-3]/::=x")):
        asked = {
            **ASK,
            "max_tokens": 80,
            "n": 16,
            "temperature": 2.0,
            "seed": 5,
            "logit_bias": likely,
            "tools": TOOLS,
            "extra_body": form,
        }
        choices = client.chat.completions.create(**asked).choices
        calls, contents = calls_and_contents(one for one in choices if one.finish_reason != "length")
        assert calls
        assert contents
        assert all(re.fullmatch(allowed, content) for content in contents)


def test_forms_that_cannot_stand_beside_tools(serving: Serving) -> None:
    url = serving()
    body = {**ASK, "tools": TOOLS, "max_tokens": 4}
    for more, told in (
        ({"json_schema": {"type": "object", "not": {}}}, "the json_schema cannot stand beside tools, which takes"),
        ({"regex": "a", "form_engine": "xgrammar"}, "form_engine is 'xgrammar'"),
        ({"regex": "("}, "unclosed group"),
    ):
        response = httpx.post(f"{url}/v1/chat/completions", json={**body, **more})
        assert response.status_code == 400
        assert told in response.json()["error"]["message"]
        assert httpx.post(
            f"{url}/v1/chat/completions", json={**body, **more, "tool_choice": "required"}
        ).is_success
