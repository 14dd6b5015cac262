"""What a server takes of a client: everything has a bound."""

# Tests: tests/server/test_refusals.py

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of one server. What passes one is refused, by name, before anything is computed.

    Attributes:
        body_bytes, body_seconds: of a request's body, and of the time in which it comes.
        depth: of arrays and objects within one another in a body.
        model_length: of what a body calls the model, as the answer repeats it: characters.
        prompts: in one body.
        answers: in all to one body: its prompts times n. No more than `pending`, either.
        pending: answers to all bodies that run or wait; a request for more is told to come again (429).
        connections: open at once; requests on others are told 503.
        idle_seconds: of a connection without a request, with one whose head is not whole, or whose client reads
            nothing.
        stalled_seconds: without a pass, while requests have not ended, before `/health` says so.
        file_bytes: of a file that a client keeps here. Each MiB of it has `body_seconds` to come.
        files, all_file_bytes: that a tenant keeps; outputs of batches count, but are never cut.
        batches: of a tenant that are remembered; for a new one the oldest that has ended is forgotten.
        batch_lines: of one batch.
    """

    body_bytes: int = 16 * 2**20
    body_seconds: float = 60.0
    depth: int = 64
    model_length: int = 256
    prompts: int = 2048
    answers: int = 4096
    pending: int = 16_384
    connections: int = 2048
    idle_seconds: int = 30
    stalled_seconds: float = 120.0
    file_bytes: int = 512 * 2**20
    files: int = 10_000
    all_file_bytes: int = 16 * 2**30
    batches: int = 10_000
    batch_lines: int = 1_000_000
