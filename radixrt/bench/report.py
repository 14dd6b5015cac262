"""Output of a benchmark: the terminal, and files that are checked before anything runs."""

# Tests: tests/bench/test_throughput.py

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from radixrt.errors import ParameterError, RadixrtError


def check_files(json_file: Path | None, plot_file: Path | None = None) -> None:
    """Raise ParameterError if a file cannot be written, RadixrtError if a plot cannot be drawn."""
    for file in (json_file, plot_file):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ParameterError(f"{file} cannot be written: it is a folder, or its folder does not exist")
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise RadixrtError("a plot needs matplotlib: pip install matplotlib")


def wide_console(width: int) -> Console:
    """The terminal, or a console of this width if there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def reason_of(error: Exception) -> str:
    """The type of an exception and the first line of its message."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:200]


def write_json(file: Path, report: Mapping[str, Any]) -> None:
    """Write a report of JSON values."""
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
