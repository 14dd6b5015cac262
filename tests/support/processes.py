"""Processes that tests look for. One that was listed may have ended before it is asked anything."""

from __future__ import annotations

import psutil


def children_that_run(part: str, process: psutil.Process | None = None) -> list[psutil.Process]:
    """Descendants of `process` (this one) that run and whose command line holds `part`."""
    children = (process or psutil.Process()).children(recursive=True)
    return [child for child in children if part in command_line(child)]


def command_line(process: psutil.Process) -> str:
    """Its words, divided by blanks; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
