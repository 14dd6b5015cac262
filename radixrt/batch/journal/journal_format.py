"""The format of a journal, line by line.

    radixrt-journal 1 <TAB> crc32 <TAB> manifest  the first line; the manifest is JSON
    crc32 <TAB> position <TAB> record             one for each finished record, in the order in which they finished
    crc32 <TAB> synced <TAB>                      all lines before it were on the disk when this one was written
    crc32 <TAB> finished <TAB>                    all records are here; the output is made, or will be

Each ends with a newline and holds no other. The position is the record's place in the output, from 0. crc32 is
zlib's, as 8 hexadecimal digits, of the rest of the line after its tab, without the newline. Other programs can
read a journal while it grows. This prints the output of a whole one:

    awk -F '\\t' '$2 ~ /^[0-9]+$/' journal | sort -s -t "$(printf '\\t')" -k 2,2n | cut -f 3-

After a kill or a power cut anything may come after the last `synced`. It is good up to the first line with a wrong
checksum. A wrong line before the last `synced` is damage.
"""

# Tests: tests/batch/journal/test_journal.py

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

from radixrt.batch.journal.manifest import Manifest
from radixrt.files.disk import Disk

VERSION = 1
SYNCED = b"synced"
FINISHED = b"finished"

BLOCK_BYTES = 4 * 2**20  # read at once
_HEADER = re.compile(rb"radixrt-journal ([0-9]{1,9})\t(?:([0-9a-f]{8})\t(.*))?", re.DOTALL)
_LINE = re.compile(rb"([0-9a-f]{8})\t(0|[1-9][0-9]{0,17}|synced|finished)\t")


class OtherFormatError(ValueError):
    """A journal is of another format.

    Attributes:
        version: of that format.
    """

    def __init__(self, version: int) -> None:
        super().__init__(f"it is of format {version}")
        self.version = version


def header_line(manifest: Manifest) -> bytes:
    """The first line of the journal of a run."""
    text = manifest.to_json()
    return b"radixrt-journal %d\t%08x\t%s\n" % (VERSION, zlib.crc32(text), text)


def parse_header(line: bytes) -> Manifest:
    """The manifest in a first line without its newline.

    Raises:
        OtherFormatError: it is a first line of another format.
        ValueError: it is none, or has been altered.
    """
    match = _HEADER.match(line)
    if match is None:
        raise ValueError("no first line of a journal")
    version, checksum, text = match.groups()
    if int(version) != VERSION:
        raise OtherFormatError(int(version))
    if text is None or int(checksum, 16) != zlib.crc32(text):
        raise ValueError("its checksum is not right")
    return Manifest.from_json(text)


def journal_line(kind: bytes, rest: bytes = b"\n") -> bytes:
    """A line of a kind, which is SYNCED, FINISHED or the digits of a position; `rest` ends with the newline."""
    body = b"%s\t%s" % (kind, rest)
    return b"%08x\t%s" % (zlib.crc32(memoryview(body)[:-1]), body)


def parse_line(line: bytes) -> tuple[bytes, int] | None:
    """The kind of a line without its newline, and where its rest begins; None if the line was altered."""
    match = _LINE.match(line)
    if match is None or int(match[1], 16) != zlib.crc32(memoryview(line)[9:]):
        return None
    return match[2], match.end()


def whole_lines(disk: Disk, fd: int) -> Iterator[bytes]:
    """The complete lines of a file, without their newlines."""
    offset, rest = 0, b""
    while block := disk.pread(fd, max(BLOCK_BYTES, len(rest)), offset):
        offset += len(block)
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
