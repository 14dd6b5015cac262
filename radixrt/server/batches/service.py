"""Files and batches of all tenants, over the Runtime that serves them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any

from starlette.requests import Request

from radixrt.engine.signals import DRAIN_SECONDS
from radixrt.parsers.choosing import Parsers
from radixrt.runtime import Runtime
from radixrt.server.batches.endpoints import BatchEndpoints
from radixrt.server.batches.queue import BatchQueue
from radixrt.server.batches.work import Work
from radixrt.server.files.endpoints import FileEndpoints, Route
from radixrt.server.files.folder import FilesFolder
from radixrt.server.files.store import FileStore
from radixrt.server.limits import Limits


class Batches:
    """Keeps files and runs batches. Leaving its context ends what runs: batches that have not ended go on when the
    folder is opened again.
    """

    def __init__(
        self,
        runtime: Runtime,
        folder: FilesFolder,
        tenants: Iterable[str | None] = (None,),
        *,
        limits: Limits | None = None,
        drain_seconds: float = DRAIN_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read what the folder has.

        Args:
            tenants: all that there are.
            drain_seconds: for lines that have begun, once their batch is to end.
            clock: tells Unix time in seconds.

        Raises:
            ParameterError: the folder cannot be used.
            BatchFileError: what is in it is not a server's.
        """
        self._limits = limits or Limits()
        self._work = Work(runtime, self._limits, drain_seconds)
        self._files: dict[str | None, FileStore] = {}
        self._queues: dict[str | None, BatchQueue] = {}
        try:
            for tenant in tenants:
                own = folder.of(tenant)
                files = self._files[tenant] = FileStore(own.files, self._limits)
                self._queues[tenant] = BatchQueue(tenant, own, files, self._work, self._limits, clock)
        except OSError as error:
            raise folder.refusal(error) from error

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(at_once=error is not None)
        for queue in self._queues.values():
            queue.join()

    def routes(self, model: str, read: Callable[[Request], Awaitable[dict[str, Any]]]) -> list[Route]:
        """The endpoints. `model` is its name; `read` gives the object of a body."""
        files = FileEndpoints(self._files, self._limits, lambda tenant, name: self._queues[tenant].user_of(name))
        return [*files.routes(), *BatchEndpoints(self._queues, self._files, model, read).routes()]

    def start(self, parsers: Parsers, on_submit: Callable[[], object], chat_max_tokens: int | None = None) -> None:
        """Run batches that have not ended, and those that come. For the arguments see `Work.begin`."""
        self._work.begin(parsers, on_submit, chat_max_tokens)
        for queue in self._queues.values():
            queue.start()

    def stop(self, *, at_once: bool = False) -> None:
        """Begin no more lines; those that have begun get their time to end, unless it is `at_once`."""
        for queue in self._queues.values():
            queue.stop(at_once=at_once)
