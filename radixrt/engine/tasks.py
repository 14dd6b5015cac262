"""What keeps an event loop responsive: work for its tasks in threads of its executor, and tasks woken in turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

WOKEN_AT_ONCE = 16  # tasks, before others of the loop have their turn
WORKERS = 2  # threads: one goes on with short work while the other does long work
YIELD_SECONDS = 1e-4  # in which a worker leaves the interpreter to the loop's thread

Answer = tuple["asyncio.Future[Any]", Any, BaseException | None]


def answer_soon(answers: Iterable[Answer]) -> None:
    """Give futures their results, or their errors, in the threads of their loops; from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, deque[Answer]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].get_loop(), deque()).append(answer)
    for loop, of_loop in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it was closed, and its tasks with it
            loop.call_soon_threadsafe(_answer, loop, of_loop)


def _answer(loop: asyncio.AbstractEventLoop, answers: deque[Answer]) -> None:
    for _ in range(min(WOKEN_AT_ONCE, len(answers))):
        future, result, error = answers.popleft()
        if future.done():  # cancelled
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    if answers:
        loop.call_soon(_answer, loop, answers)


class Workshop:
    """Runs functions for tasks of event loops in few threads, however many tasks there are."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._num_workers = 0  # started and not ended; jobs that are put in before one counts itself out are its

    async def run(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in another thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.append((function, done))
        if self._num_workers < WORKERS:
            self._num_workers += 1
            # After the tasks that are about to run: they would have to share the interpreter with it.
            loop.call_soon(loop.run_in_executor, None, self._work)
        return await done

    def _work(self) -> None:
        while True:
            answers: list[Answer] = []
            while self._jobs and len(answers) < WOKEN_AT_ONCE:
                with contextlib.suppress(IndexError):  # another worker was faster
                    answers.append(_result(*self._jobs.popleft()))
            answer_soon(answers)
            time.sleep(YIELD_SECONDS)
            if not answers:
                self._num_workers -= 1
                if not self._jobs:
                    return
                self._num_workers += 1


def _result(function: Callable[[], Any], done: asyncio.Future[Any]) -> Answer:
    if done.cancelled():
        return done, None, None
    try:
        return done, function(), None
    except Exception as error:
        return done, None, error
