"""From what is asked to a body, or to the events of a stream."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import time
import uuid
from typing import Any

from radixrt.errors import PassError
from radixrt.frontend.openai import (
    CHAT,
    answer_body,
    chunk_body,
    finish_reason,
    is_cut,
    logprobs_body,
    shown_logprobs,
    usage_body,
)
from radixrt.frontend.tool_calls import Deltas, message_of
from radixrt.output import RequestOutput, StreamChunk, TokenLogprob, Usage
from radixrt.runtime import Runtime
from radixrt.server.answer_events import DONE, AnswerEvents, Frames, OnEnd
from radixrt.server.event_frame import EventFrame, event_bytes
from radixrt.server.openai_request import OpenAIRequest
from radixrt.text.chat import Chat
from radixrt.text.token_spelling import TokenSpelling


class Answering:
    """Answers bodies by a Runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._spelling = TokenSpelling(runtime.tokenizer)

    async def outputs(self, asked: OpenAIRequest, tenant: str | None) -> list[RequestOutput]:
        """All answers to each prompt, which end within a pass if this is cancelled.

        Raises RadixrtError, also where none is whole.
        """
        return whole_outputs(await self._runtime.async_generate(list(asked.prompts), asked.params, tenant=tenant))

    def body(self, asked: OpenAIRequest, outputs: list[RequestOutput]) -> tuple[str, dict[str, object]]:
        """The id of a whole answer, and the answer."""
        reading = asked.reading
        body = answer_body(
            asked.url,
            outputs,
            echoed=[self._text(prompt) for prompt in asked.prompts] if asked.is_echoed else None,
            message_of=None if reading is None else lambda answer: message_of(reading.parts(answer)),
            includes_stop=asked.params.include_stop_str,
            id_digest=uuid.uuid4().hex,
            model=asked.model,
            created=int(time.time()),
            spelling=self._spelling,
        )
        return str(body["id"]), body

    def _text(self, prompt: str | list[int] | Chat) -> str:
        if isinstance(prompt, list) and self._runtime.tokenizer is not None:
            return self._runtime.tokenizer.decode(prompt, skip_special_tokens=False)
        return prompt if isinstance(prompt, str) else ""

    def events(self, asked: OpenAIRequest, on_end: OnEnd) -> AnswerEvents:
        """The events of the answers to all prompts, numbered as in a body."""
        return _Events(asked, self._spelling, on_end)


def whole_outputs(outputs: RequestOutput | list[RequestOutput]) -> list[RequestOutput]:
    """The outputs of a call. Raises PassError where none of their answers is whole."""
    assert isinstance(outputs, list)
    reasons = {answer.finish_reason for output in outputs for answer in output.outputs}
    if not any(reason.is_whole for reason in reasons):
        raise PassError(outputs[0].failure)
    return outputs


class _Events(AnswerEvents):
    def __init__(self, asked: OpenAIRequest, spelling: TokenSpelling, on_end: OnEnd) -> None:
        super().__init__(len(asked.prompts), on_end)
        self._asked = asked
        self._head: Any = {"id_digest": uuid.uuid4().hex, "model": asked.model, "created": int(time.time())}
        self._answers = [_Streamed(asked, index, self._head, spelling) for index in range(asked.num_answers)]

    def _beginning(self, chunk: StreamChunk) -> bytes:
        if self._asked.url != CHAT:
            return b""
        return b"".join(answer.beginning(chunk) for answer in self._answers)

    def frames(self) -> Frames | None:
        params = self._asked.params
        has_stops = bool(params.stop or params.stop_regex)
        if has_stops or not params.detokenize or not all(answer.is_plain for answer in self._answers):
            return None
        return Frames({divmod(place, params.n): one.frame for place, one in enumerate(self._answers)}, params)

    def _told(self, chunk: StreamChunk) -> bytes:
        return self._answers[chunk.prompt_index * self._asked.params.n + chunk.index].events(chunk)

    def _ending(self, outputs: list[RequestOutput]) -> bytes:
        usages = [output.usage for output in outputs]
        counts = usage_body(self._asked.url, Usage.total(usages), **self._head)
        self._on_end(str(counts["id"]), usages)
        return (event_bytes(counts) if self._asked.wants_usage else b"") + DONE


class _Streamed:
    """One answer as it is streamed: its text as it comes, or taken apart."""

    def __init__(self, asked: OpenAIRequest, index: int, head: dict[str, Any], spelling: TokenSpelling) -> None:
        self._url, self._index, self._head, self._spelling = asked.url, index, head, spelling
        self._counts: tuple[int, int] | None = (0, 0) if asked.wants_running_usage else None
        self._offset = 0  # characters of tokens whose log-probabilities were told
        self._reader = None if asked.reading is None else asked.reading.reader()
        self._asked_logprobs, self._deltas = asked.params.logprobs, Deltas()
        self._includes_stop = asked.params.include_stop_str
        self.frame = EventFrame.around(lambda text: chunk_body(self._url, index, text, **head))

    @property
    def is_plain(self) -> bool:
        """Whether events tell texts as they come, and nothing else."""
        return self._reader is None and self._counts is None and self._asked_logprobs is None

    def event(self, text: str | None, **more: Any) -> bytes:
        """With what `chunk_body` takes."""
        return event_bytes(chunk_body(self._url, self._index, text, counts=self._counts, **more, **self._head))

    def beginning(self, chunk: StreamChunk) -> bytes:
        """The event before all others of a chat's answer, once there is a first chunk."""
        if self._counts is not None:
            self._counts = chunk.prompt_tokens, 0
        return self.event(None)

    def events(self, chunk: StreamChunk) -> bytes:
        """With what a chunk has more of it; none if nothing of that is told."""
        tokens, ended = shown_logprobs(chunk, self._includes_stop), chunk.finish_reason
        if ended is not None and not ended.is_whole:
            ended = None
        if self._counts is not None:
            self._counts = chunk.prompt_tokens, self._counts[1] + len(chunk.token_ids)
        if tokens is not None or self._reader is not None or self._counts is not None:
            events = self._taken_apart(chunk, tokens, ended is not None)
        else:
            events = self.frame.of(chunk.text) if chunk.text else b""
        if ended is not None:
            events += self.event("", finish_reason=finish_reason(ended, self._deltas.has_called))
        return events

    def _taken_apart(self, chunk: StreamChunk, tokens: tuple[TokenLogprob, ...] | None, has_ended: bool) -> bytes:
        """With what more of its text tells in a chat's terms, and log-probabilities."""
        text = chunk.text
        if self._reader is None:
            deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        else:
            parts = self._reader.push(text)
            deltas = self._deltas.of([*parts, *self._reader.finish(is_cut=is_cut(chunk))] if has_ended else parts)
        if not tokens and not deltas:
            return b""
        logprobs = logprobs_body(self._url, tokens, self._spelling, self._offset)
        self._offset += sum(len(self._spelling.of(one.token_id).text) for one in tokens or ())
        first, *others = deltas or [{}]
        events = self.event(text, delta=first, logprobs=logprobs)
        return events + b"".join(self.event(text, delta=delta) for delta in others)
