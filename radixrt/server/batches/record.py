"""A batch of a client, from its creation to its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any


class Status(str, Enum):
    """How far a batch has come: OpenAI's words."""

    VALIDATING = "validating"  # waits for those before it, or its lines are being read
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # all lines have records
    COMPLETED = "completed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def has_ended(self) -> bool:
        return self in (Status.FAILED, Status.COMPLETED, Status.CANCELLED, Status.EXPIRED)


@dataclass(frozen=True)
class Counts:
    """Requests of a batch, those that have ended without and with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Problem:
    """Why a batch has failed; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class BatchRecord:
    """A batch as it is kept. Moments are Unix times in seconds.

    Attributes:
        id: a random one.
        number: its place among the tenant's batches, which run in this order.
        expires_at: from then on no line begins.
        moments: by the status, when it began; those of `validating` are `created_at`.
        model: as the server calls it.
        usage: tokens, once it has ended.
    """

    id: str
    number: int
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    model: str
    metadata: dict[str, str] | None = None
    status: Status = Status.VALIDATING
    moments: dict[str, int] = field(default_factory=dict)
    counts: Counts = Counts()
    problems: tuple[Problem, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it, as `from_json` takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> BatchRecord:
        """Raises KeyError, TypeError or ValueError where it is none."""
        values = {one.name: given[one.name] for one in fields(cls)}
        values |= {"status": Status(given["status"]), "counts": Counts(**given["counts"])}
        return cls(**{**values, "problems": tuple(Problem(**one) for one in given["problems"])})

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients see it."""
        moments = {
            f"{status.value}_at": self.moments.get(status) for status in Status if status is not Status.VALIDATING
        }
        problems = {"object": "list", "data": [asdict(problem) for problem in self.problems]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": problems if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **moments,
            "request_counts": asdict(self.counts),
            "usage": self.usage,
            "metadata": self.metadata,
        }
