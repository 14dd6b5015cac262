"""Which parsers are chosen for templates like those of known models."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixrt.errors import ParameterError
from radixrt.parsers.choosing import Parsers, chosen
from tests.support.chat_templates import CODER, GLM, GPT_OSS, HERMES, LLAMA, THINKING
from tests.support.small_tokenizers import CHATML, chat_tokenizer, small_tokenizer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, Parsers("hermes", None)),
        (THINKING, Parsers("hermes", "think")),
        (CODER, Parsers("qwen3_coder", None)),
        (LLAMA, Parsers("llama3_json", None)),
        (GPT_OSS, Parsers("harmony", "harmony")),
        (GLM, Parsers()),
        (CHATML, Parsers()),
        (CHATML + "{# </think> #}", Parsers(None, "think")),
        ("{{ raise_exception('no') }}{{ tools }}{{ m.tool_calls }}", Parsers()),
    ],
)
def test_by_the_template(template: str, expected: Parsers, tmp_path: Path) -> None:
    assert chosen(chat_tokenizer(tmp_path, template)) == expected


def test_by_name(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, THINKING)
    assert chosen(tokenizer, "none", "none") == Parsers()
    assert chosen(tokenizer, "llama3_json") == Parsers("llama3_json", "think")
    assert chosen(tokenizer, "harmony") == Parsers("harmony", "harmony")
    assert chosen(tokenizer, "none", "harmony") == Parsers(None, "harmony")
    assert chosen(tokenizer, "auto", "harmony") == Parsers(None, "harmony")
    assert chosen(small_tokenizer("bare")) == chosen(None) == Parsers()


@pytest.mark.parametrize(
    ("tools", "reasoning", "message"),
    [
        (
            "mistral",
            "auto",
            "tool_parser is 'mistral'; it must be auto, none, hermes, llama3_json, qwen3_coder, harm",
        ),
        ("auto", "hermes", "reasoning_parser is 'hermes'; it must be auto, none, think, harmony"),
        ("hermes", "harmony", "harmony is for both, or for reasoning alone"),
        ("harmony", "none", "harmony is for both"),
    ],
)
def test_what_does_not_go_together(tools: str, reasoning: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        chosen(None, tools, reasoning)
