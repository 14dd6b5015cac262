"""What the files of a model folder must be before a library opens them: regular, and not absurdly large."""

# Tests: tests/models/test_loader.py

from __future__ import annotations

import stat
from pathlib import Path

MAX_TEXT_BYTES = 2**28  # of a config, a tokenizer or a template; the largest tokenizers have a tenth of it

_TEXT = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_READ = (*_TEXT, ".safetensors")
_FOLDERS = ("additional_chat_templates",)  # the only one whose files are read, too
_KINDS = {
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a character device",
    stat.S_ISBLK: "a block device",
    stat.S_ISDIR: "a folder",
}


def unusable_file(folder: Path) -> str | None:
    """What is wrong with the first file of a model folder that must not be opened, or None. Links are followed."""
    for place in (folder, *(folder / name for name in _FOLDERS)):
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            if file.suffix in _READ and (problem := _problem(file)) is not None:
                return f"{file} {problem}"
    return None


def _problem(file: Path) -> str | None:
    try:
        status = file.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(status.st_mode)), "something else")
        return f"is {kind}, not a regular file"
    if file.suffix in _TEXT and status.st_size > MAX_TEXT_BYTES:
        return f"has {status.st_size:,} bytes; at most {MAX_TEXT_BYTES:,} are read"
    return None
