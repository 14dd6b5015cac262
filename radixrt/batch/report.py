"""What a batch did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from radixrt.batch.tally import Tally


@dataclass(frozen=True)
class BatchReport:
    """Figures of one batch: of all its records, those of earlier runs that it went on with included.

    Tokens are those of the requests that ended without an error.

    Attributes:
        output_path: the file with the records; the partial file if the batch was interrupted; None for
            standard output.
        requests: input lines that are not blank.
        written: records in the output file: `requests`, unless the batch was interrupted.
        errors: records with an error, be it in one of several answers.
        prompt_tokens, cached_tokens: tokens of the prompts, and those of them that were found in the cache.
        completion_tokens: generated tokens.
        best_hit_rate: the hit rate that no engine can exceed on the prompts that this process ran, from an empty
            cache.
        seconds: of this process, from the first request submitted to the last one finished; reading the input is
            not in it.
        own: of the records that this process has made.
        predicted_hit_rate: what the plan expected; None where it was not followed, or could not be.
    """

    output_path: Path | None
    requests: int
    written: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    best_hit_rate: float
    seconds: float
    own: Tally = field(default=Tally())
    predicted_hit_rate: float | None = None

    @classmethod
    def of_nothing(cls) -> BatchReport:
        """That of a batch that has not begun to run."""
        return cls(None, 0, 0, 0, 0, 0, 0, 0.0, 0.0)

    @property
    def hit_rate(self) -> float:
        """cached_tokens over prompt_tokens, 0 to 1; 0 if there are no tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, of this process."""
        return self.own.completion_tokens / self.seconds if self.seconds else 0.0


def print_report(report: BatchReport, console: Console, **more: str) -> None:
    """Print the figures as a small table, those of `more` at its end."""
    before = report.written - report.own.records
    rows = {
        "requests": f"{report.requests:,}" + (f" ({before:,} of them answered before)" if before else ""),
        "errors": f"{report.errors:,}",
        "prompt tokens": f"{report.prompt_tokens:,}",
        "cached tokens": f"{report.cached_tokens:,}",
        "hit rate": f"{report.own.hit_rate:.2%} (best possible {report.best_hit_rate:.2%})",
        "generated tokens": f"{report.completion_tokens:,}",
        "time": f"{report.seconds:.1f} s ({report.tokens_per_second:,.0f} generated tokens/s)",
        **{name.replace("_", " "): text for name, text in more.items()},
    }
    for name, text in rows.items():
        console.print(Text.assemble((f"{name:<18}", "dim"), text), soft_wrap=True)
