"""Random walks through the masks of a form, as a model that knows nothing would answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from radixrt.forms.compiler import FormCompiler, KnownForm
from radixrt.forms.matcher import mask_words
from radixrt.forms.vocabulary import Vocabulary
from radixrt.text.tokenizer import Tokenizer

CLOSING = '"]}'  # the first of these that may come ends the most


def compiler_of(tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]) -> FormCompiler:
    return FormCompiler(Vocabulary(vocab_size, end_ids, tokenizer.serialized(), drops_blank=tokenizer.drops_blank))


def allowed(form: KnownForm, matcher: object) -> list[int]:
    """The tokens that a mask allows; its padding allows none."""
    mask = np.full((1, mask_words(form.vocab_size)), 0x5A5A5A5A, np.int32)
    form.joined({0: matcher}).fill(mask)
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert all(token < form.vocab_size for token in tokens)
    return tokens


def walk(
    form: KnownForm,
    tokenizer: Tokenizer,
    ends: frozenset[int],
    seed: int,
    free: int = 24,
    before: Sequence[int] = (),
    closers: Sequence[str] = (),
) -> str:
    """The text of an answer whose tokens are drawn at random, after `free` of them those that end something, such
    as `closers`; it begins with the tokens `before`.
    """
    draw, matcher, ids = random.Random(seed), form.matcher(), [*before]
    for token in before:
        assert token in allowed(form, matcher)
        matcher.push(token)
    while not matcher.is_complete:
        tokens = allowed(form, matcher)
        assert tokens
        assert len(ids) < 3000
        if len(ids) >= free:
            pieces = [tokenizer.piece(i)[:1] for i in tokens]
            closing = [[i for i in tokens if i in ends], _closer(tokenizer, tokens, ids, closers, draw)]
            closing += [[i for i, piece in zip(tokens, pieces, strict=True) if piece == c] for c in CLOSING]
            tokens = next(filter(None, closing), tokens)
        token = draw.choice(tokens)
        matcher.push(token)
        if token in ends:
            break
        ids.append(token)
    assert set(allowed(form, matcher)) <= ends or matcher.is_complete
    return tokenizer.decode(ids, skip_special_tokens=False)


def _closer(
    tokenizer: Tokenizer, tokens: Sequence[int], ids: Sequence[int], closers: Sequence[str], draw: random.Random
) -> list[int]:
    """Tokens that spell more of a closer; not always one where it has not begun: a text may go on with others."""
    text = tokenizer.decode(ids[-20:], skip_special_tokens=False)
    for closer in closers:
        begun = max(size for size in range(len(closer)) if text.endswith(closer[:size]))
        found = [i for i in tokens if tokenizer.piece(i) in (closer, closer[begun])]
        if found and (begun or draw.random() < 0.2):
            return found
    return []
