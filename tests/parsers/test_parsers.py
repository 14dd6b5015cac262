"""Answers as models write them, cut at any places."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.parsers.answer_parser import AnswerParser
from radixrt.parsers.names import TOOL_PARSERS
from radixrt.parsers.source import Kind, Part, Tools
from radixrt.parsers.thinking import is_within_thoughts, opens_thoughts
from tests.support.transcripts import CODER, HARMONY, HERMES, LLAMA, OSLO, THOUGHT, TO_WEATHER, WEATHER, coder

OF_ALL_KINDS = {**WEATHER, "properties": {**WEATHER["properties"], "list": {"type": "array"}, "x": {}, "y": {}}}
TOOLS = Tools({"weather": OF_ALL_KINDS, "now": {}})
ONE = Tools(TOOLS.parameters, only_one=True)
Told = list[tuple[str, str]]  # kinds and texts
END = ("end", "")  # of a whole call
CALL = [("name", "weather"), ("arguments", OSLO), END]


def xml(arguments: str) -> Told:
    return [CALL[0], ("arguments", arguments), END]


def read(
    pieces: Iterable[str],
    *parsers: str | None,
    tools: Tools | None = TOOLS,
    is_open: bool = False,
    is_cut: bool = False,
    said: str = "",
) -> Told:
    """The parts that clients see, those that follow one another joined; all parts join to the text."""
    tool_parser, reasoning_parser = parsers
    reader, parts = AnswerParser(tool_parser, reasoning_parser, tools, is_open, said), list[Part]()
    pieces = list(pieces)
    for piece in pieces:
        parts += reader.push(piece)
    parts += reader.finish(is_cut=is_cut)
    assert "".join(part.raw for part in parts) == "".join(pieces)
    told: Told = []
    for part in parts:
        assert part.raw or part.text or part.kind is Kind.END
        if part.kind is Kind.SYNTAX:
            assert part.text == ""
        elif part.kind in (Kind.CONTENT, Kind.REASONING):
            assert part.raw in ("", part.text)
        kind = part.kind.value
        if told and told[-1][0] == kind and part.kind is not Kind.NAME:
            told[-1] = (kind, told[-1][1] + part.text)
        else:
            told.append((kind, part.text))
    return [(kind, text) for kind, text in told if kind != "syntax"]


def in_all_cuts(text: str, *parsers: str | None, **more: Any) -> Told:
    """What an answer is read as, whole, in two pieces cut at each place, and by the character."""
    told = read([text], *parsers, **more)
    assert read(text, *parsers, **more) == told
    for cut in range(len(text)):
        assert read((text[:cut], text[cut:]), *parsers, **more) == told, cut
    return told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HERMES, CALL),
        (f"\n\n{HERMES}\n", CALL),
        (f"I'll look.\n{HERMES}", [("content", "I'll look.\n"), *CALL]),
        (f"{HERMES}\n{HERMES}", CALL * 2),
        (f"{HERMES}\nThat is all.", [*CALL, ("content", "That is all.")]),
        (f'<tool_call>{{"name":"weather","arguments":{OSLO}}}</tool_call>', CALL),
        (f'<tool_call>\n{{"arguments": {OSLO}, "name": "weather"}}\n</tool_call>', CALL),  # Hermes 2 Pro
        (HERMES.removesuffix("\n</tool_call>"), CALL),  # an end token came first
        (HERMES.replace("}}", "}"), CALL),
        (
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
            [("name", "now"), ("arguments", "{}"), END],
        ),
        ("  Hello", [("content", "  Hello")]),
        ("Say <tool_call> twice: <tool_call>", [("content", "Say <tool_call> twice: <tool_call>")]),
        ("a <tool_", [("content", "a <tool_")]),
        ('<tool_call>{"name": weather}</tool_call>', [("content", '<tool_call>{"name": weather}</tool_call>')]),
        ('<tool_call>{"name": "a"}</tool_call>', [("content", '<tool_call>{"name": "a"}</tool_call>')]),
        (f"<tool_call>no</tool_call>{HERMES}", [("content", "<tool_call>no</tool_call>"), *CALL]),
        (f'<tool_call>{{"arguments": {OSLO}}}', [("content", f'<tool_call>{{"arguments": {OSLO}}}')]),
        (f'<tool_call>{{"arguments": {OSLO[:9]}', [("content", f'<tool_call>{{"arguments": {OSLO[:9]}')]),
        # what was told of a call stays told, and is completed
        (HERMES[:60], [("name", "weather"), ("arguments", '{"city": "Oslo"}')]),
        (HERMES[:-5], CALL),
        (
            f'<tool_call>{{"name": "weather", "arguments": {{"city": \'Oslo\'}}}}</tool_call>{HERMES}',
            [("name", "weather"), ("arguments", '{"city": null}'), ("content", "'Oslo'}}</tool_call>"), *CALL],
        ),
        (
            HERMES.replace("Oslo", "Os\n\tlo\x1f\\d"),
            [CALL[0], ("arguments", OSLO.replace("Oslo", r"Os\n\tlo\u001f\\d")), END],
        ),
        (f"{HERMES}{HERMES}", CALL * 2),
        (" \n", [("content", " \n")]),
        ("", []),
    ],
)
def test_hermes(text: str, told: Told) -> None:
    assert in_all_cuts(text, "hermes", None) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LLAMA, CALL),
        (f"<|python_tag|>{LLAMA}", CALL),
        (f'\n\n{{"type": "function", "name": "weather", "parameters": {OSLO}}}', CALL),
        (f"{LLAMA}; {LLAMA}", CALL * 2),
        (LLAMA.replace("parameters", "arguments"), CALL),
        (f"{LLAMA} Wait.", [*CALL, ("content", "Wait.")]),
        (f"See {LLAMA}", [("content", f"See {LLAMA}")]),
        (LLAMA.replace("weather", "climate"), [("content", LLAMA.replace("weather", "climate"))]),
        ('<|python_tag|>weather.call(city="Oslo")', [("content", '<|python_tag|>weather.call(city="Oslo")')]),
        ('{"name": "Mira", "age": 3}', [("content", '{"name": "Mira", "age": 3}')]),
        (LLAMA[:50], [("name", "weather"), ("arguments", '{"city": "Oslo"}')]),
        (LLAMA.replace("Oslo", "a\nb"), [CALL[0], ("arguments", OSLO.replace("Oslo", r"a\nb")), END]),
        ("", []),
    ],
)
def test_llama(text: str, told: Told) -> None:
    assert in_all_cuts(text, "llama3_json", None) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CODER, CALL),
        (CODER.replace("<tool_call>\n", ""), CALL),
        (f"I'll look.\n\n{CODER}\n{CODER}", [("content", "I'll look.\n\n"), *CALL, *CALL]),
        (CODER.replace("\nOslo\n", "Oslo"), CALL),
        (coder("city", 'a "b"\n\n\\</b>é'), xml('{"city": "a \\"b\\"\\n\\n\\\\</b>é"}')),
        (coder("city", "12"), xml('{"city": "12"}')),
        (coder("city", ""), xml('{"city": ""}')),
        (coder("days", "three"), xml('{"days": "three"}')),
        (coder("days", "007"), xml('{"days": "007"}')),
        (coder("days", "1e999"), xml('{"days": "1e999"}')),
        (coder("units", "C", "x", "True"), xml('{"units": "C", "x": true}')),
        (coder("x", '[1, {"a": null}]'), xml('{"x": [1, {"a": null}]}')),
        (coder("x", "NaN"), xml('{"x": "NaN"}')),
        (coder("x", '"\\ud83d"'), xml('{"x": "\\"\\\\ud83d\\""}')),
        (coder("x", "[" * 200 + "]" * 200), xml(f'{{"x": "{"[" * 200}{"]" * 200}"}}')),
        (coder("x", '["</parameter>", 1]'), xml('{"x": ["</parameter>", 1]}')),
        (coder("x", '"a</parameter>\\""'), xml('{"x": "a</parameter>\\""}')),
        (coder("x", '"a', "y", '"'), xml('{"x": "\\"a", "y": "\\""}')),
        (coder("x", '"a').replace("a\n", "a"), xml('{"x": "\\"a"}')),
        (coder(), xml("{}")),
        ("<function=>", [("content", "<function=>")]),
        ("<tool_call>\n<functio", [("content", "<tool_call>\n<functio")]),
        (HERMES, [("content", HERMES)]),
        # values with what looks like a tag
        (coder("city", "<a>\n</parameter>\n</a>"), xml('{"city": "<a>\\n</parameter>\\n</a>"}')),
        (coder("city", "a\n</function>\nb"), xml('{"city": "a\\n</function>\\nb"}')),
        (coder("city", "a\n</tool_call>\nb"), xml('{"city": "a\\n</tool_call>\\nb"}')),
        (coder("city", "<parameter=town>"), xml('{"city": "<parameter=town>"}')),
        (coder("days", "3", "city", "<parameter=days>"), xml('{"days": 3, "city": "<parameter=days>"}')),
        (coder("city", "<function=f>\n"), xml('{"city": "<function=f>\\n"}')),
        (coder("city", "<tool_call>\n"), xml('{"city": "<tool_call>\\n"}')),
        # tags that are not closed, or are left out
        (CODER.replace("\n</parameter>\n<", "\n<"), CALL),
        (CODER.replace("\n</parameter>", ""), CALL),
        (CODER.replace("\n</parameter>\n</function>\n</tool_call>", ""), CALL),
        (CODER.replace("</function>\n", ""), CALL),
        (CODER.replace("\n</tool_call>", ""), CALL),
        (CODER.replace("\n</function>\n</tool_call>", ""), CALL),
        (CODER.replace("\n</parameter>\n</function>", ""), CALL),
        (CODER.replace("\n</parameter>", "</parameter"), CALL),
        (CODER.replace("</parameter>", "</parameter/>"), CALL),
        (CODER.replace("weather>", "weather").replace("city>", "city"), CALL),
        (f"{CODER[: CODER.index('</p')]}{CODER}", [CALL[0], ("arguments", '{"city": "Oslo"}'), END, *CALL]),
        (f"{CODER[: CODER.index('</f')]}{CODER}", CALL * 2),
        (f"{CODER.replace('</function>', '')}\n{CODER}", CALL * 2),
        (f"{CODER.removesuffix('</tool_call>')}It rains.", [*CALL, ("content", "It rains.")]),
        # what is cut is completed
        (CODER[: CODER.index("lo")], xml('{"city": "Os"}')),
        (CODER[: CODER.index("3") + 1], CALL),
        (CODER[: CODER.index("3") + 6], CALL),
        (CODER[: CODER.index("</f") + 5], CALL),
        (CODER[: CODER.index("<parameter=days") + 12], xml('{"city": "Oslo"}')),
        (CODER[:-5], CALL),
        (coder("x", '"Os').partition("\n</p")[0], xml('{"x": "\\"Os"}')),
        (coder("x", "[1, Oslo").partition("\n</p")[0], xml('{"x": "[1, Oslo"}')),
        (coder("list", "[1, 2").partition("\n</p")[0], xml('{"list": [1, 2]}')),
        (coder("list", '[{"a": "b\n'), xml('{"list": [{"a": "b"}]}')),
        (coder("list", '["b\nc",]'), xml('{"list": ["b\\nc"]}')),
        (coder("list", '["b"] c'), xml('{"list": "[\\"b\\"] c"}')),
        (coder("x", "1}").partition("\n</p")[0], xml('{"x": "1}"}')),
        # what follows no parameter is content
        (
            CODER.replace("<parameter=days>", "days"),
            xml('{"city": "Oslo\\n</parameter>\\ndays\\n3"}'),
        ),
        (
            CODER.replace("</function>", "Days?"),
            [*CALL[:2], ("content", "Days?\n</tool_call>")],
        ),
    ],
)
def test_qwen3_coder(text: str, told: Told) -> None:
    assert in_all_cuts(text, "qwen3_coder", None) == told


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": ["string", "null"]}, "12", '"12"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", '"12"'),
        ({"oneOf": [{"type": "null"}, {"anyOf": [{"type": "string"}]}]}, "True", '"True"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, '"12"', '"12"'),
        ({"type": ["string", "integer"]}, "12", "12"),
        ({"type": ["string", "array"]}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"anyOf": [{"type": "string"}, {"enum": [12]}]}, "12", "12"),
        ({"type": "integer"}, "true", "true"),
        ({"anyOf": 5}, "12", "12"),
        ({"type": [["string"]]}, "12", "12"),
    ],
)
def test_values_where_text_is_among_the_types(schema: Any, value: str, expected: str) -> None:
    tools = Tools({"weather": {"properties": {"x": schema}}})
    told = in_all_cuts(coder("x", value), "qwen3_coder", None, tools=tools)
    assert told == [CALL[0], ("arguments", f'{{"x": {expected}}}'), END]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HARMONY, [("reasoning", "Need Oslo."), *CALL]),
        (HARMONY.replace("<|call|>", ""), [("reasoning", "Need Oslo."), *CALL]),  # it ends the answer: no text
        (
            f"{THOUGHT}<|channel|>final<|message|>It rains.<|return|>",
            [("reasoning", "Need Oslo."), ("content", "It rains.")],
        ),
        (f" to=functions.weather<|channel|>commentary json<|message|>{OSLO}<|call|>", CALL),
        (f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{OSLO}<|end|>", CALL),
        (f"<|channel|>analysis to=functions.weather code<|message|>{OSLO}<|call|>", CALL),
        (
            f"<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant{TO_WEATHER}{OSLO}<|call|>",
            [("content", "I'll look."), *CALL],
        ),
        ("It rains.", [("content", "It rains.")]),
        (THOUGHT[:40], [("reasoning", "Need Oslo.")]),
        (
            f"{THOUGHT}<|channel|>other<|message|>a<|end|>",
            [("reasoning", "Need Oslo."), ("content", "<|start|>assistant<|channel|>other<|message|>a<|end|>")],
        ),
        (
            "<|channel|>analysis to=browser.search<|message|>{}<|call|>",
            [("content", "<|channel|>analysis to=browser.search<|message|>{}<|call|>")],
        ),
        (f"{TO_WEATHER}{{}} and<|call|>", [CALL[0], ("arguments", "{}"), END, ("content", "and<|call|>")]),
        (f"{TO_WEATHER}\n{OSLO[:8]}", [CALL[0], ("arguments", "{}")]),
        (TO_WEATHER, [CALL[0], ("arguments", "{}"), END]),
        (f"{TO_WEATHER}print(1)<|call|>", [CALL[0], ("arguments", "{}"), ("content", "print(1)<|call|>")]),
        (f"{TO_WEATHER}{OSLO}<|ca", CALL),
        ("", []),
    ],
)
def test_harmony(text: str, told: Told) -> None:
    assert in_all_cuts(text, "harmony", "harmony") == told


def test_harmony_without_tools() -> None:
    """Thoughts are taken apart all the same; a call is text."""
    text = f"<|start|>assistant{TO_WEATHER}{OSLO}<|call|>"
    expected = [("reasoning", "Need Oslo."), ("content", text)]
    assert in_all_cuts(HARMONY, "harmony", "harmony", tools=None) == expected
    assert in_all_cuts(HARMONY, None, "harmony") == expected


@pytest.mark.parametrize(
    ("text", "is_open", "told"),
    [
        ("<think>\nIt is.\n</think>\n\nYes.", False, [("reasoning", "It is."), ("content", "Yes.")]),
        ("\nIt is.\n\n</think>\n\nYes.", True, [("reasoning", "It is."), ("content", "Yes.")]),
        ("<think>\n\n</think>\n\nYes.", False, [("content", "Yes.")]),
        ("Yes.", False, [("content", "Yes.")]),
        ("Yes <think>a</think>", False, [("content", "Yes <think>a</think>")]),
        ("<think>", False, []),
        (f"<think>\nA < b\n</think>\n\n{HERMES}", False, [("reasoning", "A < b"), *CALL]),
        (f"{HERMES}</think>{HERMES}", True, [("reasoning", HERMES), *CALL]),
        (" <thing>", False, [("content", " <thing>")]),
    ],
)
def test_thoughts(text: str, is_open: bool, told: Told) -> None:
    assert in_all_cuts(text, "hermes", "think", is_open=is_open) == told


@pytest.mark.parametrize("is_cut", [False, True])
def test_thoughts_without_an_end(is_cut: bool) -> None:
    """Those that the prompt has opened are an answer without thoughts, unless the answer was cut."""
    for text, told in (
        ("It is.", [("content", "It is.")]),
        (f"\nWell.\n{HERMES}\n", [("content", "Well.\n"), *CALL]),
        ("It is </thin", [("content", "It is </thin")]),
        ("\n", []),
    ):
        thought = [("reasoning", text.lstrip())] if text.strip() else []
        expected = thought if is_cut else [*thought, *told]
        assert in_all_cuts(text, "hermes", "think", is_open=True, is_cut=is_cut) == expected
        thought = [("reasoning", text.lstrip())] if text.strip() else []
        assert in_all_cuts(f"<think>{text}", "hermes", "think", is_cut=is_cut) == thought


@pytest.mark.parametrize(
    ("prompt", "said", "opens", "is_within"),
    [
        ("a<|assistant|><think>\n", "", True, True),
        ("a<|assistant|>\n", "", False, False),
        ("what is <think>?<|assistant|>", "", False, False),
        ("<|assistant|><think>\n\n</think>\n\n", "", False, False),
        ("<|assistant|>", "<think>a", False, True),
        ("<|assistant|>", "<think>a</think>b", False, False),
        ("<|assistant|><think>", "a", True, True),
        ("<|assistant|><think>", "a</think>b", True, False),
    ],
)
def test_prompts_that_open_thoughts(prompt: str, said: str, opens: bool, is_within: bool) -> None:
    assert (opens_thoughts(prompt), is_within_thoughts(opens, said)) == (opens, is_within)


@pytest.mark.parametrize(
    ("text", "parsers"),
    [
        (f"Well.\n{HERMES}\nSo {HERMES}", ("hermes", None)),
        (f'<tool_call>{{"arguments": {OSLO}, "name": "weather"}}</tool_call>', ("hermes", None)),
        (f"<think>a</think>{CODER}b", ("qwen3_coder", "think")),
        (f"  {LLAMA};{LLAMA}", ("llama3_json", None)),
        (HARMONY, ("harmony", "harmony")),
    ],
)
def test_answers_that_go_on(text: str, parsers: Any) -> None:
    """What was said is not told again; a call in which it ends is told whole."""
    whole = read([text], *parsers)
    for cut in range(len(text) + 1):
        told = read([text[cut:]], *parsers, said=text[:cut])
        assert read(text[cut:], *parsers, said=text[:cut]) == told
        assert told == whole[len(whole) - len(told) :] or (told[0][1], told[1:]) == (
            whole[len(whole) - len(told)][1][-len(told[0][1]) :],
            whole[len(whole) - len(told) + 1 :],
        )
        before = [part.kind for part in AnswerParser(*parsers, TOOLS).push(text[:cut])]
        is_open = before.count(Kind.NAME) - before.count(Kind.END)
        assert AnswerParser(*parsers, TOOLS, said=text[:cut]).has_open_call == is_open


@pytest.mark.parametrize(
    ("text", "parser", "left"),
    [
        (f"{HERMES}\n{HERMES}", "hermes", HERMES),
        (f"{LLAMA};{LLAMA}", "llama3_json", f";{LLAMA}"),
        (f"{CODER}\n{CODER}", "qwen3_coder", CODER),
        (
            f"{TO_WEATHER}{OSLO}<|call|><|start|>assistant{TO_WEATHER}",
            "harmony",
            f"<|start|>assistant{TO_WEATHER}",
        ),
    ],
)
def test_a_second_call_where_one_is_asked_for_is_text(text: str, parser: str, left: str) -> None:
    told = in_all_cuts(text, parser, "harmony" if parser == "harmony" else None, tools=ONE)
    assert told == [*CALL, ("content", left)]


def test_without_parsers_all_is_content() -> None:
    assert in_all_cuts(f"<think>a</think>\n{HERMES}", None, None) == [("content", f"<think>a</think>\n{HERMES}")]
    assert in_all_cuts(HERMES, "hermes", None, tools=None) == [("content", HERMES)]


_CALLED = '<tool_call>{"name": "weather", "arguments": {"city": '


@pytest.mark.parametrize(
    ("begun", "more", "parser"),
    [
        (_CALLED + '"', "a\\\\ \n<", "hermes"),
        (_CALLED, " ", "hermes"),
        (_CALLED + '1, "', "b", "hermes"),
        (_CALLED + "[", "1, ", "hermes"),
        (_CALLED, "9", "hermes"),
        ('<tool_call>{"arguments": {"city": "', "a", "hermes"),
        ("", "<tool_call>", "hermes"),
        ("", " ", "hermes"),
        ("<think>", "\n", "hermes"),
        (CODER[: CODER.index("Oslo")], "a</parameter>\n", "qwen3_coder"),
        (coder("x", "").partition("\n\n")[0], "\n</function>\n</b>", "qwen3_coder"),
        (coder().partition("</f")[0], "\n", "qwen3_coder"),
        (TO_WEATHER + '{"city": "', "<|call|>", "harmony"),
        ("", "<|channel|>", "harmony"),
    ],
)
def test_little_is_held_back(begun: str, more: str, parser: str) -> None:
    """What comes costs the same however much has come: no text grows that is looked at again."""
    reader = AnswerParser(parser, "harmony" if parser == "harmony" else "think", TOOLS)
    for piece in (*begun, *(more * 3000)):
        reader.push(piece)
        assert len(reader._source._text) < 600


# Pieces of all syntaxes, whole and in two, among others: most texts of characters at random would be content.
WORDS = [
    *re.findall(r"<\|?\w+\|?>|</\w+>|<\w+=\w+>|\s|\"\w+\": |\W|\w+", HERMES + LLAMA + CODER + HARMONY),
    *(HERMES, LLAMA, CODER, HARMONY, OSLO, "<think>", "</think>", "<function=now>", "<tool_call>", "</parameter>"),
    *("<tool_", "call>", "<|chan", '{"name": "now", "arguments": ', "\x00", "é", "😀", "\\u00", "<|python_tag|>"),
    *(" to=functions.now", "<|start|>assistant<|channel|>", "analysis", "final", "<|message|>", "<|end|>"),
]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=14).map("".join)
PARSERS = st.one_of(
    st.tuples(st.sampled_from((None, *TOOL_PARSERS[:-1])), st.sampled_from((None, "think"))),
    st.tuples(st.sampled_from((None, "harmony")), st.just("harmony")),
)


@given(
    TEXTS, PARSERS, st.sampled_from((TOOLS, ONE, None)), st.booleans(), st.lists(st.integers(0, 200), max_size=8)
)
def test_any_text_in_any_pieces(
    text: str, parsers: tuple[Any, Any], tools: Tools | None, is_open: bool, cuts: list[int]
) -> None:
    """What it is read as does not depend on the pieces, and arguments are JSON."""
    is_open = is_open and parsers[1] == "think"
    told = read([text], *parsers, tools=tools, is_open=is_open)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read([text[a:b] for a, b in pairwise(ends)], *parsers, tools=tools, is_open=is_open) == told
    assert read(text, *parsers, tools=tools, is_open=is_open) == told
    kinds = [kind for kind, _ in told]
    assert all(kinds[at - 1] == "name" for at, kind in enumerate(kinds) if kind == "arguments")
    if tools is not TOOLS:
        assert kinds.count("name") <= (tools is ONE)
    for kind, written in told:
        if kind == "arguments":
            assert isinstance(json.loads(written), dict)


@given(st.binary(max_size=80), PARSERS)
def test_bytes_at_random(text: bytes, parsers: tuple[Any, Any]) -> None:
    read(text.decode(errors="replace"), *parsers)


@given(st.lists(st.sampled_from(WORDS), max_size=14).map("".join), PARSERS)
def test_tags_alone_are_left_out(text: str, parsers: tuple[Any, Any]) -> None:
    reader = AnswerParser(*parsers, TOOLS)
    parts = [*reader.push(text), *reader.finish(is_cut=False)]
    for part in parts:
        if part.kind is Kind.SYNTAX:
            tags = (
                r"\s|</?think>|</tool_call>|\}|, *\"name\": *\"\w+\"|<\|\w+\|>|assistant|analysis|commentary|final"
            )
            assert re.fullmatch(rf"(?:{tags}|json|code)*", part.raw), part
