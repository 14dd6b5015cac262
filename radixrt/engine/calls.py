"""Calls: requests that were submitted together, and their news."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from radixrt.output import RequestOutput, StreamChunk
from radixrt.schedule.answer import Answer
from radixrt.text.builder import TextBuilder

N = TypeVar("N", RequestOutput, StreamChunk)


class PendingCall(Generic[N]):
    """Requests that were submitted together, and a queue of news: one thread adds, one takes."""

    def __init__(self) -> None:
        # By id, the first answer to each that has not ended; None until a step submits it.
        self.requests: dict[int | str, Answer | None] = {}
        self._news: deque[N] = deque()

    @property
    def waits(self) -> bool:
        """Whether there is no news yet, but will be."""
        return bool(self.requests) and not self._news

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to take or to wait for."""
        return not self.requests and not self._news  # in this order: the last news comes before its request goes

    def take(self) -> list[N]:
        """Take all news."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def end(self, first: Answer, output: RequestOutput) -> None:
        """Take a request off, with its output as news."""
        self._news.append(self._news_of(first, output))
        del self.requests[first.request.id]

    def _news_of(self, first: Answer, output: RequestOutput) -> N:
        raise NotImplementedError


class OutputCall(PendingCall[RequestOutput]):
    """A call whose news are outputs."""

    def _news_of(self, first: Answer, output: RequestOutput) -> RequestOutput:
        return output


class StreamCall(PendingCall[StreamChunk]):
    """A call of one request whose news are tokens as they come; the last chunk has the output."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0  # output tokens that were news
        self._error: Exception | None = None

    def catch_up(self) -> bool:
        """Add the request's new tokens to the news. Returns whether there are any."""
        (answer,) = self.requests.values()
        if answer is None or answer.num_output == self._seen:
            return False
        self._news.append(self._news_of(answer, None))
        return True

    def take(self) -> list[StreamChunk]:
        """Take all news as one chunk. Raises what making its text raised."""
        if self._error is not None:
            raise self._error
        chunks = super().take()
        if len(chunks) < 2:
            return chunks
        text = "".join(chunk.text for chunk in chunks)
        token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        return [StreamChunk(text, token_ids, chunks[-1].output, chunks[-1].request_id)]

    def _news_of(self, first: Answer, output: RequestOutput | None) -> StreamChunk:
        builder = first.text_stop
        assert isinstance(builder, TextBuilder)  # it streams
        ids, text = tuple(first.output_ids()[self._seen :].tolist()), ""
        self._seen += len(ids)
        try:
            text = builder.delta()
        except Exception as error:  # for its consumer: one request's text must not cost the others theirs
            self._error = error
        return StreamChunk(text, ids, output, first.request.id)
