"""What a folder says of its tokenizer beside the vocabulary: special and added tokens, BOS, chat templates."""

# Tests: tests/text/test_tokenizer.py

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from radixrt.errors import TokenizerError
from radixrt.text.added_token import FLAGS, AddedToken
from radixrt.text.codec import MAX_SIZE

_STANDARD = ("bos_token", "eos_token", "unk_token", "pad_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_DEFAULT, _WITH_TOOLS = "default", "tool_use"


@dataclass(frozen=True)
class TokenizerConfig:
    """tokenizer_config.json, and the files beside it that older or newer checkpoints have for parts of it.

    Attributes:
        exists: whether there is a tokenizer_config.json.
        named: the content of each special token that has a name, such as "bos_token", by that name.
        special: the contents of all special tokens.
        added: tokens that a text is searched for, by id.
        knows_flags: whether their flags are known; else they are those that tokenizer.json has, if it has some.
        add_bos_token, add_eos_token: whether texts begin and end with these; None: it does not say.
        is_legacy: whether a sentencepiece model begins a text with a blank after each special token, too.
        templates: chat templates by name.
    """

    exists: bool = False
    named: Mapping[str, str] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    knows_flags: bool = True
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    is_legacy: bool = False
    templates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> TokenizerConfig:
        """Read that of a folder. Raises TokenizerError, which names what is bad."""
        file = folder / "tokenizer_config.json"
        given = _object(file)
        named, special, added = _named(given, file.name), _listed(given), _added(given, file.name)
        if "added_tokens_decoder" not in given:  # older checkpoints have files of their own for them
            older = _object(folder / "special_tokens_map.json")
            named |= _named(older, "special_tokens_map.json")
            special |= _listed(older)
            for content, token_id in _object(folder / "added_tokens.json").items():
                if not _is_id(token_id) or not content:
                    raise TokenizerError(f"added_tokens.json gives {content!r} the id {token_id!r}")
                added[token_id] = AddedToken(content, False)
        special |= {*named.values()}
        return cls(
            exists=file.exists(),
            named=named,
            special=frozenset(special),
            added={i: replace(one, special=one.special or one.content in special) for i, one in added.items()},
            knows_flags="added_tokens_decoder" in given,
            add_bos_token=_flag(given, "add_bos_token"),
            add_eos_token=_flag(given, "add_eos_token"),
            is_legacy=_flag(given, "legacy") is True,
            templates=_templates(folder, given),
        )

    @property
    def template(self) -> tuple[str, str] | None:
        """The chat template, and the one for chats with tools, which may be the same. None: there is none, or no
        default among several.
        """
        plain = self.templates.get(_DEFAULT)
        return None if plain is None else (plain, self.templates.get(_WITH_TOOLS, plain))


def _object(file: Path) -> dict[str, Any]:
    """The JSON object of a file; {} where there is no file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file.name} holds no JSON object")
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool | None:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"tokenizer_config.json has {name} {value!r}; it must be true or false")
    return value


def _content(value: object) -> str | None:
    """A token's text, by itself or with flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named(given: Mapping[str, Any], file: str) -> dict[str, str]:
    named = {name: value for name, value in given.items() if name.endswith("_token")}  # some are flags
    found = {name: content for name, value in named.items() if (content := _content(value)) is not None}
    for name in _STANDARD:
        if name not in found and named.get(name) not in (None, ""):
            raise TokenizerError(f"{file} has {name} {str(named[name])[:60]}; it must be a token's text")
    extra = given.get("extra_special_tokens")
    more = {str(name): _content(value) for name, value in extra.items()} if isinstance(extra, dict) else {}
    return found | {name: content for name, content in more.items() if content is not None}


def _listed(given: Mapping[str, Any]) -> set[str]:
    lists = [value for name in _LISTS if isinstance(value := given.get(name), list)]
    return {content for one in lists for value in one if (content := _content(value)) is not None}


def _added(given: Mapping[str, Any], file: str) -> dict[int, AddedToken]:
    tokens = given.get("added_tokens_decoder", {})
    if not isinstance(tokens, dict):
        raise TokenizerError(f"{file} has added_tokens_decoder {str(tokens)[:60]}; it must be an object")
    found: dict[int, AddedToken] = {}
    for name, token in tokens.items():
        token_id = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else -1
        if not _is_id(token_id) or not isinstance(token, dict) or (content := _content(token)) is None:
            raise TokenizerError(f"{file} has the added token {name!r}: {str(token)[:60]}, which is none")
        flags = {flag: token.get(flag, False) for flag in FLAGS}
        if bad := [flag for flag, value in flags.items() if not isinstance(value, bool)]:
            raise TokenizerError(f"{file} has the added token {content!r} with {bad[0]} {flags[bad[0]]!r}")
        found[token_id] = AddedToken(content, **flags)
    return found


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_SIZE


def _templates(folder: Path, given: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own come before what tokenizer_config.json holds, and that before a processor's."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (own := folder / "chat_template.jinja").exists():
        files[_DEFAULT] = own
    if files:
        return {name: _text(path) for name, path in files.items()}
    if "chat_template" not in given:
        given = _object(folder / "chat_template.json")
    template = given.get("chat_template")
    if isinstance(template, str):
        return {_DEFAULT: template}
    if isinstance(template, list):  # with a name each
        template = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
    if not isinstance(template, dict):
        return {}
    return {str(name): text for name, text in template.items() if isinstance(text, str)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path.name} cannot be read: {error}") from error
