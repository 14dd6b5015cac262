"""tokenizer.json, as it is written, with the tokens that tokenizer_config.json adds to it."""

# Tests: tests/text/test_tokenizer.py, tests/text/test_real_vocabularies.py

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from radixrt.errors import TokenizerError
from radixrt.text.added_token import FLAGS, AddedToken
from radixrt.text.codec import JsonCodec, panics_caught
from radixrt.text.probe import check_same, probe_without
from radixrt.text.tokenizer_config import TokenizerConfig

# Folders that transformers 4 wrote for Mistral's tekken vocabularies split texts by Llama 3's expression, which
# these were not trained with: https://github.com/huggingface/transformers/issues/42299
OF_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OF_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MANY = 100_000  # tokens: as large are those of tekken
_TWO_DIGITS = re.compile(r"[0-9]{2}")

_log = logging.getLogger(__name__)


def read_tokenizer_json(file: Path, config: TokenizerConfig) -> JsonCodec:
    """The tokenizer that a tokenizer.json describes, with the added and special tokens of `config`.

    Raises TokenizerError where the two contradict each other, and whatever the package tokenizers raises.
    """
    from tokenizers import Tokenizer as Backend

    text = file.read_text(encoding="utf-8")
    with panics_caught():
        source: Any = Backend.from_str(text)
    changed = _changed(source, config)
    is_missplit = _is_missplit(source)
    if not changed and not is_missplit:
        return JsonCodec(source)
    spec: dict[str, Any] = json.loads(text)
    _add(spec, changed)
    if is_missplit:
        _log.info("%s splits texts as Llama 3 does, but has a vocabulary of tekken: they are split as there", file)
        _split_as_tekken(spec)
    with panics_caught():
        codec, plain = JsonCodec(Backend.from_str(json.dumps(spec))), JsonCodec(source)
    for token_id, token in changed.items():
        if codec.token_id(token.content) != token_id or codec.encode([token.content]) != [[token_id]]:
            raise TokenizerError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, but by {file.name} it is "
                f"{codec.encode([token.content])[0]}"
            )
    _log.info("%s has %d tokens that tokenizer_config.json adds or changes", file, len(changed))
    probe = probe_without(token.content for token in changed.values())
    ours, theirs = codec.encode([probe])[0], plain.encode([probe])[0]
    if is_missplit:  # the text must be the same, not its tokens
        ours, theirs = ([ord(letter) for letter in codec.decode(ids, False)] for ids in (ours, theirs))
    check_same(ours, theirs, probe, file.name)
    return codec


def _changed(source: Any, config: TokenizerConfig) -> dict[int, AddedToken]:
    """The added tokens that differ from those of tokenizer.json, by id. Raises TokenizerError."""
    known: Mapping[int, Any] = source.get_added_tokens_decoder()
    have = {i: AddedToken(token.content, *(getattr(token, flag) for flag in FLAGS)) for i, token in known.items()}
    wanted = dict(config.added)
    for token_id, token in config.added.items():
        if (own := source.token_to_id(token.content)) not in (None, token_id):
            raise TokenizerError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, but by tokenizer.json it is "
                f"{own}"
            )
        if not config.knows_flags and token_id in have:
            wanted[token_id] = replace(have[token_id], special=have[token_id].special or token.special)
    listed = {token.content for token in wanted.values()}
    for content in config.special - listed:
        token_id = source.token_to_id(content)
        if token_id is None:
            _log.info("tokenizer_config.json names %r, which is no token of tokenizer.json", content)
        else:
            wanted[token_id] = replace(have.get(token_id, AddedToken(content, True)), special=True)
    return {i: token for i, token in wanted.items() if have.get(i) != token}


def _add(spec: dict[str, Any], tokens: Mapping[int, AddedToken]) -> None:
    contents = {token.content for token in tokens.values()}
    kept = [token for token in spec.get("added_tokens") or [] if token["content"] not in contents]
    new = [{"id": i, **asdict(token)} for i, token in tokens.items()]
    spec["added_tokens"] = sorted([*kept, *new], key=lambda token: int(token["id"]))
    vocabulary = spec["model"].get("vocab")
    if isinstance(vocabulary, dict):  # an added token has the id that it has there; else the next free one
        taken = set(vocabulary.values())
        vocabulary |= {token.content: i for i, token in tokens.items() if i not in taken}


def _is_missplit(source: Any) -> bool:
    """Whether a tekken vocabulary is split as Llama 3's: that one has tokens of two and three digits."""
    if source.pre_tokenizer is None or OF_LLAMA_3 not in _expressions(
        json.loads(source.pre_tokenizer.__getstate__())
    ):
        return False
    vocabulary: dict[str, int] = source.get_vocab(with_added_tokens=False)
    ordinary = vocabulary.keys() - {token.content for token in source.get_added_tokens_decoder().values()}
    return len(ordinary) > _MANY and not any(map(_TWO_DIGITS.search, ordinary))


def _expressions(pre_tokenizer: dict[str, Any]) -> list[str]:
    """The regular expressions of a pre-tokenizer and its parts."""
    parts = [pre_tokenizer, *pre_tokenizer.get("pretokenizers", [])]
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), dict)]
    return [pattern["Regex"] for pattern in patterns if "Regex" in pattern]


def _split_as_tekken(spec: dict[str, Any]) -> None:
    parts = [spec["pre_tokenizer"], *spec["pre_tokenizer"].get("pretokenizers", [])]
    for part in parts:
        if part.get("pattern") == {"Regex": OF_LLAMA_3}:
            part["pattern"] = {"Regex": OF_TEKKEN}
