"""A text file that is checked before the work begins, and written when it is done."""

# Tests: tests/report/test_batch_report.py

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from radixrt.errors import BatchFileError
from radixrt.files.atomic_file import AtomicFile
from radixrt.files.standard import STANDARD


class TextFile:
    """A text file to write; an existing one is replaced.

    Args:
        path: in a folder that exists.
        what: a noun for messages, such as "report".
        others: files that it must not replace, by their nouns; "-" is standard input or output.

    Raises:
        BatchFileError: it cannot be written, or must not be.
    """

    def __init__(self, path: Path, what: str, others: Mapping[str, str | Path]) -> None:
        self.path = path
        self._what = what
        if not path.parent.is_dir():
            raise BatchFileError(f"the folder {path.parent} of the {what} does not exist; make it first")
        if path.exists() and not path.is_file():
            raise BatchFileError(f"{path} is in the way of the {what} and is not a plain file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise BatchFileError(f"the {what} {path} cannot be written: no files can be made in {path.parent}")
        for name, other in others.items():
            if other != STANDARD and _is_same(path, Path(other)):
                raise BatchFileError(f"the {what} {path} is the batch's {name}; give it another name")

    def write(self, text: str) -> None:
        """Write the text in one step, in UTF-8.

        Raises:
            BatchFileError: the disk refuses.
        """
        try:
            with AtomicFile(self.path) as file:
                file.write(text.encode("utf-8", "backslashreplace"))
                file.finish()
        except OSError as error:
            raise BatchFileError(
                f"cannot write the {self._what} {self.path}: {error.strerror or error}"
            ) from error


def _is_same(path: Path, other: Path) -> bool:
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()
