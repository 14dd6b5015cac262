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
    """A call of one request whose news are tokens as they come: the first, then `interval` of them at a time; the
    last chunk has the output.
    """

    def __init__(self, interval: int = 1) -> None:
        super().__init__()
        self._interval = check_int("stream_interval", interval, 1, 2**31 - 1)
        self._seen = 0  # output tokens that were news

    def catch_up(self) -> bool:
        """Add the request's new tokens to the news, if there are enough. Returns whether there are."""
        (answer,) = self.requests.values()
        if answer is None or answer.num_output - self._seen < (self._interval if self._seen else 1):
            return False
        self._news.append(self._news_of(answer, None))
        return True

    def take(self) -> Iterator[StreamChunk]:
        """Take all news as one chunk."""
        chunks = list(super().take())
        if len(chunks) > 1:
            text = "".join(chunk.text for chunk in chunks)
            token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
            chunks = [StreamChunk(text, token_ids, chunks[-1].output, chunks[-1].request_id)]
        yield from chunks

    def _news_of(self, first: Answer, output: RequestOutput | None) -> StreamChunk | Exception:
        ids = tuple(first.output_ids()[self._seen :].tolist())
        self._seen += len(ids)
        try:
            return StreamChunk("" if first.text is None else first.text.delta(), ids, output, first.request.id)
        except Exception as error:  # for its consumer: one request's text must not cost the others theirs
            return error
