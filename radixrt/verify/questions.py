"""The prompts of a verification, the requests for them, and the loop that has them answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.errors import PassError, PromptError
from radixrt.output import RequestOutput
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request
from radixrt.verify.values import Values, values_of

_FILL = SamplingParams(max_new_tokens=0)  # puts a prompt into the cache
_OWN = _FILL.logprobs_mode  # the mode of a model's own log-probabilities


@dataclass(frozen=True)
class Question:
    """A prompt with its parameters.

    Attributes:
        line: its number for the user, and for the seed of its draws: its place in the file, from 0.
        ids: `[n]`, its tokens.
    """

    line: int
    ids: Int32Array
    params: SamplingParams

    @property
    def max_len(self) -> int:
        """Tokens of the prompt and its longest answer, unless the context ends before."""
        return len(self.ids) + max(1, self.params.max_new_tokens)


class Asker:
    """Asks one Runtime the questions.

    Attributes:
        said: what was said to each question alone, by its place and the number of the answer, once that is known.
        num_forgotten: tokens that were forgotten on purpose.
        on_forget: called when the cache is emptied and nothing runs.
    """

    def __init__(
        self, runtime: Runtime, questions: Sequence[Question], said: dict[tuple[int, int], Values]
    ) -> None:
        self.runtime, self.questions, self.said = runtime, questions, said
        self.num_forgotten = 0
        self.on_forget: Callable[[], object] = lambda: None
        self._places: dict[int | str, int] = {}

    def __len__(self) -> int:
        return len(self.questions)

    def answer(self, place: int, *, more: int = 0) -> Request:
        """A request for the answers to a question, and `more` of them."""
        question = self.questions[place]
        params = replace(
            question.params,
            n=question.params.n + (more if question.params.max_new_tokens else 0),
            logprobs=0,
            prompt_logprobs=None,
            prompt_logprobs_start=0,
            truncate_prompt_tokens=None,
        )
        return self._request(place, question.ids, params)

    def score(self, place: int, *, start: int = 0, answered: bool = False) -> Request:
        """A request for the log-probabilities of a prompt from `start` on.

        With `answered` its first answer belongs to it, if that has the model's own log-probabilities.
        """
        ids, is_own = self.questions[place].ids, self.questions[place].params.logprobs_mode == _OWN
        if answered and is_own:
            ids = np.concatenate([ids[:1], self.said[place, 0].token_ids])
        return self._request(place, ids, replace(_FILL, prompt_logprobs=0, prompt_logprobs_start=start))

    def fill(self, place: int, count: int) -> Request:
        """A request that puts the first tokens of a prompt into the cache."""
        return self._request(place, self.questions[place].ids[:count], _FILL)

    def _request(self, place: int, ids: Int32Array, params: SamplingParams) -> Request:
        line = self.questions[place].line
        try:
            request = self.runtime.prepare(ids, params, index=line)
        except PromptError as error:  # such as one that does not fit in the pool
            raise PromptError(f"prompt {line} {error}") from error
        self._places[request.id] = place
        return request

    def forget(self) -> None:
        """Empty the cache, but for what running requests use."""
        self.num_forgotten += self.runtime.flush_cache()
        if not self.runtime.has_work:
            self.on_forget()

    def drive(
        self,
        requests: Iterable[Request],
        *,
        in_order: bool = False,
        between: Callable[[], object] = lambda: None,
    ) -> Iterator[RequestOutput]:
        """Have requests answered, with `between` called before each pass. Raises PassError if one fails."""
        self.runtime.submit(*requests, in_order=in_order)
        between()
        while self.runtime.has_work:
            yield from self.runtime.step()
            between()

    def ask(
        self, requests: Iterable[Request], *, in_order: bool = False, between: Callable[[], object] = lambda: None
    ) -> Iterator[Values]:
        """`drive` to the end: what was said. Raises PassError if a request fails."""
        for output in self.drive(requests, in_order=in_order, between=between):
            yield from self.heard(output)

    def heard(self, output: RequestOutput) -> Iterator[Values]:
        """What an output says. Raises PassError if it is not whole."""
        place = self._places.pop(output.id)
        if (failure := output.failure) is not None:
            raise PassError(f"prompt {self.questions[place].line} failed: {failure}") from output.cause
        yield from values_of(place, output)

    def run(self, requests: Iterable[Request]) -> None:
        """`ask` for requests of which nothing is to be compared."""
        for _ in self.ask(requests):
            pass
