"""The process of a rank other than the first: it loads its part of the model, and computes what it is told."""

# Tests: tests/ranks/test_ranks.py, tests/ranks/test_stages.py

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from radixrt.config import RuntimeConfig
from radixrt.errors import RadixrtError
from radixrt.ranks.followers import BEAT_SECONDS
from radixrt.workers.channel import Channel, Message, error_as_json
from radixrt.workers.process import LOG

if TYPE_CHECKING:
    from radixrt.ranks.kept_parts import OwnParts
    from radixrt.ranks.rank import RankParts


class Follower:
    """Does what the first rank says, in order."""

    def __init__(self, parts: RankParts, kept: OwnParts) -> None:
        from radixrt.ranks.messages import PassReader  # what is of torch is imported last

        self._parts, self._runner = parts, parts.runner
        self._kept = kept
        self._reader, self._num_launched = PassReader(parts.decoder.stage.count), 0
        self._in_flight: deque[object] = deque()

    def handle(self, message: Message) -> Message | None:
        """Do what a message says. Returns what the first rank is to know."""
        from radixrt.ranks.leading_runner import COMPARE_EVERY, digest_of
        from radixrt.ranks.messages import identity_message, transfers_of

        body = message.body
        if "launch" in body:
            pass_ = self._reader.pass_of(message)
            changes = pass_.row_changes
            self._parts.rows.req_to_token[changes.rows, changes.positions] = changes.slots
            self._in_flight.append(self._runner.launch(pass_))
            self.end_passes(but=1)
            self._num_launched += 1
            if (number := self._num_launched - 1) % COMPARE_EVERY == 0:
                return Message({"digest": [number, digest_of(self._runner)]})
        elif "masks" in body:
            masks = self._runner.mask_memory(*body["masks"])
            masks[:] = message.numbers.reshape(masks.shape)
            self._runner.draw_masked(self._in_flight[-1], masks)
        elif "transfer" in body:
            self._runner.transfer(transfers_of(message))
        elif "reload" in body:
            self._parts.reload(body["reload"])
        elif "kept" in body:
            self._kept.handle(body["kept"], message.numbers)
        elif "identity" in body:
            return identity_message(body["asked"], self._parts.identity())
        return Message({"answers": body["asked"]}) if "asked" in body else None

    def end_passes(self, *, but: int = 0) -> None:
        """Wait for the passes in flight, but so many."""
        while len(self._in_flight) > but:
            self._runner.collect(self._in_flight.popleft())


def follow(channel: Channel, first: dict[str, Any]) -> None:
    """Be a rank until the first one closes its end."""
    import torch

    from radixrt.ranks.group import Shape, joined, store_at
    from radixrt.ranks.kept_parts import OwnParts
    from radixrt.ranks.rank import assemble_rank, folder_of

    config = RuntimeConfig(**first["config"])
    shape = Shape(config.num_ranks, config.pipeline_parallel_size)
    store = store_at(first["port"], shape.size)

    channel.send(Message({"here": True}))
    group = joined(store, first["rank"], shape, torch.device(first["config"]["device"]), config.impl)

    def loaded() -> None:
        channel.send(Message({"loaded": True}))

    try:
        parts = assemble_rank(config, folder_of(config), group, loaded)
    except RadixrtError as error:
        channel.send(Message({"refused": error_as_json(error)}))
        return
    follower = Follower(parts, OwnParts(parts.kept_parts, first["kept_file"]))
    while True:
        for message in channel.receive():
            if (told := follower.handle(message)) is not None:
                channel.send(told)
        if channel.is_closed:
            follower.end_passes()  # others may wait for this rank's part
            return
        channel.wait()


def _next_of(channel: Channel) -> Message | None:
    while not (messages := channel.receive()):
        if channel.is_closed:
            return None
        channel.wait()
    return messages[0]


def _stay_alive(channel: Channel, parent: int) -> None:
    """Give signs of life, and end the process where the first rank has gone: what this one waits for may never
    come. Its end of the socket may live on in a process that it has forked.
    """
    poll = select.poll()
    poll.register(channel, 0)  # these events come without being asked for
    gone = select.POLLHUP | select.POLLERR
    while not any(events & gone for _, events in poll.poll(1000 * BEAT_SECONDS)) and os.getppid() == parent:
        channel.send(Message({"alive": True}))
    time.sleep(1.0)  # it ends by itself if it can
    os._exit(1)


def main() -> None:
    """`python -m radixrt.ranks.follower FD`: FD is a connected socket."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the first rank hears them, and closes its end
    if level := os.environ.get(LOG):
        logging.basicConfig(level=level, format="%(name)s: %(message)s")
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    first = _next_of(channel)
    if first is None:
        return
    threading.Thread(target=_stay_alive, args=(channel, parent), daemon=True).start()
    try:
        follow(channel, first.body)
    except Exception as error:
        channel.send(Message({"lost": f"{type(error).__name__}: {error}"}))
        raise


if __name__ == "__main__":
    main()
