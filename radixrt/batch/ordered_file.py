"""An output file whose lines become ready in any order and stand on disk in theirs."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from radixrt.batch.output_file import OutputFile


class OrderedFile:
    """Lines put at positions 0, 1, 2, ... in any order, written to an OutputFile in theirs.

    A line is written once all before it are. `finish` makes the file durable and gives it its name. Leaving the
    context without `finish` writes the lines that wait behind a gap, in order, and keeps the partial file.

    Raises:
        BatchFileError: as OutputFile.
    """

    def __init__(self, path: str | Path, *, overwrite: bool) -> None:
        self._file = OutputFile(path, overwrite=overwrite)
        self.partial = self._file.partial
        self._waiting: dict[int, bytes] = {}
        self._next = 0

    def __enter__(self) -> OrderedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if not self._file.closed:
                for position in sorted(self._waiting):
                    self._file.write(self._waiting[position])

    def put(self, position: int, line: bytes) -> None:
        """Take the line of `position`, its newline included."""
        self._waiting[position] = line
        while self._next in self._waiting:
            self._file.write(self._waiting.pop(self._next))
            self._next += 1

    def flush(self) -> None:
        """Hand what can be written to the operating system, so that others see it."""
        self._file.flush()

    def finish(self) -> None:
        """Make the partial file durable and give it its name."""
        self._file.finish()
