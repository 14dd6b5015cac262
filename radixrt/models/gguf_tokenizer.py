"""The tokenizer of a GGUF file, built from its vocabulary (`tokenizer.ggml.*`): the ids are the model's own.

Before it is written it is compared with its source: one of sentencepiece's vocabularies with sentencepiece itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from radixrt.errors import ModelError, TokenizerError
from radixrt.models.gguf_header import Header
from radixrt.models.gguf_splits import SPLITS
from radixrt.text.added_token import AddedToken
from radixrt.text.probe import BEGINNINGS, PROBE, check_round_trip, check_same

# Types of tokens; all others are normal.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
MAX_PIECE = 1024  # characters
# Ways to make pieces of two others: those of Mistral and Gemma have about 2 for each piece.
MERGES_PER_PIECE, MORE_MERGES = 8, 2**16
# What ends a turn or a text, whatever its type is.
ENDS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
}
# Phi-3's special tokens take the blanks after them, but for these.
_KEEPS_BLANKS = {"<unk>", "<s>", "<|endoftext|>"}
_BLANK = "\u2581"  # how sentencepiece spells one
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of its tokens."""

    kind: str | None  # gpt2, llama, ...
    pieces: list[str]
    types: NDArray[np.integer[Any]]  # `[num_tokens]`
    bos: int | None
    eos: int | None
    unknown: int | None
    adds_bos: bool
    adds_eos: bool

    @classmethod
    def of(cls, header: Header) -> Vocabulary:
        """Raises ModelError where there is none, or the file contradicts itself."""

        def own(name: str, *types: type) -> Any:
            return header.field(f"tokenizer.ggml.{name}", *types)

        kind, pieces = own("model", str), own("tokens", list)
        if not pieces:
            raise ModelError("it has no vocabulary (tokenizer.ggml.tokens)")
        types = own("token_type", np.ndarray)
        if types is None:
            types = np.ones(len(pieces), np.int32)
        if len(types) != len(pieces):
            raise ModelError(f"it has {len(pieces):,} tokens and {len(types):,} types of tokens")
        # As llama.cpp has it where a file does not say.
        is_llama = kind == "llama"
        ids: dict[str, int | None] = {}
        for name, default in _LLAMA_IDS.items():
            ids[name] = header.id(f"tokenizer.ggml.{name}_token_id", len(pieces))
            if ids[name] is None and is_llama and default < len(pieces):
                ids[name] = default
        adds_bos, adds_eos = own("add_bos_token", bool), own("add_eos_token", bool)
        if adds_bos is None:
            split = SPLITS.get(own("pre", str)) if kind == "gpt2" else None
            adds_bos = is_llama or (split is not None and split.adds_bos)
        return cls(
            kind,
            [piece or f"[EMPTY_{number}]" for number, piece in enumerate(pieces)],
            np.where([piece in ENDS for piece in pieces], CONTROL, types),
            **ids,
            adds_bos=adds_bos and ids["bos"] is not None,
            adds_eos=bool(adds_eos) and ids["eos"] is not None,
        )

    def end_tokens(self, header: Header) -> list[int]:
        """Of texts and of turns, sorted."""
        named = {header.id(f"tokenizer.ggml.{name}_token_id", len(self.pieces)) for name in ("eot", "eom")}
        ends = {number for number, piece in enumerate(self.pieces) if piece in ENDS}
        return sorted(ends | _known(*named, self.eos))

    @cached_property
    def special(self) -> set[int]:
        """Ids of tokens that are markers and no text."""
        named = _known(self.eos, self.bos if self.adds_bos else None, self.unknown if self.is_llama else None)
        return named.union(np.flatnonzero(np.isin(self.types, (UNKNOWN, CONTROL))).tolist())

    @property
    def is_llama(self) -> bool:
        """Whether it is one of sentencepiece's, with merges by score."""
        return self.kind == "llama"

    @cached_property
    def ids(self) -> dict[str, int]:
        """By spelling. Raises ModelError where two tokens have one."""
        ids: dict[str, int] = {}
        for number, piece in enumerate(self.pieces):
            if self.is_llama and self.types[number] == USER_DEFINED:
                piece = piece.replace(_BLANK, " ")  # texts are searched for it before blanks are spelled so
            if len(piece) > MAX_PIECE:
                raise ModelError(f"token {number} has {len(piece):,} characters; {MAX_PIECE:,} are supported")
            if (other := ids.setdefault(piece, number)) != number:
                raise ModelError(f"the tokens {other} and {number} are both spelled {piece!r}")
        return ids

    def normal(self) -> dict[str, int]:
        """Those that texts are made of."""
        others = {UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}
        types = self.types.tolist()
        return {piece: i for piece, i in self.ids.items() if types[i] not in others and i not in self.special}


def _known(*ids: int | None) -> set[int]:
    return {each for each in ids if each is not None}


_LLAMA_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def write_tokenizer(vocabulary: Vocabulary, header: Header, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat templates.

    Raises ModelError where the kind of vocabulary or its way of splitting is not supported, or what was built does
    not encode as the file's own tokenizer.
    """
    build = _BUILDERS.get(vocabulary.kind or "")
    if build is None:
        raise ModelError(
            f"its tokenizer is of the kind {vocabulary.kind!r} (tokenizer.ggml.model), which is not "
            f"supported; these are: {', '.join(_BUILDERS)}"
        )
    try:
        tokenizer = build(vocabulary, header)
    except TokenizerError as error:
        raise ModelError(str(error)) from error
    added = _added_tokens(vocabulary, header)
    for is_special, add in ((True, tokenizer.add_special_tokens), (False, tokenizer.add_tokens)):
        add([tokenizers.AddedToken(**asdict(token)) for token in added.values() if token.special is is_special])
    _check_added(tokenizer, added)
    _add_ends(tokenizer, vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_config(vocabulary, added, folder)
    _write_templates(header, folder)


def _byte_level(vocabulary: Vocabulary, header: Header) -> Tokenizer:
    """Of the kind gpt2: texts are split, and bytes merged in the order of the merges."""
    split = SPLITS.get(pre := header.field("tokenizer.ggml.pre", str))
    if split is None:
        raise ModelError(
            f"its tokenizer splits texts as {pre!r} (tokenizer.ggml.pre), which is not supported; "
            f"these are: {', '.join(sorted(SPLITS))}"
        )
    merges: dict[tuple[str, str], None] = {}  # of equal ones the first counts
    for merge in header.field("tokenizer.ggml.merges", list) or []:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ModelError(f"the merge {merge!r} is not of two pieces")
        merges[merge[:cut], merge[cut + 1 :]] = None
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, list(merges), ignore_merges=split.ignores_merges))
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    parts = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    for text in (PROBE, *BEGINNINGS):
        check_round_trip(tokenizer.decode(tokenizer.encode(text).ids), text)
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary, header: Header) -> Tokenizer:
    """Of the kind llama: characters are merged to the piece of the highest score, as sentencepiece does."""
    scores = header.field("tokenizer.ggml.scores", np.ndarray)
    if scores is None or len(scores) != len(vocabulary.pieces):
        raise ModelError("its tokenizer merges by scores (tokenizer.ggml.scores), and lacks them")
    prefix = header.field("tokenizer.ggml.add_space_prefix", bool) is not False
    has_bytes = bool((vocabulary.types == BYTE).any())
    unknown = None if vocabulary.unknown is None else vocabulary.pieces[vocabulary.unknown]
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges_by_score(vocabulary.normal(), scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    spelled = normalizers.Replace(" ", _BLANK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), spelled]) if prefix else spelled
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    # What has a NUL sentencepiece takes apart, and llama.cpp does not.
    pieces = [piece.replace(_BLANK, " ") for piece in vocabulary.normal() if "\0" not in piece]
    texts = [PROBE, *BEGINNINGS, *pieces]
    expected = _processor(vocabulary, scores, prefix, has_bytes).encode(texts)
    for text, encoding, ids in zip(texts, tokenizer.encode_batch_fast(texts), expected, strict=True):
        check_same(encoding.ids, ids, text, "sentencepiece")
    if has_bytes:
        for text in (PROBE, *BEGINNINGS):
            # Its spelling of a blank is read as one.
            check_round_trip(tokenizer.decode(tokenizer.encode(text).ids), text.replace(_BLANK, " "))
    return tokenizer


_BUILDERS: dict[str, Callable[[Vocabulary, Header], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges_by_score(normal: dict[str, int], scores: NDArray[Any]) -> list[tuple[str, str]]:
    """All ways to make a piece of two others: those of a higher score first.

    Of equal scores a longer piece comes first: sentencepiece takes the leftmost pair, which grows there. Raises
    ModelError where there are far more ways than vocabularies that were trained have.
    """
    own = {piece: piece for piece in normal}  # one string for each piece
    limit = MERGES_PER_PIECE * len(normal) + MORE_MERGES
    merges: list[tuple[str, str]] = []
    for piece in sorted(normal, key=lambda piece: (-float(scores[normal[piece]]), -len(piece))):
        cuts = ((own.get(piece[:cut]), own.get(piece[cut:])) for cut in range(len(piece) - 1, 0, -1))
        merges += [(left, right) for left, right in cuts if left is not None and right is not None]
        if len(merges) > limit:
            raise ModelError(
                f"its {len(normal):,} pieces can be made of two others in at least {len(merges):,} ways; "
                f"{limit:,} are supported for so many"
            )
    return merges


def _processor(vocabulary: Vocabulary, scores: NDArray[Any], prefix: bool, has_bytes: bool) -> Any:
    """sentencepiece's own tokenizer of the vocabulary, for texts without added tokens. Raises ModelError."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    proto: Any = vars(sentencepiece_model_pb2)["ModelProto"]()  # made as that module is imported
    types = vocabulary.types.tolist()
    for number, (piece, score) in enumerate(zip(vocabulary.pieces, scores.tolist(), strict=True)):
        if number == vocabulary.unknown:
            kind = UNKNOWN
        elif number in vocabulary.special or types[number] == USER_DEFINED:
            kind = CONTROL if len(piece) > 1 else USER_DEFINED  # a character is its piece, whatever that is
        else:
            kind = types[number] if types[number] in (UNUSED, BYTE) else 1
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = has_bytes
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = prefix
    proto.normalizer_spec.remove_extra_whitespaces = False
    try:
        return SentencePieceProcessor(model_proto=proto.SerializeToString())
    except Exception as error:  # of several kinds, by what is wrong
        raise ModelError(f"sentencepiece cannot use its vocabulary: {error}") from error


def _added_tokens(vocabulary: Vocabulary, header: Header) -> dict[int, AddedToken]:
    """What texts are searched for before anything else, by id."""
    strips = vocabulary.is_llama and header.field("general.architecture") == "phi3"
    user_defined = set(np.flatnonzero(vocabulary.types == USER_DEFINED).tolist())
    return {
        number: AddedToken(
            piece,
            special=number in vocabulary.special,
            rstrip=strips and number in vocabulary.special and piece not in _KEEPS_BLANKS,
        )
        for piece, number in vocabulary.ids.items()
        if number in vocabulary.special or number in user_defined
    }


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Texts begin with BOS and end with EOS, as far as they are to."""
    before = {"bos": vocabulary.bos} if vocabulary.bos is not None and vocabulary.adds_bos else {}
    after = {"eos": vocabulary.eos} if vocabulary.eos is not None and vocabulary.adds_eos else {}
    if added := before | after:
        tokens = [{"id": name, "ids": [i], "tokens": [vocabulary.pieces[i]]} for name, i in added.items()]
        single = [*before, "$A", *after]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)


def _check_added(tokenizer: Tokenizer, added: dict[int, AddedToken]) -> None:
    for number, token in added.items():
        if (ids := tokenizer.encode(token.content).ids) != [number]:
            raise ModelError(f"the token {number}, {token.content!r}, is encoded as {ids}")


def _write_config(vocabulary: Vocabulary, added: dict[int, AddedToken], folder: Path) -> None:
    named = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "unk_token": vocabulary.unknown}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
        **{name: added[i].content for name, i in named.items() if i in vocabulary.special},
        "added_tokens_decoder": {str(i): asdict(token) for i, token in sorted(added.items())},
    }
    text = json.dumps(config, ensure_ascii=False, indent=1)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _write_templates(header: Header, folder: Path) -> None:
    """The chat template, and those for a purpose, such as tools, where the file names them."""
    if (template := header.field("tokenizer.chat_template", str)) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    more = folder / "additional_chat_templates"
    for name in header.field("tokenizer.chat_templates", list) or []:
        template = header.field(f"tokenizer.chat_template.{name}", str)
        if template is not None and _TEMPLATE_NAME.fullmatch(name):
            more.mkdir(exist_ok=True)
            (more / f"{name}.jinja").write_text(template, encoding="utf-8")
