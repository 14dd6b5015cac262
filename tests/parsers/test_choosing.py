"""Which parsers are chosen for templates like those of known models."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixrt.errors import ParameterError
from radixrt.parsers.choosing import Parsers, chosen
from tests.support.small_tokenizers import CHATML, chat_tokenizer, small_tokenizer

_HEAD = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
HERMES = (
    _HEAD
    + "<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + '<tool_call>\n{"name": "{{ f.name }}", "arguments"'
    ": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = HERMES.replace("assistant\n{% endif", "assistant\n<think>\n{% endif") + "{# </think> #}"
CODER = (
    _HEAD + "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<tool_call>\n<function={{ f.name }}>\n"
    "{% for k, v in f.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    _HEAD
    + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
    + _CALLS
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}{% else %}{{ m.content }}'
    "{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GPT_OSS = (
    _HEAD + "{% if m.tool_calls %}" + _CALLS + "<|start|>assistant to=functions.{{ f.name }}<|channel|>"
    "commentary json"
    "<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}{% else %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}{# <|channel|>analysis #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM = HERMES.replace(
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}', "{{ f.name }}\n<arg_key>place"
)


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
