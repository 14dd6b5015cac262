"""OpenAI's Agents SDK at a server, through chats."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

pytest.importorskip("agents", reason="openai-agents is not installed: make test-clients")

from agents import Agent, ModelSettings, Runner, Tool, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel

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

set_tracing_disabled(True)


def agent_of(url: str, **more: Any) -> Agent[None]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tools: list[Tool] = [function_tool(weather)]
    options = {"name": "Ada", "instructions": "You tell the weather.", "tools": tools, **more}
    return Agent(model=OpenAIChatCompletionsModel("any", openai_client=client), **options)


def run(agent: Agent[None], asked: Any, is_streamed: bool) -> tuple[Any, str]:
    """The result of a run, and the text that was streamed."""

    async def streamed() -> tuple[Any, str]:
        result = Runner.run_streamed(agent, asked)
        texts = []
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                texts.append(event.data.delta)
        return result, "".join(texts)

    if is_streamed:
        return asyncio.run(streamed())
    return asyncio.run(Runner.run(agent, asked)), ""


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools(is_streamed: bool, serving: Serving, script: Script) -> None:
    script.says(CALL, ANSWER)
    settings = ModelSettings(include_usage=True, parallel_tool_calls=False, store=False, metadata={"page": "7"})
    result, streamed = run(agent_of(serving(), model_settings=settings), QUESTION, is_streamed)
    assert result.final_output == ANSWER
    assert streamed == (ANSWER if is_streamed else "")
    assert RAIN in script.prompts[1]
    assert CALL in script.prompts[1]
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.input_tokens == sum(len(request.prompt_ids) for request in script.requests)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_form_beside_tools(is_streamed: bool, serving: Serving, script: Script) -> None:
    script.says(CALL, FORECAST)
    result, _ = run(agent_of(serving(), output_type=Forecast), QUESTION, is_streamed)
    assert result.final_output == Forecast(city="Oslo", days=3, is_wet=True)
    assert RAIN in script.prompts[1]


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_call_that_must_be_before_a_form(choice: str, serving: Serving, script: Script) -> None:
    script.says(CALL, FORECAST)  # the choice is reset once a tool was called
    agent = agent_of(serving(), output_type=Forecast, model_settings=ModelSettings(tool_choice=choice))
    assert run(agent, QUESTION, False)[0].final_output.is_wet


def test_handing_over(serving: Serving, script: Script) -> None:
    """A tool without parameters."""
    url = serving()
    script.says('<tool_call>\n{"name": "transfer_to_ben", "arguments": {}}\n</tool_call>', FORECAST)
    ben = agent_of(url, name="Ben", output_type=Forecast)
    result, _ = run(agent_of(url, handoffs=[ben], output_type=Forecast), QUESTION, False)
    assert result.last_agent is ben
    assert result.final_output.city == "Oslo"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_breaks_off(is_streamed: bool, serving: Serving, script: Script) -> None:
    """The agent tells the model that its call has failed."""
    script.says(CUT, CALL, SHORT)
    assert run(agent_of(serving()), QUESTION, is_streamed)[0].final_output == SHORT
    assert "An error occurred" in script.prompts[1]
    assert RAIN in script.prompts[2]


@pytest.mark.parametrize("arguments", MALFORMED)
def test_a_malformed_call(arguments: str, serving: Serving, script: Script) -> None:
    """It is in the history of the session."""
    script.says(CALL, SHORT)
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": arguments}
    told = {"type": "function_call_output", "call_id": "a", "output": "That is no call."}
    history = [{"role": "user", "content": QUESTION}, call, told]
    assert run(agent_of(serving()), history, False)[0].final_output == SHORT
    assert json.dumps(arguments)[1:-1] in script.prompts[0] or arguments in script.prompts[0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_too_long_a_context(is_streamed: bool, serving: Serving, script: Script) -> None:
    with pytest.raises(openai.BadRequestError, match=CONTEXT_ERROR) as error:
        run(agent_of(serving()), LONG, is_streamed)
    assert error.value.code == "context_length_exceeded"
