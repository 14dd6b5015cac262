"""A tokenizer's JSON, made over for forms: any text is spelled by ordinary tokens that the model can draw."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from radixrt.errors import FormError
from radixrt.forms.form_process import marked

_IN_BRACKETS = re.compile("<.*>", re.DOTALL)
_SPELL_BYTES = ("ByteLevel", "ByteFallback")


def for_forms(serialized: str, size: int, end_ids: Collection[int]) -> str:
    """The JSON of a tokenizer (of the package tokenizers) whose tokens that are no text cannot be met in a text.

    These are special tokens, those that end an answer, and added ones in brackets, such as `<think>`, which
    llguidance holds to be special: they are called by names with a mark. Tokens from `size` on, which the model
    cannot draw, are left out. Nothing changes a text before it is spelled: no normalizer, no
    blank before it, none taken by a token beside it. Raises FormError where tokens do not spell bytes.
    """
    made = json.loads(serialized)
    kinds = [decoder.get("type") for decoder in _all(made["decoder"], "decoders")]
    if not set(kinds).intersection(_SPELL_BYTES):
        told = f"its decoder is {' and '.join(map(str, kinds))}" if kinds else "it has no decoder"
        raise FormError(f"this model's tokenizer does not spell bytes, which forms need: {told}")
    added = [token for token in made["added_tokens"] if token["id"] < size]
    hidden = {token["id"] for token in added if token["special"] or _IN_BRACKETS.fullmatch(token["content"])}
    hidden.update(end_ids)
    _rename(made["model"], hidden, size)
    known = {token["id"] for token in added}
    added += [
        {"id": token_id, "content": name, "single_word": False, "normalized": False}
        for name, token_id in _names(made["model"]).items()
        if token_id in hidden - known
    ]
    made["added_tokens"] = [
        token
        | {"special": token["id"] in hidden, "lstrip": False, "rstrip": False}
        | ({"content": marked(token["content"]), "normalized": False} if token["id"] in hidden & known else {})
        for token in added
    ]
    if "ByteFallback" in kinds:
        made["model"]["byte_fallback"] = True
    blanks = [one for one in _all(made["normalizer"], "normalizers") if _is_of_blanks(one)]
    made["normalizer"] = blanks[0] if blanks else None
    for one in _all(made["pre_tokenizer"], "pretokenizers"):
        if one["type"] in ("ByteLevel", "Metaspace"):
            one["add_prefix_space"] = False
        if one["type"] == "Metaspace":
            one["prepend_scheme"] = "never"
    made |= {"post_processor": None, "truncation": None, "padding": None}
    return json.dumps(made, ensure_ascii=False)


def _all(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A step of a tokenizer, or those of a sequence."""
    if step is None:
        return []
    return [one for each in step[inner] for one in _all(each, inner)] if step["type"] == "Sequence" else [step]


def _is_of_blanks(normalizer: Mapping[str, Any]) -> bool:
    """Whether it spells a blank as vocabularies do, and does nothing else."""
    return bool(normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "})


def _names(model: Mapping[str, Any]) -> dict[str, int]:
    """Ids by names; those of Unigram are places in a list."""
    vocab = model["vocab"]
    return vocab if isinstance(vocab, dict) else {name: place for place, (name, _) in enumerate(vocab)}


def _rename(model: dict[str, Any], hidden: Collection[int], size: int) -> None:
    """Mark the names of `hidden` tokens, and leave out what is not below `size`, also in merges."""
    names, vocab = _names(model), model["vocab"]
    gone = {name for name, token_id in names.items() if token_id in hidden or token_id >= size}
    if isinstance(vocab, dict):
        model["vocab"] = {
            marked(name) if name in gone else name: token_id for name, token_id in vocab.items() if token_id < size
        }
    else:
        model["vocab"] = [[marked(name) if name in gone else name, score] for name, score in vocab[:size]]
    if "unk_token" in model:  # which might end an answer: what cannot be spelled is no token
        model["unk_token"] = None
    if gone and "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if gone.isdisjoint((*pair, "".join(pair)))]
