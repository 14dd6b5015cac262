"""`LiveStream`: chunks of answers as they come, for a task, or for a function that is called with each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from radixrt.engine.calls import StreamCall
from radixrt.engine.driver import Driver
from radixrt.output import StreamChunk
from radixrt.schedule.answer import Answer


class LiveStream:
    """The answers to the prompts of a call; in one event loop."""

    def __init__(self, driver: Driver, call: StreamCall) -> None:
        self._driver, self._call = driver, call

    @property
    def is_over(self) -> bool:
        """Whether all chunks were taken."""
        return self._call.is_over

    async def news(self) -> Iterator[StreamChunk]:
        """Wait for chunks and take them: one of each answer that has new tokens, those with outputs last."""
        return self._call.chunks(await self._driver.async_news(self._call))

    def take(self) -> Iterator[StreamChunk]:
        """The chunks that have come, without waiting."""
        return self._call.chunks(self._call.take())

    def lend_texts(self) -> dict[tuple[int, int], list[Any]] | None:
        """See `StreamCall.lend_texts`."""
        return self._call.lend_texts()

    def lent_news(self) -> Iterator[tuple[Answer, list[int], StreamChunk | None]]:
        """See `StreamCall.lent_news`."""
        return self._call.lent_news()

    def take_texts_back(self) -> None:
        """Undo `lend_texts`, before chunks were taken."""
        self._call.take_texts_back()

    async def listen(self, on_news: Callable[[], bool]) -> None:
        """Let `on_news` take chunks, once a pass, until it returns False or the stream is over. It costs less than
        a task that is woken for each. What it does not take stays; `remind` then has it called again.

        Raises what it raises, and as `news` does.
        """
        await self._driver.listen(self._call, on_news)

    def remind(self) -> None:
        """Call the `on_news` of `listen`, if there is one."""
        self._driver.remind(self._call)
