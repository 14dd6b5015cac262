"""A Runtime whose model wants to say given texts: clients' sessions can be told beforehand.

Its engine, its forms, its parsers and its server are the real ones. What it wants to say is drawn as far as the
request's form allows it; otherwise the model, which is tiny and random, draws by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.assembly import assemble
from radixrt.config import RuntimeConfig
from radixrt.forms.matcher import WORD_BITS, Form, Matcher, Matchers, OneByOne
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.runtime import Runtime
from radixrt.schedule.request import Request
from radixrt.text.tokenizer import Tokenizer
from tests.support.chat_templates import HERMES
from tests.support.checkpoints import llama, write
from tests.support.small_tokenizers import chat_tokenizer

CONTEXT = 4096
END = "<|im_end|>"


@dataclass
class Script:
    """What the model says, and what it is asked.

    Attributes:
        texts: to be said, one for each request in the order in which they come.
        refused: what it wanted to say next where the form did not allow that.
        prompts: of the requests, as the model sees them.
        requests: as they run.
    """

    texts: deque[str] = field(default_factory=deque)
    refused: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def says(self, *texts: str) -> None:
        """Begin anew, with these texts."""
        self.texts = deque(texts)
        self.refused, self.prompts, self.requests = [], [], []

    def check_said(self) -> None:
        """All was said as it was to be."""
        assert not self.texts
        assert not self.refused


def scripted_runtime(folder: Path, script: Script, template: str = HERMES) -> Runtime:
    """A Runtime that says what the script has."""
    tokenizer = chat_tokenizer(folder, template)
    (end,) = tokenizer.encode(END, add_special_tokens=False).tolist()
    write(llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=CONTEXT), folder, eos=end)
    parts = assemble(RuntimeConfig(str(folder), device="cpu", max_total_tokens=2 * CONTEXT))
    made = {one.name: getattr(parts.builder, one.name) for one in fields(RequestBuilder)}
    return Runtime.from_parts(replace(parts, builder=_Builder(**made, script=script, end=end)))


@dataclass(eq=False)
class _Builder(RequestBuilder):
    script: Script = field(default_factory=Script)
    end: int = 0

    def build(self, *arguments: Any, **options: Any) -> Request:
        request = super().build(*arguments, **options)
        assert self.tokenizer is not None
        self.script.prompts.append(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        wanted = _Wanted(self.script, self.script.texts.popleft(), self.tokenizer, self.end)
        request = replace(request, form=_Said(self.config.vocab_size, request.form, wanted))
        self.script.requests.append(request)
        return request


@dataclass(frozen=True)
class _Wanted:
    script: Script
    text: str
    tokenizer: Tokenizer
    end: int

    def next_after(self, tokens: list[int]) -> int | None:
        """The token that is to follow; None where something else was said."""
        told = self.tokenizer.decode(tokens, skip_special_tokens=False)
        if not self.text.startswith(told):
            return None
        rest = self.tokenizer.encode(self.text[len(told) :], add_special_tokens=False) if told != self.text else ()
        return int(rest[0]) if len(rest) else self.end


@dataclass(frozen=True)
class _Said:
    """A form in which what is wanted comes, as long as the form of the request allows that."""

    vocab_size: int
    inner: Form | None
    wanted: _Wanted

    def matcher(self) -> _Matcher:
        return _Matcher(self, None if self.inner is None else self.inner.matcher())

    def joined(self, matchers: Mapping[int, Matcher]) -> Matchers:
        return OneByOne(matchers, _fill_row)


@dataclass
class _Matcher:
    form: _Said
    inner: Matcher | None
    tokens: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.inner is not None and self.inner.is_complete

    def push(self, token_id: int) -> None:
        if self.inner is not None:
            self.inner.push(token_id)
        self.tokens.append(token_id)

    def forced(self) -> list[int]:
        return []  # each token is an event of a stream


def _fill_row(matcher: _Matcher, masks: Int32Array, row: int) -> None:
    form, wanted = matcher.form, matcher.form.wanted
    masks[row] = -1
    if matcher.inner is not None:
        assert form.inner is not None
        form.inner.joined({row: matcher.inner}).fill(masks)
    token = wanted.next_after(matcher.tokens)
    if token is None:
        return
    if not masks[row, token // WORD_BITS] >> token % WORD_BITS & 1:
        told = wanted.tokenizer.decode(matcher.tokens, skip_special_tokens=False)
        wanted.script.refused.append(wanted.text[len(told) :])
        return
    masks[row] = 0
    masks[row].view(np.uint32)[token // WORD_BITS] = 1 << token % WORD_BITS

