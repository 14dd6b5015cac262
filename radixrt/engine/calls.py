"""Calls: requests that were submitted together, and their news."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from radixrt.checks import check_int
from radixrt.errors import PassError
from radixrt.frontend.arguments import OnError
from radixrt.output import FinishReason, RequestOutput, StreamChunk
from radixrt.sampling_params import SamplingParams
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
        self.is_left = False  # whether nobody wants its news any more
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

    def fail(self, error: Exception) -> None:
        """Raise an error to whoever takes the news."""
        self._news.append(error)

    def end(self, first: Answer, output: RequestOutput) -> None:
        """Take a request off, with its output as news."""
        news: N | Exception = self._news_of(first, output)
        if output.cause is not None and self._on_error == "raise":
            news = PassError(f"prompt {output.index}: {output.failure}")
            news.__cause__ = output.cause
        self._news.append(news)
        del self.requests[first.request.id]

    def _news_of(self, first: Answer, output: RequestOutput) -> N | Exception:
        raise NotImplementedError


def spelled(
    ids: Sequence[int], reason: FinishReason | None, matched: int | str | None, params: SamplingParams
) -> Sequence[int]:
    """The tokens of a chunk that are text: all but one that has ended the answer by its id."""
    is_cut = reason is FinishReason.STOP and isinstance(matched, int) and not params.include_stop_str
    return ids[:-1] if is_cut else ids


class OutputCall(PendingCall[RequestOutput]):
    """A call whose news are outputs."""

    def _news_of(self, first: Answer, output: RequestOutput) -> RequestOutput:
        return output


class Note(NamedTuple):
    """What the thread that steps leaves of an answer: its part of a chunk takes as little time as can be."""

    answer: Answer
    end: int  # of its known tokens
    is_last: bool  # it has ended with them
    text: str | None  # None: it is made of the tokens, by who takes them
    output: RequestOutput | None

    def followed_by(self, later: Note) -> Note:
        """This one and the next of its answer as one."""
        if self.text is None or later.text is None:
            return later
        return later._replace(text=self.text + later.text)


class StreamCall(PendingCall[Note]):
    """A call whose news are tokens as they come: of each answer the first, then `interval` of them at a time; the
    last note of a request has its output.

    Texts are made of the news with `tokenizer`, unless stops are looked for in them.
    """

    def __init__(self, interval: int, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self._interval = check_int("stream_interval", interval, 1, 2**31 - 1)
        self._tokenizer = tokenizer
        self._noted: dict[Answer, int] = {}  # the end of each answer's latest note
        self._over: set[Answer] = set()  # whose last note was news
        self._taken: dict[Answer, int] = {}  # the end of what was taken of each
        self._texts: dict[Answer, Detokenizer] = {}  # those that are made of the news
        self._is_lent = False  # whether they are made elsewhere

    def catch_up(self, request_id: int | str) -> bool:
        """Add the new tokens of those of a request's answers that have enough of them to the news. Returns whether
        there are any.
        """
        first, has_news = self.requests[request_id], False
        if first is None:
            return False
        for answer in first.family if first.children else (first,):
            noted, end = self._noted.get(answer), answer.known_len
            due = answer.request.prompt_len + 1 if noted is None else noted + self._interval
            if (end >= due or answer.finished) and answer not in self._over:
                self._news.append(self._note(answer, end))
                has_news = True
        return has_news

    def chunks(self, news: Iterable[Note]) -> Iterator[StreamChunk]:
        """News as one chunk of each answer, those with outputs last: whoever takes them late gets fewer."""
        notes: dict[Answer, Note] = {}
        for note in news:
            before = notes.get(note.answer)
            notes[note.answer] = note if before is None else before.followed_by(note)
        found = list(notes.values())
        if len(found) > 1:
            found.sort(key=lambda note: note.output is not None)
        return map(self._chunk, found)

    def lend_texts(self) -> dict[tuple[int, int], list[Any]] | None:
        """Let texts be made elsewhere: those of chunks are empty from now on. No stops are looked for in them.
        Returns the states of the Detokenizers of answers that have begun, by prompt and sample; None without a
        tokenizer.
        """
        if self._tokenizer is None:
            return None
        self._is_lent = True
        return {(answer.request.index, answer.sample_index): text.state() for answer, text in self._texts.items()}

    def lent_news(self) -> Iterator[tuple[Answer, list[int], StreamChunk | None]]:
        """Take all news once texts are made elsewhere: tokens of an answer that are text, and a chunk where there
        is more to tell.
        """
        for note in self.take():
            assert note.text is None
            if note.is_last or note.output is not None:
                chunk = self._chunk(note)
                params = note.answer.request.params
                yield note.answer, [*spelled(chunk.token_ids, chunk.finish_reason, chunk.matched, params)], chunk
            else:
                yield note.answer, self._new_ids(note.answer, note.end)[1], None

    def _new_ids(self, answer: Answer, end: int) -> tuple[int, list[int]]:
        """Where the tokens of an answer begin that were not taken yet, and these."""
        first = self._taken.get(answer, answer.request.prompt_len)
        self._taken[answer] = end
        return first, answer.tokens_between(first, end).tolist()

    def take_texts_back(self) -> None:
        """Undo `lend_texts`, before chunks were taken."""
        self._is_lent = False

    def _note(self, answer: Answer, end: int, output: RequestOutput | None = None) -> Note | Exception:
        self._noted[answer] = end
        text, is_last = answer.text, answer.finished
        if is_last:
            self._over.add(answer)
        if text is None:
            return Note(answer, end, is_last, None, output)
        try:
            if is_last:
                text.finish()
            return Note(answer, end, is_last, text.delta(), output)
        except Exception as error:  # for its consumer: one request's text must not cost the others theirs
            return error

    def _news_of(self, first: Answer, output: RequestOutput) -> Note | Exception:
        *others, last = [answer for answer in first.family if answer not in self._over]
        self._news += [self._note(answer, answer.known_len) for answer in others]
        return self._note(last, last.known_len, output)

    def _chunk(self, note: Note) -> StreamChunk:
        answer, end, is_last, text, output = note
        request = answer.request
        first, ids = self._new_ids(answer, end)
        reason, matched = answer.ending() if is_last else (None, None)
        return StreamChunk(
            self._text(answer, ids, reason, matched) if text is None else text,
            tuple(ids),
            output,
            request.id,
            answer.sample_index,
            None
            if request.params.logprobs is None
            else tuple(answer.log.logprobs[first - request.prompt_len : end - request.prompt_len]),
            reason,
            matched,
            request.index,
            request.prompt_len,
        )

    def _text(self, answer: Answer, ids: list[int], reason: FinishReason | None, matched: int | str | None) -> str:
        """What becomes certain of an answer's text with these tokens."""
        params = answer.request.params
        if self._tokenizer is None or not params.detokenize or self._is_lent:
            return ""
        if (made := self._texts.get(answer)) is None:
            made = Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
            self._texts[answer] = made
        text = made.push(*spelled(ids, reason, matched, params))
        return text if reason is None else text + made.finish()
