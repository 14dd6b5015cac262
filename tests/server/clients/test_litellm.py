"""LiteLLM at a server, as OpenAI's and as vLLM's."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network when it is imported
pytest.importorskip("litellm", reason="litellm is not installed: make test-clients")

import litellm

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

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": weather.__doc__, "parameters": SCHEMA}}
]
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]

pytestmark = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])


def ask(url: str, provider: str, messages: list[Any], is_streamed: bool = False, **more: Any) -> Any:
    """A whole response; of a stream, as LiteLLM builds it of chunks."""
    options = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "num_retries": 0, **more}
    response = litellm.completion(f"{provider}/any", messages, stream=is_streamed, **options)
    if not is_streamed:
        return response
    chunks = [*response]
    assert len(chunks) > 2
    return litellm.stream_chunk_builder(chunks, messages=messages)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools(is_streamed: bool, provider: str, serving: Serving, script: Script) -> None:
    script.says(CALL, ANSWER)
    url, more = serving(), {"stream_options": {"include_usage": True}} if is_streamed else {}
    answer = ask(url, provider, ASKED, is_streamed, tools=TOOLS, **more).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather"}
    result["content"] = weather(**json.loads(call.function.arguments))
    response = ask(url, provider, [*ASKED, answer.message, result], is_streamed, tools=TOOLS, **more)
    assert response.choices[0].message.content == ANSWER
    assert response.choices[0].finish_reason == "stop"
    assert RAIN in script.prompts[1]
    assert response.usage.prompt_tokens == len(script.requests[1].prompt_ids)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_form_beside_tools(is_streamed: bool, provider: str, serving: Serving, script: Script) -> None:
    script.says(CALL, FORECAST)
    url, more = serving(), {"tools": TOOLS, "response_format": Forecast, "is_streamed": is_streamed}
    assert ask(url, provider, ASKED, **more).choices[0].message.tool_calls[0].function.name == "weather"
    content = ask(url, provider, ASKED, **more).choices[0].message.content
    assert Forecast.model_validate_json(content).is_wet


def test_a_call_that_must_be(provider: str, serving: Serving, script: Script) -> None:
    script.says(CALL)
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(serving(), provider, ASKED, tools=TOOLS, tool_choice=named, response_format=Forecast).choices[0]
    assert answer.message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_breaks_off(is_streamed: bool, provider: str, serving: Serving, script: Script) -> None:
    script.says(CUT, SHORT)
    url = serving()
    message = ask(url, provider, ASKED, is_streamed, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    told = {"role": "tool", "tool_call_id": call.id, "content": "That is no call."}
    response = ask(url, provider, [*ASKED, message, told], is_streamed, tools=TOOLS)
    assert response.choices[0].message.content == SHORT


@pytest.mark.parametrize("arguments", MALFORMED)
def test_a_malformed_call(arguments: str, provider: str, serving: Serving, script: Script) -> None:
    """It is in the history of the session."""
    script.says(SHORT)
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "a", "content": "That is no call."}
    response = ask(serving(), provider, [*ASKED, said, told], tools=TOOLS)
    assert response.choices[0].message.content == SHORT
    assert json.dumps(arguments)[1:-1] in script.prompts[0] or arguments in script.prompts[0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_too_long_a_context(is_streamed: bool, provider: str, serving: Serving, script: Script) -> None:
    with pytest.raises(litellm.ContextWindowExceededError, match=CONTEXT_ERROR):
        ask(serving(), provider, [{"role": "user", "content": LONG}], is_streamed)


def test_fields_of_other_providers(provider: str, serving: Serving, script: Script) -> None:
    """What histories carry from one provider to another changes nothing, and is taken."""
    script.says(SHORT)
    part = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    messages = [
        {"role": "system", "content": [{**part, "text": "You tell the weather."}]},
        {"role": "user", "content": [part], "name": "mira"},
        {"role": "assistant", "content": "Where?", "thinking_blocks": [thought], "reasoning_content": "Hm."},
        {"role": "user", "content": "Oslo.", "cache_control": {"type": "ephemeral"}},
    ]
    more = {"reasoning_effort": "low", "user": "mira", "metadata": {"page": "7"}, "store": False}
    allowed = {"allowed_openai_params": ["reasoning_effort"]}
    response = ask(serving(), provider, messages, **more, **allowed)
    assert response.choices[0].message.content == SHORT
    assert "Where?" in script.prompts[0]
