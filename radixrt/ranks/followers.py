"""The other ranks, as the first one sees them: started, told what to compute, and watched."""

# Tests: tests/ranks/test_ranks.py, tests/ranks/test_stages.py

from __future__ import annotations

import os
import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from radixrt.arrays import Int32Array
from radixrt.config import RuntimeConfig, config_as_json
from radixrt.errors import DeviceLostError, ModelError, ParameterError, RadixrtError
from radixrt.ranks.group import RankGroup, Shape, joined, waiting_store
from radixrt.workers.channel import Message, error_of
from radixrt.workers.process import Process

PROGRAM = "radixrt.ranks.follower"
BEAT_SECONDS = 2.0  # between two signs of life of a rank
SILENCE_SECONDS = 15.0  # after which it counts as hanging
PASS_SECONDS = 25.0  # of a pass on a GPU, likewise
_LOOK_SECONDS = 0.2
_STOPPED_SECONDS = 5.0  # between two looks: this process was stopped
_REASON_SECONDS = 1.0  # in which a loss elsewhere is known, if that is why a pass failed here


class Followers:
    """Ranks 1 and up of a model, each in a process of its own on this host. A thread watches them: where one is
    lost, all are ended, and what waits for them with them.

    Args:
        config: of the first rank's Runtime.
        devices: of all ranks.

    Attributes:
        kept_file: an open file that all have, for pieces of kept caches: see `KeptParts`.
    """

    def __init__(self, config: RuntimeConfig, devices: list[torch.device]) -> None:
        self._store, self._size = waiting_store(len(devices)), len(devices)
        self._shape, self._impl = Shape(len(devices), config.pipeline_parallel_size), config.impl
        self._device, self._group = devices[0], RankGroup()
        self._lost: str | None = None  # why
        self._refusal: RadixrtError | None = None  # of one that could not be made
        self._num_asked = 0
        self._answers: dict[int, Message] = {}  # by rank: to what it was asked last of all that it has answered
        self.kept_file = _memory_file()
        self._looked_at = self._waits_from = 0.0
        self._waits_since: float | None = None
        self._is_closing = threading.Event()
        self._lock = threading.Lock()  # of what follows
        self._digests: dict[int, dict[int, int]] = {}  # of planned passes, by number and rank
        self._watcher = threading.Thread(target=self._watch, name="radixrt-ranks", daemon=True)
        self._processes: list[Process] = []
        try:
            for rank, device in enumerate(devices[1:], start=1):
                own = config_as_json(config) | {"device": str(device)}
                first = {"config": own, "rank": rank, "port": self._store.port}
                first["kept_file"] = self.kept_file
                self._processes.append(Process(PROGRAM, {}, Message(first), [self.kept_file]))
        except BaseException:
            self.close()
            raise

    def join(self) -> RankGroup:
        """The group of all ranks. Raises ModelError where one has ended before it could join."""
        for rank in range(1, self._size):
            self._wait_for("here", rank)
        self._group = joined(self._store, 0, self._shape, self._device, self._impl)
        return self._group

    def wait_until_loaded(self) -> None:
        """Wait until all have loaded their weights. Raises what one was refused by."""
        for rank in range(1, self._size):
            self._wait_for("loaded", rank)
        self._looked_at = time.monotonic()
        self._heard = dict.fromkeys(range(1, self._size), self._looked_at)
        self._watcher.start()

    def _wait_for(self, news: str, rank: int) -> None:
        process = self._processes[rank - 1]
        while True:
            for message in process.receive():
                if "refused" in message.body:
                    raise error_of(message.body["refused"])
                if "lost" in message.body:
                    raise ModelError(f"rank {rank} cannot load the model: {message.body['lost']}")
                if news in message.body:
                    return
            if process.is_closed:
                raise ModelError(f"rank {rank} has ended while it loaded the model: {process.end()}")
            process.channel.wait()

    def reason_of(self, error: BaseException) -> RadixrtError | None:
        """Why this rank could not be made, if that is why another one could not; None: by itself."""
        if isinstance(error, RadixrtError) or not isinstance(error, Exception) or not self._watcher.is_alive():
            return None
        self._wait_until(lambda: self._lost is not None, _REASON_SECONDS)
        return self._refusal or (None if self._lost is None else ModelError(self._lost))

    def send(
        self, message: Message, *, draws: bool = False, meanwhile: Callable[[], bool] = lambda: False
    ) -> None:
        """Tell all of them; with `draws`, those of the last stage alone. While there is no room for it,
        `meanwhile` is called: it returns whether it has done something. Raises DeviceLostError where one is lost.
        """
        self.check()
        told = self._processes[: self._shape.stage_size - 1] if draws else self._processes
        try:
            for process in told:
                process.send(message)
            for process in told:
                while process.channel.has_unsent and self._lost is None:
                    if meanwhile():
                        process.channel.flush()
                        continue
                    poll = select.poll()
                    poll.register(process.channel, select.POLLOUT)
                    poll.poll(1000 * _LOOK_SECONDS)
                    process.channel.flush()
        except (OSError, ValueError):  # the watching thread has closed it meanwhile
            self.check()
            raise
        self.check()

    def ask(self, body: dict[str, Any], numbers: Int32Array | None = None) -> int:
        """Tell all of them what they answer once it is done. Returns what `wait_for` takes."""
        self._num_asked += 1
        body = {**body, "asked": self._num_asked}
        self.send(Message(body) if numbers is None else Message(body, numbers))
        return self._num_asked

    def wait_for(self, asked: int) -> list[Message]:
        """Wait until all have answered; a Ctrl-C here may have left earlier answers waited for by nobody. Returns
        the answers by rank, unless they were asked more meanwhile. Raises DeviceLostError where one is lost.
        """

        def are_here() -> bool:
            answered = [message.body["answers"] for message in self._answers.copy().values()]
            return len(answered) == len(self._processes) and min(answered) >= asked

        self._wait_until(lambda: are_here() or self._lost is not None, float("inf"))
        self.check()
        return [self._answers[rank] for rank in range(1, self._size)]

    def _wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not holds() and time.monotonic() < end:
            time.sleep(0.01)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """While this rank waits for a pass."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def check(self) -> None:
        """Raise DeviceLostError where a rank is lost."""
        if self._lost is not None:
            raise DeviceLostError(self._lost)

    def why_lost(self, error: Exception) -> str:
        """End all after what has raised here, such as a pass: because one of them is lost, or by itself."""
        self._wait_until(lambda: self._lost is not None, _REASON_SECONDS)
        self._lose(f"rank 0 of {self._size} has failed: {type(error).__name__}: {error}")
        assert self._lost is not None
        return self._lost

    def compare(self, rank: int, number: int, digest: int) -> None:
        """A rank's digest of what a pass was planned to compute, of either thread; ranks that differ are lost."""
        with self._lock:
            known = self._digests.setdefault(number, {})
            known[rank] = digest
            if len(known) == self._size:
                del self._digests[number]
            differ = len({*known.values()}) > 1
        if differ:
            self._lose(f"rank {rank} of {self._size} computes another pass {number} than others")

    def close(self) -> None:
        """End them: each by itself, or else at once."""
        self._is_closing.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(5 * _LOOK_SECONDS)
        for process in self._processes:
            process.close()
        for process in self._processes:
            process.wait_for_end(5.0)
        if self.kept_file >= 0:
            os.close(self.kept_file)
            self.kept_file = -1

    # -- in the watching thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._look()
        except Exception as error:
            self._lose(f"what watches the ranks has failed: {error!r}")

    def _look(self) -> None:
        while not self._is_closing.is_set() and self._lost is None:
            poll = select.poll()
            for process in self._processes:
                poll.register(process.channel, select.POLLIN)
            poll.poll(1000 * _LOOK_SECONDS)
            if self._is_closing.is_set():
                return
            for rank, process in enumerate(self._processes, start=1):
                for message in process.channel.receive():
                    self._hear(rank, message)
                if process.is_closed:
                    self._lose(f"rank {rank} of {self._size} has ended: {process.end()}")
                    return
            self._look_at_the_time()

    def _hear(self, rank: int, message: Message) -> None:
        self._heard[rank] = time.monotonic()
        if "lost" in message.body:
            self._lose(f"rank {rank} of {self._size}: {message.body['lost']}")
        elif "refused" in message.body:
            self._refusal = error_of(message.body["refused"])
            self._lose(f"rank {rank} of {self._size}: {self._refusal}")
        elif "answers" in message.body:
            self._answers[rank] = message
        elif "digest" in message.body:
            self.compare(rank, *message.body["digest"])

    def _look_at_the_time(self) -> None:
        now = time.monotonic()
        if now - self._looked_at > _STOPPED_SECONDS:  # this process was: what waits begins anew
            self._heard = dict.fromkeys(self._heard, now)
            self._waits_from = now
        self._looked_at = now
        for rank, heard in self._heard.items():
            if now - heard > SILENCE_SECONDS:
                self._lose(f"rank {rank} of {self._size} hangs: nothing was heard of it for {now - heard:.0f} s")
                return
        if self._device.type != "cuda" or (since := self._waits_since) is None:
            return
        if (seconds := now - max(since, self._waits_from)) > PASS_SECONDS:
            self._lose(f"a pass of {self._size} ranks has not ended after {seconds:.0f} s")

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = f"{why}; no rank can go on without the others: go on in a new process"
        for process in self._processes:
            process.end()
        self._group.abort()


def _memory_file() -> int:
    """An open file without a name, in memory where the system has such; it is empty."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("radixrt-kept-cache")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def start_followers(config: RuntimeConfig, device: torch.device) -> Followers:
    """The ranks beside the first one, which is on `device`: on the next cards, or on this host's processors.

    Raises ParameterError where there are not so many cards.
    """
    size = config.num_ranks
    if device.type != "cuda":
        return Followers(config, [device] * size)
    first = torch.cuda.current_device() if device.index is None else device.index
    if first + size > (count := torch.cuda.device_count()):
        raise ParameterError(f"{config.told_ranks}, from cuda:{first} on, but torch sees {count} CUDA devices")
    return Followers(config, [torch.device("cuda", first + rank) for rank in range(size)])
