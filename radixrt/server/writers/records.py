"""What a server and a process that writes its streams tell each other: records of bytes, after their lengths."""

# Tests: tests/server/test_writers.py

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

_HEAD = struct.Struct("<IBI")  # bytes that follow, kind, number of the stream
_ANSWER = struct.Struct("<I")
_END = struct.Struct("<I?")


class Kind(IntEnum):
    """Of a record. The first five are the server's, the others the process's."""

    BEGIN = 0  # a stream, whose connection comes with it
    TOKENS = 1
    END = 2  # of an answer
    FAIL = 3  # the stream ends here
    CLOSE = 4  # the stream has no reader any more
    READY = 5
    OVER = 6  # all of the stream was written
    GONE = 7  # its client has gone or reads nothing, or it cannot be written


def record(kind: Kind, stream: int, content: bytes = b"") -> bytes:
    """A record as it is sent."""
    return _HEAD.pack(len(content), kind, stream) + content


def begin_record(stream: int, value: dict[str, Any]) -> bytes:
    """Of a new stream."""
    return record(Kind.BEGIN, stream, json.dumps(value).encode())


def tokens_record(stream: int, answer: int, token_ids: Sequence[int]) -> bytes:
    """The next tokens of an answer."""
    return record(Kind.TOKENS, stream, struct.pack(f"<I{len(token_ids)}i", answer, *token_ids))


def end_record(stream: int, answer: int, piece: bytes, *, is_last: bool) -> bytes:
    """The end of an answer, with what is written after its text. `is_last`: the stream ends with it."""
    return record(Kind.END, stream, _END.pack(answer, is_last) + piece)


def tokens_of(content: bytes) -> tuple[int, list[int]]:
    """The answer and its tokens."""
    return _ANSWER.unpack_from(content)[0], np.frombuffer(content, "<i4", offset=_ANSWER.size).tolist()


def end_of(content: bytes) -> tuple[int, bool, bytes]:
    """The answer, whether the stream ends with it, and what is written after its text."""
    answer, is_last = _END.unpack_from(content)
    return answer, is_last, content[_END.size :]


def take_records(received: bytearray) -> Iterator[tuple[Kind, int, bytes]]:
    """Take the records that have come whole."""
    start = 0
    while len(received) - start >= _HEAD.size:
        length, kind, stream = _HEAD.unpack_from(received, start)
        if len(received) - start - _HEAD.size < length:
            break
        start += _HEAD.size + length
        yield Kind(kind), stream, bytes(received[start - length : start])
    del received[:start]
