"""`FormCompiler`: from what is asked for to a form, tried before it is compiled, and kept."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any

from radixrt.checks import short
from radixrt.errors import FormError
from radixrt.form_spec import FormSpec
from radixrt.forms.ends import Ends
from radixrt.forms.form_process import (
    LLGUIDANCE,
    XGRAMMAR,
    Refusal,
    token_map,
    xgrammar_compiler,
    xgrammar_grammar,
)
from radixrt.forms.llguidance_form import LlguidanceForm, compiled
from radixrt.forms.schema_keywords import (
    for_llguidance,
    llguidance_refusal,
    misread_pattern,
    without_new_lines,
    xgrammar_refusal,
)
from radixrt.forms.trial import Trials, Verdict
from radixrt.forms.vocabulary import Vocabulary
from radixrt.forms.xgrammar_form import XgrammarForm

INSTALL = "pip install 'radixrt[grammar]'"
MAX_KEPT = 4096  # compiled forms
MAX_KEPT_BYTES = 2**29
_MAX_VERDICTS = 2**16
_MAX_REASON = 300  # characters
_MAX_SHARE = 16  # of `max_kept_bytes`, of one form with several beginnings: a 16th

KnownForm = LlguidanceForm | XgrammarForm
_Key = tuple[str, str, bytes]  # engine, kind, and hash of the text


class FormCompiler:
    """Compiles forms for the tokens of one model. Threads may share it: they take turns.

    A form is first tried in a process of its own (`Trials`); what was tried is not tried again. Compiled forms are
    kept, those that were used last, up to `MAX_KEPT` and `MAX_KEPT_BYTES`.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, max_kept: int = MAX_KEPT, max_kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        if find_spec("llguidance") is None:
            raise FormError(f"answers in a form need a package that is not installed: {INSTALL}")
        self._vocabulary = vocabulary
        self._trials = Trials(vocabulary)
        self._lock = threading.Lock()
        self._max_kept, self._max_kept_bytes = max_kept, max_kept_bytes
        self._kept: OrderedDict[_Key, tuple[Any, int]] = OrderedDict()  # with bytes; the last used one is last
        self._kept_bytes = 0
        self._verdicts: dict[_Key, Verdict] = {}

    def compile(self, asked: FormSpec, stop_ids: frozenset[int], num_answers: int = 1) -> KnownForm:
        """The form of some answers, that these tokens end. Raises FormError."""
        with self._lock:
            engine, verdict, key = self._engine_for(asked)
            drawable = frozenset(token for token in stop_ids if token < self._vocabulary.size)
            ends = Ends(drawable, frozenset(self._tokens.eos_tokens))
            made = self._compiled(key, asked, verdict.size + len(asked.text), num_answers)
            kind = LlguidanceForm if engine == LLGUIDANCE else XgrammarForm
            return kind(made, ends, self._vocabulary.size)

    def check(self, asked: FormSpec) -> None:
        """Raise FormError if answers cannot have a form; it is not compiled to be used."""
        with self._lock:
            self._engine_for(asked)

    def _engine_for(self, asked: FormSpec) -> tuple[str, Verdict, _Key]:
        """The first engine that takes a form, and what its trial has found. Raises FormError."""
        reasons: list[str] = []
        for engine in _engines(asked):
            if engine == XGRAMMAR and find_spec(XGRAMMAR) is None:
                reasons.append(f"{XGRAMMAR} is not installed ({INSTALL})")
                continue
            key = (engine, asked.kind, hashlib.blake2b(asked.text.encode(), digest_size=16).digest())
            if (verdict := self._verdict(key, asked)).reason is None:
                return engine, verdict, key
            reasons.append(f"{engine}: {verdict.reason}")
            if verdict.is_bomb:
                break
        raise FormError(f"the {asked.kind} cannot be the form of an answer: {'; '.join(reasons)}")

    def close(self) -> None:
        """End the process that tries forms; the next form starts another."""
        self._trials.close()

    @property
    def num_kept(self) -> int:
        """Compiled forms that are kept."""
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """What these take, as far as trials tell."""
        return self._kept_bytes

    @cached_property
    def _tokens(self) -> Any:
        return token_map(self._vocabulary.as_json)

    @cached_property
    def _xgrammar(self) -> Any:
        return xgrammar_compiler(self._tokens)

    def _verdict(self, key: _Key, asked: FormSpec) -> Verdict:
        if key not in self._verdicts:
            verdict = Verdict(_refusal_by_text(key[0], asked))
            if verdict.reason is None:
                verdict = self._trials.try_form(key[0], asked.kind, _text_for(key[0], asked))
            if verdict.reason is not None:
                verdict = replace(verdict, reason=short(_one_line(verdict.reason), _MAX_REASON))
            if len(self._verdicts) == _MAX_VERDICTS:
                self._verdicts.clear()
            self._verdicts[key] = verdict
        return self._verdicts[key]

    def _compiled(self, key: _Key, asked: FormSpec, size: int, num_answers: int) -> Any:
        """A form of `size` bytes, or as many times that as it has beginnings."""
        made, kept_size = self._kept.pop(key, (None, 0))
        self._kept_bytes -= kept_size
        text, drops_blank = _text_for(key[0], asked), self._vocabulary.drops_blank
        try:
            if key[0] == LLGUIDANCE:
                made = made or compiled(self._tokens, asked.kind, text, drops_blank)
                # A form that takes much memory takes long to compile, too: all of its beginnings have a share.
                made.expect(num_answers, self._max_kept_bytes // _MAX_SHARE // max(1, size))
                size *= len(made.made)
            else:
                made = made or xgrammar_grammar(self._xgrammar, asked.kind, text, drops_blank)
        except Refusal as error:  # where the limits of a run are lower than those of the trial
            raise FormError(f"the {asked.kind} cannot be compiled: {_one_line(str(error))}") from error
        self._kept[key] = (made, size)  # the last one
        self._kept_bytes += size
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_kept or self._kept_bytes > self._max_kept_bytes
        ):
            self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        return made


@lru_cache(maxsize=4)
def form_compiler(vocabulary: Vocabulary) -> FormCompiler:
    """One for all that use the same tokens. Raises FormError where a package is missing."""
    return FormCompiler(vocabulary)


def _engines(asked: FormSpec) -> tuple[str, ...]:
    """Which are tried, one after the other. Of other kinds xgrammar takes nothing that llguidance refuses."""
    if asked.engine != "auto":
        return (asked.engine,)
    has_two = asked.kind == "json_schema" or (asked.kind == "grammar" and "::=" in asked.text)
    return (LLGUIDANCE, XGRAMMAR) if has_two else (LLGUIDANCE,)


def _text_for(engine: str, asked: FormSpec) -> str:
    """What an engine gets."""
    if engine == LLGUIDANCE and asked.kind == "json_schema" and re.search(r"\[\^|\\[<>]", asked.text):
        return json.dumps(for_llguidance(json.loads(asked.text)))
    if engine == XGRAMMAR and asked.kind == "regex":
        return without_new_lines(asked.text)
    return asked.text


def _refusal_by_text(engine: str, asked: FormSpec) -> str | None:
    """Why a form must not go to an engine, which would leave out some of it; or None."""
    if asked.kind == "json_schema":
        schema = json.loads(asked.text)
        return llguidance_refusal(schema) if engine == LLGUIDANCE else xgrammar_refusal(schema)
    if asked.kind == "regex" and engine == XGRAMMAR and (what := misread_pattern(asked.text)):
        return f"{what!r} would be misread"
    return None


def _one_line(reason: str) -> str:
    return " ".join(reason.split())
