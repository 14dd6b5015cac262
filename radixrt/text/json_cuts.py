"""Where texts may be cut for a tokenizer of the package tokenizers, by its normalizers, pre-tokenizers and
vocabulary.
"""

# Tests: tests/text/test_cuts.py

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from radixrt.text.added_token import FLAGS, AddedToken
from radixrt.text.cuts import BLANK, Border, Cuts, Letters, NoCuts, Step, divided_by_vocabulary
from radixrt.text.split_pattern import SplitPattern, UnknownPattern, literal

# As the package's ByteLevel splits texts.
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"\w+|[^\w\s]+"
_FORMS = {"NFC": "NFD", "NFD": "NFD", "NFKC": "NFKD", "NFKD": "NFKD"}  # with what each takes apart first
# Parts of Hangul's syllables: those that begin one, and those that join them.
_LEADING, _JOINING = range(0x1100, 0x1160), range(0x1160, 0x1200)
_TAKING = ("Isolated", "Removed")  # behaviors that divide at both ends of a match


def json_cuts(backend: Any) -> Cuts:
    """The cuts of a tokenizer of the package tokenizers. Raises NoCuts."""
    changes = [*_parts(_state(backend.normalizer), "normalizers")]
    splits = [*_parts(_state(backend.pre_tokenizer), "pretokenizers")]
    if splits and splits[0]["type"] == "Metaspace":  # it begins as a normalizer
        changes.append(splits[0])
    puts = [part for part in changes if "prepend" in part or part.get("prepend_scheme", "never") != "never"]
    if len(puts) > 1 or any(part["type"] == "Metaspace" for part in splits[1:]):
        raise NoCuts("it puts several blanks before a text")
    letters = _letters([found for part in changes if (found := _change(part)) is not None])
    steps = [*map(_step, splits)]
    kinds = [part["type"] for part in splits]
    if "ByteLevel" in kinds:  # what comes after it sees bytes
        steps = [*steps[: kinds.index("ByteLevel") + 1], _crossed]
    else:
        steps.append(_vocabulary(backend))
    prepends, spells_blanks = any("prepend" in part for part in puts), kinds[:1] == ["Metaspace"]
    return Cuts(letters, steps, _added(backend, prepends, spells_blanks), drops_blank=bool(puts))


def _state(part: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return found


def _parts(spec: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """The parts of a pipeline, in their order."""
    if spec is None:
        return
    if spec["type"] != "Sequence":
        yield spec
    else:
        for part in spec[name]:
            yield from _parts(part, name)


def _added(backend: Any, prepends: bool, spells_blanks: bool) -> Iterator[AddedToken]:
    """All added tokens, as they are written and as the normalised text has them.

    The normalizer `prepends` a blank to them as to texts; the first pre-tokenizer `spells_blanks` as the model.
    """
    for token in backend.get_added_tokens_decoder().values():
        own = AddedToken(token.content, *(getattr(token, flag) for flag in FLAGS))
        yield own
        if own.normalized:
            content = own.content if backend.normalizer is None else backend.normalizer.normalize_str(own.content)
            content = content.removeprefix(BLANK) if prepends else content
            yield replace(own, content=content.replace(" ", BLANK) if spells_blanks else content)


# --- normalizers ---


def _change(part: dict[str, Any]) -> Letters | None:
    """What becomes of neighbours; None: nothing, but for what is put before a text."""
    kind = part["type"]
    if kind == "Prepend" and part["prepend"] == BLANK:
        return None
    if kind == "Metaspace" and part["replacement"] == BLANK:
        return _replaced(" ", BLANK)
    if kind in _FORMS:
        return _form(kind)
    if kind == "Replace" and part["pattern"].get("String"):
        return _replaced(part["pattern"]["String"], part["content"])
    if kind == "Lowercase":
        return _lower
    raise NoCuts(f"it normalises texts by {kind}")


def _letters(changes: list[Letters]) -> Letters:
    def letters(before: str, after: str) -> tuple[str, str] | None:
        found: tuple[str, str] | None = (before, after)
        for change in changes:
            if found is not None:
                found = change(*found)
        return found

    return letters


def _form(form: Any) -> Letters:
    apart: Any = _FORMS[form]

    def letters(before: str, after: str) -> tuple[str, str] | None:
        begins = [unicodedata.normalize(apart, letter)[0] for letter in (before, after)]
        if any(map(_joins, begins)) or (form != apart and begins[1] in _composing()):
            return None
        return unicodedata.normalize(form, before)[-1], unicodedata.normalize(form, after)[0]

    return letters


def _joins(letter: str) -> bool:
    """Whether a character, taken apart as far as can be, may join what comes before it."""
    return unicodedata.category(letter)[0] == "M" or ord(letter) in _JOINING


@cache
def _composing() -> frozenset[str]:
    """The characters that some other joins: a text that begins with one may begin with another by what follows."""
    found = {*map(chr, _LEADING)}
    for letter in map(chr, (*range(0xC0, 0xAC00), *range(0xF900, 0x30000))):
        first, *more = unicodedata.decomposition(letter).split() or [""]
        if more and not first.startswith("<"):
            found.add(unicodedata.normalize("NFD", letter)[0])
    return frozenset(found)


def _replaced(what: str, by: str) -> Letters:
    def letters(before: str, after: str) -> tuple[str, str] | None:
        if len(what) == 1 and by:
            return (by[-1] if before == what else before), (by[0] if after == what else after)
        return None if before in what or after in what else (before, after)

    return letters


def _lower(before: str, after: str) -> tuple[str, str] | None:
    small = before.lower(), after.lower()
    has_other = any(len(one) > 1 for one in small) or "Σ" in (before, after)
    return None if has_other else small


# --- pre-tokenizers ---


def _step(part: dict[str, Any]) -> Step:
    kind = part["type"]
    if kind == "Metaspace":
        return _metaspace if part["split"] else _local
    if kind == "Split":
        return _split(part)
    if kind == "ByteLevel":
        own = _by(SplitPattern(_BYTE_LEVEL), "Isolated") if part["use_regex"] else _crossed
        return _before_blanks(own) if part["add_prefix_space"] else own
    if kind in _CLASSES:
        return _CLASSES[kind](part)
    raise NoCuts(f"it splits texts by {kind}")


def _local(before: str, after: str) -> Border:
    return Border.LOCAL


def _crossed(before: str, after: str) -> Border:
    return Border.CROSSED


def _metaspace(before: str, after: str) -> Border:
    return Border.DIVIDED if after == BLANK else Border.LOCAL


def _before_blanks(own: Step) -> Step:
    """A blank is put before each text that begins with none."""
    return lambda before, after: own(before, after) if after == " " else Border.CROSSED


def _split(part: dict[str, Any]) -> Step:
    pattern = part["pattern"]
    try:
        found = SplitPattern(pattern["Regex"]) if "Regex" in pattern else literal(pattern["String"])
    except UnknownPattern as error:
        raise NoCuts(f"it splits texts by {next(iter(pattern.values()))!r}, of which {error}") from error
    return _by(found, part["behavior"])


def _by(pattern: SplitPattern, behavior: str) -> Step:
    """Texts are split at both ends of each match."""

    def step(before: str, after: str) -> Border:
        if not pattern.is_local(before, after):
            return Border.CROSSED
        if behavior in _TAKING:
            is_matched = pattern.always_takes(before) or pattern.always_takes(after)
            return Border.DIVIDED if is_matched else Border.LOCAL
        return Border.CROSSED if pattern.takes(before) or pattern.takes(after) else Border.LOCAL

    return step


def _around(takes: Callable[[str], bool], behavior: str) -> Step:
    """Each character of a class is a match."""

    def step(before: str, after: str) -> Border:
        found = takes(before), takes(after)
        if behavior == "Contiguous":
            return Border.DIVIDED if found[0] is not found[1] else Border.LOCAL if not found[0] else Border.CROSSED
        if not any(found):
            return Border.LOCAL
        return Border.DIVIDED if behavior in _TAKING else Border.CROSSED

    return step


def _is_mark(letter: str) -> bool:
    is_ascii_mark = letter.isascii() and letter.isprintable() and not letter.isalnum() and letter != " "
    return is_ascii_mark or unicodedata.category(letter)[0] == "P"


def _is_number(letter: str) -> bool:
    return unicodedata.category(letter)[0] == "N"


_CLASSES: dict[str, Callable[[dict[str, Any]], Step]] = {
    "Digits": lambda part: _around(_is_number, "Isolated" if part["individual_digits"] else "Contiguous"),
    "Punctuation": lambda part: _around(_is_mark, part["behavior"]),
    "Whitespace": lambda part: _by(SplitPattern(_WORDS), "Removed"),
    "WhitespaceSplit": lambda part: _around(str.isspace, "Removed"),
    "CharDelimiterSplit": lambda part: _around(part["delimiter"].__eq__, "Removed"),
    "BertPreTokenizer": lambda part: _around(lambda letter: letter.isspace() or _is_mark(letter), "Isolated"),
}


# --- the vocabulary ---


def _vocabulary(backend: Any) -> Step:
    """Where the vocabulary has no token across, what is not divided yet may be cut, if merges make the tokens."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.ignore_merges:
        return _crossed
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return _crossed
    return divided_by_vocabulary(backend.get_vocab(with_added_tokens=False))
