"""The folder of all that a server keeps for its clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from radixrt.batch.journal.run_lock import RunLock
from radixrt.errors import ParameterError
from radixrt.files.disk import DISK

_NO_TENANT = "no-key"  # where no keys are needed; no name of a tenant's is like that


@dataclass(frozen=True)
class TenantFolder:
    """What is kept of one tenant, a folder each.

    Attributes:
        files: contents and records of files.
        batches: records of batches.
        runs: what batches that have not ended have written.
    """

    files: Path
    batches: Path
    runs: Path


class FilesFolder:
    """A folder with one for each tenant, named by what follows from its key; this process alone uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, tenant: str | None) -> TenantFolder:
        """A tenant's folders, made if they are not there. Raises OSError where the disk refuses."""
        own = self._path / (tenant or _NO_TENANT)
        found = TenantFolder(own / "files", own / "batches", own / "runs")
        for path in (own, found.files, found.batches, found.runs):
            path.mkdir(mode=0o700, exist_ok=True)
        return found

    def refusal(self, error: OSError) -> ParameterError:
        """What to raise where the disk refuses."""
        return ParameterError(f"files cannot be kept in {self._path}: {error.strerror or error}")


@contextmanager
def files_folder(path: Path) -> Iterator[FilesFolder]:
    """The folder at a path, made if it is not there, for this user and this process alone.

    Raises:
        ParameterError: it cannot be had.
        BatchFileError: another server uses it, or its file system has no locks.
    """
    folder = FilesFolder(path)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        lock = RunLock(path / "lock", DISK)
    except OSError as error:
        raise folder.refusal(error) from error
    try:
        yield folder
    finally:
        lock.release()
