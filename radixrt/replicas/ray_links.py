"""Replicas as actors of Ray, each on a card of its own, on any host of a cluster."""

from __future__ import annotations

import logging
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

try:
    import ray
    from ray.exceptions import RayError
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "ray":
        raise
    raise ImportError("replicas on Ray need Ray, which is not installed: pip install 'radixrt[ray]'") from error

from radixrt.config import RuntimeConfig, config_as_json
from radixrt.errors import ParameterError
from radixrt.replicas.links import Link
from radixrt.replicas.worker import BEAT, serve
from radixrt.workers.channel import Channel, Message, decode, encode

_log = logging.getLogger(__name__)

_READ_AT_ONCE = 1 << 24


def connect(address: str | None) -> None:
    """Connect to the cluster of an address, as in `ray.init`; nothing if this process is connected to one.

    Raises ParameterError where there is none.
    """
    if ray.is_initialized():
        return
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        # What actors print would come on standard output, which may carry records.
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ParameterError(f"there is no Ray cluster at {address!r}: {error}") from error
    finally:
        # Ray's handler ends the process at once; a batch lets requests end.
        if threading.current_thread() is threading.main_thread() and on_terminate is not None:
            signal.signal(signal.SIGTERM, on_terminate)


class Actor:
    """The process of a replica: what its group sends goes to `serve` in a thread, and what that says goes back."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._unsent = bytearray()
        self._served = ThreadPoolExecutor(1).submit(_serve, Channel(theirs))

    def exchange(self, sent: bytes) -> bytes:
        """Pass on bytes of messages. Returns those that come within `BEAT` seconds, or none.

        Once `serve` has ended, and what it said was returned, the process ends; an error of `serve` is raised.
        """
        self._unsent += sent
        ends = time.monotonic() + BEAT
        while True:
            left = max(0.0, ends - time.monotonic())
            readable, writable, _ = select.select([self._socket], [self._socket] * bool(self._unsent), [], left)
            if writable:
                self._send()
            if readable:
                return self._read()
            if not writable:
                return b""

    def _send(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()  # what was said before the end is still to be read

    def _read(self) -> bytes:
        try:
            read = self._socket.recv(_READ_AT_ONCE)
        except ConnectionResetError:
            read = b""
        if not read:
            self._served.result()
            ray.actor.exit_actor()
        return read


def _serve(channel: Channel) -> None:
    try:
        serve(channel)
    finally:
        channel.close()


class RayLink:
    """A `Link` to an actor. At most one call is on its way; what is sent meanwhile goes with the next.

    Args:
        actor: of `Actor`.
        first: message for it.
    """

    def __init__(self, actor: Any, first: Message) -> None:
        self.actor = actor
        self._unsent, self._received = bytearray(), bytearray()
        self._call: Any = None
        self._how = "killed"
        self.is_closed = False
        self.send(first)

    def send(self, message: Message) -> None:
        self._unsent += encode(message)
        self.call()

    def call(self) -> Any:
        """The call that is on its way: one that begins now, if there was none."""
        if self._call is None:
            self._call = self.actor.exchange.remote(bytes(self._unsent))
            self._unsent.clear()
        return self._call

    def receive(self) -> list[Message]:
        if not self.is_closed and ray.wait([self.call()], timeout=0)[0]:
            try:
                self._received += ray.get(self._call)
            except RayError as error:
                self.is_closed, self._how = True, " ".join(str(error).split())
            self._call = None
        return decode(self._received)

    def end(self) -> str:
        ray.kill(self.actor, no_restart=True)
        return self._how

    def close(self) -> None:
        self.end()

    def wait_for_end(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not self.is_closed and (left := ends - time.monotonic()) > 0:
            ray.wait([self.call()], timeout=left)
            self.receive()


class RayLinks:
    """`Links` to actors of a cluster: each has a card of its own, or CPUs where there are no cards.

    Args:
        config: of the Runtimes. `device` None: cards if the cluster has any.
        num_replicas: None: one for each card of the cluster, and one on CPUs. If there are fewer cards, the others
            wait, as Ray's actors do.
        address: as in `ray.init`; it does not count where this process is connected to a cluster.

    Attributes:
        num_replicas: as many as there are.
        config: keyword arguments of their Runtimes.
        resources: of an actor, as Ray names them.

    Raises ParameterError where there is no cluster, and where the device is one card.
    """

    are_here = False

    def __init__(self, config: RuntimeConfig, num_replicas: int | None = None, address: str | None = None) -> None:
        device = None if config.device is None else str(config.device)
        if device is not None and device.startswith("cuda:"):
            raise ParameterError(f"device is {device!r}; Ray gives each replica a card: leave the number out")
        connect(address)
        cards = int(ray.cluster_resources().get("GPU", 0))
        on_cards = cards > 0 if device is None else device == "cuda"
        self.num_replicas = num_replicas or (max(1, cards) if on_cards else 1)
        self.config = config_as_json(config)
        if on_cards:
            if self.num_replicas > cards:
                _log.warning(
                    "%d replicas want a card each; the cluster has %d, and the others wait",
                    self.num_replicas,
                    cards,
                )
            self.config["device"] = "cuda"
            self.resources = {"num_gpus": 1, "num_cpus": config.threads or 1}
        else:
            processors = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
            threads = config.threads or _share(processors, self.num_replicas)
            beside = min(self.num_replicas, max(1, max(processors) // threads))  # replicas on the largest host
            self.config["memory_fraction"] = config.share_of_memory(on_gpu=False) / beside
            self.config |= {"device": device or "cpu", "threads": threads}
            self.resources = {"num_cpus": threads}

    def start(self, number: int) -> RayLink:
        """An actor, which begins once the cluster has a place for it."""
        actor = ray.remote(Actor).options(**self.resources, max_restarts=0).remote()
        return RayLink(actor, Message({"config": self.config}))

    def wait(self, links: Sequence[Link], seconds: float) -> None:
        calls = [link.call() for link in links if isinstance(link, RayLink)]
        ray.wait(calls, timeout=seconds)


def _share(processors: Sequence[int], num_replicas: int) -> int:
    """The most processors of one host that each of so many replicas can have; at least 1."""
    fits = (n for n in range(max(processors), 0, -1) if sum(own // n for own in processors) >= num_replicas)
    return next(fits, 1)
