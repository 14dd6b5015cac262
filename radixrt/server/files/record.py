"""A kept file, without its content."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

BATCH, OUTPUT = "batch", "batch_output"


@dataclass(frozen=True)
class FileRecord:
    """A file as it is kept.

    Attributes:
        id: a random one, which is also the name of its content on disk.
        number: its place among the tenant's files.
        bytes: of its content.
        created_at: Unix time in seconds.
        filename: as its owner calls it; nothing is looked up by it.
        purpose: `BATCH`, or `OUTPUT` of what a batch has written.
    """

    id: str
    number: int
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def to_json(self) -> dict[str, Any]:
        """All of it, as `FileRecord` takes it."""
        return asdict(self)

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients see it."""
        shown = {name: value for name, value in asdict(self).items() if name != "number"}
        return {**shown, "object": "file", "status": "processed", "expires_at": None, "status_details": None}
