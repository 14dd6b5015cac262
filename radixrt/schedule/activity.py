"""Where a runtime's time goes, in passes, tokens and seconds since it was made."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Activity:
    """What an engine has done since it was made; the difference of two is what it did in between.

    Attributes:
        passes, extend_passes: all of them, and those with extends.
        extended_tokens: tokens that extends computed, such as those of prompts.
        decoded_tokens: tokens that were sampled.
        prefill_seconds, decode_seconds: of the device, in passes with extends and in those of decodes alone.
        scheduling_seconds: of the host, for planning and booking passes.
    """

    passes: int = 0
    extend_passes: int = 0
    extended_tokens: int = 0
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    scheduling_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the device computed."""
        return self.prefill_seconds + self.decode_seconds

    def __sub__(self, earlier: Activity) -> Activity:
        return Activity(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))
