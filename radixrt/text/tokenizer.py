"""Text to token ids and back, for the tokenizer of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixrt.errors import TokenizerError

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of one checkpoint; made by `load_tokenizer`.

    Attributes:
        vocab_size: the ids it knows are below this. A model may have more rows, never fewer.
        bos_token_id: the token that begins a text, or None.
        eos_token_id: the token that ends a text, or None.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    _encode: Callable[[list[str]], list[list[int]]]
    _decode: Callable[[list[int], bool], str]

    def encode(self, text: str) -> TokenIds:
        """Token ids of `text`, int32 [num_tokens], with BOS where the checkpoint's tokenizer adds it.

        Special tokens written out in the text (such as `</s>`) become those tokens where the tokenizer is one
        that transformers loads; a bare sentencepiece model takes them as plain text.

        Raises:
            TokenizerError: `text` holds half of a surrogate pair; the message names its position.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """`encode` of each text, quicker than one by one: the tokenizer shares them out over its threads.

        Raises:
            TokenizerError: as `encode`; the message names the first such text's place in the list too.
        """
        for place, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                which = f"text {place}" if len(texts) > 1 else "the text"
                raise TokenizerError(
                    f"{which} holds U+{ord(text[error.start]):04X}, half of a surrogate pair, at character "
                    f"{error.start}; it is not valid Unicode"
                ) from None
        if not texts:
            return []
        return [np.array(ids, dtype=np.int32) for ids in self._encode(list(texts))]

    def decode(
        self, token_ids: Sequence[int] | npt.NDArray[np.integer[Any]], skip_special_tokens: bool = True
    ) -> str:
        """Text of `token_ids` as the tokens spell it: blanks before punctuation are not tidied away.

        Bytes that are not UTF-8 become U+FFFD. Ids from `vocab_size` on spell nothing: a model may have more
        rows than its tokenizer.

        Raises:
            TokenizerError: an id is negative.
        """
        ids = [int(i) for i in token_ids]
        if ids and min(ids) < 0:
            raise TokenizerError(f"token id {min(ids)} at position {ids.index(min(ids))} is negative")
        return self._decode([i for i in ids if i < self.vocab_size], skip_special_tokens)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder or of a hub id.

    A folder with `tokenizer.model` and neither `tokenizer.json` nor `tokenizer_config.json` is read by
    sentencepiece; BOS is added if that model defines one. Everything else is read by transformers. No code
    from the folder is run.

    Raises:
        TokenizerError: there is no such folder, or it holds no tokenizer that can be read.
    """
    folder = Path(source)
    if not folder.is_dir() and (isinstance(source, Path) or not _HUB_ID.fullmatch(source)):
        raise TokenizerError(f"cannot load a tokenizer from {source}: there is no such folder")
    others = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    sentencepiece_model = folder / "tokenizer.model"
    try:
        if sentencepiece_model.exists() and not any(path.exists() for path in others):
            return _load_sentencepiece(sentencepiece_model)
        return _load_transformers(str(folder), local=folder.is_dir())
    except Exception as error:  # whatever the two libraries raise on what they cannot read
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise TokenizerError(f"cannot load a tokenizer from {source}: {cause}") from error


def _load_transformers(source: str, local: bool) -> Tokenizer:
    from transformers import AutoTokenizer  # a third of a second, hence here

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local)

    def encode(texts: list[str]) -> list[list[int]]:
        # verbose=False: the length is the Runtime's business, it refuses what is too long
        ids: list[list[int]] = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        return ids

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        return str(
            tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    size = max(tokenizer.get_vocab().values()) + 1  # added tokens may leave gaps: not len()
    return Tokenizer(size, tokenizer.bos_token_id, tokenizer.eos_token_id, encode, decode)


def _load_sentencepiece(path: Path) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(path))
    bos, eos = processor.bos_id(), processor.eos_id()

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = processor.encode(texts, add_bos=bos >= 0)
        return ids

    def special(token_id: int) -> bool:
        return bool(processor.is_control(token_id) or processor.is_unknown(token_id))

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            return str(processor.decode([i for i in ids if not special(i)]))
        # the processor spells control tokens as nothing
        return "".join(
            "".join(map(processor.id_to_piece, run)) if are_special else processor.decode(list(run))
            for are_special, run in groupby(ids, special)
        )

    return Tokenizer(processor.vocab_size(), bos if bos >= 0 else None, eos if eos >= 0 else None, encode, decode)
