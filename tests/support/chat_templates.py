"""Chat templates like those of known models: what they write of tools, calls and thoughts."""

from __future__ import annotations

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
# Of thoughts it shows those before a call, unless an answer has come since.
GPT_OSS = (
    _HEAD + "{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking in a message with tool calls!') }}{% endif %}"
    "{% set since = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}"
    "{% set has_ended = since | rejectattr('tool_calls') | list %}"
    "{% if (m.content or m.thinking) and not has_ended %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    + _CALLS
    + "<|start|>assistant to=functions.{{ f.name }}<|channel|>"
    "commentary json"
    "<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}{% else %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}{# <|channel|>analysis #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM = HERMES.replace(
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}', "{{ f.name }}\n<arg_key>place"
)
