"""What an output's name does to its bytes."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from radixrt.batch.formats.compression import check_output_name, encoded
from radixrt.batch.formats.source import read_lines, zstd_module
from radixrt.errors import BatchFileError
from radixrt.files.standard import STANDARD

try:
    ZSTD = zstd_module("the tests")
except BatchFileError:
    ZSTD = None
needs_zstd = pytest.mark.skipif(ZSTD is None, reason="neither Python's own zstd nor backports.zstd is there")

LINES = [b'{"text": "%d"}\n' % (n * n) for n in range(3000)]
NAMES = [
    pytest.param("out.jsonl", bytes, id="plain"),
    pytest.param("out.jsonl.gz", gzip.decompress, id="gzip"),
    pytest.param("out.jsonl.zst", lambda data: ZSTD.decompress(data), id="zstd", marks=needs_zstd),
    pytest.param("out.zstd", lambda data: ZSTD.decompress(data), id="zstd, its long name", marks=needs_zstd),
]
Decompress = Callable[[bytes], bytes]


def encode(path: Path, lines: list[bytes]) -> bytes:
    return b"".join(encoded(path, iter(lines)))


@pytest.mark.parametrize(("name", "decompress"), NAMES)
def test_what_is_written_is_read(tmp_path: Path, name: str, decompress: Decompress) -> None:
    path = tmp_path / name
    path.write_bytes(encode(path, LINES))
    assert decompress(path.read_bytes()) == b"".join(LINES)
    assert [line + b"\n" for _, line in read_lines(path)] == LINES
    if decompress is not bytes:
        assert path.stat().st_size < len(b"".join(LINES)) / 3
    assert encode(tmp_path / f"other {name}", LINES) == path.read_bytes()  # of any name, at any time
    assert decompress(encode(path, [])) == b""


@pytest.mark.parametrize(("name", "decompress"), NAMES[1:])
def test_damage_is_found_by_who_reads(tmp_path: Path, name: str, decompress: Decompress) -> None:
    path = tmp_path / name
    written = encode(path, LINES[:100])
    for position in range(4, len(written)):
        path.write_bytes(written[:position] + bytes([written[position] ^ 0x10]) + written[position + 1 :])
        try:
            lines = [line for _, line in read_lines(path)]
        except BatchFileError:
            continue
        assert b"\n".join(lines) + b"\n" == b"".join(LINES[:100])  # what changed has no meaning


def test_names_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STANDARD, "out", "out.jsonl", "out.gz", Path("out.gz.old")):
        check_output_name(name)
    with pytest.raises(BatchFileError, match=r"records are JSON lines; name it \.jsonl, \.jsonl\.gz or"):
        check_output_name("out.parquet")
    for name in ("out.jsonl.bz2", "out.jsonl.xz", "out.lz4"):
        with pytest.raises(BatchFileError, match=rf"cannot write {name}: .* is not written; name it \.jsonl, .*"):
            check_output_name(name)
    monkeypatch.setitem(sys.modules, "backports", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "compression.zstd", None)  # type: ignore[arg-type]
    for name in ("out.zst", "out.zstd"):
        with pytest.raises(BatchFileError, match=rf"{name} is for zstd, .*pip install backports\.zstd"):
            check_output_name(name)
