"""Which parts of a chat a template leaves out, as functions of Python in its place."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any

import pytest

from radixrt.text.said_arguments import SaidArguments
from radixrt.text.traces import Part, lost, told

Template = Callable[[dict[str, Any]], "str | None"]


def lost_by(
    template: Template, *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None
) -> list[Part]:
    variables = {"messages": list(messages), "tools": tools}
    text = template(variables)
    assert text is not None
    return lost(variables, text, template)


def said(content: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def plain(variables: dict[str, Any]) -> str:
    return "boilerplate yes no " + "\n".join(m["content"] for m in variables["messages"] if m["role"] != "critic")


def test_short_words_that_are_elsewhere_prove_nothing() -> None:
    assert lost_by(plain, said("yes"), said("no")) == []
    critics = [said("no", "critic"), said("yes no", "critic")]
    assert lost_by(plain, said("yes"), *critics) == [("message", 1), ("message", 2)]
    assert lost_by(plain, said("", "critic"), said(" \n"), said("")) == [("message", 0)]


def test_long_contents_prove_themselves() -> None:
    """Of these no second text is made; but of one that is in another one, or in thoughts."""
    rendered = []

    def noted(variables: dict[str, Any]) -> str:
        rendered.append(variables)
        return plain(variables)

    long = "It is told that Mira likes Oslo."
    for messages, count in (
        ([said(long), said("She does, and so does Tarek.", "assistant")], 1),
        ([said(long), said("She does.", "assistant")], 2),
        ([said(long), said(f"No: {long}", "assistant")], 2),
        ([said(long), said("She does, and so does Tarek.", "assistant", reasoning_content=long)], 2),
    ):
        rendered.clear()
        assert lost_by(noted, *messages) == []
        assert len(rendered) == count
    assert lost_by(noted, said(f"No: {long}"), said(long, "critic")) == [("message", 1)]
    rendered.clear()
    messages = [said(long), said("She does, and so does Tarek.", "assistant")]
    one, other = (message["content"] for message in messages)
    for text in (other + one, one[:30] + one + other):  # wherever they are
        assert lost({"messages": messages}, text, noted) == []
    assert rendered == []


@pytest.mark.parametrize(
    "cut",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:30],
        lambda content: content[len(content) // 2 :],
        lambda content: content.split("\n")[-1],
        lambda content: "\n".join(content.split("\n")[:: content.count("\n")]),
        lambda content: content.replace("four", ""),
        lambda content: "",
    ],
)
def test_a_content_that_is_cut_is_lost(cut: Callable[[str], str]) -> None:
    template = lambda variables: "".join(cut(m["content"]) for m in variables["messages"])  # noqa: E731
    assert lost_by(template, said("one two three\nfour five six\nseven eight nine")) == [("message", 0)]


@pytest.mark.parametrize(
    "change",
    [
        str.strip,
        str.upper,
        lambda content: content.replace("/no_think", ""),
        lambda content: repr(content)[1:-1],
        lambda content: json.dumps(content),
        html.escape,
        lambda content: f"{content[:3]} and {content}, so {content}",
        lambda content: " ".join(content.split()),
    ],
)
def test_a_content_that_is_written_otherwise_is_there(change: Callable[[str], str]) -> None:
    template = lambda variables: "".join(change(m["content"]) for m in variables["messages"])  # noqa: E731
    for content in (
        "  Be  brief. /no_think\n",
        "/no_think",
        "å",
        "a /no_think 'b' & \"å\"\nc d",
        "<tool_response>\na\n</tool_response>",
    ):
        assert lost_by(template, said(content)) == []


def test_what_marks_change_is_looked_for_without_them() -> None:
    """Such as where a template compares messages, knows some contents, or fails on others."""

    def known(variables: dict[str, Any]) -> str | None:
        contents = [m["content"] for m in variables["messages"]]
        if len(contents) == 1:
            return "on" if contents == ["on"] else ""
        return None if "_" in "".join(contents) else "".join(contents[1:])

    assert lost_by(known, said("on")) == []
    assert lost_by(known, said("off")) == [("message", 0)]
    assert lost_by(known, said("missing"), said("here"), said('a "b"')) == [("message", 0)]


def test_order_is_not_asked_for() -> None:
    backwards = lambda variables: "".join(m["content"] for m in reversed(variables["messages"]))  # noqa: E731
    assert lost_by(backwards, said("a"), said("b"), said("c")) == []


TOLD = [
    ("a", "a"),
    ("  a b \n", "a b"),
    ("<think>x</think>\n\na", "a"),
    ("[THINK]x[/THINK]a", "a"),
    ("<seed:think>x</seed:think>a", "a"),
    ("x</think>a", "a"),
    ("<think>x</think>", ""),
    ("<think>x", ""),
    ("a <think>x", "a"),
    ("", ""),
]


@pytest.mark.parametrize(("content", "expected"), TOLD)
def test_thoughts_of_the_assistant_may_be_left_out(content: str, expected: str) -> None:
    first, end = told(said(content, "assistant"))
    assert content[first:end] == expected
    first, end = told(said(content))
    assert content[first:end] == content.strip()


def call(arguments: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **more}


def test_calls_and_tools() -> None:
    def first_call(variables: dict[str, Any]) -> str:
        function = variables["messages"][0]["tool_calls"][0]["function"]
        return f"{function['name']} {function['arguments']} {variables['tools'][0]}"

    message = said("", "assistant", tool_calls=[call({"a": 1}), call({"a": 1}), call({})])
    tools = [{"type": "function", "function": {"name": "f"}}, {"name": "g"}, {"anything": 1}]
    expected = [("call", 0, 1), ("call", 0, 2), ("tool", 1)]
    assert lost_by(first_call, message, tools=tools) == expected
    names = lambda variables: str([c["function"]["name"] for c in variables["messages"][0]["tool_calls"]])  # noqa: E731
    assert lost_by(names, message) == [("call", 0, 0), ("call", 0, 1)]
    ids = lambda variables: str([c.get("id") for c in variables["messages"][0]["tool_calls"]])  # noqa: E731
    assert lost_by(ids, said("", "assistant", tool_calls=[call({}, id="functions.f:0")])) == []


ARGUMENTS = [
    {"city": "Oslo", "day": "now", "n": 1},
    '{"city": "Oslo", "day": "no',
    '{"a": "\\u00e5\\n", "b": "c"}',
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_each_name_and_each_text_of_arguments_is_looked_for(arguments: Any) -> None:
    if isinstance(arguments, str):
        arguments = SaidArguments(arguments)
    message = said("", "assistant", tool_calls=[call(arguments)])
    shows: list[tuple[Callable[[Any], object], bool]] = [
        (lambda known: str(known), True),
        (lambda known: list(known.items()), True),
        (list, False),
        (lambda known: list(known.values()), False),
        (lambda known: list(known.items())[:1], False),
        (lambda known: [*known.keys(), next(iter(known.values()))], False),
    ]
    for show, is_whole in shows:
        template = lambda variables: str(show(variables["messages"][0]["tool_calls"][0]["function"]["arguments"]))  # noqa: B023, E731
        assert lost_by(template, message) == ([] if is_whole else [("call", 0, 0)])
