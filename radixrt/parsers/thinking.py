"""Thoughts at the beginning of an answer: `<think>...</think>`."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

import regex

from radixrt.parsers.source import Source, Steps, reasoning, skip_next, syntax, text_until

_BEGIN = regex.compile(r"\s{0,32}<think>")
_ENDS = ("\n\n</think>", "\n</think>", "</think>")


def think(source: Source, is_open: bool) -> Steps[None]:
    """Thoughts that the answer begins with, or goes on with if the prompt has opened them (`is_open`)."""
    if not is_open and not (yield from skip_next(source, _BEGIN)):
        return
    if (yield from text_until(source, reasoning, _ENDS)):
        yield syntax(source.take(source.text.index(">") + 1))


def opens_thoughts(prompt: str, continued: str | None) -> bool:
    """Whether a rendered chat ends inside thoughts; `continued` is the content of a message that goes on."""
    if continued is not None:
        return continued.rfind("<think>") > continued.rfind("</think>") or prompt.endswith("<think>")
    return prompt.rstrip().endswith("<think>")
