"""The events of a stream, made of the chunks of its answers as they come."""

# Tests: tests/server/test_server.py, tests/server/test_sglang.py

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from radixrt.errors import PassError, RadixrtError
from radixrt.output import RequestOutput, StreamChunk, Usage
from radixrt.sampling_params import SamplingParams
from radixrt.server.event_frame import EventFrame, event_bytes
from radixrt.server.refusal import refusal_of

DONE = b"data: [DONE]\n\n"

OnEnd = Callable[[str, list[Usage]], None]  # gets the id of an answer, and counts of its prompts


@dataclass(frozen=True)
class Frames:
    """What is around the texts of answers.

    Attributes:
        frames: by prompt and sample.
        params: of all answers.
    """

    frames: Mapping[tuple[int, int], EventFrame]
    params: SamplingParams


class AnswerEvents:
    """The server-sent events of the answers to `num_prompts` prompts. `on_end` is called if all went well.

    Attributes:
        is_over: whether the last event was made.
    """

    def __init__(self, num_prompts: int, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._outputs: list[RequestOutput | None] = [None] * num_prompts  # those that have ended
        self._num_running, self._has_begun = num_prompts, False
        self.is_over = False

    def of(self, chunks: Iterable[StreamChunk]) -> bytes:
        """The events of the next chunks, and after the last one those of the end.

        Raises PassError if the first chunk of all is that of a request that has failed; a later one is told by the
        last event. What iterating raises is left to who has given the chunks.
        """
        events: list[bytes] = []
        for chunk in chunks:
            if (output := chunk.output) is not None and output.failure is not None:
                error = PassError(output.failure)
                if not self._has_begun:
                    raise error
                return b"".join(events) + self.failure(error)
            if not self._has_begun:
                self._has_begun = True
                events.append(self._beginning(chunk))
            events.append(self._told(chunk))
            if output is not None:
                self._outputs[chunk.prompt_index] = output
                self._num_running -= 1
                if not self._num_running:
                    self.is_over = True
                    events.append(self._ending([one for one in self._outputs if one is not None]))
        return b"".join(events)

    def frames(self) -> Frames | None:
        """Where events differ in a text alone, until an answer ends."""
        return None

    def failure(self, error: RadixrtError) -> bytes:
        """The last event, where the answers cannot go on."""
        self.is_over = True
        return event_bytes(refusal_of(error).body())

    def _beginning(self, chunk: StreamChunk) -> bytes:
        """Events before all others, once there is a first chunk."""
        return b""

    def _told(self, chunk: StreamChunk) -> bytes:
        """Events of a chunk; none if nothing of it is told."""
        raise NotImplementedError

    def _ending(self, outputs: list[RequestOutput]) -> bytes:
        """Events after all others."""
        raise NotImplementedError
