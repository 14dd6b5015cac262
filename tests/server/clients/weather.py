"""What the sessions of all clients are about."""

from __future__ import annotations

from pydantic import BaseModel, Field

QUESTION, RAIN = "Does it rain in Oslo?", "It rains in Oslo for 3 days."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Os'
MALFORMED = ('{"city": "Os', "[]", "null", "no JSON")  # arguments of a call, which other servers have let through
# Longer than 128 tokens, with a character that some take for the end of a line.
ANSWER = "Yes, it rains\u2028for 3 days; and it goes on: " + "drop, " * 20 + "stop."
SHORT = "Yes."
FORECAST = '{"city": "Oslo", "days": 3, "is_wet": true}'
LONG = "Oslo is wet. " * 2000  # more tokens than the context has
CONTEXT_ERROR = "maximum context length"


class Forecast(BaseModel):
    """A forecast."""

    city: str
    days: int = Field(description="how many")
    is_wet: bool


def weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: its name.
        days: how many.
    """
    return f"It rains in {city} for {days} days."
