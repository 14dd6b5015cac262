"""Rendering in a process of its own: the same text as transformers, and limits that no template passes."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from radixrt.errors import TokenizerError
from radixrt.text import chat_template, template_process
from radixrt.text.chat import Chat, SharedParts
from radixrt.text.chat_block import ChatBlock
from radixrt.text.chat_template import ChatTemplate
from radixrt.text.common_length import common_length
from radixrt.text.said_arguments import SaidArguments
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from radixrt.workers.line_process import LineProcess
from tests.support.chat_templates import GPT_OSS
from tests.support.processes import children_that_run
from tests.support.small_tokenizers import CHATML, HARMONY, chat_tokenizer

CHAT = [{"role": "system", "content": " Be <brief> & 'kind'. "}, {"role": "user", "content": "日本 😀\n\n x"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place, <now>",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"place": "Århus", "n": 1.5}}}
CALLED = [
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "yes", "tool_call_id": "a"},
]

# What stands for the messages in templates of tests: no message may be left out.
SHOWN = "{% for m in messages %}{{ m.content }}{% endfor %}"

# Each uses what templates of known models use.
TEMPLATES: dict[str, str] = {
    "chatml": CHATML,
    "blanks": "{%- for m in messages %}\n    {{- m.role }}:\n {{ m.content }} {% if loop.last %}\n  last\n"
    "  {% endif %}\n{% endfor %}\n\n",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim + eos_token }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages[::-1] %}"
    "{% set ns.n = ns.n + loop.index %}"
    "{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen | join(', ') }}{{ ns.seen }}" + SHOWN,
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}" + SHOWN,
    "macro": "{% macro put(m, sep='|') -%} [{{ m.role }}{{ sep }}{{ caller() if caller }}] {%- endmacro %}"
    "{% for m in messages %}{% call put(m) %}{{ m.content }}{% endcall %}{{ put(m) }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ {'b': 1.0, 'a': none} | tojson(sort_keys=true) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "channels": HARMONY,
    "defaults": "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{{ enable_thinking }}"
    "{{ documents is defined }}{{ tools is none }}{{ add_generation_prompt }}" + SHOWN,
    "text": "{% set t = messages[1].content %}{{ t.split('\\n')[-1].lstrip('\\n') }}{{ t.startswith('日') }}"
    "{{ t | upper }}{{ t | length }}{{ '%s-%d' | format('a', 3) }}{{ t.replace('x', 'y')[1:] }}{{ '<&>' | e }}"
    + SHOWN,
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endif %}"
    "{{ m.content }}"
    "{{ m.tool_call_id }}{% endfor %}",
}


def transformers_text(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    text: str = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False, **options)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_character_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    tokenizer = chat_tokenizer(tmp_path, TEMPLATES[name])
    for prompted in (True, False):
        expected = transformers_text(tmp_path, CHAT, add_generation_prompt=prompted)
        assert tokenizer.chat_text(CHAT, add_generation_prompt=prompted) == expected
    if name == "tools":
        expected = transformers_text(tmp_path, CALLED, tools=[TOOL], add_generation_prompt=True)
        assert tokenizer.chat_text({"messages": CALLED, "tools": [TOOL]}) == expected
        assert "Århus" in expected


def test_many_at_once(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "{% if messages[0].content == 'x' %}{{ 1 / 0 }}{% endif %}" + CHATML)
    chats = [Chat.of([{"role": "user", "content": text}]) for text in "axb"]
    first, bad, last = tokenizer.chat_texts(chats)
    assert (first, last) == (tokenizer.chat_text(chats[0]), tokenizer.chat_text(chats[2]))
    assert isinstance(bad, TokenizerError)
    assert "division by zero" in str(bad)
    assert tokenizer.chat_texts([]) == []


SAID = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "system", "content": "Be brief."}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "a"}],
    CALLED,
    [*CALLED, {"role": "user", "content": "a"}],
    [CALLED[0], {**CALLED[1], "tool_calls": [{**CALL, "function": {**CALL["function"], "arguments": "{"}}]}],
]


@pytest.mark.parametrize("most", [1, 3, 512])
@pytest.mark.parametrize("template", ["json", "tools"])
def test_shared_messages_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, most: int
) -> None:
    """The texts are those of chats that are rendered alone, in their order."""
    tokenizer = chat_tokenizer(tmp_path, TEMPLATES[template] + "{{ n }}{# tool_calls #}")
    given = [{"messages": messages, "chat_template_kwargs": {"n": n}} for messages in SAID for n in (1, True)]
    expected = [tokenizer.chat_text(chat) for chat in given]
    monkeypatch.setattr(chat_template, "MOST_CHATS", most)
    shared = SharedParts()
    for chats in ([Chat.of(chat) for chat in given], [Chat.of(chat, shared) for chat in given]):
        assert tokenizer.chat_texts(chats) == expected
        assert tokenizer.chat_texts(chats[::-1]) == expected[::-1]


def test_a_message_that_has_changed_since(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, SHOWN)
    message = {"role": "user", "content": "a"}
    for content in "ab":
        message["content"] = content
        assert tokenizer.chat_texts([Chat([message]), Chat([message, message])]) == [content, content * 2]


def test_each_answer_is_written_before_the_next_chat_is_rendered() -> None:
    """So a chat that ends the process costs no other one its answer, and no more than one text is held."""
    raw = io.BytesIO()
    before = []

    def answer(name: str, variables: dict[str, Any]) -> dict[str, Any]:
        before.append(raw.getvalue().count(b"\n"))
        return {"text": variables["messages"][0]["content"], "lost": []}

    messages = [{"role": "user", "content": content} for content in ("ab", "abc", "b")]
    block = {"messages": messages, "others": [{}], "chats": [["plain", 0, 0, [place]] for place in range(3)]}
    answers = io.BufferedWriter(raw)
    template_process._answer_block(block, answers, SaidArguments, common_length, answer)
    assert before == [0, 1, 2]
    found = [json.loads(line) for line in raw.getvalue().splitlines()]
    assert [(one["shared"], one["text"]) for one in found] == [(0, "ab"), (2, "c"), (0, "b")]


def test_a_time_is_that_of_now(tmp_path: Path) -> None:
    assert chat_tokenizer(tmp_path, "{{ strftime_now('%Y') }}" + SHOWN).chat_text(CHAT)[:4] in map(
        str, range(2024, 2200)
    )


# --- what a chat has besides messages ---


THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_variables_of_the_template(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, THINKING)
    plain, switched = (
        tokenizer.chat_text(CHAT),
        transformers_text(tmp_path, CHAT, add_generation_prompt=True, enable_thinking=False),
    )
    assert switched == plain + "<think></think>"
    chat = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert tokenizer.chat_text(chat) == switched
    silent = tokenizer.with_template_kwargs({"enable_thinking": False})
    assert silent.chat_text(CHAT) == switched
    assert silent.chat_text({**chat, "chat_template_kwargs": {"enable_thinking": True}}) == plain
    assert tokenizer.with_template_kwargs(None) is tokenizer
    with pytest.raises(TokenizerError, match="chat_template_kwargs have 'thinking', which the chat te"):
        tokenizer.with_template_kwargs({"thinking": False})
    with pytest.raises(TokenizerError, match="chat_template_kwargs have 'thinking', which"):
        tokenizer.chat_text({"messages": CHAT, "chat_template_kwargs": {"thinking": False}})


def test_what_the_template_does_not_use_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="the chat has 'tools', which the chat template of this c"):
        tokenizer.chat_text({"messages": CHAT, "tools": [TOOL]})
    with pytest.raises(TokenizerError, match="the chat has 'tool_calls', which the chat template"):
        tokenizer.chat_text(CALLED)


def test_thoughts_of_gpt_oss(tmp_path: Path) -> None:
    """Its template calls them thinking, and shows those before a call. A call's content goes before them."""
    tokenizer = chat_tokenizer(tmp_path, GPT_OSS)
    said = "<|start|>assistant<|channel|>analysis<|message|>{}<|end|><|start|>assistant to=functions.weather"
    for more, shown in (({"reasoning_content": "Look."}, "Look."), ({"content": "I look."}, "I look.")):
        for also in ({}, {"reasoning_content": "Look."}):
            called = {"role": "assistant", "content": None, "tool_calls": [CALL], **more, **also}
            chat = [CALLED[0], called, CALLED[2]]
            assert said.format(shown) in tokenizer.chat_text(chat)
            assert shown not in tokenizer.chat_text([*chat, {"role": "assistant", "content": "It rains."}])
    thought = [CALLED[0], {"role": "assistant", "content": "Yes.", "reasoning_content": "Look."}]
    for source in ("{# <|channel|>analysis thinking reasoning_content #}", "{# thinking #}"):
        assert "'thinking'" not in chat_tokenizer(tmp_path, source + "{{ messages }}").chat_text(thought)


def test_calls_without_a_content(tmp_path: Path) -> None:
    """Some templates look into it, as Qwen3's, others ask whether it is none, as DeepSeek's."""
    calls = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    for template, text in (
        ("{% for m in messages %}{% if 'a' in m.content %}{% endif %}{{ m.content }}.{% endfor %}", "."),
        ("{% for m in messages %}{{ m.content is none }}{% endfor %}", "True"),
    ):
        tokenizer = chat_tokenizer(tmp_path, template + "{{ messages | map(attribute='tool_calls') | list }}")
        plain = {"role": "user", "content": "b"}
        assert str(tokenizer.chat_texts([Chat.of(calls), Chat.of([plain])])[0]).partition("[")[0] == text
    tokenizer = chat_tokenizer(tmp_path, "{{ messages[0].content + 1 }}{# tool_calls #}")
    with pytest.raises(TokenizerError, match="fails on these messages"):
        tokenizer.chat_text(calls)


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path, "plain " + SHOWN)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}" + SHOWN)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_text(CHAT).startswith("plain ")
    assert tokenizer.chat_text({"messages": CHAT, "tools": [TOOL]}).startswith("weather ")


STRIPPING = CHATML.replace("message['content']", "message['content'] | trim").replace(
    "m.content", "m.content | trim"
)


@pytest.mark.parametrize("ending", ["", " ", "\n\n"])
@pytest.mark.parametrize("template", [CHATML, STRIPPING])
def test_the_last_message_goes_on(tmp_path: Path, template: str, ending: str) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    messages = [*CHAT, {"role": "assistant", "content": "It is" + ending}]
    text = tokenizer.chat_text({"messages": messages, "continue_final_message": True})
    assert text == transformers_text(tmp_path, messages, continue_final_message=True)
    assert text.endswith("It is" + (ending if template == CHATML else ""))


def test_a_message_that_the_template_drops_cannot_go_on(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "{{ messages[0].content }}")
    messages = [*CHAT, {"role": "assistant", "content": "It is"}]
    with pytest.raises(TokenizerError, match=r"chat message 1 has the role 'user', which .* leaves out"):
        tokenizer.chat_text({"messages": messages, "continue_final_message": True})


# --- limits ---

NESTED = "".join(f"{{% for {v} in range(99999) %}}" for v in "abc") + "{{ a }}" + "{% endfor %}" * 3
SILENT = NESTED.replace("{{ a }}", "{% if a %}{% endif %}")
LOOP = (
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(99) %}{% set ns.x = DOUBLED %}{% endfor %}"
    "{{ ns.x | length }}"
)

ENDLESS = {
    "nested ranges": SILENT,
    "a power": "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
}
LARGE = {
    "a product": "{{ ('x' * 10 ** 10) | length }}",
    "doubled by ~": LOOP.replace("DOUBLED", "ns.x ~ ns.x"),
    "doubled by +": LOOP.replace("DOUBLED", "ns.x + ns.x"),
    "doubled by join": LOOP.replace("DOUBLED", "[ns.x, ns.x] | join"),
    "doubled by replace": LOOP.replace("DOUBLED", "ns.x | replace('a', 'aa')").replace("abcdefgh", "a"),
    "doubled by format": LOOP.replace("DOUBLED", "'%s%s' | format(ns.x, ns.x)"),
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "centred": "{{ 'x' | center(10 ** 10) }}",
    "filled": "{{ ('x'.ljust(10 ** 10)) | length }}",
    "a list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
}


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(chat_template, "MAX_BYTES", 2**28)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 2**20)


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end(tmp_path: Path, name: str) -> None:
    tokenizer = chat_tokenizer(
        tmp_path, "{% if messages[0].role == 'user' %}" + ENDLESS[name] + "{% endif %}done" + SHOWN
    )
    with pytest.raises(TokenizerError, match="the chat template takes more than 10 seconds for these messages"):
        tokenizer.chat_text(CHAT[1:])
    assert tokenizer.chat_text(CHAT).startswith("done"), "other messages are taken as ever"


def test_the_limit_of_time_is_for_all_renders_of_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a chat takes at most twice as long."""
    timers: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: timers.append(seconds))

    def lost(variables: dict[str, Any], text: str, render: Callable[[Any], object]) -> list[Any]:
        return [render(variables) for _ in range(5)]

    answer = template_process._answer(lost, lambda name, variables: {"text": "a"}, 7, "plain", {"messages": []})
    assert (answer, timers) == ({"text": "a", "lost": ["a"] * 5}, [7, 7, 0])


@pytest.mark.usefixtures("low_limits")
def test_the_limit_of_time_holds_where_its_signal_is_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPROF,))
    try:
        with pytest.raises(
            TokenizerError, match="the chat template takes more than 10 seconds for these messages"
        ):
            chat_tokenizer(tmp_path, SILENT).chat_text(CHAT)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
        signal.signal(signal.SIGPROF, before)


@pytest.mark.usefixtures("low_limits")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory")
@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_all_memory(tmp_path: Path, name: str) -> None:
    tokenizer = chat_tokenizer(
        tmp_path, "{% if messages[0].role == 'user' %}" + LARGE[name] + "{% endif %}done" + SHOWN
    )
    limits = "needs more than 1 GiB of memory for these|writes more than|takes more than 10 sec"
    with pytest.raises(TokenizerError, match=f"the chat template ({limits})"):
        tokenizer.chat_text(CHAT[1:])
    assert tokenizer.chat_text(CHAT).startswith("done")


@pytest.mark.usefixtures("low_limits")
def test_a_template_that_writes_without_end(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="the chat template writes more than 67,108,864 characters for these"):
        # In few long pieces: it is to pass this limit before that of time.
        chat_tokenizer(tmp_path, NESTED.replace("{{ a }}", "{{ a }}" + "a" * 200)).chat_text(CHAT)


def test_a_macro_that_calls_itself_for_ever(tmp_path: Path) -> None:
    template = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
    with pytest.raises(TokenizerError, match="fails on these messages: maximum recursion depth exceeded"):
        chat_tokenizer(tmp_path, template).chat_text(CHAT)


@pytest.mark.usefixtures("low_limits")
def test_one_of_many_without_end(tmp_path: Path) -> None:
    """The others are rendered, and after three in a row nobody waits for a fourth."""
    tokenizer = chat_tokenizer(
        tmp_path, "{% if messages[0].content == 'x' %}" + SILENT + "{% endif %}done" + SHOWN
    )
    chats = [Chat.of([{"role": "user", "content": text}]) for text in "axbxxxxx"]
    texts = [str(text) for text in tokenizer.chat_texts(chats)]
    endless, refused = "takes more than 10 seconds for", "3 times in a row: it is not run again"
    assert [text.startswith("done") for text in texts[:4]] == [True, False, True, False]
    assert [endless in text for text in texts] == [False, True, False, True, True, True, False, False]
    assert [refused in text for text in texts] == [False] * 6 + [True] * 2


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """How processes have ended since."""
    seen: list[int | None] = []
    own = LineProcess.end

    def noted(self: LineProcess, wait: float) -> int | None:
        seen.append(own(self, wait))
        return seen[-1]

    monkeypatch.setattr(LineProcess, "end", noted)
    return seen


@pytest.mark.usefixtures("low_limits")
def test_a_chat_without_end_costs_no_other_one_its_text(tmp_path: Path, ends: list[int | None]) -> None:
    """None is rendered twice, wherever in a block it is."""
    tokenizer = chat_tokenizer(tmp_path, "{% if messages[0].content == 'x' %}" + SILENT + "{% endif %}" + SHOWN)
    chats = [Chat.of([{"role": "user", "content": text}]) for text in "abcxdexf"]
    texts = tokenizer.chat_texts(chats)
    assert ["x" if isinstance(text, TokenizerError) else text for text in texts] == [*"abcxdexf"]
    assert "takes more than 10 seconds for these messages" in str(texts[3])
    assert ends == [-signal.SIGPROF] * 2


@pytest.mark.parametrize("is_its_doing", [False, True])
def test_a_process_that_ends_for_another_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_its_doing: bool
) -> None:
    """The chat that it was at is rendered once more, alone: somebody may have killed the process."""
    asked: list[int] = []
    own = ChatTemplate._of_block

    def killed(self: ChatTemplate, block: ChatBlock) -> tuple[list[dict[str, Any]], int | None]:
        asked.append(block.num_chats)
        answers, status = own(self, block)
        place = next((i for i, answer in enumerate(answers) if answer["text"] == "x"), -1)
        if place >= 0 and (is_its_doing or len(asked) == 1):
            return answers[:place], -signal.SIGKILL
        return answers, status

    monkeypatch.setattr(ChatTemplate, "_of_block", killed)
    chats = [Chat.of([{"role": "user", "content": text}]) for text in "abxcd"]
    texts = chat_tokenizer(tmp_path, SHOWN).chat_texts(chats)
    told = "the chat template has ended the process that renders it, with the status -9"
    assert list(map(str, texts)) == ["a", "b", told if is_its_doing else "x", "c", "d"]
    assert asked == [5, 1, 2]


# --- the process ---


def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "", {})
    before = rendering_children()
    (text,) = template.render([Chat.of(CHAT[:1])], {}, add_generation_prompt=True)
    assert text == CHAT[0]["content"]
    (own,) = rendering_children() - before
    del template
    gc.collect()
    assert own not in rendering_children()


def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    before = rendering_children()
    text = tokenizer.chat_text(CHAT)
    (own,) = rendering_children() - before
    os.kill(own, signal.SIGKILL)
    psutil.Process(own).wait(30)
    assert tokenizer.chat_text(CHAT) == text


def rendering_children() -> set[int]:
    """Ids of this process's children that render."""
    return {child.pid for child in children_that_run("template_process")}


def test_threads_take_turns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            texts[number] = tokenizer.chat_text([{"role": "user", "content": str(number)}])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts[number] == own_text(tokenizer, number) for number in range(4))


def own_text(tokenizer: Tokenizer, number: int) -> str:
    return tokenizer.chat_text([{"role": "user", "content": str(number)}])
