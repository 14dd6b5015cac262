"""Standard input and output in place of a path."""

# Tests: tests/batch/formats/test_source.py

from __future__ import annotations

from pathlib import Path

STANDARD = "-"
"""Names standard input or output in place of a path. A file of that name is Path("-") or "./-"."""


def place_name(place: str | Path, what: str) -> str:
    """A path, or "standard input" or "standard output", for messages."""
    return f"standard {what}" if place == STANDARD else str(place)
