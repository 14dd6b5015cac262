"""Text to token ids and back, for the tokenizer of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixrt.arrays import Int32Array
from radixrt.errors import TokenizerError
from radixrt.files.model_files import unusable_file
from radixrt.text.chat import Chat, Message, check_unicode, checked_kwargs
from radixrt.text.chat_template import ChatTemplate

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")
_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of one checkpoint; made by `load_tokenizer`."""

    vocab_size: int  # its ids are below this; a model may have more rows, never fewer
    bos_token_id: int | None  # begins a text
    eos_token_id: int | None  # ends it
    byte_ids: frozenset[int]  # byte-fallback tokens, of one byte each: only a whole run of them has a text
    _encode: Callable[[list[str], bool], list[list[int]]]
    _decode: Callable[[list[int], bool], str]
    _piece: Callable[[int], str | None]
    _template: ChatTemplate | None = None
    _template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of chats that do not give them
    _serialized: Callable[[], str | None] = lambda: None
    _is_plain: bool = False
    _token_bytes: Callable[[], list[bytes | None]] = list

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32Array:
        """Encode `text` to int32 `[num_tokens]`, with BOS if the checkpoint's tokenizer adds special tokens.

        Special tokens written out in the text (such as `</s>`) become those tokens, except in a bare sentencepiece
        model, where they are plain text. Raises TokenizerError where `text` holds half of a surrogate pair.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Int32Array]:
        """`encode` each text on the tokenizer's threads; errors name the text's place in the list too."""
        for place, text in enumerate(texts):
            check_unicode(f"text {place}" if len(texts) > 1 else "the text", text)
        if not texts:
            return []
        return [np.array(ids, dtype=np.int32) for ids in self._encode(list(texts), add_special_tokens)]

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` and `chat_text` can be called."""
        return self._template is not None

    def template_names(self, text: str) -> bool:
        """Whether the source of the chat template, if there is one, holds this text."""
        return self._template is not None and self._template.holds(text)

    def with_template_kwargs(self, template_kwargs: Mapping[str, Any] | None) -> Tokenizer:
        """This tokenizer, with variables that the chat template gets from now on; those of a chat go before them.

        Raises TokenizerError if they are no JSON, or the template does not use one.
        """
        if not (checked := checked_kwargs(template_kwargs)):
            return self
        self._known_template().check_uses(checked, "chat_template_kwargs have")
        return replace(self, _template_kwargs=checked)

    def encode_chat(self, chat: Chat | Mapping[str, Any] | Sequence[Message]) -> Int32Array:
        """Encode `chat_text` to int32 `[num_tokens]`, with the same errors.

        The template alone decides about BOS, as in transformers' `apply_chat_template`. Special tokens written out
        in a content become those tokens.
        """
        return self.encode(self.chat_text(chat), add_special_tokens=False)

    def chat_text(
        self, chat: Chat | Mapping[str, Any] | Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation, as `Chat.of` takes it, with the checkpoint's chat template, in a sandbox.

        `add_generation_prompt` ends it with the beginning of the assistant's answer, unless the last message is
        continued. Raises TokenizerError if a message is bad, or the template is missing, refuses the messages,
        fails, has no use for something in the chat, tries to leave its sandbox, or passes a limit.
        """
        template, checked = self._known_template(), Chat.of(chat)
        (text,) = template.render([checked], self._template_kwargs, add_generation_prompt=add_generation_prompt)
        if isinstance(text, TokenizerError):
            raise text
        return text

    def chat_texts(self, chats: Sequence[Chat]) -> list[str | TokenizerError]:
        """`chat_text` of many chats at once, which is faster; an error takes the place of its text."""
        return self._known_template().render(chats, self._template_kwargs, add_generation_prompt=True)

    def _known_template(self) -> ChatTemplate:
        if self._template is None:
            raise TokenizerError(
                "this checkpoint's tokenizer has no chat template: give the prompt as text, or add a "
                "chat_template.jinja to the model's folder"
            )
        return self._template

    def piece(self, token_id: int) -> str:
        """A token as the vocabulary spells it, such as `▁the`, `Ġthe` or `<0xE3>`; "" for an unknown id."""
        if token_id < 0:
            raise TokenizerError(f"token id {token_id} is negative")
        return (self._piece(int(token_id)) if token_id < self.vocab_size else None) or ""

    def serialized(self) -> str | None:
        """The tokenizer as JSON of the package tokenizers; None where it is none of theirs."""
        return self._serialized()

    def plain(self) -> str | None:
        """`serialized`, if that decodes as this one does: see `plain_tokenizer`."""
        return self._serialized() if self._is_plain else None

    def token_bytes(self) -> list[bytes | None]:
        """Where there is no JSON, the bytes of each token, None for special ones; [] where they are not known."""
        return self._token_bytes()

    @cached_property
    def drops_blank(self) -> bool:
        """Whether `decode` drops a blank that a text begins with, as Llama's sentencepiece does."""
        pieces = ((i, self.piece(i)) for i in range(self.vocab_size))
        word = next((i for i, piece in pieces if piece.startswith("▁") and len(piece) > 1), None)
        return word is not None and not self.decode([word]).startswith(" ")

    @cached_property
    def anchor(self) -> int | None:
        """An ordinary token that spells a letter or digit, or None. Tokens after it keep their leading blank."""
        texts = ((i, self._decode([i], True)) for i in range(self.vocab_size) if i not in self.byte_ids)
        return next((i for i, text in texts if text.isascii() and text.isalnum()), None)

    def decode(self, token_ids: Sequence[int] | NDArray[np.integer[Any]], skip_special_tokens: bool = True) -> str:
        """Decode `token_ids`, bytes that are not UTF-8 as U+FFFD, without tidying blanks before punctuation away.

        Ids from `vocab_size` on spell nothing; negative ones raise TokenizerError.
        """
        ids = list(map(int, token_ids))
        if ids and min(ids) < 0:
            raise TokenizerError(f"token id {min(ids)} at position {ids.index(min(ids))} is negative")
        if ids and max(ids) >= self.vocab_size:
            ids = [i for i in ids if i < self.vocab_size]
        return self._decode(ids, skip_special_tokens)

    def decode_inside(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str | None:
        """Decode `token_ids` as inside a text: after the anchor. None: there is none, or its text changes."""
        if self.anchor is None:
            return None
        prefix = self.decode([self.anchor], skip_special_tokens)
        text = self.decode([self.anchor, *token_ids], skip_special_tokens)
        return text[len(prefix) :] if text.startswith(prefix) else None


def tokenizer_of(source: str | Path) -> Tokenizer | None:
    """`load_tokenizer`, or None for a folder without one."""
    folder = Path(source)
    if folder.is_dir() and not any(list(folder.glob(name)) for name in _FILES):
        return None
    return load_tokenizer(source)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder or of a hub id; no code from the folder is run.

    A folder with `tokenizer.model` and neither `tokenizer.json` nor `tokenizer_config.json` is read by
    sentencepiece, with BOS if that model defines one; everything else by transformers. Raises TokenizerError if
    there is no such folder, or none that can be read in it.
    """
    folder = Path(source)
    if not folder.is_dir() and (isinstance(source, Path) or not _HUB_ID.fullmatch(source)):
        raise TokenizerError(f"cannot load a tokenizer from {source}: there is no such folder")
    if (problem := unusable_file(folder)) is not None:
        raise TokenizerError(f"cannot load a tokenizer from {source}: {problem}")
    bare, others = folder / "tokenizer.model", ("tokenizer.json", "tokenizer_config.json")
    try:
        if bare.exists() and not any((folder / name).exists() for name in others):
            return _load_sentencepiece(bare)
        return _load_transformers(str(folder), local=folder.is_dir())
    except Exception as error:  # whatever the two libraries raise on what they cannot read
        raise TokenizerError(f"cannot load a tokenizer from {source}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _load_transformers(source: str, local: bool) -> Tokenizer:
    from transformers import AutoTokenizer  # a third of a second, hence here

    own: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local)
    vocabulary: dict[str, int] = own.get_vocab()
    template = None
    with suppress(ValueError):  # there is none, or there are several and no default
        # A checkpoint may have one of its own for tools.
        plain, with_tools = own.get_chat_template(), own.get_chat_template(tools=[{}])
        special = {
            name: str(token) for name, token in own.special_tokens_map.items() if not isinstance(token, list)
        }
        template = ChatTemplate(plain, with_tools, special) if plain else None
    return Tokenizer(
        vocab_size=max(vocabulary.values()) + 1,  # added tokens may leave gaps: not len()
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        byte_ids=byte_ids_of(vocabulary),
        # verbose=False: the Runtime refuses prompts that are too long
        _encode=lambda texts, special: own(
            texts, add_special_tokens=special, return_attention_mask=False, verbose=False
        )["input_ids"],
        _decode=_decoding(own),
        _piece=own.convert_ids_to_tokens,
        _template=template,
        _serialized=partial(_as_json, own),
        _is_plain=_is_plain(own),
    )


def byte_ids_of(vocabulary: Mapping[str, int]) -> frozenset[int]:
    """The byte-fallback tokens."""
    return frozenset(i for spelled, i in vocabulary.items() if _BYTE_PIECE.fullmatch(spelled))


def _decoding(own: Any) -> Callable[[list[int], bool], str]:
    """How a tokenizer of transformers decodes; where that adds nothing to the package tokenizers, without it: of
    the few tokens of a piece of a stream its checks would take most of the time.
    """
    if _is_plain(own):
        backend = own.backend_tokenizer
        return lambda ids, skip: str(backend.decode(ids, skip_special_tokens=skip))
    return lambda ids, skip: str(own.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _is_plain(own: Any) -> bool:
    """Whether a tokenizer of transformers decodes as the package tokenizers does."""
    from transformers import PreTrainedTokenizerFast as Fast

    return isinstance(own, Fast) and type(own).decode is Fast.decode and type(own)._decode is Fast._decode


def _load_sentencepiece(path: Path) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(path))
    bos, eos = processor.bos_id(), processor.eos_id()

    def is_special(token_id: int) -> bool:
        return bool(processor.is_control(token_id) or processor.is_unknown(token_id))

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            return str(processor.decode([i for i in ids if not is_special(i)]))
        # the processor spells control tokens as nothing
        return "".join(
            "".join(map(processor.id_to_piece, run)) if are_special else processor.decode(list(run))
            for are_special, run in groupby(ids, is_special)
        )

    def spelled(token_id: int) -> bytes:
        piece = str(processor.id_to_piece(token_id))
        return bytes([int(piece[3:5], 16)]) if processor.is_byte(token_id) else piece.replace("▁", " ").encode()

    size: int = processor.vocab_size()
    return Tokenizer(
        vocab_size=size,
        bos_token_id=bos if bos >= 0 else None,
        eos_token_id=eos if eos >= 0 else None,
        byte_ids=frozenset(i for i in range(size) if processor.is_byte(i)),
        _encode=lambda texts, special: processor.encode(texts, add_bos=special and bos >= 0),
        _decode=decode,
        _piece=processor.id_to_piece,
        _token_bytes=lambda: [None if is_special(i) else spelled(i) for i in range(size)],
    )


def _as_json(own: Any) -> str | None:
    """A tokenizer of transformers without padding and truncation."""
    backend = getattr(own, "backend_tokenizer", None)
    if backend is None:
        return None
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())
