"""An output file that gets its name when it is whole: plain, compressed, on standard output; disks that refuse."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import radixrt
from radixrt.batch.ordered_file import OrderedFile
from radixrt.batch.output_file import OutputFile
from radixrt.batch.source import STANDARD, read_lines, zstd_module
from radixrt.errors import BatchFileError

try:
    ZSTD = zstd_module("the tests")
except BatchFileError:
    ZSTD = None
needs_zstd = pytest.mark.skipif(ZSTD is None, reason="neither Python's own zstd nor backports.zstd is there")

HOME = Path(radixrt.__file__).resolve().parent.parent
LINES = [b'{"text": "%d"}\n' % (n * n) for n in range(3000)]
NAMES = [
    pytest.param("out.jsonl", bytes, id="plain"),
    pytest.param("out.jsonl.gz", gzip.decompress, id="gzip"),
    pytest.param("out.jsonl.zst", lambda data: ZSTD.decompress(data), id="zstd", marks=needs_zstd),
    pytest.param("out.zstd", lambda data: ZSTD.decompress(data), id="zstd, its long name", marks=needs_zstd),
]
names = pytest.mark.parametrize(("name", "decompress"), NAMES)
Decompress = Callable[[bytes], bytes]


def write(path: Path, lines: list[bytes] = LINES, **more: Any) -> bytes:
    with OutputFile(path, **{"overwrite": False, **more}) as file:
        for line in lines:
            file.write(line)
        assert not path.exists() or more
        file.finish()
        assert file.closed
    return path.read_bytes()


@names
def test_what_is_written_is_read(tmp_path: Path, name: str, decompress: Decompress) -> None:
    path = tmp_path / name
    written = write(path)
    assert decompress(written) == b"".join(LINES)
    assert [line + b"\n" for _, line in read_lines(path)] == LINES
    if decompress is not bytes:
        assert len(written) < len(b"".join(LINES)) / 3
    assert write(path, overwrite=True) == written  # at any time
    assert decompress(write(path, [], overwrite=True)) == b""
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(("name", "decompress"), NAMES[1:])
def test_damage_is_found_by_who_reads(tmp_path: Path, name: str, decompress: Decompress) -> None:
    path = tmp_path / name
    written = write(path, LINES[:100])
    assert decompress(written) == b"".join(LINES[:100])
    for position in range(4, len(written)):
        path.write_bytes(written[:position] + bytes([written[position] ^ 0x10]) + written[position + 1 :])
        try:
            lines = [line for _, line in read_lines(path)]
        except BatchFileError:
            continue
        assert b"\n".join(lines) + b"\n" == b"".join(LINES[:100])  # what changed has no meaning


@names
@pytest.mark.parametrize("count", [0, 1, len(LINES)])
def test_what_is_not_finished_can_be_read_to_its_end(
    tmp_path: Path, name: str, decompress: Decompress, count: int
) -> None:
    (tmp_path / name).write_bytes(b"the one before")
    with OutputFile(tmp_path / name, overwrite=True) as file:
        for line in LINES[:count]:
            file.write(line)
    assert file.closed
    assert file.partial == tmp_path / f"{name}.partial"
    assert decompress(file.partial.read_bytes()) == b"".join(LINES[:count])
    assert (tmp_path / name).read_bytes() == b"the one before"
    with pytest.raises(BatchFileError, match=r"cannot write .*\.partial: File exists"):
        OutputFile(tmp_path / name, overwrite=False)


def test_flushed_lines_are_seen(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out", overwrite=False) as file:
        file.write(b"a\n")
        file.flush()
        assert file.partial is not None
        assert file.partial.read_bytes() == b"a\n"


def test_names_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatchFileError, match=r"records are JSON lines; name it \.jsonl, \.jsonl\.gz or"):
        OutputFile(tmp_path / "out.parquet", overwrite=True)
    monkeypatch.setitem(sys.modules, "backports", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "compression.zstd", None)  # type: ignore[arg-type]
    with pytest.raises(BatchFileError, match=r"out\.zst is for zstd, .*pip install backports\.zstd"):
        OutputFile(tmp_path / "out.zst", overwrite=True)
    with pytest.raises(BatchFileError, match=r"cannot write .*: No such file"):
        OutputFile(tmp_path / "no" / "out", overwrite=True)
    assert os.listdir(tmp_path) == []


@names
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_every_call_that_fails_is_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, decompress: Decompress, call: str
) -> None:
    """The n-th one, for every n that there is: the file is the old one, but where only its folder fails."""
    (tmp_path / name).write_bytes(b"the one before")
    real, outcomes = getattr(os, call), []
    for failing in range(10):
        calls = 0

        def refuse(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > failing:  # noqa: B023
                raise OSError(28, "No space left on device")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            try:
                write(tmp_path / name, overwrite=True)
            except BatchFileError as error:
                outcomes.append(str(error))
            else:
                break
        assert calls == failing + 1  # nothing was tried again
        if call == "replace" or failing == 0:
            assert (tmp_path / name).read_bytes() == b"the one before"
            assert decompress((tmp_path / f"{name}.partial").read_bytes()) == b"".join(LINES)
    assert len(outcomes) == {"fsync": 2, "replace": 1}[call]
    assert set(outcomes) == {f"cannot write {tmp_path / name}.partial: No space left on device"}
    assert decompress((tmp_path / name).read_bytes()) == b"".join(LINES)


@names
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk(tmp_path: Path, name: str, decompress: Decompress) -> None:
    (tmp_path / f"{name}.partial").symlink_to("/dev/full")
    with pytest.raises(BatchFileError, match=r"cannot write .*\.partial: No space left"):
        write(tmp_path / name, overwrite=True)
    assert not (tmp_path / name).exists()
    with OutputFile(tmp_path / name, overwrite=True) as file:
        with pytest.raises(BatchFileError, match=r"cannot write .*\.partial: No space left"):
            write_for_ever(file)
        assert file.closed
    assert not (tmp_path / name).exists()


def write_for_ever(file: OutputFile) -> None:
    while True:
        file.write(os.urandom(10_000))


def test_lines_that_wait_are_kept_when_it_is_left(tmp_path: Path) -> None:
    with OrderedFile(tmp_path / "out.gz", overwrite=False) as file:
        for position in (3, 0, 2):
            file.put(position, b"%d\n" % position)
    assert gzip.decompress((tmp_path / "out.gz.partial").read_bytes()) == b"0\n2\n3\n"


# -- standard output ---------------------------------------------------------------------------------------


def test_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with OutputFile(STANDARD, overwrite=False) as file:
        assert file.partial is None
        file.write(b"\xff\n")
        file.flush()
        assert capfdbinary.readouterr().out == b"\xff\n"
        file.write(b"a\n")
        file.finish()
    os.write(1, b"behind\n")  # it is not closed
    assert capfdbinary.readouterr().out == b"a\nbehind\n"


def test_what_was_printed_before_stays_before() -> None:
    code = """
from radixrt.batch.output_file import OutputFile
print("before")
with OutputFile("-", overwrite=False) as file:
    file.write(b"record\\n")
    file.finish()
print("behind")
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=HOME, env=buffered, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("before\nrecord\nbehind\n", "")


def test_standard_output_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BatchFileError, match="cannot write standard output: "):
        OutputFile(STANDARD, overwrite=False)  # what capsys puts there is no file
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(BatchFileError, match="cannot write standard output: it is closed"):
        OutputFile(STANDARD, overwrite=False)


def test_a_reader_that_goes_away() -> None:
    code = """
import sys
from radixrt.batch.output_file import OutputFile
from radixrt.errors import BatchFileError
try:
    with OutputFile("-", overwrite=False) as file:
        for _ in range(100_000):
            file.write(b"x" * 100)
except BatchFileError as error:
    sys.stderr.write(str(error))
    sys.exit(2)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=HOME, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == "cannot write standard output: Broken pipe"
    assert process.wait() == 2
    process.stderr.close()
