"""gpt-oss's answers: messages in channels. https://cookbook.openai.com/articles/openai-harmony"""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

import regex

from radixrt.parsers.json_calls import arguments
from radixrt.parsers.source import (
    END,
    Kind,
    Part,
    Source,
    Steps,
    Tools,
    all_text,
    content,
    match_next,
    reasoning,
    skip_closing,
    syntax,
    text_until,
)

# A recipient stands before the channel or after it; the prompt ends in "<|start|>assistant".
_TO = r"(?: to=functions\.(?P<name>[^<>\s]{1,256}))?"
_HEAD = regex.compile(
    rf"(?:<\|start\|>assistant)?{_TO}<\|channel\|>(?P<channel>analysis|commentary|final){_TO}"
    r" ?(?:<\|constrain\|>)?(?:\w{1,16} ?)?<\|message\|>"
)
_END = regex.compile(r"\s{0,32}<\|(?:end|call|return)\|>")
_TAGS = regex.compile(r"<\|(?:start|channel)\|>")
_ENDS = regex.compile(r"<\|(?:end|call|return|start|channel)\|>")


def harmony(source: Source, tools: Tools | None, has_form: bool = False) -> Steps[None]:
    """The channel analysis is reasoning, what goes to a function is its call, the rest is content. Without tools
    a call is content, too, as it was written. All that follows the head of the channel final is content if it
    `has_form`, whatever it spells.
    """
    has_called = False
    while True:
        match = yield from match_next(source, _HEAD)
        is_call = match is not None and match["name"] is not None
        if match is None or (is_call and (tools is None or (has_called and tools.only_one))):
            if not source.first:
                return
            yield content(source.take(1))
            yield from text_until(source, content, _TAGS)
            continue
        raw = source.take_to(match.end())
        if is_call:
            has_called = True
            yield Part(Kind.NAME, raw, match["name"])
            is_whole = yield from arguments(source)
            yield from skip_closing(source, _END)
            if is_whole:
                yield END
        else:
            yield syntax(raw)
            if has_form and match["channel"] == "final":
                yield from all_text(source, content)
                return
            yield from text_until(source, reasoning if match["channel"] == "analysis" else content, _ENDS)
            yield from skip_closing(source, _END)
