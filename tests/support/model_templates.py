"""Chat templates that do to messages what those of known models do: written anew, for what they keep and drop."""

from __future__ import annotations

import re

_TAG = re.compile(r"(\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\})", re.DOTALL)


def _template(text: str) -> str:
    """A template whose text between tags may have new lines as \\n, too, as its strings do."""
    pieces = _TAG.split(text.strip())
    return "".join(piece if i % 2 else piece.replace("\\n", "{{ '\\n' }}") for i, piece in enumerate(pieces))


# Trims contents, shows tools in the first user message, takes one call a message and drops a content beside it.
LLAMA3 = _template("""
{%- macro turn(role) -%}<|start_header_id|>{{ role }}<|end_header_id|>\\n\\n{{ caller()
    }}<|eot_id|>{%- endmacro -%}
{%- set begin = 1 if messages[0].role == 'system' else 0 -%}
{{- bos_token -}}
{%- call turn('system') -%}
Knowledge ends in 2023.\\n\\n{{ messages[0].content | trim if begin else '' }}
{%- endcall -%}
{%- set ns = namespace(tools=tools) -%}
{%- for m in messages[begin:] -%}
{%- if m.role == 'user' and ns.tools -%}
{%- call turn('user') -%}
Answer with a call of one of these:\\n
{%- for t in ns.tools %}{{ t | tojson(indent=4) }}\\n{% endfor %}{{ m.content | trim -}}
{%- endcall -%}
{%- set ns.tools = none -%}
{%- elif m.tool_calls -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
{%- set f = m.tool_calls[0].function -%}
{%- call turn('assistant') %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endcall -%}
{%- elif m.role in ('tool', 'ipython') -%}
{%- call turn('ipython') %}{{ m.content | tojson if m.content is iterable else m.content }}{% endcall -%}
{%- else -%}
{%- call turn(m.role) %}{{ m.content | trim }}{% endcall -%}
{%- endif -%}
{%- endfor -%}
{%- if ns.tools %}{{ raise_exception('tools need a message of the user') }}{% endif -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\\n\\n{% endif -%}
""")

# Knows four roles and passes over others, drops thoughts before the last question, shows results as the user's.
QWEN3 = _template("""
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and
    m.content.endswith('</tool_response>')) -%}
{%- set ns.last = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- if tools -%}
<|im_start|>system\\n{{ messages[0].content + '\\n\\n' if messages[0].role == 'system' }}# Tools\\n
{%- for t in tools %}\\n{{ t | tojson }}{% endfor %}<|im_end|>\\n
{%- elif messages[0].role == 'system' -%}
<|im_start|>system\\n{{ messages[0].content }}<|im_end|>\\n
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n
{%- elif m.role == 'assistant' -%}
{%- set content, thoughts = m.content or '', '' -%}
{%- if m.reasoning_content is string -%}
{%- set thoughts = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
<|im_start|>assistant\\n
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}<think>\\n{{ thoughts.strip('\\n')
    }}\\n</think>\\n\\n{% endif -%}
{{- content -}}
{%- for c in m.tool_calls or [] -%}
{{- '\\n' if content or not loop.first -}}
<tool_call>\\n{"name": "{{ c.function.name }}", "arguments": {# -#}
{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\\n</tool_call>
{%- endfor -%}
<|im_end|>\\n
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' -}}
\\n<tool_response>\\n{{ m.content }}\\n</tool_response>
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\\n{% if enable_thinking is false
    %}<think>\\n\\n</think>\\n\\n{% endif %}{% endif -%}
""")

# Walks through arguments as an object.
QWEN3_CODER = _template("""
{%- if tools %}<|im_start|>system\\n{% for t in tools %}<function>{{ t.function.name }}</function>{% endfor
    %}<|im_end|>\\n{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}\\n{{ m.content or '' -}}
{%- for c in m.tool_calls or [] -%}
\\n<tool_call>\\n<function={{ c.function.name }}>\\n
{%- for name, value in c.function.arguments | items -%}
<parameter={{ name }}>\\n{{ value if value is string else value | tojson }}\\n</parameter>\\n
{%- endfor -%}
</function>\\n</tool_call>
{%- endfor -%}
<|im_end|>\\n
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\\n{% endif -%}
""")

# Puts all system messages first, drops thoughts, shows calls only beside no content, joins arguments as text.
DEEPSEEK_R1 = _template("""
{{- bos_token -}}
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
<|User|>{{ m.content }}
{%- elif m.role == 'assistant' and m.content is none -%}
{%- for c in m.tool_calls -%}
{{- '<|Assistant|>' if loop.first }}<|call|>{{ c.type + '<|sep|>' + c.function.name + '\\n```json\\n' +
    c.function.arguments + '\\n```' -}}
{%- endfor -%}
<|end|>
{%- elif m.role == 'assistant' -%}
{%- set content = m.content.split('</think>')[-1] if '</think>' in m.content else m.content -%}
<|Assistant|>{{ content }}<|end|>
{%- elif m.role == 'tool' -%}
<|output|>{{ m.content }}<|output end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|Assistant|><think>\\n{% endif -%}
""")

# Renames the assistant, puts the system's message into the user's first one, wants turns, trims.
GEMMA3 = _template("""
{{- bos_token -}}
{%- set first, loop_messages = '', messages -%}
{%- if messages[0].role == 'system' -%}
{%- set first, loop_messages = messages[0].content + '\\n\\n', messages[1:] -%}
{%- endif -%}
{%- for m in loop_messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\\n{{ first if loop.first }}{{ m.content |
    trim }}<end_of_turn>\\n
{%- endfor -%}
{%- if add_generation_prompt %}<start_of_turn>model\\n{% endif -%}
""")

# Puts the system's message before the last one, if that is the user's; wants ids of 9 characters.
MISTRAL = _template("""
{{- bos_token -}}
{%- set system, rest = none, messages -%}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}{% endif -%}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list -%}
{%- for m in rest -%}
{%- if m.role == 'user' -%}
{%- if tools and m == asked[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ system + '\\n\\n' if loop.last and system }}{{ m.content }}[/INST]
{%- elif m.tool_calls -%}
[TOOL_CALLS] [
{%- for c in m.tool_calls -%}
{%- if c.id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}{% endif -%}
{{ c.function | tojson }}{{ ', ' if not loop.last }}
{%- endfor -%}
]{{ eos_token }}
{%- elif m.role == 'assistant' -%}
{{ ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ m.content | string | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else -%}
{{ raise_exception('only user, assistant and tool are known') }}
{%- endif -%}
{%- endfor -%}
""")

# Writes channels: thoughts only before calls that no answer has followed; a system or developer message first.
GPT_OSS = _template("""
{%- set developer, rest = '', messages -%}
{%- if messages[0].role in ('developer', 'system') -%}
{%- set developer, rest = messages[0].content, messages[1:] -%}
{%- endif -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>
{%- if developer or tools -%}
<|start|>developer<|message|>{{ developer }}{% for t in tools or [] %}\\ntype {{ t.function.name
    }} = (_: {{ t.function.parameters | tojson }}){% endfor %}<|end|>
{%- endif -%}
{%- set ns = namespace(called=none) -%}
{%- for m in rest -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- set answers = rest[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') |
    list -%}
{%- if m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif -%}
{%- if (m.content or m.thinking) and not answers -%}
<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>
{%- endif -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
{%- set ns.called = m.tool_calls[0].function.name -%}
<|start|>assistant to=functions.{{ ns.called
    }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
{%- if loop.last and not add_generation_prompt -%}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif -%}
{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' -%}
{%- if ns.called is none %}{{ raise_exception('a result needs a call') }}{% endif -%}
<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'user' -%}
<|start|>user<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
""")

MODEL_TEMPLATES = {
    "Llama 3": LLAMA3,
    "Qwen3": QWEN3,
    "Qwen3-Coder": QWEN3_CODER,
    "DeepSeek R1": DEEPSEEK_R1,
    "Gemma 3": GEMMA3,
    "Mistral": MISTRAL,
    "gpt-oss": GPT_OSS,
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
