"""What goes from the last stage to the first one, and when each waits for the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layers.stages import TokenReceiver, TokenSender


class Wire:
    """A link whose two ends are here."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.waited: list[str] = []

    def start_sending(self, tensor: Tensor) -> Any:
        self.sent.append(tensor)
        return Work(self, f"sent {int(tensor[0])}")

    def receive(self, place: Tensor) -> Tensor:
        self.waited.append("received")
        return place.copy_(self.sent.pop(0))


class Work:
    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name

    def wait(self) -> None:
        self._wire.waited.append(self._name)


def tokens(number: int) -> Tensor:
    return torch.full((3,), number, dtype=torch.int32)


def test_tokens_are_received_when_they_are_needed() -> None:
    """Not before; those of passes that have ended long since are received, though nobody needs them."""
    wire: Any = Wire()
    receiver, last = TokenReceiver(wire, depth=2), tokens(-1)
    for number in range(4):
        wire.start_sending(tokens(number))
        # The last one is of a runner with fewer rows.
        assert receiver.expect(last if number < 3 else torch.zeros(1, dtype=torch.int32)) == number
        receiver.take(-1, last)
        assert len(wire.waited) == max(0, number - 1)
    receiver.take(1, last)  # the host knows them
    assert (len(wire.waited), last.tolist()) == (2, [-1, -1, -1])
    receiver.take(2, last)
    assert (len(wire.waited), last.tolist()) == (3, [2, 2, 2])


def test_what_is_sent_is_a_copy_that_lives_until_it_has_gone() -> None:
    """The next pass draws into the same place. Nothing is waited for that may not have gone."""
    wire: Any = Wire()
    sender, last = TokenSender(wire, depth=2), tokens(0)
    for number in range(4):
        last.fill_(number)
        sender.send(last)
    assert [sent.tolist() for sent in wire.sent] == [[number] * 3 for number in range(4)]
    assert wire.waited == ["sent 0", "sent 1"]
