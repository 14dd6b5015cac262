"""Output of a benchmark: the terminal, and files that are checked before anything runs."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from radixrt.errors import BatchFileError, ParameterError, RadixrtError
from radixrt.files.path_roles import PathRole, check_apart, check_target

# What files begin with that a benchmark has written, and may replace.
_REPORT, _PICTURE = b'{\n "environment": {', b"\x89PNG"


def check_files(json_file: Path | None, plot_file: Path | None = None) -> None:
    """Raise ParameterError if a file cannot be written, or one is there that no benchmark wrote; RadixrtError if a
    plot cannot be drawn.
    """
    given = (("the report", json_file, _REPORT), ("the picture", plot_file, _PICTURE))
    places = [PathRole(what, file, written=True) for what, file, _ in given if file is not None]
    try:
        for place in places:
            check_target(place.what, place.path)
        check_apart(places)
        for what, file, begins in given:
            if file is not None and file.exists() and _beginning(file, len(begins)) not in (begins, b""):
                raise ParameterError(f"{what} {file} exists and was not written by a benchmark; name another file")
    except (BatchFileError, OSError) as error:
        raise ParameterError(str(error)) from error
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise RadixrtError("a plot needs matplotlib: pip install matplotlib")


def _beginning(file: Path, size: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(size)


def wide_console(width: int) -> Console:
    """The terminal, or a console of this width if there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def figure_table(title: str | None, names: str, *headers: str, **options: Any) -> Table:
    """A table whose first column, under `names`, has names, and the others figures."""
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left", **options)
    table.add_column(names, no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right")
    return table


def told(values: Mapping[str, Any]) -> str:
    """Names and values in a line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def reason_of(error: Exception) -> str:
    """The type of an exception and the first line of its message."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:200]


def write_json(file: Path, report: Mapping[str, Any]) -> None:
    """Write a report of JSON values and paths, its `environment` first."""
    file.write_text(json.dumps(report, indent=1, default=os.fspath) + "\n", encoding="utf-8")
