"""The result of a verification: as values, as JSON, and as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixrt.verify.layer_watch import Origin
from radixrt.verify.values import Difference, Value


@dataclass(frozen=True)
class Outcome:
    """What one situation brought.

    Attributes:
        name, title: of the situation.
        values: token ids and log-probabilities that were compared with those alone.
        differing: lines of the prompts that got other bits, from 0, ascending.
        first: of the first of them, its first difference.
        origin: where the model first computed other bits for it, when the situation was made once more with a
            watch on every layer; None: it did not differ then.
        hit_rate: of the situation, 0 to 1.
        retractions: times that an answer was taken back to the queue.
        evicted_tokens, loaded_tokens: that left the KV pool for lack of room, and that came back from the host.
        seconds: that it took.
    """

    name: str
    title: str
    values: int
    differing: tuple[int, ...]
    first: Difference | None
    origin: Origin | None
    hit_rate: float
    retractions: int
    evicted_tokens: int
    loaded_tokens: int
    seconds: float

    @property
    def same_bits(self) -> bool:
        return self.first is None

    @property
    def notes(self) -> str:
        """What happened to the cache, in words."""
        numbers = {
            "retractions": self.retractions,
            "tokens evicted": self.evicted_tokens,
            "tokens from the host": self.loaded_tokens,
        }
        return ", ".join(f"{number:,} {name}" for name, number in numbers.items() if number)


@dataclass(frozen=True)
class Verification:
    """Whether prompts got the same bits in all situations.

    Attributes:
        lines: of the prompts, from 0: their places in the list or the file.
        outcomes: of each situation, in order.
        model, device, dtype, deterministic: what was asked.
    """

    lines: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    model: str
    device: str
    dtype: str
    deterministic: bool

    @property
    def same_bits(self) -> bool:
        """Whether all values of all situations have the bits that they have alone."""
        return all(outcome.same_bits for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values: the attributes by their names, `same_bits`, and of each first difference the
        `line`, the log-probabilities, their bits in hexadecimal and their distance in float32 numbers.
        """
        return {
            "same_bits": self.same_bits,
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "deterministic": self.deterministic,
            "prompts": len(self.lines),
            "situations": [self._situation(outcome) for outcome in self.outcomes],
        }

    def _situation(self, outcome: Outcome) -> dict[str, Any]:
        first, origin = outcome.first, outcome.origin
        difference = None
        if first is not None:
            difference = {
                "line": self.lines[first.prompt],
                "sample": first.sample,
                "position": first.position,
                "prompt_len": first.prompt_len,
                "expected": _value(first.expected),
                "found": _value(first.found),
                "ulps": first.ulps,
                "origin": None if origin is None else dict(vars(origin)),
            }
        named = {name: value for name, value in vars(outcome).items() if name not in ("first", "origin")}
        return {**named, "same_bits": outcome.same_bits, "first_difference": difference}

    def print(self, console: Console) -> None:
        """Print a table of the situations, then what differs in each."""
        mode = "deterministic" if self.deterministic else "without --deterministic"
        where = f"{self.model}, {self.dtype} on {self.device}, {mode}"
        told = f"{len(self.lines):,} prompts, {where}; compared with each alone, nothing cached"
        console.print(told, markup=False, soft_wrap=True)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("situation", "hit rate", "values", "result", ""):
            table.add_column(name, justify="right" if name in ("hit rate", "values") else "left")
        for outcome in self.outcomes:
            result = Text("same bits", "green")
            if not outcome.same_bits:
                count = len(outcome.differing)
                result = Text(f"{count:,} {'prompt differs' if count == 1 else 'prompts differ'}", "red")
            numbers = f"{outcome.hit_rate:.1%}", f"{outcome.values:,}"
            table.add_row(outcome.title, *numbers, result, Text(outcome.notes, "dim"))
        console.print(table)
        for outcome in self.outcomes:
            if (first := outcome.first) is not None:
                console.print()
                for line in self._told(outcome, first):
                    console.print(line, markup=False, soft_wrap=True)
        console.print()
        total = sum(outcome.values for outcome in self.outcomes)
        verdict = "the same bits everywhere" if self.same_bits else "not the same bits"
        console.print(f"{verdict}: {len(self.outcomes)} situations, {total:,} values compared", markup=False)

    def _told(self, outcome: Outcome, first: Difference) -> list[str]:
        number = first.position if first.in_prompt else first.position - first.prompt_len
        whose = "the prompt" if first.in_prompt else f"answer {first.sample}" if first.sample else "the answer"
        apart = "" if first.ulps is None else f", {first.ulps:,} ulp"
        origin = "unknown: it did not differ again" if outcome.origin is None else str(outcome.origin)
        return [
            f"{outcome.title}: line {self.lines[first.prompt] + 1}, token {number:,} of {whose}",
            f"  alone  {_shown(first.expected)}",
            f"  here   {_shown(first.found)}{apart}",
            f"  first differs in: {origin}",
        ]


def _value(value: Value | None) -> dict[str, Any] | None:
    if value is None:
        return None
    logprob = value.logprob if math.isfinite(value.logprob) else None  # JSON has no infinity
    return {"token_id": value.token_id, "logprob": logprob, "bits": value.bits}


def _shown(value: Value | None) -> str:
    if value is None:
        return "the answer has ended"
    return f"token {value.token_id}, log-probability {value.logprob:.9g} ({value.bits})"
