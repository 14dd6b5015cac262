"""LangChain's ChatOpenAI at a server: chats, streams, tools and answers in a form."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import pytest

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-clients")

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.support.serving import ANSWERS, QUESTIONS, Serving


@tool
def weather(city: Literal["Oslo", "Lima"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"It rains in {city} for {days} days."


def chat_of(url: str, **more: Any) -> ChatOpenAI:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, **more}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="any", max_retries=0, **options)


def test_chats_and_batches_of_them(serving: Serving) -> None:
    chat = chat_of(serving())
    answer = chat.invoke(QUESTIONS[0])
    assert answer.content == ANSWERS[0]
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] >= 1
    assert [one.content for one in chat.batch(QUESTIONS)] == ANSWERS


def test_streams(serving: Serving) -> None:
    chat = chat_of(serving(), max_tokens=30, extra_body={"ignore_eos": True}, stream_usage=True)
    chunks = [*chat.stream(QUESTIONS[0])]
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    assert sum(bool(chunk.content) for chunk in chunks) > 3
    assert whole.content == chat.invoke(QUESTIONS[0]).content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 30


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools(is_streamed: bool, serving: Serving) -> None:
    """The model would call none by itself. What it has called goes on as history."""
    pytest.importorskip("llguidance")
    chat = chat_of(serving(), max_tokens=300, temperature=1, seed=1)
    asking = chat.bind_tools([weather], tool_choice="weather")
    if is_streamed:
        first, *chunks = asking.stream("Does it rain?")
        answer: AIMessage = sum(chunks, first)
    else:
        answer = asking.invoke("Does it rain?")
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Oslo", "Lima")
    assert call["args"]["days"] in (1, 2, 3)
    told = weather.invoke(call)
    assert isinstance(told, ToolMessage)
    history = [HumanMessage("Does it rain?"), answer, told]
    counts = []
    for messages in (history[:1], history):
        usage = chat.bind_tools([weather]).invoke(messages, max_tokens=1).usage_metadata
        assert usage is not None
        counts.append(usage["input_tokens"])
    assert counts[1] > counts[0] + 10


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_answers_in_the_form_of_a_class(method: Any, serving: Serving) -> None:
    pytest.importorskip("llguidance")

    class Count(pydantic.BaseModel):
        """A count."""

        count: int = pydantic.Field(ge=0, le=999)
        is_even: bool

    chat = chat_of(serving(), max_tokens=100, frequency_penalty=2)  # or it writes blanks without end
    assert isinstance(chat.with_structured_output(Count, method=method).invoke(QUESTIONS[1]), Count)
