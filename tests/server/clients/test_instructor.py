"""Instructor at a server: answers in the form of classes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from pydantic import field_validator

pytest.importorskip("instructor", reason="instructor is not installed: make test-clients")

import instructor
from instructor.core import IncompleteOutputException, InstructorRetryException

from tests.server.clients.weather import CONTEXT_ERROR, FORECAST, LONG, MALFORMED, QUESTION, Forecast
from tests.support.scripted import Script
from tests.support.serving import Serving, client_of

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
FOUND = {"city": "Oslo", "days": 3, "is_wet": True}
MODES = ("TOOLS", "JSON_SCHEMA", "JSON", "MD_JSON")


def call(arguments: str, name: str = "Forecast") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def said(mode: str, answer: str, name: str = "Forecast") -> str:
    """An answer as a mode wants it."""
    if mode == "MD_JSON":
        return f"```json\n{answer}\n```"
    return call(answer, name) if mode == "TOOLS" else answer


def asking(url: str, mode: str) -> Any:
    return instructor.from_openai(client_of(url), mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", MODES)
def test_forms(mode: str, serving: Serving, script: Script) -> None:
    script.says(said(mode, FORECAST))
    chat = asking(serving(), mode).chat.completions
    found, response = chat.create_with_completion(model="any", messages=ASKED, response_model=Forecast)
    assert found.model_dump() == FOUND
    assert response.usage.prompt_tokens == len(script.requests[0].prompt_ids)


@pytest.mark.parametrize("mode", MODES)
def test_streams(mode: str, serving: Serving, script: Script) -> None:
    script.says(said(mode, FORECAST, "PartialForecast"))
    parts = [*asking(serving(), mode).create_partial(model="any", messages=ASKED, response_model=Forecast)]
    assert len(parts) > 3
    assert parts[-1].model_dump() == FOUND


@pytest.mark.parametrize("mode", MODES)
def test_one_after_the_other(mode: str, serving: Serving, script: Script) -> None:
    lima = FORECAST.replace("Oslo", "Lima")
    script.says(said(mode, f'{{"tasks": [{FORECAST}, {lima}]}}', "IterableForecast"))
    found = asking(serving(), mode).create_iterable(model="any", messages=ASKED, response_model=Forecast)
    assert [one.city for one in found] == ["Oslo", "Lima"]


@pytest.mark.parametrize("mode", MODES)
def test_retries(mode: str, serving: Serving, script: Script) -> None:
    """The answer that was refused, and why, are in the history."""

    class Long(Forecast):
        """A forecast of five days."""

        @field_validator("days")
        @classmethod
        def are_five(cls, days: int) -> int:
            if days != 5:
                raise ValueError("it must be of 5 days")
            return days

    script.says(said(mode, FORECAST, "Long"), said(mode, FORECAST.replace("3", "5"), "Long"))
    chat = asking(serving(), mode).chat.completions
    found = chat.create(model="any", messages=ASKED, response_model=Long, max_retries=2)
    assert found.days == 5
    assert "it must be of 5 days" in script.prompts[1]
    assert '"days": 3' in script.prompts[1]


def test_several_calls(serving: Serving, script: Script) -> None:
    script.says(f"{call(FORECAST)}\n{call(FORECAST.replace('Oslo', 'Lima'))}")
    chat = asking(serving(), "PARALLEL_TOOLS").chat.completions
    found = chat.create(model="any", messages=ASKED, response_model=Iterable[Forecast])
    assert [one.city for one in found] == ["Oslo", "Lima"]


def test_a_call_that_is_cut(serving: Serving, script: Script) -> None:
    """By its length; the next turn has it in its history."""
    script.says(call(FORECAST), call(FORECAST))
    chat = asking(serving(), "TOOLS").chat.completions
    with pytest.raises(IncompleteOutputException) as error:
        chat.create(model="any", messages=ASKED, response_model=Forecast, max_retries=0, max_tokens=60)
    (choice,) = error.value.last_completion.choices
    assert choice.finish_reason == "length"
    (cut,) = choice.message.tool_calls
    history = [*ASKED, choice.message.model_dump(), {"role": "tool", "tool_call_id": cut.id, "content": "Cut."}]
    found = chat.create(model="any", messages=history, response_model=Forecast, max_retries=0)
    assert found.model_dump() == FOUND


@pytest.mark.parametrize("arguments", MALFORMED)
def test_a_malformed_call(arguments: str, serving: Serving, script: Script) -> None:
    """It is in the history of the session."""
    script.says(call(FORECAST))
    made = {"id": "a", "type": "function", "function": {"name": "Forecast", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [made]}
    told = {"role": "tool", "tool_call_id": "a", "content": "That is no call."}
    chat = asking(serving(), "TOOLS").chat.completions
    found = chat.create(model="any", messages=[*ASKED, said, told], response_model=Forecast)
    assert found.model_dump() == FOUND
    assert json.dumps(arguments)[1:-1] in script.prompts[0] or arguments in script.prompts[0]


@pytest.mark.parametrize("mode", MODES)
def test_too_long_a_context(mode: str, serving: Serving, script: Script) -> None:
    chat = asking(serving(), mode).chat.completions
    messages = [{"role": "user", "content": LONG}]
    with pytest.raises(InstructorRetryException, match=CONTEXT_ERROR) as error:
        chat.create(model="any", messages=messages, response_model=Forecast, max_retries=0)
    cause = error.value.__cause__
    assert isinstance(cause, openai.BadRequestError)
    assert cause.code == "context_length_exceeded"
