"""Files that benchmarks write: checked before anything runs, and nothing else is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from radixrt.bench.report import check_files, write_json
from radixrt.errors import ParameterError

PICTURE = b"\x89PNG\r\n\x1a\n..."


def test_what_a_benchmark_wrote_is_replaced(tmp_path: Path) -> None:
    report, picture = tmp_path / "out.json", tmp_path / "out.png"
    check_files(report, picture)
    write_json(report, {"environment": {"torch": "2"}, "options": {}})
    picture.write_bytes(PICTURE)
    check_files(report, picture)
    report.write_bytes(b"")
    check_files(report)
    check_files(None)


@pytest.mark.parametrize("content", [b"{}\n", b'{"environment": {}}', b"precious", PICTURE, b"{"])
def test_another_file_is_no_report(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ParameterError, match=r"the report .*config\.json exists and was not written by"):
        check_files(file)
    assert file.read_bytes() == content


def test_another_file_is_no_picture(tmp_path: Path) -> None:
    write_json(tmp_path / "out.json", {"environment": {}})
    with pytest.raises(ParameterError, match=r"the picture .*out\.json exists and was not written by"):
        check_files(None, tmp_path / "out.json")


def test_one_file_for_both(tmp_path: Path) -> None:
    os.symlink(tmp_path, tmp_path / "same")
    with pytest.raises(ParameterError, match=r"the picture .* is the report; give it another name"):
        check_files(tmp_path / "out", tmp_path / "same" / "out")


def test_no_name_and_no_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.symlink(tmp_path / "out", tmp_path / "link")
    for file, message in (
        (tmp_path, "is in the way of the report"),
        (tmp_path / "fifo", "is in the way of the report"),
        (tmp_path / "link", "is a symbolic link"),
        (tmp_path / "none" / "out", "of the report does not exist"),
        (tmp_path / ("x" * 256), "name too long"),
    ):
        with pytest.raises(ParameterError, match=message):
            check_files(file)
