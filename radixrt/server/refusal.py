"""What a client is told instead of an answer."""

# Tests: tests/server/test_refusals.py

from __future__ import annotations

import logging

from radixrt.checks import short
from radixrt.errors import (
    ContextLengthError,
    DeviceLostError,
    ParameterError,
    PassError,
    PromptError,
    RadixrtError,
    ReplicaLostError,
    SchedulerError,
    TokenizerError,
)
from radixrt.frontend.openai import error_body

_LONGEST = 4000  # characters of a message: errors repeat what was given

_log = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that gets no answer.

    Attributes:
        status: HTTP's.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(short(message, _LONGEST))
        self.status, self.code, self.headers = status, code, headers or {}

    def body(self) -> dict[str, object]:
        """As OpenAI's clients read it."""
        return error_body(str(self), self.code, is_ours=self.status >= 500)


def refusal_of(error: Refusal | RadixrtError) -> Refusal:
    """What an error tells a client. One that is not the client's fault is logged, with where it comes from."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ContextLengthError):
        return Refusal(400, str(error), "context_length_exceeded")  # OpenAI's, which agents look for
    if isinstance(error, (ParameterError, PromptError, TokenizerError)):
        return Refusal(400, str(error), "invalid_value")
    _log.error("a request has failed: %s", error, exc_info=error)
    if isinstance(error, (DeviceLostError, ReplicaLostError, SchedulerError)):
        return Refusal(503, str(error), "engine_lost")
    return Refusal(500, str(error), "pass_failed" if isinstance(error, PassError) else "failed")
