"""Strict JSON: nothing is guessed when it is read, and every value read can be written."""

# Tests: tests/batch/formats/test_record.py

from __future__ import annotations

import json

from radixrt.checks import finite, object_of, refuse_constant

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
    return encoded(json.dumps(record, ensure_ascii=False, allow_nan=False)) + b"\n"


def encoded(text: str) -> bytes:
    """JSON without new lines in UTF-8, as a line for those, too, who break lines where str.splitlines does."""
    # The escaped characters occur only inside strings; those below U+0020 are escaped anyway. Halves of surrogate
    # pairs have no UTF-8, and Python's escape of them is JSON's.
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return text.encode("utf-8", "backslashreplace")


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite, object_pairs_hook=object_of)
