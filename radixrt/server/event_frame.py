"""Events as bytes: JSON of any text, and what is around it."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from radixrt.batch.formats.strict_json import encoded

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_A_TEXT = uuid4().hex  # that is nowhere else in an event


def json_bytes(value: object) -> bytes:
    """`value` as JSON in UTF-8, which is one line for everybody."""
    return encoded(_json(value))


def event_bytes(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def chunk_of(piece: bytes) -> bytes:
    """A piece of a body, which is not empty, as HTTP/1.1 sends it."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


@dataclass(frozen=True)
class EventFrame:
    """What is around the text in events that differ in a text alone."""

    before: bytes
    after: bytes

    @staticmethod
    def around(value_of: Callable[[str], object]) -> EventFrame:
        """`value_of` gives the value of an event with a text, which is in it once."""
        return EventFrame(*event_bytes(value_of(_A_TEXT)).split(json_bytes(_A_TEXT)))

    def of(self, text: str) -> bytes:
        """The event with this text."""
        return self.before + json_bytes(text) + self.after
