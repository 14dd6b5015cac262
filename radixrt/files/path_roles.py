"""The paths of a command: what it writes must be none of its other files, and must be a plain file."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from radixrt.errors import BatchFileError
from radixrt.files.atomic_file import partial_path
from radixrt.files.standard import STANDARD


@dataclass(frozen=True)
class PathRole:
    """A file of a command, or a folder with all that is in it.

    Attributes:
        what: its name in messages, such as "the input".
        path: where it is, or will be.
        written: whether the command writes there.
    """

    what: str
    path: Path
    written: bool = False


def read_role(what: str, path: str | Path) -> list[PathRole]:
    """What a command reads at a path; nothing for standard input."""
    return [] if path == STANDARD else [PathRole(what, Path(path))]


def written_role(what: str, path: Path) -> list[PathRole]:
    """A file that a command writes in one step, with its partial file."""
    return [PathRole(what, path, True), PathRole(f"the partial file of {what}", partial_path(path), True)]


def check_apart(places: Sequence[PathRole]) -> None:
    """Raise BatchFileError if a place that is written is another one, is inside of it, or has it inside.

    Symbolic and hard links to a place are that place.
    """
    reads = [place for place in places if not place.written]
    writes = [place for place in places if place.written]
    for number, place in enumerate(writes):
        for other in [*reads, *writes[:number]]:
            if is_same(place.path, other.path):
                raise BatchFileError(f"{place.what} {place.path} is {other.what}; give it another name")
            if _is_inside(place.path, other.path):
                raise BatchFileError(
                    f"{place.what} {place.path} is in {other.what} {other.path}; put it somewhere else"
                )
            if _is_inside(other.path, place.path):
                raise BatchFileError(
                    f"{other.what} {other.path} is in {place.what} {place.path}, which is written to; give that "
                    "another name"
                )


def is_same(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file, now or once it exists."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path leads into a folder, or to a file that has another name directly in it."""
    if Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents:
        return True
    if not (os.path.isfile(path) and os.path.isdir(folder)):
        return False
    return any(os.path.isfile(entry) and os.path.samefile(entry, path) for entry in os.scandir(folder))


def refusal_of_target(what: str, path: Path) -> str | None:
    """Why no file can be made or replaced at a path; None if one can.

    A symbolic link is refused: the link would be replaced, not what it leads to, which may be a device.
    """
    if not path.name or "\0" in str(path):
        return f"{what} {str(path)!r} is no name of a file"
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:  # such as a name that is too long
        return f"{what} {path} cannot be written: {error.strerror or error}"
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} of {what} does not exist; make it first"
    if stat.S_ISLNK(mode):
        return f"{what} {path} is a symbolic link; give the path that it leads to"
    if not stat.S_ISREG(mode):
        return f"{path} is in the way of {what} and is not a plain file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{what} {path} cannot be written: no files can be made in {folder}"
    return None


def check_target(what: str, path: Path, *, instead: str = "") -> None:
    """Raise BatchFileError with `refusal_of_target`, and after it what to give instead."""
    if (refusal := refusal_of_target(what, path)) is not None:
        raise BatchFileError(refusal + instead)
