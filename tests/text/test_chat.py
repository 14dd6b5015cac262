"""Chat messages to token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from radixrt.errors import TokenizerError
from radixrt.text.chat import Chat, SharedParts, checked_messages, is_chat
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.small_tokenizers import (
    CHATML,
    KINDS,
    chat_tokenizer,
    sentencepiece_model,
    small_tokenizer,
    write_llama,
)

CHAT = [
    {"role": "system", "content": "Be  brief."},
    {"role": "user", "content": "hello 日本 😀"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "{{ 7 * 7 }}\n"},
]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("chatml"))


def test_the_template_writes_the_chat(chatml: Tokenizer) -> None:
    assert chatml.has_chat_template
    ids = chatml.encode_chat(CHAT)
    assert ids.dtype == np.int32
    written = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    assert chatml.decode(ids, skip_special_tokens=False) == written + "<|im_start|>assistant\n"
    assert chatml.piece(int(ids[0])) == "<|im_start|>"
    assert chatml.chat_text(CHAT, add_generation_prompt=False) == written


BOS_TEMPLATES = {"none": CHATML, "its own": "{{ bos_token }}" + CHATML, "spelled": "<s>" + CHATML}


@pytest.mark.parametrize("template", BOS_TEMPLATES)
@pytest.mark.parametrize("kind", ["byte level", "llama"])
def test_the_template_alone_decides_about_bos(tmp_path: Path, kind: str, template: str) -> None:
    """As in transformers; the tokenizer's own BOS is never added to the template's."""
    if kind == "llama":
        write_llama(tmp_path, chat_template=BOS_TEMPLATES[template])
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.encode("x")[0] == tokenizer.bos_token_id == 1
    else:
        tokenizer = chat_tokenizer(tmp_path, BOS_TEMPLATES[template])
    ids = tokenizer.encode_chat(CHAT[:2]).tolist()
    assert ids.count(tokenizer.bos_token_id) == (0 if template == "none" else 1)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(CHAT[:2], add_generation_prompt=True)
    assert ids == theirs["input_ids"]


def test_what_is_none_is_not_given() -> None:
    """As in messages that OpenAI's clients have made of answers."""
    answer = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "annotations": []}
    chat = Chat.of({"messages": [answer], "tools": None, "continue_final_message": None, "more": None})
    assert chat == Chat([{"role": "assistant", "content": "b"}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_without_a_template(kind: str) -> None:
    assert not small_tokenizer(kind).has_chat_template
    with pytest.raises(TokenizerError, match=r"has no chat template: give the prompt as text, or add .*\.jinja"):
        small_tokenizer(kind).encode_chat(CHAT)


def test_several_templates(tmp_path: Path) -> None:
    named = {"tool_use": "tools", "default": "plain {{ messages | join(' ', attribute='content') }}"}
    assert chat_tokenizer(tmp_path / "a", named).has_chat_template  # type: ignore[arg-type]
    assert load_tokenizer(tmp_path / "a").chat_text(CHAT[:1]) == "plain Be  brief."
    del named["default"]
    assert not chat_tokenizer(tmp_path / "b", named).has_chat_template  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__['os'].system('touch MARKER') }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        "{{ (messages|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('MARKER', 'w') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
    ],
)
def test_a_template_that_tries_to_leave_its_sandbox(tmp_path: Path, template: str) -> None:
    marker = tmp_path / "it_ran"
    tokenizer = chat_tokenizer(tmp_path, template.replace("MARKER", str(marker)))
    messages = [dict(message) for message in CHAT]
    with pytest.raises(TokenizerError, match="the chat template of this checkpoint tries to do what its sandbox"):
        tokenizer.encode_chat(messages)
    assert messages == CHAT
    assert not marker.exists()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ nothing.at_all }}", "fails on these messages: 'nothing' is undefined"),
        ("{% for %}", "fails on these messages: "),
        ("{{ 1 / 0 }}", "fails on these messages: division by zero"),
    ],
)
def test_a_template_that_refuses_or_fails(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=f"the chat template {message}"):
        chat_tokenizer(tmp_path, template).encode_chat(CHAT)


USER = {"role": "user", "content": "x"}
BAD = [
    ("hello", "a chat is a list of messages, not str"),
    (USER, "a chat is a list of messages, not dict"),
    (7, "a chat is a list of messages, not int"),
    ([], "the chat is empty"),
    ([USER, "hello"], "chat message 1 is str; it must be a dict of role and content"),
    ([USER, None], "chat message 1 is NoneType"),
    ([{"role": "user"}], "chat message 0 has no 'content'"),
    ([USER, USER, {"text": "x"}], "chat message 2 has no 'role' and no 'content'"),
    ([{**USER, "name": 1}], "chat message 0 has a name of type int; it must be a string"),
    ([USER, {**USER, "more": {1}}], "chat message 1 has a field 'more' that cannot be written as JSON: .*set"),
    ([{**USER, "audio": {"id": "a"}, "images": ["b"]}], "chat message 0 has 'audio', 'images', which cannot"),
    ([{**USER, "function_call": {"name": "f"}}], "chat message 0 has 'function_call', which cannot be honoured"),
    ([{"role": "assistant", "content": "a", "prefix": True}], "chat message 0 has 'prefix', which cannot be hono"),
    ([{**USER, "content": None}], "chat message 0 has a content of type NoneType; it must be a string"),
    ([{**USER, "content": [{"type": "text"}]}], "chat message 0 has a content whose part 0 is no"),
    ([USER, {**USER, "role": 3}], "chat message 1 has a role of type int"),
    ([{**USER, "role": ""}], "chat message 0 has an empty role"),
    ([USER, {**USER, "content": "ab\ud83d"}], "chat message 1 holds U[+]D83D, .* at character 2 of its content"),
]


@pytest.mark.parametrize(("messages", "message"), BAD)
def test_bad_messages_are_named(chatml: Tokenizer, messages: object, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        chatml.encode_chat(messages)  # type: ignore[arg-type]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "å"]}'}}


def test_a_message_of_calls() -> None:
    """Templates want arguments as objects; clients of OpenAI have them as strings."""
    written = {**CALL, "function": {"name": "f", "arguments": {"x": [1, "å"]}}}
    for given in (CALL, written):
        (checked,) = checked_messages([{"role": "assistant", "content": None, "tool_calls": [given]}])
        assert checked == {"role": "assistant", "content": None, "tool_calls": [written]}
    assert checked_messages([{"role": "assistant", "tool_calls": [CALL]}])[0].keys() == {"role", "tool_calls"}
    answer = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    (checked,) = checked_messages([{**answer, "tool_call_id": "a", "name": None}])
    assert checked == {"role": "tool", "content": "ab", "tool_call_id": "a"}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_what_is_empty_says_nothing(role: str) -> None:
    """OpenAI's client gives an answer's message with all fields, and rows of tables have those of all messages."""
    empty = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "reasoning_content", "name"))
    message = {"role": role, "content": "a"}
    assert checked_messages([{**message, **empty}]) == [message]
    assert checked_messages([{**message, "tool_calls": [], "annotations": []}]) == [message]


BAD_CHATS = [
    (
        {"messages": [USER], "tool": []},
        "a chat has 'tool'; it may have messages, tools, chat_template_kwargs, con",
    ),
    ({"messages": [], "tools": []}, "the chat is empty"),
    ({"messages": [USER], "tools": {}}, "tools are of type dict; they must be a list"),
    ({"messages": [USER], "tools": ["f"]}, "tools hold what is no object"),
    ({"messages": [USER], "tools": [{"f": {1}}]}, "tools that cannot be written as JSON: .*set"),
    ({"messages": [USER], "chat_template_kwargs": ["x"]}, "chat_template_kwargs are .*; they must map names to v"),
    (
        {"messages": [USER], "chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs have 'tools', which the t",
    ),
    ({"messages": [USER], "continue_final_message": 1}, "continue_final_message is 1; it must be True or False"),
    ({"messages": [USER], "continue_final_message": True}, "needs a last message of the assistant that has a con"),
    ([{"role": "assistant", "tool_calls": "f"}], "tool_calls of type str; they must be a list"),
    ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "tool call 0 without a function that has a name"),
    ([{**USER, "tool_calls": [CALL]}], "chat message 0 has 'tool_calls'; with the role 'user' it may have none"),
    ({"messages": [USER], "reasoning_effort": 3}, "reasoning_effort is 3; it must be a string of at most 64"),
    ([{**USER, "content": [{"type": "image_url"}]}], "whose part 0 is of type 'image_url'; only text"),
]


@pytest.mark.parametrize(("chat", "message"), BAD_CHATS)
def test_bad_chats_are_named(chat: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Chat.of(chat)


def test_messages_are_copied() -> None:
    checked = checked_messages(tuple(CHAT))
    assert checked == CHAT
    checked[0]["content"] = "changed"
    assert CHAT[0]["content"] == "Be  brief."


def test_what_is_a_chat() -> None:
    assert is_chat(CHAT)
    assert is_chat(({"role": 1},))  # a bad one
    assert is_chat([USER, "hello"])
    assert is_chat({"messages": CHAT})
    assert is_chat(Chat.of(CHAT))
    for other in ("hello", "", b"x", [], ["hello"], [1, 2], [CHAT], ["hello", USER], USER, None, np.arange(3)):
        assert not is_chat(other)
    for other in ([{"messages": CHAT}], [Chat.of(CHAT)]):  # lists of one
        assert not is_chat(other)


def test_pieces() -> None:
    level, fallback, bare = map(small_tokenizer, ("byte level", "byte fallback", "bare"))
    assert level.piece(int(level.encode(" likes")[0])).startswith("Ġ")
    for tokenizer in (fallback, bare):
        assert tokenizer.piece(1) == "<s>"
        assert tokenizer.piece(int(tokenizer.encode("😀")[-1])) == "<0x80>"
        assert len(tokenizer.byte_ids) == 256
    assert level.byte_ids == frozenset()
    for tokenizer in (level, fallback, bare):
        assert tokenizer.piece(tokenizer.vocab_size) == tokenizer.piece(2**40) == ""
        with pytest.raises(TokenizerError, match="token id -1 is negative"):
            tokenizer.piece(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_anchor_is_an_ordinary_letter(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    assert tokenizer.anchor is not None
    assert tokenizer.decode([tokenizer.anchor]).isalnum()
    assert tokenizer.anchor not in tokenizer.byte_ids


def test_encoding_without_special_tokens(tmp_path: Path) -> None:
    llama = load_tokenizer(write_llama(tmp_path, sentencepiece_model()))
    for tokenizer in (llama, small_tokenizer("bare")):
        assert tokenizer.encode("hello").tolist() == [1, *tokenizer.encode("hello", add_special_tokens=False)]


def test_what_chats_share_is_copied_once() -> None:
    system, tools = {"role": "system", "content": "Be brief."}, [{"type": "function", "function": {"name": "f"}}]
    given = [{"messages": [system, {"role": "user", "content": text}], "tools": tools} for text in "ab"]
    shared = SharedParts()
    first, second = (Chat.of(chat, shared) for chat in given)
    assert (first, second) == (Chat.of(given[0]), Chat.of(given[1]))
    assert first.messages[0] is second.messages[0]
    assert first.tools is second.tools
    system["content"] = "Be long."
    assert (first.messages[0]["content"], Chat.of(given[0]).messages[0]["content"]) == ("Be brief.", "Be long.")


def test_shared_parts_tell_objects_and_their_uses_apart() -> None:
    shared = SharedParts()
    for content in "ab":
        given = {"role": "user", "content": content}
        assert Chat.of([given], shared).messages[0]["content"] == content
        del given  # the next one must not get its identity
    message = {"role": "user", "content": "a", "messages": 1}
    Chat.of([message], shared)
    with pytest.raises(TokenizerError, match="chat_template_kwargs have 'messages', which the template gets"):
        Chat.of({"messages": [message], "chat_template_kwargs": message}, shared)
    bad = {"role": "user"}
    for messages in ([bad], [message, bad]):  # each error names its own place
        with pytest.raises(TokenizerError, match=f"chat message {len(messages) - 1} has no 'content'"):
            Chat.of(messages, shared)
