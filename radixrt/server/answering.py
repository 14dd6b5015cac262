"""From what is asked to a body, or to the events of a stream."""

# Tests: tests/server/test_server.py

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from radixrt.errors import PassError, RadixrtError
from radixrt.frontend.openai import (
    CHAT,
    answer_body,
    chunk_body,
    finish_reason,
    logprobs_body,
    shown_logprobs,
    usage_body,
)
from radixrt.frontend.tool_calls import Deltas, message_of
from radixrt.output import RequestOutput, StreamChunk, Usage
from radixrt.runtime import Runtime
from radixrt.server.asked import Asked
from radixrt.server.reading import Reading
from radixrt.server.refusal import refusal_of
from radixrt.server.responses import Events, event_bytes
from radixrt.text.chat import Chat
from radixrt.text.token_spelling import TokenSpelling

DONE = b"data: [DONE]\n\n"

OnEnd = Callable[[str, list[Usage]], None]  # gets the id of an answer, and counts of its prompts


class Answering:
    """Answers bodies by a Runtime. A task that is cancelled ends its requests, within one pass."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._spelling = TokenSpelling(runtime.tokenizer)

    async def outputs(self, asked: Asked, tenant: str | None) -> list[RequestOutput]:
        """All answers to each prompt. Raises RadixrtError, also where none is whole."""
        return whole_outputs(await self._runtime.async_generate(list(asked.prompts), asked.params, tenant=tenant))

    def body(self, asked: Asked, outputs: list[RequestOutput]) -> tuple[str, dict[str, object]]:
        """The id of a whole answer, and the answer."""
        reading = asked.reading
        body = answer_body(
            asked.url,
            outputs,
            echoed=[self._text(prompt) for prompt in asked.prompts] if asked.is_echoed else None,
            message_of=None if reading is None else lambda text: message_of(reading.parts(text)),
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

    async def events(self, asked: Asked, tenant: str | None, on_end: OnEnd) -> Events:
        """The server-sent events of the answers to all prompts, numbered as in a body. Raises RadixrtError before
        the first one where a prompt cannot run; what goes wrong later, with any of them, is the last event.
        `on_end` is called if all went well.
        """
        head: Any = {"id_digest": uuid.uuid4().hex, "model": asked.model, "created": int(time.time())}
        answers = [_Streamed(asked.reading) for _ in range(asked.num_answers)]
        usages: list[Usage] = []

        def event(index: int, text: str | None, **more: Any) -> bytes:
            counts = (chunk.prompt_tokens, answers[index].num_tokens) if asked.wants_running_usage else None
            return event_bytes(chunk_body(asked.url, index, text, counts=counts, **more, **head))

        stream = self._runtime.async_stream_all(list(asked.prompts), asked.params, tenant=tenant)
        async with aclosing(stream) as chunks:
            chunk = sound(await anext(chunks))
            if asked.url == CHAT:
                for index in range(asked.num_answers):
                    yield event(index, None)
            try:
                while True:
                    index = chunk.prompt_index * asked.params.n + chunk.index
                    tokens, answer = shown_logprobs(chunk), answers[index]
                    answer.num_tokens += len(chunk.token_ids)
                    is_whole = chunk.finish_reason is not None and chunk.finish_reason.is_whole
                    ended = chunk.finish_reason if is_whole else None
                    deltas = answer.deltas(chunk.text, ended is not None)
                    if tokens or deltas:
                        logprobs = logprobs_body(asked.url, tokens, self._spelling, answer.offset)
                        for delta in deltas or [{}]:
                            yield event(index, chunk.text, delta=delta, logprobs=logprobs)
                            logprobs = None
                        answer.offset += sum(len(self._spelling.of(one.token_id).text) for one in tokens or ())
                    if ended is not None:
                        yield event(index, "", finish_reason=finish_reason(ended, answer.has_called))
                    if chunk.output is not None:
                        usages.append(chunk.output.usage)
                    if len(usages) == len(asked.prompts):
                        break
                    chunk = sound(await anext(chunks))
            except RadixrtError as error:
                yield event_bytes(refusal_of(error).body())
                return
        counts = usage_body(asked.url, Usage.total(usages), **head)
        on_end(str(counts["id"]), usages)
        if asked.wants_usage:
            yield event_bytes(counts)
        yield DONE


def whole_outputs(outputs: RequestOutput | list[RequestOutput]) -> list[RequestOutput]:
    """The outputs of a call. Raises PassError where none of their answers is whole."""
    assert isinstance(outputs, list)
    reasons = {answer.finish_reason for output in outputs for answer in output.outputs}
    if not any(reason.is_whole for reason in reasons):
        raise PassError(outputs[0].failure)
    return outputs


class _Streamed:
    """One answer as it is streamed: its text as it comes, or taken apart.

    Attributes:
        num_tokens: that have come.
        offset: characters of those whose log-probabilities were told.
    """

    def __init__(self, reading: Reading | None) -> None:
        self.num_tokens = self.offset = 0
        self._reader = None if reading is None else reading.reader()
        self._deltas = Deltas()

    @property
    def has_called(self) -> bool:
        return self._deltas.num_calls > 0

    def deltas(self, text: str, has_ended: bool) -> list[dict[str, Any]]:
        """What more of its text tells, in a chat's terms."""
        if self._reader is None:
            return [{"content": text}] if text else []
        parts = self._reader.push(text)
        return self._deltas.of([*parts, *self._reader.finish()] if has_ended else parts)


def sound(chunk: StreamChunk) -> StreamChunk:
    """The chunk, unless it ends a request that has failed: PassError."""
    if chunk.output is not None and chunk.output.failure is not None:
        raise PassError(chunk.output.failure)
    return chunk
