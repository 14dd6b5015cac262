"""Standard output and standard error that are closed, full, or without a reader, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import signalled_batch

COUNT = 40
ARGUMENTS = ["batch", "--input", "in.jsonl", "--output"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(f'{{"prompt": [{n}, 1]}}\n' for n in range(COUNT)))


def shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which "$@" is the command over a runtime without a model."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    own = [sys.executable, signalled_batch.__file__, "none", *arguments]
    line = ["bash", "-o", "pipefail", "-c", command, "bash", *own]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ('"$@" 2>&1 >/dev/null | true', 0),  # the bar and messages have no reader
        ('"$@" 2>&-', 0),
        ('"$@" 2>/dev/full', 0),
        ('"$@" >&-', 0),
        ('"$@" >&- 2>&-', 0),
        ('"$@" >/dev/full', 2),
        ('"$@" | true', 141),
    ],
)
def test_an_output_file_is_whole_whatever_becomes_of_the_messages(command: str, status: int) -> None:
    result = shell(command, *ARGUMENTS, "out.jsonl")
    assert result.returncode == status
    assert len(Path("out.jsonl").read_bytes().splitlines()) == COUNT
    assert sorted(os.listdir()) == ["in.jsonl", "out.jsonl"]
    assert "Traceback" not in result.stderr
    if status == 2:
        assert "the figures of out.jsonl cannot be printed: No space left on device\n" in result.stderr


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ('"$@" | true', 141, "radixrt: error: cannot write standard output: Broken pipe\n"),
        ('"$@" >&-', 2, "radixrt: error: cannot write standard output: it is closed\n"),
        ('"$@" >/dev/full', 2, "radixrt: error: cannot write standard output: No space left on device\n"),
    ],
)
def test_records_on_standard_output(command: str, status: int, said: str) -> None:
    result = shell(command, *ARGUMENTS, "-", "--no-progress")
    assert (result.returncode, result.stderr) == (status, said)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ('"$@" >&-', 2, "radixrt: error: standard output is closed: the answer would be lost\n"),
        ('"$@" >/dev/full', 75, "radixrt: error: cannot write standard output: No space left on device\n"),
        ('"$@" | true', 141, ""),
        ('"$@" 2>&- >&-', 2, ""),
    ],
)
def test_what_is_printed(command: str, status: int, said: str) -> None:
    result = shell(command, "models")
    assert (result.returncode, result.stderr) == (status, said)


def test_ctrl_c_while_modules_are_imported() -> None:
    code = """
import builtins, sys
import radixrt.cli
own = builtins.__import__
def interrupted(name, *args):
    if name == "radixrt.cli.command":
        raise KeyboardInterrupt
    return own(name, *args)
builtins.__import__ = interrupted
sys.exit(radixrt.cli.main(["models"]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "radixrt: interrupted\n")
