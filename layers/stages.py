"""The stages of a pipeline: consecutive layers of a model, each stage on ranks of its own, as a rank sees them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Link:
    """One direction from one rank to another.

    Attributes:
        group: torch's process group of these two, the sender first, NCCL's on GPUs, Gloo's on CPUs.
    """

    group: Any

    def start_sending(self, tensor: Tensor) -> Any:
        """Start sending what has been computed, which must not change until the returned work is done."""
        return self.group.send([tensor], 1, 0)

    def send(self, tensor: Tensor) -> None:
        """Send; later work of this stream, or a CPU, waits until the other side has taken it."""
        self.start_sending(tensor.contiguous()).wait()

    def receive(self, place: Tensor) -> Tensor:
        """Fill `place`, as large as what is sent, and return it. On a GPU the current stream waits for that."""
        self.group.recv([place], 0, 0).wait()
        return place


class TokenSender:
    """The last stage's end of what it tells the first one: the tokens that it has drawn."""

    def __init__(self, link: Link, depth: int) -> None:
        self._link, self._depth = link, depth
        self._sent: deque[tuple[Any, Tensor]] = deque()  # what may not have gone yet

    def send(self, last_token: Tensor) -> None:
        """Send the last tokens of all rows, `[max_requests + 1]` int32, as they are now. Nothing waits for it."""
        copy = last_token.clone()
        self._sent.append((self._link.start_sending(copy), copy))
        while len(self._sent) > self._depth:
            self._sent.popleft()[0].wait()


class TokenReceiver:
    """The first stage's end. Tokens are received when they are needed, and not offered a place before: NCCL's
    kernel would wait for them on a multiprocessor that the products of the next pass lack, which then take up to
    twice as long. Those of a pass that `depth` others have followed are received, too: it has ended, and the last
    stage waits for no older ones.
    """

    def __init__(self, link: Link, depth: int) -> None:
        self._link, self._depth = link, depth
        self._expected: deque[tuple[int, torch.Size]] = deque()  # numbers of passes, and shapes of their tokens
        self._num_expected = 0

    def expect(self, last_token: Tensor) -> int:
        """Expect the tokens of another pass. Returns its number: they are counted."""
        number = self._num_expected
        self._expected.append((number, last_token.shape))
        self._num_expected += 1
        while len(self._expected) > self._depth:
            self._receive(last_token)  # so old that the host knows them: nobody will ask
        return number

    def take(self, number: int, last_token: Tensor) -> None:
        """Wait for the tokens of pass `number`; if they were not taken before, `last_token` has them then."""
        newest: Tensor | None = None
        while self._expected and self._expected[0][0] <= number:
            newest = self._receive(last_token)
        if newest is not None:
            last_token.copy_(newest)

    def _receive(self, like: Tensor) -> Tensor:
        """The tokens of the first pass whose are expected."""
        _, shape = self._expected.popleft()
        return self._link.receive(like.new_empty(shape))


@dataclass(frozen=True)
class Stage:
    """Whose place is `index` of `count` stages. Hidden states go from each stage to the next one, and the tokens
    that the last one draws to the first one, between ranks of equal places in their stages. All ranks launch the
    same passes in the same order.

    Attributes:
        before: from the stage before; None in the first one, and where nothing is computed.
        after: to the stage after; None in the last one, likewise.
        sender: of drawn tokens, in the last stage.
        receiver: of drawn tokens, in the first stage.
    """

    index: int = 0
    count: int = 1
    before: Link | None = None
    after: Link | None = None
    sender: TokenSender | None = None
    receiver: TokenReceiver | None = None

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Its own of so many: equally many in each stage, or one more in the first ones, since the last one has
        the output head, too.
        """
        each, more = divmod(num_layers, self.count)
        begin = self.index * each + min(self.index, more)
        return range(begin, begin + each + (self.index < more))


WHOLE = Stage()
