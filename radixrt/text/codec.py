"""Codecs: text to token ids and back, without what begins or ends a text."""

# Tests: tests/text/test_tokenizer.py, tests/text/test_real_vocabularies.py

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Any, Protocol

import regex

from radixrt.text.added_token import AddedToken
from radixrt.text.cuts import BLANK, Cuts, NoCuts, divided_by_vocabulary
from radixrt.text.json_cuts import json_cuts

MAX_PIECE = 1024  # characters or bytes of a token
MAX_SIZE = 2**22  # ids of a vocabulary are below; the largest ones have a tenth of it
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@contextmanager
def panics_caught() -> Iterator[None]:
    """Raise ValueError where the package tokenizers panics, as on a text that its regular expressions give up on:
    its class is no Exception, and cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the package tokenizers gives up: {error}") from error


class Codec(Protocol):
    """What a tokenizer does with text and ids. All ids are below `size`; some may be no token.

    Attributes:
        size: one more than the largest id.
        byte_ids: byte-fallback tokens, of one byte each: only a whole run of them has a text.
    """

    @property
    def size(self) -> int: ...

    @property
    def byte_ids(self) -> frozenset[int]: ...

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, on threads. Raises whatever the library raises."""

    def cuts(self) -> Cuts:
        """Where texts may be cut. Raises NoCuts where that cannot be told."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of ids from 0 to `size` - 1; bytes that are not UTF-8 as U+FFFD."""

    def piece(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it."""

    def token_id(self, piece: str) -> int | None:
        """The token that the vocabulary spells so."""

    def serialized(self) -> str | None:
        """As JSON of the package tokenizers; None where it is none of theirs."""

    def token_bytes(self) -> list[bytes | None]:
        """Where there is no JSON, the bytes of each token, None for special ones; else []."""

    def definition(self) -> bytes:
        """All that its ids and texts depend on."""


class JsonCodec:
    """A tokenizer of the package tokenizers, as its JSON says."""

    def __init__(self, backend: Any) -> None:
        """`backend` is theirs; what pads, cuts or draws lots is switched off in it. Raises ValueError for ids that
        are too large.
        """
        backend.no_padding()
        backend.no_truncation()
        if getattr(backend.model, "dropout", None) is not None:
            backend.model.dropout = None
        self._backend = backend
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1  # added tokens may leave gaps: not the count
        if self.size > MAX_SIZE:
            raise ValueError(f"its largest token id is {self.size - 1:,}; it must be below {MAX_SIZE:,}")
        falls_back = backend.decoder is not None and b'"ByteFallback"' in backend.decoder.__getstate__()
        spelled = vocabulary.items() if falls_back else ()
        self.byte_ids = frozenset(i for piece, i in spelled if _BYTE_PIECE.fullmatch(piece))

    def encode(self, texts: list[str]) -> list[list[int]]:
        with panics_caught():
            return [one.ids for one in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def cuts(self) -> Cuts:
        return json_cuts(self._backend)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        with panics_caught():
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> str | None:
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def token_id(self, piece: str) -> int | None:
        found: int | None = self._backend.token_to_id(piece)
        return found

    def serialized(self) -> str | None:
        return str(self._backend.to_str())

    def token_bytes(self) -> list[bytes | None]:
        return []

    def definition(self) -> bytes:
        return str(self._backend.to_str()).encode()

    @property
    def keeps_bytes(self) -> bool:
        """Whether texts should come back as they were: byte-pair encoding has all bytes."""
        return type(self._backend.model).__name__ == "BPE"

    def lead(self) -> tuple[int, ...]:
        """The special tokens that its post-processor puts before a text."""
        with panics_caught():
            if not self._backend.num_special_tokens_to_add(is_pair=False):
                return ()
            text, inner = self._some_text()
            whole: list[int] = self._backend.encode(text, add_special_tokens=True).ids
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return tuple(whole[:start])
        raise ValueError(f"its post-processor makes {whole} of the tokens {inner}")

    def _some_text(self) -> tuple[str, list[int]]:
        """A text and its tokens: not every vocabulary has an "a"."""
        spelled = (self.decode([token_id], True) for token_id in range(self.size))
        for text in chain(("a",), spelled):
            try:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            except Exception:
                continue
            if ids:
                return text, ids
        raise ValueError("it encodes none of its own tokens")


def _is_in_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start] if start else "", text[end : end + 1]
    return any(letter.isalnum() or letter == "_" for letter in before + after)


class SentencePieceModel:
    """The pieces of a sentencepiece model, and what they are."""

    def __init__(self, model: bytes) -> None:
        """Raises ValueError for what is none."""
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        schema: Any = sentencepiece_model_pb2
        self._proto = schema.ModelProto()
        try:
            self._proto.ParseFromString(model)
        except DecodeError as error:
            raise ValueError(f"it is no sentencepiece model: {error}") from error
        kinds = self._proto.SentencePiece
        self._puts_blank = bool(self._proto.normalizer_spec.add_dummy_prefix)  # before a text
        self.pieces: list[str] = [each.piece for each in self._proto.pieces]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        types = [each.type for each in self._proto.pieces]
        self.special = {
            i: self.pieces[i] for i, kind in enumerate(types) if kind in (kinds.CONTROL, kinds.UNKNOWN)
        }
        self.byte_ids = frozenset(i for i, kind in enumerate(types) if kind == kinds.BYTE)
        self.user_defined = {self.pieces[i] for i, kind in enumerate(types) if kind == kinds.USER_DEFINED}
        self.ordinary_ids = frozenset(i for i, kind in enumerate(types) if kind in (kinds.NORMAL, kinds.BYTE))

    @property
    def ends(self) -> dict[str, str]:
        """The tokens that begin and end texts, by their names."""
        spec = self._proto.trainer_spec
        ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id}
        return {name: self.special[i] for name, i in ids.items() if i in self.special}

    def cuts(self, added: Iterable[AddedToken]) -> Cuts:
        """Where texts may be cut, if they spell out `added` tokens. Raises NoCuts."""
        model, normalizer = self._proto.trainer_spec, self._proto.normalizer_spec
        if model.model_type != model.BPE:
            raise NoCuts("a sentencepiece model of this type looks at the whole text")
        has_other_blanks = not normalizer.escape_whitespaces or model.treat_whitespace_as_suffix
        if normalizer.precompiled_charsmap or has_other_blanks:
            raise NoCuts("a sentencepiece model that changes more than blanks looks at the whole text")
        if normalizer.remove_extra_whitespaces and not self._puts_blank:
            raise NoCuts("a sentencepiece model that removes the blanks before a text looks at the whole text")
        own = [AddedToken(piece, False) for piece in self.user_defined]
        steps = [divided_by_vocabulary(self.pieces)]
        return Cuts(_with_blanks, steps, [*own, *added], drops_blank=self._puts_blank)

    def processor(self, *, add_dummy_prefix: bool = True) -> Any:
        """What encodes with it; texts do not begin with a blank without `add_dummy_prefix`, even if it says so."""
        from sentencepiece import SentencePieceProcessor

        self._proto.normalizer_spec.add_dummy_prefix &= add_dummy_prefix
        return SentencePieceProcessor(model_proto=self._proto.SerializeToString())


def _with_blanks(before: str, after: str) -> tuple[str, str]:
    """Two neighbours as sentencepiece has them."""
    return before.replace(" ", BLANK), after.replace(" ", BLANK)


class SentencePieceCodec:
    """A sentencepiece model, and tokens that were added to it.

    A text is cut at tokens that it spells out, and sentencepiece encodes what is between them.
    """

    def __init__(self, model: bytes, added: Mapping[int, AddedToken], *, is_legacy: bool = False) -> None:
        """Texts spell out all of `added`, by id; some may be pieces of the model. A model that begins texts with a
        blank does so after each of them if `is_legacy`, else at the beginning of a text alone.
        """
        self._model = SentencePieceModel(model)
        self._added = dict(sorted(added.items()))
        self._first = self._model.processor()
        self._later = self._first if is_legacy or not added else self._model.processor(add_dummy_prefix=False)
        self._definition = model + repr(([*self._added.items()], is_legacy)).encode()
        self._num_pieces = len(self._model.pieces)
        self.size = max([self._num_pieces, *(i + 1 for i in added)])
        self.byte_ids = self._model.byte_ids
        self._ids = self._model.ids | {token.content: i for i, token in self._added.items()}
        special = {i for i, token in self._added.items() if token.special}
        self._special = (self._model.special.keys() - self._added.keys()) | special
        contents = [token.content for token in self._added.values()]
        self._contents = regex.compile(r"\L<contents>", contents=contents) if contents else None

    def encode(self, texts: list[str]) -> list[list[int]]:
        if self._contents is None:
            whole: list[list[int]] = self._first.encode(texts)
            return whole
        return [self._encode(text) for text in texts]

    def cuts(self) -> Cuts:
        return self._model.cuts(self._added.values())

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for token_id, start, following in self._spelled_out(text):
            ids += [*self._between(text[end:start], at_start=end == 0), token_id]
            end = following
        return ids + self._between(text[end:], at_start=end == 0)

    def _spelled_out(self, text: str) -> Iterator[tuple[int, int, int]]:
        """The added tokens that a text spells out, and where each begins and ends with its blanks."""
        assert self._contents is not None
        end = searched = 0
        while match := self._contents.search(text, searched):
            start, following = match.span()
            token_id = self._ids[match[0]]
            token = self._added[token_id]
            if token.single_word and _is_in_word(text, start, following):
                searched = start + 1
                continue
            while token.lstrip and start > end and text[start - 1].isspace():
                start -= 1
            while token.rstrip and text[following : following + 1].isspace():
                following += 1
            yield token_id, start, following
            end = searched = following

    def _between(self, text: str, *, at_start: bool) -> list[int]:
        found: list[int] = (self._first if at_start else self._later).encode(text) if text else []
        return found

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i not in self._special]
        parts: list[str] = []
        for is_known, run in groupby(ids, self._is_known):
            if is_known:
                parts.append((self._later if parts else self._first).decode(list(run)))
            else:  # the processor spells control tokens as nothing, and fails on added ones
                parts += [self.piece(i) or "" for i in run]
        return "".join(parts)

    def _is_known(self, token_id: int) -> bool:
        """Whether sentencepiece decodes it."""
        return token_id < self._num_pieces and token_id not in self._added and token_id not in self._special

    def piece(self, token_id: int) -> str | None:
        if (token := self._added.get(token_id)) is not None:
            return token.content
        return self._model.pieces[token_id] if token_id < self._num_pieces else None

    def token_id(self, piece: str) -> int | None:
        return self._ids.get(piece)

    def serialized(self) -> str | None:
        return None

    def token_bytes(self) -> list[bytes | None]:
        return [None if i in self._special else self._bytes_of(i) for i in range(self.size)]

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self.piece(token_id) or ""
        if token_id in self.byte_ids:
            return bytes([int(piece[3:5], 16)])
        return (piece if token_id in self._added else piece.replace("▁", " ")).encode()

    def definition(self) -> bytes:
        return self._definition
