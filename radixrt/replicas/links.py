"""How a group reaches its replicas: processes of this host, each over a socket pair."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from radixrt.config import RuntimeConfig, config_as_json
from radixrt.errors import ParameterError
from radixrt.workers.channel import Message
from radixrt.workers.process import Process


class Link(Protocol):
    """A replica that has been started, as its group sees it."""

    @property
    def is_closed(self) -> bool:
        """It has gone, and what it has sent has been received."""

    def send(self, message: Message) -> None: ...

    def receive(self) -> list[Message]:
        """What has come; does not wait."""

    def end(self) -> str:
        """End it at once, whatever it does. Returns how it ended, for an error's message."""

    def close(self) -> None:
        """Let it end by itself."""

    def wait_for_end(self, seconds: float) -> None:
        """After `close`: until it has ended. After so long it is ended."""


class Links(Protocol):
    """Starts replicas, and waits for them.

    Attributes:
        are_here: replicas read the files of this host.
    """

    are_here: bool

    def start(self, number: int) -> Link:
        """Start the replica of a number, anew if it was there before."""

    def wait(self, links: Sequence[Link], seconds: float) -> None:
        """Until one of the links has something to receive, or is closed; at most so long."""


@dataclass(frozen=True)
class Placement:
    """Where a replica runs.

    Attributes:
        config: of its Runtime.
        environment: of its process, beside this one's.
    """

    config: RuntimeConfig
    environment: Mapping[str, str] = field(default_factory=dict)


class Processes:
    """`Links` to processes of this host, one for each placement."""

    are_here = True

    def __init__(self, placements: Sequence[Placement], program: str = "radixrt.replicas.worker") -> None:
        self._placements, self._program = placements, program

    def start(self, number: int) -> Process:
        placement = self._placements[number]
        first = Message({"config": config_as_json(placement.config)})
        return Process(self._program, placement.environment, first)

    def wait(self, links: Sequence[Link], seconds: float) -> None:
        poll = select.poll()
        for link in links:
            if isinstance(link, Process):
                poll.register(link.channel, select.POLLIN | select.POLLOUT * link.channel.has_unsent)
        poll.poll(seconds * 1000)


def placements(config: RuntimeConfig, num_replicas: int | None) -> list[Placement]:
    """One replica for each visible card, or as many as are wanted: on the cards in turn, or on CPUs. With ranks on
    as many cards each.

    Raises ParameterError where the device is one card, or cannot be had, or ranks want more cards than there are.
    """
    from radixrt.execution.device import choose_device  # torch

    device = choose_device(config.device)
    if device.type != "cuda":
        return _on_processors(config, num_replicas or 1)
    if device.index is not None and config.device is not None and ":" in str(config.device):
        raise ParameterError(
            f"device is {config.device!r}; replicas take the visible cards in turn: leave the number out, and "
            "choose cards by CUDA_VISIBLE_DEVICES"
        )
    size, visible = config.num_ranks, _visible_cards()
    cards = [",".join(visible[first : first + size]) for first in range(0, len(visible) - size + 1, size)]
    if not cards:
        raise ParameterError(f"{config.told_ranks}, but torch sees {len(visible)} CUDA devices")
    wanted = num_replicas or len(cards)
    sharing = -(-wanted // len(cards))  # replicas on the fullest card
    if sharing > 1:
        config = _with(config, memory_fraction=config.share_of_memory(on_gpu=True) / sharing)
    return [
        Placement(_with(config, device="cuda"), {"CUDA_VISIBLE_DEVICES": cards[number % len(cards)]})
        for number in range(wanted)
    ]


def _on_processors(config: RuntimeConfig, num_replicas: int) -> list[Placement]:
    from radixrt.cpu_count import usable_cpus

    threads = config.threads or max(1, usable_cpus() // num_replicas)
    fraction = config.share_of_memory(on_gpu=False) / num_replicas
    own = _with(config, device=config.device or "cpu", threads=threads, memory_fraction=fraction)
    return [Placement(own)] * num_replicas


def _visible_cards() -> list[str]:
    """Numbers or names of the cards that this process may use."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(map(str, range(count))) if named is None else named.split(",")[:count]


def _with(config: RuntimeConfig, **changed: object) -> RuntimeConfig:
    return RuntimeConfig(**config_as_json(config) | changed)
