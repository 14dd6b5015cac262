"""Pydantic AI's agents at a server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed: make test-clients")

from pydantic_ai import (
    Agent,
    ModelContextWindowExceededError,
    ModelRetry,
    NativeOutput,
    PromptedOutput,
    TextOutput,
    ToolOutput,
)
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.server.clients.weather import (
    ANSWER,
    CALL,
    CONTEXT_ERROR,
    CUT,
    FORECAST,
    LONG,
    MALFORMED,
    QUESTION,
    RAIN,
    SHORT,
    Forecast,
    weather,
)
from tests.support.scripted import Script
from tests.support.serving import Serving

FINAL = f'<tool_call>\n{{"name": "final_result", "arguments": {FORECAST}}}\n</tool_call>'
FOUND = Forecast(city="Oslo", days=3, is_wet=True)


def agent_of(url: str, **more: Any) -> Agent[None, Any]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = OpenAIChatModel("any", provider=OpenAIProvider(openai_client=client))
    return Agent(model, **{"instructions": "You tell the weather.", "tools": [weather], **more})


def run(agent: Agent[None, Any], asked: str, is_streamed: bool, **more: Any) -> tuple[Any, list[Any]]:
    """What a run comes to, and all messages."""

    async def streamed() -> tuple[Any, list[Any]]:
        async with agent.run_stream(asked, **more) as result:
            outputs = [output async for output in result.stream_output(debounce_by=None)]
            assert len(outputs) > 1
            return outputs[-1], result.all_messages()

    async def whole() -> tuple[Any, list[Any]]:
        result = await agent.run(asked, **more)
        return result.output, result.all_messages()

    return asyncio.run(streamed() if is_streamed else whole())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools(is_streamed: bool, serving: Serving, script: Script) -> None:
    script.says(CALL, ANSWER, "Rain.")
    url = serving()
    output, messages = run(agent_of(url), QUESTION, is_streamed)
    assert output == ANSWER
    assert RAIN in script.prompts[1]
    assert run(agent_of(url), "And now?", False, message_history=messages)[0] == "Rain."
    assert ANSWER in script.prompts[2]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput, PromptedOutput])
def test_a_form_beside_tools(kind: Any, is_streamed: bool, serving: Serving, script: Script) -> None:
    """As a tool that must be called, as a response_format, and told in the prompt."""
    script.says(CALL, FINAL if kind is ToolOutput else FORECAST)
    output_type = kind(Forecast, name="final_result") if kind is ToolOutput else kind(Forecast)
    output, _ = run(agent_of(serving(), output_type=output_type), QUESTION, is_streamed)
    assert output == FOUND
    assert RAIN in script.prompts[1]


def test_a_form_or_text(serving: Serving, script: Script) -> None:
    def loud(text: str) -> str:
        return text.upper()

    url, output_type = serving(), [Forecast, TextOutput(loud)]
    script.says(FINAL, "No.")
    assert run(agent_of(url, output_type=output_type), QUESTION, False)[0] == FOUND
    assert run(agent_of(url, output_type=output_type), QUESTION, False)[0] == "NO."


def test_several_calls(serving: Serving, script: Script) -> None:
    lima = CALL.replace("Oslo", "Lima")
    script.says(f"{CALL}\n{lima}", ANSWER)
    assert run(agent_of(serving()), QUESTION, False)[0] == ANSWER
    assert RAIN in script.prompts[1]
    assert RAIN.replace("Oslo", "Lima") in script.prompts[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_breaks_off(is_streamed: bool, serving: Serving, script: Script) -> None:
    """The agent tells the model what is wrong."""
    script.says(CUT, CALL, ANSWER)
    assert run(agent_of(serving()), QUESTION, is_streamed)[0] == ANSWER
    assert "error" in script.prompts[1]
    assert RAIN in script.prompts[2]


@pytest.mark.parametrize("arguments", MALFORMED)
def test_a_malformed_call(arguments: str, serving: Serving, script: Script) -> None:
    """It is in the history of the session."""
    script.says(CALL, SHORT)
    history = [
        ModelRequest([UserPromptPart(QUESTION)]),
        ModelResponse([ToolCallPart("weather", arguments, "a")]),
        ModelRequest([ToolReturnPart("weather", "That is no call.", "a")]),
    ]
    assert run(agent_of(serving()), "Again.", False, message_history=history)[0] == SHORT
    assert "That is no call." in script.prompts[0]


def test_an_answer_that_is_refused(serving: Serving, script: Script) -> None:
    agent = agent_of(serving(), output_type=NativeOutput(Forecast), retries=1)

    @agent.output_validator
    def of_five_days(found: Forecast) -> Forecast:
        if found.days != 5:
            raise ModelRetry("it must be of 5 days")
        return found

    script.says(FORECAST, FORECAST.replace("3", "5"))
    assert run(agent, QUESTION, False)[0].days == 5
    assert "it must be of 5 days" in script.prompts[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_too_long_a_context(is_streamed: bool, serving: Serving, script: Script) -> None:
    with pytest.raises(ModelContextWindowExceededError, match=CONTEXT_ERROR):
        run(agent_of(serving()), LONG, is_streamed)
