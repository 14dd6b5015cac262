"""Calls: requests that were submitted together, and their news."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from radixrt.checks import check_int
from radixrt.errors import PassError
from radixrt.frontend.request_builder import OnError
from radixrt.output import FinishReason, RequestOutput, StreamChunk, TokenLogprob
from radixrt.schedule.answer import Answer
from radixrt.text.builder import Detokenizer
from radixrt.text.tokenizer import Tokenizer

N = TypeVar("N")


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


class Piece(NamedTuple):
    """What the thread that steps leaves of an answer: its part of a chunk takes as little time as can be."""

    answer: Answer
    token_ids: list[int]
    text: str | None  # None: it is made of the tokens, by who takes them
    logprobs: list[TokenLogprob]
    ending: tuple[FinishReason | None, int | str | None]
    output: RequestOutput | None

    def followed_by(self, later: Piece) -> Piece:
        """This one and the next of its answer as one."""
        text = None if self.text is None or later.text is None else self.text + later.text
        logprobs = self.logprobs + later.logprobs
        return later._replace(token_ids=self.token_ids + later.token_ids, text=text, logprobs=logprobs)


class StreamCall(PendingCall[Piece]):
    """A call whose news are tokens as they come: of each answer the first, then `interval` of them at a time; the
    last piece of a request has its output.

    Texts are made of the news with `tokenizer`, unless stops are looked for in them.
    """

    def __init__(self, interval: int, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self._interval = check_int("stream_interval", interval, 1, 2**31 - 1)
        self._tokenizer = tokenizer
        self._seen: dict[Answer, int] = {}  # output tokens that were news
        self._over: set[Answer] = set()  # whose last piece was news
        self._texts: dict[Answer, Detokenizer] = {}  # those that are made of the news

    def catch_up(self, request_id: int | str) -> bool:
        """Add the new tokens of those of a request's answers that have enough of them to the news. Returns whether
        there are any.
        """
        first = self.requests[request_id]
        due = [] if first is None else [answer for answer in first.family if self._is_due(answer)]
        self._news += [self._piece(answer) for answer in due]
        return bool(due)

    def chunks(self, news: Iterable[Piece]) -> Iterator[StreamChunk]:
        """News as one chunk of each answer, those with outputs last: whoever takes them late gets fewer."""
        pieces: dict[Answer, Piece] = {}
        for piece in news:
            before = pieces.get(piece.answer)
            pieces[piece.answer] = piece if before is None else before.followed_by(piece)
        return map(self._chunk, sorted(pieces.values(), key=lambda piece: piece.output is not None))

    def _is_due(self, answer: Answer) -> bool:
        seen = self._seen.get(answer, 0)
        enough = answer.num_output - seen >= (self._interval if seen else 1)
        return answer not in self._over and (enough or answer.finished)

    def _piece(self, answer: Answer, output: RequestOutput | None = None) -> Piece | Exception:
        seen = self._seen.get(answer, 0)
        ids = answer.output_ids()[seen:].tolist()
        self._seen[answer] = seen + len(ids)
        text = answer.text
        try:
            if answer.finished:
                self._over.add(answer)
                if text is not None:
                    text.finish()
            delta = None if text is None else text.delta()
        except Exception as error:  # for its consumer: one request's text must not cost the others theirs
            return error
        return Piece(answer, ids, delta, answer.log.logprobs[seen : seen + len(ids)], answer.ending(), output)

    def _news_of(self, first: Answer, output: RequestOutput) -> Piece | Exception:
        *others, last = [answer for answer in first.family if answer not in self._over]
        self._news += map(self._piece, others)
        return self._piece(last, output)

    def _chunk(self, piece: Piece) -> StreamChunk:
        answer, ids, text, logprobs, (reason, matched), output = piece
        request = answer.request
        return StreamChunk(
            self._text(piece) if text is None else text,
            tuple(ids),
            output,
            request.id,
            answer.sample_index,
            None if request.params.logprobs is None else tuple(logprobs),
            reason,
            matched,
            request.index,
            request.prompt_len,
        )

    def _text(self, piece: Piece) -> str:
        """What becomes certain of an answer's text with these tokens."""
        answer, ids, (reason, matched) = piece.answer, piece.token_ids, piece.ending
        params = answer.request.params
        if self._tokenizer is None or not params.detokenize:
            return ""
        if (made := self._texts.get(answer)) is None:
            made = Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
            self._texts[answer] = made
        if reason is FinishReason.STOP and isinstance(matched, int) and not params.include_stop_str:
            ids = ids[:-1]
        text = made.push(*ids)
        return text if reason is None else text + made.finish()
