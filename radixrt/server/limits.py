"""What a server takes of a client: everything has a bound."""

# Tests: tests/server/test_server.py

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of one server. What passes one is refused, by name, before anything is computed.

    Attributes:
        body_bytes, body_seconds: of a request's body, and of the time in which it comes.
        depth: of arrays and objects within one another in a body.
        prompts: in one body.
        answers: in all to one body: its prompts times n.
        waiting: requests that wait for a place among the running ones; others are told to come again (429).
        stalled_seconds: without a pass, while requests have not ended, before `/health` says so.
    """

    body_bytes: int = 16 * 2**20
    body_seconds: float = 60.0
    depth: int = 64
    prompts: int = 2048
    answers: int = 4096
    waiting: int = 4096
    stalled_seconds: float = 120.0
