"""What a client is told instead of an answer."""

# Tests: tests/server/test_server.py

from __future__ import annotations

from radixrt.errors import (
    DeviceLostError,
    PassError,
    RadixrtError,
    ReplicaLostError,
    SchedulerError,
    TokenizerError,
)
from radixrt.frontend.openai import error_body


class Refusal(Exception):
    """A request that gets no answer.

    Attributes:
        status: HTTP's.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}

    def body(self) -> dict[str, object]:
        """As OpenAI's clients read it."""
        return error_body(str(self), self.code, is_ours=self.status >= 500)


def refusal_of(error: RadixrtError | ValueError) -> Refusal:
    """What an error of radixrt, or of a checked value, tells a client."""
    if isinstance(error, PassError):
        return Refusal(500, str(error), "pass_failed")
    if isinstance(error, (DeviceLostError, ReplicaLostError, SchedulerError)):
        return Refusal(503, str(error), "engine_lost")
    is_theirs = isinstance(error, (ValueError, TokenizerError))
    return Refusal(400, str(error), "invalid_value") if is_theirs else Refusal(500, str(error), "failed")
