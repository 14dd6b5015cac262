"""Text to token ids and back, for the tokenizer of a checkpoint."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixrt.arrays import Int32Array
from radixrt.cpu_count import usable_cpus
from radixrt.errors import TokenizerError
from radixrt.files.model_files import unusable_file
from radixrt.text.added_token import AddedToken
from radixrt.text.chat import Chat, Message, check_unicode, checked_kwargs
from radixrt.text.chat_template import ChatTemplate
from radixrt.text.codec import Codec, JsonCodec, SentencePieceCodec, SentencePieceModel
from radixrt.text.cuts import Cuts, NoCuts
from radixrt.text.known_words import FEW_PROCESSORS, KnownWords
from radixrt.text.probe import PROBE, check_round_trip
from radixrt.text.tekken import BOS, EOS, read_tekken
from radixrt.text.text_tree import TextTree
from radixrt.text.tokenizer_config import TokenizerConfig
from radixrt.text.tokenizer_json import read_tokenizer_json

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")
_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
_FETCHED = (*_FILES, "*token*.json", "chat_template*", "additional_chat_templates/*", "config.json")

_LONGEST_CAUSE, _LONGEST_EXCERPT = 1000, 60  # characters

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of one checkpoint; made by `load_tokenizer`.

    Attributes:
        codec: what it does with text and ids.
        bos_token_id, eos_token_id: what begins a text, and what ends it.
        lead: the tokens that special tokens before a text are; mostly BOS.
    """

    codec: Codec
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    lead: tuple[int, ...] = ()
    _template: ChatTemplate | None = None
    _template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of chats that do not give them

    @property
    def vocab_size(self) -> int:
        """Its ids are below this; a model may have more rows or fewer."""
        return self.codec.size

    @property
    def byte_ids(self) -> frozenset[int]:
        """Byte-fallback tokens, of one byte each: only a whole run of them has a text."""
        return self.codec.byte_ids

    @cached_property
    def identity(self) -> str:
        """A hash of all that its ids and texts depend on, in hex."""
        return hashlib.sha256(self.codec.definition() + repr((self.lead, self.eos_token_id)).encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32Array:
        """Encode `text` to int32 `[num_tokens]`, with BOS if the checkpoint's tokenizer adds special tokens.

        What the tokenizer puts at the end of texts is left out: a prompt goes on. Special tokens written out in
        the text (such as `</s>`) become those tokens, except in a bare sentencepiece model, where they are plain
        text. Raises TokenizerError for half of a surrogate pair, and for what the vocabulary lacks.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Int32Array]:
        """`encode` each text on the tokenizer's threads, what several begin with once.

        Errors name the text's place in the list, too.
        """
        for place, text in enumerate(texts):
            check_unicode(f"text {place}" if len(texts) > 1 else "the text", text)
        lead = self.lead if add_special_tokens else ()
        if len(texts) > 1 and (tree := self.text_tree(texts)) is not None:
            encode = self.codec.encode if self._words is None else self._words.encode
            with suppress(Exception):  # the package tokenizers raises nothing narrower; what it was is told below
                found = chain.from_iterable(tree.encoded(encode, lead))
                by_number = dict(zip(tree.order, found, strict=True))
                return [by_number[number] for number in range(len(texts))]
        return [np.array([*lead, *ids], dtype=np.int32) for ids in self._encoded(list(texts))]

    def text_tree(self, texts: Sequence[str]) -> TextTree | None:
        """Texts as a tree of what they share; None where it cannot be told where they may be cut."""
        return None if self._cuts is None else TextTree(texts, self._cuts)

    @cached_property
    def _cuts(self) -> Cuts | None:
        try:
            return self.codec.cuts()
        except NoCuts as error:
            _log.info("each text is encoded by itself, also what several begin with: %s", error)
            return None

    @cached_property
    def _words(self) -> KnownWords | None:
        """What encodes stretches of texts faster than the tokenizer itself; None: nothing does."""
        cuts = self._cuts
        if cuts is None or cuts.drops_blank or usable_cpus() > FEW_PROCESSORS:
            return None
        return KnownWords(lambda texts: self.codec.encode(texts), cuts)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, encoded whole."""
        if not texts:
            return []
        try:
            return self.codec.encode(texts)
        except Exception as error:  # the package tokenizers raises nothing narrower
            if len(texts) == 1:
                text = _excerpt(texts[0])
                raise TokenizerError(f"the tokenizer cannot encode {text}: {_cause(error)}") from error
        found = []
        for place, text in enumerate(texts):
            try:
                found += self._encoded([text])
            except TokenizerError as error:
                raise TokenizerError(f"text {place}: {error}") from error
        return found

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
        return (self.codec.piece(int(token_id)) if token_id < self.vocab_size else None) or ""

    def token_id(self, piece: str) -> int | None:
        """The token that the vocabulary spells so, if there is one."""
        return self.codec.token_id(piece)

    def serialized(self) -> str | None:
        """The tokenizer as JSON of the package tokenizers; None where it is none of theirs."""
        return self.codec.serialized()

    def token_bytes(self) -> list[bytes | None]:
        """Where there is no JSON, the bytes of each token, None for special ones; [] where they are not known."""
        return self.codec.token_bytes()

    @cached_property
    def drops_blank(self) -> bool:
        """Whether `decode` drops a blank that a text begins with, as Llama's sentencepiece does."""
        pieces = ((i, self.piece(i)) for i in range(self.vocab_size))
        word = next((i for i, piece in pieces if piece.startswith("▁") and len(piece) > 1), None)
        return word is not None and not self.decode([word]).startswith(" ")

    @cached_property
    def anchor(self) -> int | None:
        """An ordinary token that spells a letter or digit, or None. Tokens after it keep their leading blank."""
        texts = ((i, self.codec.decode([i], True)) for i in range(self.vocab_size) if i not in self.byte_ids)
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
        return self.codec.decode(ids, skip_special_tokens)

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

    tokenizer.json decides, or else tekken.json, or else a sentencepiece model. tokenizer_config.json is asked for
    special and added tokens, BOS and templates alone, whatever class it names. transformers converts what has none
    of the three files. What is not just read is compared with its source on a text of many scripts.

    Raises TokenizerError if there is no such folder, none that can be read in it, or a difference.
    """
    folder = Path(source)
    if not folder.is_dir() and (isinstance(source, Path) or not _HUB_ID.fullmatch(source)):
        raise TokenizerError(f"cannot load a tokenizer from {source}: there is no such folder")
    try:
        if not folder.is_dir():
            folder = _fetched(str(source))
        if (problem := unusable_file(folder)) is not None:
            raise TokenizerError(problem)
        return _read(folder)
    except Exception as error:  # whatever the libraries raise on what they cannot read
        raise TokenizerError(f"cannot load a tokenizer from {source}: {_cause(error)}") from error


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(_FETCHED)))


def _cause(error: Exception) -> str:
    """On one line."""
    return " ".join(str(error).split())[:_LONGEST_CAUSE] or type(error).__name__


def _excerpt(text: str) -> str:
    return repr(text) if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]!r}..."


def _read(folder: Path) -> Tokenizer:
    config = TokenizerConfig.of(folder)
    codec: Codec
    if (file := folder / "tokenizer.json").exists():
        codec = json_codec = read_tokenizer_json(file, config)
        lead = json_codec.lead()
    elif (file := folder / "tekken.json").exists():
        codec, lead, config = _tekken(file, config)
    elif (file := folder / "tokenizer.model").exists():
        codec, lead, config = _sentencepiece(file, config)
    else:
        return _converted(folder, config)
    return _with_special_tokens(codec, lead, config)


def _with_special_tokens(codec: Codec, lead: tuple[int, ...], config: TokenizerConfig) -> Tokenizer:
    ids = {name: codec.token_id(config.named[name]) for name in ("bos_token", "eos_token") if name in config.named}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    if config.add_bos_token and bos is None:
        raise TokenizerError(
            f"add_bos_token is true in tokenizer_config.json, and bos_token is {config.named.get('bos_token')!r}, "
            "which is no token of the vocabulary"
        )
    if config.add_bos_token and bos is not None and bos not in lead:
        lead = (bos, *lead)
    elif config.add_bos_token is False:
        lead = tuple(token_id for token_id in lead if token_id != bos)
    if config.add_eos_token:
        _log.info("the tokenizer ends texts with %r, which prompts go without", config.named.get("eos_token"))
    template = None
    if config.template is not None:
        template = ChatTemplate(*config.template, config.named)
    return Tokenizer(codec, bos, eos, lead, template)


def _tekken(file: Path, config: TokenizerConfig) -> tuple[Codec, tuple[int, ...], TokenizerConfig]:
    named = {"bos_token": BOS, "eos_token": EOS, **config.named}
    return read_tekken(file), (), replace(config, named=named, add_bos_token=config.add_bos_token is not False)


def _sentencepiece(file: Path, config: TokenizerConfig) -> tuple[Codec, tuple[int, ...], TokenizerConfig]:
    """A model alone makes no special tokens of what texts spell. Texts begin with BOS if it has one."""
    data = file.read_bytes()
    model = SentencePieceModel(data)
    named = {**model.ends, **config.named}
    adds_bos = "bos_token" in named if config.add_bos_token is None else config.add_bos_token
    config = replace(config, named=named, add_bos_token=adds_bos)
    added: dict[int, AddedToken] = {}
    if config.exists:
        special = {i for i, piece in enumerate(model.pieces) if i in model.special or piece in config.special}
        known = {*model.pieces, *(token.content for token in config.added.values())}
        for content in config.special - known:
            _log.info("tokenizer_config.json names %r, which is no token of %s", content, file.name)
        for i, token in config.added.items():
            has_other = i in model.ordinary_ids and model.pieces[i] != token.content
            if has_other or model.ids.get(token.content, i) != i:
                told = f"{model.pieces[i]!r} has that" if has_other else f"it has {model.ids[token.content]}"
                raise TokenizerError(
                    f"the added token {token.content!r} is to have the id {i}, but in {file.name} {told}"
                )
        added = {**{i: AddedToken(model.pieces[i], True) for i in special}, **config.added}
    return SentencePieceCodec(data, added, is_legacy=config.is_legacy), (), config


def _converted(folder: Path, config: TokenizerConfig) -> Tokenizer:
    """What transformers makes of other files, such as vocab.json and merges.txt."""
    from tokenizers import Tokenizer as Backend
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    own: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    if not isinstance(own, PreTrainedTokenizerFast):
        raise TokenizerError(f"transformers makes a {type(own).__name__} of it, which has no tokenizer.json")
    codec = JsonCodec(Backend.from_str(own.backend_tokenizer.to_str()))
    if codec.keeps_bytes:
        text = PROBE.replace("▁", "_")  # some spell a blank so
        check_round_trip(codec.decode(codec.encode([text])[0], False), text)
    names = {name: str(token) for name, token in own.special_tokens_map.items() if not isinstance(token, list)}
    return _with_special_tokens(codec, codec.lead(), replace(config, named={**names, **config.named}))
