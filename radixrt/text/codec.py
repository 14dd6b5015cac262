"""Codecs: text to token ids and back, without what begins or ends a text."""

# Tests: tests/text/test_tokenizer.py, tests/text/test_real_vocabularies.py

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


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
        """`backend` is theirs; what pads, cuts or draws lots is switched off in it."""
        backend.no_padding()
        backend.no_truncation()
        if getattr(backend.model, "dropout", None) is not None:
            backend.model.dropout = None
        self._backend = backend
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1  # added tokens may leave gaps: not the count
        falls_back = backend.decoder is not None and b'"ByteFallback"' in backend.decoder.__getstate__()
        spelled = vocabulary.items() if falls_back else ()
        self.byte_ids = frozenset(i for piece, i in spelled if _BYTE_PIECE.fullmatch(piece))

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
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
        """Whether any text comes back as it was, but for Unicode's forms."""
        return bool(self.byte_ids) or type(self._backend.decoder).__name__ == "ByteLevel"

    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that its post-processor puts before and after a text."""
        inner = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return tuple(whole[:start]), tuple(whole[start + len(inner) :])
        raise ValueError(f"its post-processor makes {whole} of the tokens {inner}")


@dataclass(frozen=True)
class AddedToken:
    """A token that texts are searched for before anything else.

    Attributes:
        content: its text.
        special: whether texts without special tokens leave it out.
        lstrip, rstrip: whether it takes the blanks before it, or after it.
        single_word: whether it must not be part of a word.
        normalized: whether the text is searched for it after its normalisation.
    """

    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @property
    def pattern(self) -> str:
        """The regular expression that finds it."""
        found = re.escape(self.content)
        if self.single_word:
            found = rf"(?<!\w){found}(?!\w)"
        return (r"\s*" if self.lstrip else "") + f"({found})" + (r"\s*" if self.rstrip else "")


class SentencePieceCodec:
    """A sentencepiece model, and tokens that were added to it.

    A text is cut at tokens that it spells out, and sentencepiece encodes what is between them.
    """

    def __init__(self, model: bytes, added: Mapping[int, AddedToken], *, is_legacy: bool = False) -> None:
        """Texts spell out all of `added`, by id; some may be pieces of the model. A model that begins texts with a
        blank does so after each of them if `is_legacy`, else at the beginning of a text alone.
        """
        self._model, self._added, self._is_legacy = model, dict(sorted(added.items())), is_legacy
        self._first = _processor(model)
        self._later = self._first if is_legacy else _processor(model, add_dummy_prefix=False)
        self._num_pieces: int = self._first.vocab_size()
        self.size = max([self._num_pieces, *(i + 1 for i in added)])
        self.byte_ids = frozenset(i for i in range(self._num_pieces) if self._first.is_byte(i))
        self._ids = {token.content: i for i, token in self._added.items()}
        longest_first = sorted(self._added.values(), key=lambda token: -len(token.content))
        self._cuts = re.compile("|".join(token.pattern for token in longest_first)) if added else None

    def encode(self, texts: list[str]) -> list[list[int]]:
        if self._cuts is None:
            whole: list[list[int]] = self._first.encode(texts)
            return whole
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        assert self._cuts is not None
        ids: list[int] = []
        end = 0
        for match in self._cuts.finditer(text):
            ids += self._between(text[end : match.start()], at_start=end == 0)
            ids.append(self._ids[match[match.lastindex or 0]])
            end = match.end()
        return ids + self._between(text[end:], at_start=end == 0)

    def _between(self, text: str, *, at_start: bool) -> list[int]:
        found: list[int] = (self._first if at_start else self._later).encode(text) if text else []
        return found

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if not self._is_special(i)]
        parts: list[str] = []
        for is_known, run in groupby(ids, self._is_known):
            if not is_known:  # the processor spells control tokens as nothing, and fails on added ones
                parts += [self.piece(i) or "" for i in run]
            else:
                parts.append((self._later if parts else self._first).decode(list(run)))
        return "".join(parts)

    def _is_special(self, token_id: int) -> bool:
        if (token := self._added.get(token_id)) is not None:
            return token.special
        return token_id < self._num_pieces and bool(
            self._first.is_control(token_id) or self._first.is_unknown(token_id)
        )

    def _is_known(self, token_id: int) -> bool:
        """Whether sentencepiece decodes it."""
        return token_id < self._num_pieces and token_id not in self._added and not self._is_special(token_id)

    def piece(self, token_id: int) -> str | None:
        if (token := self._added.get(token_id)) is not None:
            return token.content
        return str(self._first.id_to_piece(token_id)) if token_id < self._num_pieces else None

    def token_id(self, piece: str) -> int | None:
        if (found := self._ids.get(piece)) is not None:
            return found
        return self._pieces.get(piece)

    @cached_property
    def _pieces(self) -> dict[str, int]:
        """Unlike the processor this tells unknown pieces from the unknown token."""
        return {str(self._first.id_to_piece(i)): i for i in range(self._num_pieces)}

    def serialized(self) -> str | None:
        return None

    def token_bytes(self) -> list[bytes | None]:
        return [None if self._is_special(i) else self._bytes_of(i) for i in range(self.size)]

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added or token_id >= self._num_pieces:
            return (self.piece(token_id) or "").encode()
        piece = str(self._first.id_to_piece(token_id))
        return bytes([int(piece[3:5], 16)]) if token_id in self.byte_ids else piece.replace("▁", " ").encode()

    def definition(self) -> bytes:
        return self._model + repr(([*self._added.items()], self._is_legacy)).encode()

    @property
    def ends(self) -> dict[str, int]:
        """What the model begins and ends texts with."""
        return {"bos_token": self._first.bos_id(), "eos_token": self._first.eos_id()}

    @property
    def special_pieces(self) -> dict[int, str]:
        """The control tokens of the model, and its unknown one."""
        return {i: self._first.id_to_piece(i) for i in range(self._num_pieces) if self._is_special(i)}


def _processor(model: bytes, *, add_dummy_prefix: bool | None = None) -> Any:
    from sentencepiece import SentencePieceProcessor

    if add_dummy_prefix is not None:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        proto: Any = ModelProto.FromString(model)
        proto.normalizer_spec.add_dummy_prefix = add_dummy_prefix
        model = proto.SerializeToString()
    return SentencePieceProcessor(model_proto=model)
