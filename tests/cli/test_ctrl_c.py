"""Ctrl-C from the first import of the command's process to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Makes the process press Ctrl-C when a module is looked for, or at its end. Python runs it before anything else.
SITE = """
import atexit, os, signal, sys

class Presses:
    def find_spec(name, path=None, target=None):
        if name == {moment!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses)
if {moment!r} == "the end":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""
SCRIPT = "import sys\nfrom radixrt.cli import main\nsys.exit(main())\n"  # as pip makes it


def started(folder: Path, moment: str, by: str, ignored: bool = False) -> subprocess.Popen[str]:
    (folder / "sitecustomize.py").write_text(SITE.format(moment=moment))
    (folder / "radixrt").write_text(SCRIPT)
    route = [str(folder / "radixrt")] if by == "script" else ["-m", "radixrt"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    try:
        return subprocess.Popen(
            [sys.executable, *route, "models"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("by", ["script", "module"])
@pytest.mark.parametrize(
    "moment", ["radixrt.version", "radixrt.cli", "argparse", "radixrt.files.standard", "radixrt.models", "the end"]
)
def test_one_line_whenever_it_comes(moment: str, by: str, tmp_path: Path) -> None:
    process = started(tmp_path, moment, by)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "radixrt: interrupted\n")
    assert ("LlamaForCausalLM" in out) == (moment == "the end")


@pytest.mark.parametrize("by", ["script", "module"])
def test_it_may_be_ignored(by: str, tmp_path: Path) -> None:
    """As shells do for what they start in the background."""
    process = started(tmp_path, "argparse", by, ignored=True)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert "LlamaForCausalLM" in out


@pytest.mark.long
@pytest.mark.parametrize("delay", [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0])
def test_at_any_moment_of_a_longer_command(delay: float, tmp_path: Path) -> None:
    """Counted from the first line of Python that is not Python's own."""
    (tmp_path / "radixrt").write_text(SCRIPT)
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'begins\\n')\n")
    arguments = ["generate", "Who?", "--max-new-tokens", "1000", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "radixrt"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "begins\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "radixrt: interrupted\n")


def test_a_program_that_imports_the_package_keeps_its_own() -> None:
    code = "import signal, radixrt.cli; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n"
