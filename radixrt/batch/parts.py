"""Prompts whose answers run as several requests: which answers each has, and one output of all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from radixrt.output import CompletionOutput, RequestOutput, Usage
from radixrt.planning.shards import Pieces
from radixrt.schedule.request import Request


@dataclass(frozen=True)
class Part:
    """Some of the answers to a prompt.

    Attributes:
        first, count: those from `first` on.
        of: answers to the prompt.
    """

    first: int
    count: int
    of: int

    def request(self, whole: Request) -> Request:
        """The request for them: its draws are those of the whole request."""
        params = replace(whole.params, n=self.count)
        return replace(whole, params=params, first_answer=self.first, id=f"{whole.id}/{self.first}")


def part_at(pieces: Pieces, piece: int, num_answers: int) -> Part | None:
    """Which of so many answers to its prompt a piece has; None for all."""
    if not pieces.is_part[piece]:
        return None
    return Part(int(pieces.first_answers[piece]), int(pieces.num_answers[piece]), num_answers)


class PartialOutputs:
    """Outputs of parts, until a prompt has all of its own. Prompts have numbers of the caller's."""

    def __init__(self) -> None:
        self._found: dict[int, dict[Part, RequestOutput]] = {}

    def add(self, prompt: int, part: Part, output: RequestOutput) -> RequestOutput | None:
        """Note the output of a part. Returns that of the prompt, with the part's id, once it has all parts."""
        found = self._found.setdefault(prompt, {})
        found[part] = output
        if sum(each.count for each in found) < part.of:
            return None
        del self._found[prompt]
        return _joined([(each, found[each]) for each in sorted(found, key=lambda each: each.first)])

    def failure(self, prompt: int) -> RequestOutput | None:
        """An output for each further part, if one of the prompt's has failed: the others need not run."""
        for output in self._found.get(prompt, {}).values():
            if output.cause is not None:
                why = output.failure or str(output.cause)
                return replace(RequestOutput.refused(output.index, why, output.id), cause=output.cause)
        return None


def _joined(parts: list[tuple[Part, RequestOutput]]) -> RequestOutput:
    first = next((output for _, output in parts if output.cause is not None), parts[0][1])
    outputs = [output for _, output in parts]
    usages = [output.usage for output in outputs]
    started = [output.timings.first_token for output in outputs if output.timings.first_token is not None]
    return replace(
        first,
        outputs=tuple(answer for part, output in parts for answer in _answers(part, output)),
        # Hits are those of the first answers; what further parts compute of the prompt is computed again.
        usage=Usage(
            prompt_tokens=usages[0].prompt_tokens,
            cached_tokens=usages[0].cached_tokens,
            computed_tokens=usages[0].computed_tokens,
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            recomputed_tokens=sum(usage.recomputed_tokens for usage in usages)
            + sum(usage.computed_tokens for usage in usages[1:]),
        ),
        timings=replace(
            first.timings,
            queue=min(output.timings.queue for output in outputs),
            first_token=min(started, default=None),
            total=max(output.timings.total for output in outputs),
        ),
    )


def _answers(part: Part, output: RequestOutput) -> list[CompletionOutput]:
    """The answers of a part, with their numbers; of one that was refused, so many that are alike."""
    found = output.outputs
    if len(found) < part.count:
        found = found[:1] * part.count
    return [replace(answer, index=part.first + nth) for nth, answer in enumerate(found)]
