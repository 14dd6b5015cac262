"""Strict JSON: nothing is guessed when it is read, and every value read can be written."""

# Tests: tests/batch/formats/test_record.py

from __future__ import annotations

import json
import math

from radixrt.checks import object_of, refuse_constant, short

_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def loads(data: bytes) -> object:
    """The value of one JSON text in UTF-8.

    Raises:
        ValueError: it is not UTF-8 or not JSON, a key appears twice in an object, or a number is not finite. The
            message continues a sentence whose subject is the text: "is not JSON: ...".
        RecursionError: it nests too deep.
    """
    try:
        value: object = _DECODER.decode(data.decode("utf-8"))
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def dump_line(record: dict[str, object]) -> bytes:
    """One line of JSON in UTF-8, with its newline."""
    # The escaped characters occur only inside strings. str.splitlines would break a line at some of them; halves
    # of surrogate pairs have no UTF-8, and Python's escape of them is JSON's.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def nests_deeper(value: object, limit: int) -> bool:
    """Whether lists and objects nest more than `limit` deep."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return bool(level)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{short(text)} is out of range")
    return value


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite, object_pairs_hook=object_of)
