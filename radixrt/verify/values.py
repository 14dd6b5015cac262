"""What a Runtime says to a prompt, position by position; two of them are compared as bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from radixrt.arrays import Int32Array
from radixrt.output import RequestOutput, TokenLogprob


@dataclass(frozen=True)
class Value:
    """A token and its natural log-probability, a float32."""

    token_id: int
    logprob: float

    @property
    def bits(self) -> str:
        """The log-probability's bits in hexadecimal."""
        return f"0x{np.float32(self.logprob).view(np.uint32):08x}"

    @property
    def rank(self) -> int:
        """A number of the log-probability: those of neighbouring float32 numbers differ by 1."""
        bits = int(np.float32(self.logprob).view(np.int32))
        return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@dataclass(frozen=True)
class Difference:
    """The first position at which a prompt, or an answer to it, got other bits.

    Attributes:
        prompt: place of the prompt in the list.
        sample: which of its answers.
        position: of the token, in the prompt and its answer.
        prompt_len: tokens of the prompt: positions from there on are the answer's.
        expected, found: what was said alone and in the situation; None where the answer had ended before.
    """

    prompt: int
    sample: int
    position: int
    prompt_len: int
    expected: Value | None
    found: Value | None

    @property
    def in_prompt(self) -> bool:
        return self.position < self.prompt_len

    @property
    def ulps(self) -> int | None:
        """How many float32 numbers one log-probability is from the other; None where the tokens differ."""
        if self.expected is None or self.found is None or self.expected.token_id != self.found.token_id:
            return None
        return abs(self.expected.rank - self.found.rank)


@dataclass(frozen=True)
class Values:
    """Tokens from `start` on, in a prompt and one of its answers, with their log-probabilities, `[n]` each, as the
    request of an id was told them.
    """

    request_id: int | str
    prompt: int
    sample: int
    start: int
    prompt_len: int
    token_ids: Int32Array
    logprobs: NDArray[np.float32]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def followed_by(self, other: Values) -> Values:
        """These and those that begin at their end."""
        assert self.end == other.start
        ids, logprobs = (self.token_ids, other.token_ids), (self.logprobs, other.logprobs)
        return replace(self, token_ids=np.concatenate(ids), logprobs=np.concatenate(logprobs))

    def at(self, position: int) -> Value | None:
        place = position - self.start
        if not 0 <= place < len(self.token_ids):
            return None
        return Value(int(self.token_ids[place]), float(self.logprobs[place]))

    def difference(self, found: Values) -> Difference | None:
        """Where values found elsewhere, which may begin later, first differ from these; None: nowhere.

        Values of a prompt end with it, those of an answer where that ends: an answer that ends elsewhere differs.
        """
        own = slice(found.start - self.start, None)
        ids, bits = self.token_ids[own], self.logprobs[own].view(np.int32)
        if found.start < found.prompt_len:
            ids, bits = ids[: len(found.token_ids)], bits[: len(found.token_ids)]
        count = min(len(ids), len(found.token_ids))
        differs = ids[:count] != found.token_ids[:count]
        differs |= bits[:count] != found.logprobs.view(np.int32)[:count]
        place = int(differs.argmax()) if differs.any() else count
        if place == len(ids) == len(found.token_ids):
            return None
        position = found.start + place
        return Difference(
            found.prompt, found.sample, position, self.prompt_len, self.at(position), found.at(position)
        )


def values_of(prompt: int, output: RequestOutput) -> Iterator[Values]:
    """What an output with log-probabilities says of a prompt, of its answers, or of both."""
    prompt_len = output.usage.prompt_tokens

    def values(sample: int, start: int, tokens: Sequence[TokenLogprob]) -> Values:
        ids = np.array([token.token_id for token in tokens], np.int32)
        logprobs = np.array([token.logprob for token in tokens], np.float32)
        return Values(output.id, prompt, sample, start, prompt_len, ids, logprobs)

    if output.prompt_logprobs:
        yield values(0, prompt_len - len(output.prompt_logprobs), output.prompt_logprobs)
    for answer in output.outputs:
        if answer.logprobs is not None:
            yield values(answer.index, prompt_len, answer.logprobs)
