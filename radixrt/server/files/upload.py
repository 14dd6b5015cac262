"""A form with a file, as it comes: the file goes to disk piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from radixrt.checks import short
from radixrt.server.body import gone
from radixrt.server.limits import Limits
from radixrt.server.refusal import Refusal

_FILE = "file"
_PIECE = 2**20  # bytes, taken apart and written at once
_MAX_FIELD = 1024  # bytes of a value, or of a file's name
_MAX_PARTS = 16


class Form:
    """Takes the body of a multipart form apart. The part "file" goes to `write`, the others become `fields`.

    Attributes:
        fields: by name.
        filename: as the client calls the file; None as long as none has begun.
        is_whole: whether the end of the form has come.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], object]) -> None:
        """Raises Refusal where the body is no multipart form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            told = short(content_type) or "none"
            raise Refusal(400, f"the content type is {told}; it must be multipart/form-data", "invalid_form")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_whole = False
        self._write = write
        self._num_parts = 0
        self._part = ""  # the name of the one that comes
        self._value = bytearray()  # of a field
        self._header, self._disposition, self._header_value = b"", b"", b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._take_header,
                    "on_header_value": self._take_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _no_form(error) from None

    def feed(self, data: bytes) -> None:
        """Take more of the body. Raises Refusal where it is no form, or what `write` raises."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _no_form(error) from None

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise Refusal(400, f"the form has more than {_MAX_PARTS} parts", "invalid_form")
        self._part, self._disposition = "", b""
        self._value.clear()

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header, self._header_value = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        self._part = _text("a name", options.get(b"name", b""))
        if self._part == _FILE:
            if self.filename is not None:
                raise Refusal(400, "the form has two files; it must have one", "invalid_form")
            self.filename = _text("filename", options.get(b"filename", b""))
        elif self._part in self.fields:
            raise Refusal(400, f"the form has {short(self._part)} twice", "invalid_form")

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == _FILE:
            self._write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD:
            raise _too_long(self._part)

    def _end_part(self) -> None:
        if self._part != _FILE:
            self.fields[self._part] = _text(self._part, bytes(self._value))

    def _end(self) -> None:
        self.is_whole = True


async def pieces_in_time(body: AsyncIterable[bytes], limits: Limits) -> AsyncIterator[bytes]:
    """A body in pieces of about a MiB, each of which has its time to come. Raises Refusal."""
    stream, piece, end = body.__aiter__(), bytearray(), time.monotonic() + limits.body_seconds
    while True:
        try:
            more = await asyncio.wait_for(_next(stream), end - time.monotonic())
        except asyncio.TimeoutError:
            told = f"{_PIECE:,} bytes of the file did not come within {limits.body_seconds:g} s"
            raise Refusal(408, told, "timeout") from None
        except ClientDisconnect:
            raise gone() from None
        piece += more or b""
        if more is None or len(piece) >= _PIECE:
            yield bytes(piece)
            piece.clear()
            end = time.monotonic() + limits.body_seconds
        if more is None:
            return


async def receive(
    body: AsyncIterable[bytes], form: Form, limits: Limits, in_thread: Callable[..., Awaitable[None]]
) -> None:
    """Take a form whole; what is long is done by `in_thread`. Raises Refusal or OSError."""
    async for piece in pieces_in_time(body, limits):
        await in_thread(form.feed, piece)
    if not form.is_whole:
        raise Refusal(400, "the form breaks off before its end", "invalid_form")


async def _next(stream: AsyncIterator[bytes]) -> bytes | None:
    async for piece in stream:
        return piece
    return None


def _text(what: str, value: bytes) -> str:
    if len(value) > _MAX_FIELD:
        raise _too_long(what)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Refusal(400, f"{short(what)} in the form is not UTF-8", "invalid_form") from None


def _too_long(what: str) -> Refusal:
    return Refusal(400, f"{short(what)} in the form has more than {_MAX_FIELD:,} bytes", "invalid_form")


def _no_form(error: FormParserError) -> Refusal:
    return Refusal(400, f"the body is no multipart form: {error}", "invalid_form")
