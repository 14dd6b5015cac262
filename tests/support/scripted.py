"""A Runtime whose model says given texts: sessions of clients can be told beforehand.

Its engine, forms, parsers and server are the real ones. A text comes token by token, as far as the form of its
request allows it; an answer fails where the form refuses what is to be said next.
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
        prompts: of the requests, as the model sees them.
        requests: as they run.
    """

    texts: deque[str] = field(default_factory=deque)
    prompts: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def says(self, *texts: str) -> None:
        """Begin anew, with these texts."""
        self.texts, self.prompts, self.requests = deque(texts), [], []


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
        text = self.script.texts.popleft()
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False).tolist(), self.end]
        request = replace(request, form=_Said(self.config.vocab_size, request.form, text, tokens))
        self.script.requests.append(request)
        return request


@dataclass(frozen=True)
class _Said:
    """A form that takes one text, as long as the form of the request does."""

    vocab_size: int
    inner: Form | None
    text: str
    tokens: list[int]

    def matcher(self) -> _Matcher:
        return _Matcher(self, None if self.inner is None else self.inner.matcher())

    def joined(self, matchers: Mapping[int, Matcher]) -> Matchers:
        return OneByOne(matchers, _fill_row)


@dataclass
class _Matcher:
    form: _Said
    inner: Matcher | None
    num_said: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_said == len(self.form.tokens) or (self.inner is not None and self.inner.is_complete)

    def push(self, token_id: int) -> None:
        if token_id != self.form.tokens[self.num_said]:
            raise ValueError(f"the form refuses token {self.num_said} of {self.form.text!r}")
        if self.inner is not None:
            self.inner.push(token_id)
        self.num_said += 1

    def forced(self) -> list[int]:
        return []  # each token is an event of a stream


def _fill_row(matcher: _Matcher, masks: Int32Array, row: int) -> None:
    word, bit = divmod(matcher.form.tokens[matcher.num_said], WORD_BITS)
    masks[row] = -1
    if matcher.inner is not None:
        assert matcher.form.inner is not None
        matcher.form.inner.joined({row: matcher.inner}).fill(masks)
    if masks[row].view(np.uint32)[word] >> bit & 1:
        masks[row] = 0
        masks[row].view(np.uint32)[word] = 1 << bit
