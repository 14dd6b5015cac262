"""What a run of a batch is of, so that another is not taken for its continuation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from radixrt.version import __version__

_LONGEST_VALUE = 60  # characters of a value in a message
_NOT_GIVEN = "not given"


@dataclass(frozen=True)
class Manifest:
    """All that the records of a run depend on. Two runs with equal manifests write the same records.

    The mappings hold whatever JSON can say, to any depth.

    Attributes:
        num_records: lines of the output.
        input: what tells this input from others: a hash of its content.
        weights, tokenizer: what tells these from others.
        parameters: the sampling parameters of lines that give none.
        settings: what else a record depends on, such as the format of records or the dtype of the KV.
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
        """The manifest of which this is the JSON.

        Raises:
            ValueError: it is of none.
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
    """What a kept manifest says otherwise than one's own, a phrase for each value."""
    there, here = dict(_leaves(kept)), dict(_leaves(own))
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
    """Some of a long text, what stands at `where` in it."""
    if len(text) <= _LONGEST_VALUE:
        return text
    start = max(0, where - _LONGEST_VALUE // 3)
    end = start + _LONGEST_VALUE
    return "..." * (start > 0) + text[start:end] + "..." * (end < len(text))
