"""Thoughts at the beginning of an answer: `<think>...</think>`."""

# Tests: tests/parsers/test_parsers.py

from __future__ import annotations

import regex

from radixrt.parsers.source import Part, Source, Steps, reasoning, skip_next, syntax, text_until

_BEGIN = regex.compile(r"\s{0,32}<think>")
_END = regex.compile(r"\n{0,2}</think>")


def think(source: Source, is_open: bool) -> Steps[str]:
    """Thoughts that the answer begins with, or goes on with if the prompt has opened them (`is_open`).

    Returns the text of thoughts that the prompt has opened and the model has not closed: it may have answered
    without any.
    """
    if not is_open and not (yield from skip_next(source, _BEGIN)):
        return ""
    told: list[str] = []

    def made(raw: str) -> Part:
        told.append(raw)
        return reasoning(raw)

    if match := (yield from text_until(source, made, _END)):
        yield syntax(source.take_to(match.end()))
        return ""
    return "".join(told) if is_open else ""


def opens_thoughts(prompt: str) -> bool:
    """Whether a rendered chat ends with the beginning of thoughts."""
    return prompt.rstrip().endswith("<think>")


def is_within_thoughts(is_open: bool, said: str) -> bool:
    """Whether thoughts go on after the beginning of an answer, `said`, which the prompt may have opened."""
    return "</think>" not in said and (is_open or _BEGIN.match(said) is not None)
