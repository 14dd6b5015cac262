"""Templates like those of known models: all that is said is in the text, or the chat is refused by number."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.errors import TokenizerError
from radixrt.text.chat import Chat
from radixrt.text.chat_template import ChatTemplate
from radixrt.text.traces import told
from tests.support.model_templates import MODEL_TEMPLATES, SPECIAL_TOKENS

NAMES = list(MODEL_TEMPLATES)
WITH_CALLS = [name for name in NAMES if name != "Gemma 3"]
WITH_TOOLS = [name for name in WITH_CALLS if name != "DeepSeek R1"]


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(source, source, SPECIAL_TOKENS) for name, source in MODEL_TEMPLATES.items()}


def text_of(template: ChatTemplate, messages: list[dict[str, Any]], **more: Any) -> str:
    (text,) = template.render([Chat.of({"messages": messages, **more})], {}, add_generation_prompt=True)
    if isinstance(text, TokenizerError):
        raise text
    return text


def call(number: int, arguments: object = '{"city": "Oslo"}', name: str = "weather") -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "yes"}
ANSWER = {"role": "assistant", "content": "no"}
AGAIN = {"role": "user", "content": "Does it rain? "}
CALLS = {"role": "assistant", "content": "", "tool_calls": [call(1)]}
RESULT = {"role": "tool", "content": 'dry\n"now"', "tool_call_id": "call00001"}
TURN = [USER, ANSWER, AGAIN]
THOUGHTS = "<think>\nHm.\n</think>\n\n"

PASS: dict[str, tuple[list[str], list[dict[str, Any]], dict[str, Any]]] = {
    "turns": (NAMES, [SYSTEM, *TURN], {}),
    "turns without a system's message": (NAMES, TURN, {}),
    "a developer's message": (NAMES, [{**SYSTEM, "role": "developer"}, *TURN], {}),
    "thoughts in a content": (NAMES, [USER, {**ANSWER, "content": THOUGHTS + "no"}, AGAIN], {}),
    "thoughts beside a content": (NAMES, [USER, {**ANSWER, "reasoning_content": "Hm."}, AGAIN], {}),
    "thoughts and nothing else": (NAMES, [USER, {**ANSWER, "content": THOUGHTS}, AGAIN], {}),
    "an empty answer": (NAMES, [USER, {**ANSWER, "content": ""}, AGAIN], {}),
    "a refusal": (NAMES, [USER, {"role": "assistant", "content": None, "refusal": "I do not."}, AGAIN], {}),
    "fields that say nothing": (
        NAMES,
        [{**one, "name": "Mira", "cache_control": {"type": "ephemeral"}, "audio": None, "id": 7} for one in TURN],
        {},
    ),
    "blocks of thoughts": (NAMES, [USER, {**ANSWER, "thinking_blocks": [{"thinking": "Hm."}]}, AGAIN], {}),
    "an effort": (NAMES, TURN, {"reasoning_effort": "low"}),
    "an answer that goes on": (
        NAMES,
        [*TURN, {**ANSWER, "content": "It is \n"}],
        {"continue_final_message": True},
    ),
    "thoughts and an answer that goes on": (
        NAMES,
        [USER, {**ANSWER, "content": THOUGHTS + "It is"}],
        {"continue_final_message": True},
    ),
    "thoughts that go on": (NAMES, [USER, {**ANSWER, "content": "<think>\nIt"}], {"continue_final_message": True}),
    "a call and its result": (WITH_CALLS, [USER, CALLS, RESULT], {}),
    "a call without a content": (WITH_CALLS, [USER, {**CALLS, "content": None}, RESULT], {}),
    "a call after thoughts": (WITH_CALLS, [USER, {**CALLS, "reasoning_content": "Look."}, RESULT], {}),
    "a call without arguments": (WITH_CALLS, [USER, {**CALLS, "tool_calls": [call(1, "{}")]}, RESULT], {}),
    "tools": (WITH_TOOLS, [USER, CALLS, RESULT, ANSWER, AGAIN], {"tools": [TOOL]}),
    "a hint beside a tool": (WITH_TOOLS, [USER], {"tools": [{**TOOL, "cache_control": {}, "strict": True}]}),
    "a result for each call": (WITH_CALLS, [USER, CALLS, RESULT, CALLS, RESULT, ANSWER, AGAIN], {}),
    "two calls at once": (
        [name for name in WITH_CALLS if name not in ("Llama 3", "gpt-oss")],
        [
            USER,
            {**CALLS, "tool_calls": [call(1), call(2, '{"city": "Rome"}')]},
            RESULT,
            {**RESULT, "content": "wet"},
        ],
        {},
    ),
    "a content beside a call": (
        ["Qwen3", "Qwen3-Coder", "gpt-oss"],
        [USER, {**CALLS, "content": "I look."}, RESULT],
        {},
    ),
}


@pytest.mark.parametrize("case", PASS)
def test_all_that_is_said_is_in_the_text(templates: dict[str, ChatTemplate], case: str) -> None:
    names, messages, more = PASS[case]
    for name in names:
        text = text_of(templates[name], messages, **more)
        for message in Chat.of(messages).messages:
            content = (message.get("content") or "")[slice(*told(message))]
            assert content in text or json.dumps(content)[1:-1] in text, name
            for one in message.get("tool_calls") or ():
                assert one["function"]["name"] in text, name
                assert all(str(value) in text for value in one["function"]["arguments"].values()), name
        assert "cache_control" not in text
        assert "ephemeral" not in text
        if more.get("continue_final_message"):
            begun = re.sub(r"<think>.*</think>\s*", "", messages[-1]["content"], flags=re.DOTALL)
            assert text.endswith((begun, begun.rstrip())), name


def test_an_effort_goes_to_the_template_that_uses_it(templates: dict[str, ChatTemplate]) -> None:
    assert "Reasoning: low" in text_of(templates["gpt-oss"], TURN, reasoning_effort="low")
    chosen = {"reasoning_effort": "high"}
    assert "Reasoning: high" in text_of(
        templates["gpt-oss"], TURN, reasoning_effort="low", chat_template_kwargs=chosen
    )
    assert text_of(templates["Qwen3"], TURN, reasoning_effort="low") == text_of(templates["Qwen3"], TURN)


def test_fields_go_to_templates_that_use_them() -> None:
    source = "{% for m in messages %}{{ m.name }}: {{ m.content }} {{ m.mood }}{{ m.keys() | sort }}{% endfor %}"
    message = {**USER, "name": "Mira", "mood": {"is": "good"}, "cache_control": {}}
    text = text_of(ChatTemplate(source, source, {}), [message])
    assert text == "Mira: yes {'is': 'good'}['content', 'mood', 'name', 'role']"


def test_a_developer_is_the_system_unless_the_template_knows_him(templates: dict[str, ChatTemplate]) -> None:
    developer = {**SYSTEM, "role": "developer"}
    for name in NAMES:
        same = text_of(templates[name], [developer, USER]) == text_of(templates[name], [SYSTEM, USER])
        assert same, name
    source = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    assert text_of(ChatTemplate(source, source, {}), [developer]) == "systemBe brief."
    for unknown in ("{# 'developer' #}", "{% set who = 'a developer' %}"):
        assert text_of(ChatTemplate(unknown + source, unknown + source, {}), [developer]) == "systemBe brief."
    source = "{% if 'developer' %}" + source + "{% endif %}"
    assert text_of(ChatTemplate(source, source, {}), [developer]) == "developerBe brief."


def test_a_developer_that_the_template_does_not_show_is_the_system() -> None:
    """Whatever else it has that word for; where it leaves him out, raises, or fails, also beside a call."""
    begin = "{% set who = 'developer' %}{% for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}"
    shown = "{{ m.role }}{{ '' + m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}"
    for other in ("", "{% else %}{{ raise_exception('who?') }}", "{% else %}{{ 1 / 0 }}"):
        source = begin + shown + other + "{% endif %}{% endfor %}"
        template = ChatTemplate(source, source, {})
        assert text_of(template, [{**SYSTEM, "role": "developer"}, USER]) == "systemBe brief.useryes"
        called = [{**SYSTEM, "role": "developer"}, {**CALLS, "content": None, "tool_calls": [call(1, "{}")]}]
        assert text_of(template, called) == "systemBe brief.assistantweather"


def test_a_lost_message_without_calls_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answers = ChatTemplate._answers

    def noted(self: ChatTemplate, some: list[dict[str, Any]]) -> list[dict[str, Any]]:
        asked.extend(some)
        return answers(self, some)

    monkeypatch.setattr(ChatTemplate, "_answers", noted)
    template = ChatTemplate(MODEL_TEMPLATES["Qwen3"], MODEL_TEMPLATES["Qwen3"], SPECIAL_TOKENS)
    with pytest.raises(TokenizerError, match="chat message 3 has the role 'critic'"):
        text_of(template, [USER, {**CALLS, "content": None}, RESULT, CRITIC])
    assert len(asked) == 1


CRITIC = {"role": "critic", "content": "yes"}
LEFT_OUT = "chat message {} has the role {!r}, which the chat template of this checkpoint leaves out"
REFUSED: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    *((name, [USER, CRITIC], {}, LEFT_OUT.format(1, "critic")) for name in ("Qwen3", "DeepSeek R1", "gpt-oss")),
    ("Qwen3", [USER, {**CRITIC, "content": ""}], {}, LEFT_OUT.format(1, "critic")),
    ("Qwen3", [{**CRITIC, "content": " \n"}, USER], {}, LEFT_OUT.format(0, "critic")),
    ("Qwen3", [USER, ANSWER, CRITIC, USER], {}, LEFT_OUT.format(2, "critic")),
    ("Mistral", [SYSTEM, USER, CALLS, RESULT], {}, LEFT_OUT.format(0, "system")),
    ("Mistral", [SYSTEM, USER, ANSWER], {"continue_final_message": True}, LEFT_OUT.format(0, "system")),
    ("gpt-oss", [USER, SYSTEM], {}, LEFT_OUT.format(1, "system")),
    ("gpt-oss", [SYSTEM, {**SYSTEM, "role": "developer"}, USER], {}, LEFT_OUT.format(1, "developer")),
    (
        "Llama 3",
        [USER, {**CALLS, "content": "I look."}, RESULT],
        {},
        "chat message 1 has a content beside its cal",
    ),
    ("Mistral", [USER, {**CALLS, "content": "yes"}, RESULT], {}, "chat message 1 has a content beside its calls"),
    (
        "DeepSeek R1",
        [USER, {**CALLS, "content": "I look."}],
        {},
        "chat message 1 has a tool call 0, which the chat",
    ),
    (
        "Mistral",
        [SYSTEM, {**ANSWER, "role": "assistant"}],
        {"tools": [TOOL]},
        "chat message 0 has the role 'system'",
    ),
    (
        "Mistral",
        [ANSWER],
        {"tools": [TOOL]},
        "the chat has a tool 0, which the chat template of this checkpoint le",
    ),
    (
        "Gemma 3",
        [USER, CALLS, RESULT],
        {},
        "the chat has 'tool_calls', which the chat template of this checkpoint d",
    ),
]


@pytest.mark.parametrize(("name", "messages", "more", "message"), REFUSED)
def test_what_would_be_left_out_is_refused_by_number(
    templates: dict[str, ChatTemplate],
    name: str,
    messages: list[dict[str, Any]],
    more: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(TokenizerError, match=re.escape(message)):
        text_of(templates[name], messages, **more)


MALFORMED = [
    '{"city": "Os',
    '{"city"',
    "{",
    "[]",
    "null",
    '"Oslo"',
    "Oslo",
    "7",
    '{"a": 1} {',
    [],
    7,
    [{"a": 1}],
    True,
    '{"city": "\\ud83d"}',
]


@pytest.mark.parametrize("name", WITH_CALLS)
def test_malformed_arguments_are_rendered_as_they_were_said(templates: dict[str, ChatTemplate], name: str) -> None:
    for arguments in MALFORMED:
        messages = [USER, {**CALLS, "tool_calls": [call(1, arguments)]}, RESULT]
        text, said = text_of(templates[name], messages), arguments
        said = arguments if isinstance(arguments, str) else json.dumps(arguments)
        if name == "Mistral":  # it writes whole calls as JSON
            assert f'"arguments": {json.dumps(said)}' in text
        elif name == "Qwen3-Coder":
            values = re.findall(r"<parameter=(.*?)>\n(.*?)\n</parameter>", text)
            completed = {
                '{"city": "Os': [("city", "Os")],
                '{"city"': [("city", "")],
                "{": [],
                "null": [],
                '{"city": "\\ud83d"}': [("city", "\ufffd")],
            }
            assert values == completed.get(said, [("arguments", said)]), arguments
        else:
            assert said in text, arguments
    for missing in ({}, {"arguments": None}, {"arguments": ""}):
        function = {"name": "weather", **missing}
        messages = [USER, {**CALLS, "tool_calls": [{**call(1), "function": function}]}, RESULT]
        assert "weather" in text_of(templates[name], messages)


def test_arguments_with_real_new_lines_are_objects() -> None:
    chat = Chat.of([{**CALLS, "tool_calls": [call(1, '{"text": "a\n\tb"}')]}])
    assert chat.messages[0]["tool_calls"][0]["function"]["arguments"] == {"text": "a\n\tb"}


BLANKS = st.sampled_from(["", " ", "\n", "\n\n "])
SAID = st.sampled_from(
    ["{}", "{} and more", "yes {}", "{}\nno\n", "<tool_response>\n{}\n</tool_response>", '"{}" <&>', "日本{}"]
)
ARGUMENTS = st.sampled_from(["{}", '{"city": "Oslo"}', '{"city": "Os', "[]", "null", "Oslo"])


@st.composite
def chats(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """A chat, and a word of each message that is nowhere else; none of an empty message."""
    messages: list[dict[str, Any]] = []
    words: list[str] = []
    roles = st.sampled_from(["system", "developer", "user", "user", "assistant", "assistant", "tool", "critic"])
    for place in range(draw(st.integers(1, 7))):
        role, word = draw(roles), f"w{place}ord"
        content = draw(BLANKS) + draw(SAID).format(word) + draw(BLANKS)
        if not draw(st.integers(0, 5)):
            content = word = ""
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            kind = draw(st.sampled_from(["", "", "thoughts", "inside", "calls", "calls"]))
            if kind == "thoughts":
                message["reasoning_content"] = "Hm."
            elif kind == "inside":
                message["content"] = "<think>Hm.</think>" + content
            elif kind == "calls":
                message["tool_calls"] = [call(n, draw(ARGUMENTS)) for n in range(draw(st.integers(1, 2)))]
                if draw(st.booleans()):
                    message["content"], word = draw(st.sampled_from([None, ""])), ""
        if role == "tool":
            message["tool_call_id"] = "call00000"
        messages.append(message)
        words.append(word)
    more: dict[str, Any] = {"tools": [TOOL]} if draw(st.integers(0, 3)) == 0 else {}
    if messages[-1]["role"] == "assistant" and messages[-1]["content"]:
        more["continue_final_message"] = draw(st.booleans())
    return {"messages": messages, **more}, words


@settings(max_examples=300, deadline=None)
@given(chats(), st.sampled_from(NAMES))
def test_no_chat_loses_a_message(
    templates: dict[str, ChatTemplate], chat: tuple[dict[str, Any], list[str]], name: str
) -> None:
    """It is rendered with all contents, or refused; and what is refused by number is truly missing."""
    asked, words = chat
    template, checked = templates[name], Chat.of(asked)
    (text,) = template.render([checked], {}, add_generation_prompt=True)
    if isinstance(text, str):
        for word, message in zip(words, checked.messages, strict=True):
            # Beside a call gpt-oss takes a content for thoughts, and drops it once an answer has come.
            assert word in text or (name == "gpt-oss" and "tool_calls" in message)
        assert "tools" not in asked or "weather" in text
        return
    if found := re.match(r"chat message (\d+) has (the role|a content)", str(text)):
        (answer,) = template._answers([template._question(checked, {}, True)])
        word = words[int(found[1])]
        assert not word or word not in answer["text"]
    else:
        known = ("refuses these messages", "tool call", "the chat has")
        assert any(told in str(text) for told in known), text
