"""The process of a replica: a Runtime that runs what its group sends, and sends back what has ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from radixrt.engine.gc_control import old_objects_left_alone
from radixrt.errors import DeviceLostError, ModelError, RadixrtError
from radixrt.output import RequestOutput
from radixrt.replicas.messages import ended_message, requests_of, state_as_json
from radixrt.workers.channel import Channel, Message, error_as_json

if TYPE_CHECKING:
    from radixrt.runtime import Runtime
    from radixrt.schedule.request import Request

MADE_BEFORE = 512  # they begin: about as many requests as a pass can begin, since the device may wait meanwhile
BEAT = 0.2  # seconds, at most, between two messages while passes run


class Server:
    """What a replica does with messages and passes, whatever carries the messages.

    Args:
        runtime: has no other requests.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiting: deque[Request] = deque()  # in the order in which they begin
        self._begun: list[int | str] = []  # ids of those that have begun since the last message
        self._ended: list[RequestOutput] = []
        self._told = 0.0  # when the last message was made

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return self._runtime.has_work or bool(self._ended)

    def ready(self) -> Message:
        """The first message: what the group must know of the Runtime."""
        runtime = self._runtime
        body = {
            "limits": [*astuple(runtime.limits)],
            "context_length": runtime.context_length,
            "products": [table.to_json() for table in runtime.products],
            "device": _device_name(runtime),
        }
        return Message({"ready": body, **self._state()})

    def handle(self, message: Message) -> Message | None:
        """Do what a message says. Returns the answer, if it wants one."""
        body = message.body
        if "run" in body:
            requests: list[Request] = []
            for made in requests_of(message, self._runtime):
                if isinstance(made, RequestOutput):
                    self._ended.append(made)
                else:
                    requests.append(made)
            self._runtime.submit(*requests, in_order=True)
            self._waiting += requests
        elif "abort" in body:
            for request_id in body["abort"]:
                self._runtime.abort(request_id)
        elif "identity" in body:
            return self._after_all({"identity": self._runtime.identity()})
        elif "weights" in body:
            return self._after_all({"load": body["load"], "error": self._load(body["weights"])})
        return None

    def _load(self, source: str) -> list[str] | None:
        """Load other weights. Returns the error where nothing has changed."""
        try:
            self._runtime.update_weights(source)
        except ModelError as error:
            return error_as_json(error)
        except RadixrtError as error:  # there may be weights of both
            raise DeviceLostError(str(error)) from error
        return None

    def _after_all(self, body: dict[str, Any]) -> Message:
        """The answer to what has run all requests to their end: no later pass may come that would tell of them."""
        self._ended += self._runtime.step()
        return Message(body)

    def step(self) -> Message | None:
        """Run a pass. Returns what has ended, or after a while that passes go on."""
        if self._runtime.has_work:
            self._ended += self._runtime.step()
        while self._waiting and self._runtime.has_begun(self._waiting[0]):
            self._begun.append(self._waiting.popleft().id)
        now = time.monotonic()
        needs_more = bool(self._begun) and not self._waiting
        if not (self._ended or needs_more) and now - self._told < BEAT and self._runtime.has_work:
            return None
        self._told = now
        message = ended_message(self._ended, {"begun": self._begun, **self._state()})
        self._ended, self._begun = [], []
        return message

    def _state(self) -> dict[str, Any]:
        runtime = self._runtime
        return state_as_json(runtime.activity(), runtime.cache_stats(), runtime.num_running)


def _runtime(options: dict[str, Any]) -> Runtime:
    from radixrt.runtime import Runtime  # torch: after the environment of the group's choice

    return Runtime(**options)


def serve(channel: Channel, make: Callable[[dict[str, Any]], Runtime] = _runtime) -> None:
    """Make a Runtime with the options of the first message, and answer messages until the group closes its end."""
    while not (messages := channel.receive()):
        if channel.is_closed:
            return
        channel.wait()
    try:
        runtime = make(messages[0].body["config"])
    except RadixrtError as error:
        channel.send(Message({"refused": error_as_json(error)}))
        return
    with runtime:
        server, told = Server(runtime), deque(messages[1:])
        channel.send(server.ready())
        try:
            while True:
                with old_objects_left_alone():
                    _run_all(channel, server, told)
                if channel.is_closed:
                    return
                channel.wait()
        except DeviceLostError as error:
            channel.send(Message({"lost": str(error)}))


def _run_all(channel: Channel, server: Server, told: deque[Message]) -> None:
    """Answer messages and run passes until there are none, or the group has closed its end."""
    while True:
        told += channel.receive()
        # Where the device has nothing to do, others are made once it computes the first ones.
        enough = MADE_BEFORE if server.has_work else 1
        while told:
            has_enough = server.has_work and server.num_waiting >= enough
            if has_enough and all("run" in other.body for other in told):
                break
            if (answer := server.handle(told.popleft())) is not None:
                channel.send(answer)
        if channel.is_closed or not (told or server.has_work):
            return
        if (news := server.step()) is not None:
            channel.send(news)


def main(make: Callable[[dict[str, Any]], Runtime] = _runtime) -> None:
    """`python -m radixrt.replicas.worker FD`: FD is a connected socket."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the group hears them, and says what is to be done
    if level := os.environ.get("RADIXRT_WORKER_LOG"):
        logging.basicConfig(level=level, format="%(name)s: %(message)s")
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    serve(channel, make)
    channel.close()


def _device_name(runtime: Runtime) -> str:
    if not str(runtime.device).startswith("cuda"):
        return str(runtime.device)
    import torch

    return torch.cuda.get_device_name(runtime.device)


if __name__ == "__main__":
    main()
