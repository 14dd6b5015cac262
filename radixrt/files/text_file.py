"""A text file that is checked before the work begins, and written when it is done."""

# Tests: tests/report/test_batch_report.py

from __future__ import annotations

from pathlib import Path

from radixrt.errors import BatchFileError
from radixrt.files.atomic_file import AtomicFile
from radixrt.files.path_roles import PathRole, check_target, written_role


class TextFile:
    """A text file to write; an existing one is replaced.

    Args:
        path: in a folder that exists.
        what: a noun for messages, such as "report".

    Raises:
        BatchFileError: it cannot be written.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._what = what
        check_target(f"the {what}", path)

    @property
    def places(self) -> list[PathRole]:
        """What is written, for `check_apart`."""
        return written_role(f"the {self._what}", self.path)

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
