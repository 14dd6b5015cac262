"""Calls: requests that were submitted together, and their news."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from radixrt.checks import check_int
from radixrt.errors import PassError
from radixrt.frontend.request_builder import OnError
from radixrt.output import RequestOutput, StreamChunk
from radixrt.schedule.answer import Answer

N = TypeVar("N", RequestOutput, StreamChunk)


class PendingCall(Generic[N]):
    """Requests that were submitted together, and a queue of news: one thread adds, one takes.

    With `on_error` "raise", a PassError takes the place of an output whose pass failed.
    """

    def __init__(self, on_error: OnError = "raise") -> None:
        # By id, the first answer to each that has not ended; None until a step submits it.
        self.requests: dict[int | str, Answer | None] = {}
        self._news: deque[N | Exception] = deque()
        self._on_error = on_error

    @property
    def waits(self) -> bool:
        """Whether there is no news yet, but will be."""
        return bool(self.requests) and not self._news

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to take or to wait for."""
        return not self.requests and not self._news  # in this order: the last news comes before its request goes

    def take(self) -> Iterator[N]:
        """Take all news; an error among them is raised."""
        for _ in range(len(self._news)):
            news = self._news.popleft()
            if isinstance(news, Exception):
                raise news
            yield news

    def end(self, first: Answer, output: RequestOutput) -> None:
        """Take a request off, with its output as news."""
        news: N | Exception = self._news_of(first, output)
        if output.cause is not None and self._on_error == "raise":
            news = PassError(f"prompt {output.index}: {output.error}")
            news.__cause__ = output.cause
        self._news.append(news)
        del self.requests[first.request.id]

    def _news_of(self, first: Answer, output: RequestOutput) -> N | Exception:
        raise NotImplementedError


class OutputCall(PendingCall[RequestOutput]):
    """A call whose news are outputs."""

    def _news_of(self, first: Answer, output: RequestOutput) -> RequestOutput:
        return output


class StreamCall(PendingCall[StreamChunk]):
    """A call whose news are tokens as they come: of each answer the first, then `interval` of them at a time; the
    last chunk of a request has its output.
    """

    def __init__(self, interval: int = 1) -> None:
        super().__init__()
        self._interval = check_int("stream_interval", interval, 1, 2**31 - 1)
        self._seen: dict[Answer, int] = {}  # output tokens that were news
        self._over: set[Answer] = set()  # whose last chunk was news

    def catch_up(self, request_id: int | str) -> bool:
        """Add the new tokens of those of a request's answers that have enough of them to the news. Returns whether
        there are any.
        """
        first = self.requests[request_id]
        due = [] if first is None else [answer for answer in first.family if self._is_due(answer)]
        self._news += [self._chunk(answer) for answer in due]
        return bool(due)

    def take(self) -> Iterator[StreamChunk]:
        """Take all news as one chunk of each answer, of a request's that with the output last."""
        chunks: dict[tuple[int, int], StreamChunk] = {}
        for chunk in super().take():
            answer = chunk.prompt_index, chunk.index
            before = chunks.pop(answer, None)  # it comes to the end
            chunks[answer] = chunk if before is None else before.followed_by(chunk)
        yield from chunks.values()

    def _is_due(self, answer: Answer) -> bool:
        seen = self._seen.get(answer, 0)
        enough = answer.num_output - seen >= (self._interval if seen else 1)
        return answer not in self._over and (enough or answer.finished)

    def _chunk(self, answer: Answer, output: RequestOutput | None = None) -> StreamChunk | Exception:
        seen = self._seen.get(answer, 0)
        ids = tuple(answer.output_ids()[seen:].tolist())
        self._seen[answer] = seen + len(ids)
        if answer.finished:
            self._over.add(answer)
        request, logprobs = answer.request, None
        if request.params.logprobs is not None:
            logprobs = tuple(answer.log.logprobs[seen : seen + len(ids)])
        try:
            text = answer.text
            if text is not None and answer.finished:
                text.finish()
            delta = "" if text is None else text.delta()
            return StreamChunk(
                *(delta, ids, output, request.id, answer.sample_index, logprobs, *answer.ending()),
                prompt_index=request.index,
                prompt_tokens=request.prompt_len,
            )
        except Exception as error:  # for its consumer: one request's text must not cost the others theirs
            return error

    def _news_of(self, first: Answer, output: RequestOutput) -> StreamChunk | Exception:
        *others, last = [answer for answer in first.family if answer not in self._over]
        self._news += map(self._chunk, others)
        return self._chunk(last, output)
