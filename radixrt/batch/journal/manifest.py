"""Identifies a run of a batch, so that another run is not taken for its continuation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from radixrt.version import __version__

_LONGEST_VALUE = 60  # characters of a value in a message
_NOT_GIVEN = "not given"
# Settings that the manifests of older runs lack.
CUTS = "lengths that the context allows"
ENDS = "tokens that end answers"


@dataclass(frozen=True)
class Manifest:
    """Everything that the records of a run depend on. Two runs with equal manifests write the same records.

    The mappings hold JSON values of any depth.

    Attributes:
        num_records: lines of the output.
        input: identifies the input, by a hash of its content.
        weights, tokenizer: identify these.
        parameters: the sampling parameters of lines that give none.
        settings: anything else that records depend on, such as their format or the dtype of the KV.
        radixrt: the version that began the run.
    """

    num_records: int
    input: Mapping[str, Any]
    weights: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    radixrt: str = __version__

    def to_json(self) -> bytes:
        """The manifest as one line of ASCII, without its newline.

        Raises:
            ValueError, TypeError: JSON cannot say it.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """The manifest from its JSON.

        Raises:
            ValueError: it is not that of a manifest.
        """
        try:
            values = json.loads(text)
            manifest = cls(**values)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no manifest: {error}") from error
        if type(manifest.num_records) is not int or manifest.num_records < 0:
            raise ValueError("no manifest: it has no number of records")
        return manifest


def differences(kept: Manifest, own: Manifest) -> list[str]:
    """A phrase for each value in which a kept manifest differs from our own."""
    there, here = dict(_leaves(kept)), dict(_leaves(own))
    for name in (f"settings.{CUTS}", f"settings.{ENDS}"):
        there.setdefault(name, here.get(name, _NOT_GIVEN))
    phrases = []
    for name in dict.fromkeys([*there, *here]):
        a, b = there.get(name, _NOT_GIVEN), here.get(name, _NOT_GIVEN)
        if not _same(a, b):
            differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            phrases.append(f"{name} is {_short(a, differs)} there and {_short(b, differs)} here")
    return phrases


def _leaves(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The path to each value, with the value as JSON."""

    def walk(path: str, value: object) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                yield from walk(f"{path}.{name}" if path else name, item)
        else:
            yield path, json.dumps(value, ensure_ascii=False, sort_keys=True)

    return walk("", json.loads(manifest.to_json()))


def _same(a: str, b: str) -> bool:
    """Whether two values are equal: 1 and 1.0 are, 1 and true are not."""
    if a == b or _NOT_GIVEN in (a, b):
        return a == b
    x, y = json.loads(a), json.loads(b)
    return {type(x), type(y)} == {int, float} and bool(x == y)


def _short(text: str, where: int) -> str:
    """An excerpt of a long text around `where`."""
    if len(text) <= _LONGEST_VALUE:
        return text
    start = max(0, where - _LONGEST_VALUE // 3)
    end = start + _LONGEST_VALUE
    return "..." * (start > 0) + text[start:end] + "..." * (end < len(text))
