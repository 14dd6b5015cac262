"""Answers with calls, as models write them."""

from __future__ import annotations

from typing import Any

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
}
OSLO = '{"city": "Oslo", "days": 3}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
LLAMA = f'{{"name": "weather", "parameters": {OSLO}}}'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
THOUGHT = "<|channel|>analysis<|message|>Need Oslo.<|end|><|start|>assistant"
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
HARMONY = f"{THOUGHT}{TO_WEATHER}{OSLO}<|call|>"


def coder(*parameters: str) -> str:
    pairs = zip(parameters[::2], parameters[1::2], strict=True)
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function=weather>\n{written}</function>\n</tool_call>"
