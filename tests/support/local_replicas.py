"""Replicas without processes: each is a `Server` around a simulated Runtime, and what comes of its messages is
a test's to decide.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence

from radixrt.replicas.links import Link
from radixrt.replicas.worker import Server
from radixrt.runtime import Runtime
from radixrt.workers.channel import Message

MOST_WAITS = 3000  # of a group, in a test


class Killed(BaseException):
    """What a simulated Runtime raises where a real one's process would be killed."""


def as_sent(message: Message) -> Message:
    """What comes out at the other end."""
    return Message(json.loads(json.dumps(message.body)), message.numbers.copy())


class LocalLink:
    """A `Link` to a replica that does something only in `advance`.

    Attributes:
        is_slow: its messages do not arrive.
        hangs: it does nothing any more.
        loses_messages: what it has said and nobody has received is lost where its Runtime is killed.
    """

    loses_messages = False

    def __init__(self, runtime: Runtime) -> None:
        self.server = Server(runtime)
        self.said: deque[Message] = deque([as_sent(self.server.ready())])
        self.told: deque[Message] = deque()
        self.is_slow = self.hangs = self.is_dead = False

    @property
    def is_closed(self) -> bool:
        return self.is_dead and not self.said

    def send(self, message: Message) -> None:
        if not self.is_dead:
            self.told.append(as_sent(message))

    def receive(self) -> list[Message]:
        if self.is_slow:
            return []
        said, self.said = self.said, deque()
        return list(said)

    def advance(self, passes: int = 1) -> None:
        """Read what was sent, and run passes."""
        if self.is_dead or self.hangs:
            return
        for _ in range(passes):
            while self.told:
                if (answer := self.server.handle(self.told.popleft())) is not None:
                    self.said.append(as_sent(answer))
            try:
                news = self.server.step() if self.server.has_work else None
            except Killed:
                self.crash(self.loses_messages)
                return
            if news is not None:
                self.said.append(as_sent(news))

    def double(self) -> None:
        """The last message arrives twice."""
        if self.said:
            self.said.append(self.said[-1])

    def crash(self, loses_messages: bool = False) -> None:
        self.is_dead = True
        self.is_slow = False
        if loses_messages:
            self.said.clear()

    def end(self) -> str:
        self.is_dead = True
        return "ended"

    def close(self) -> None:
        self.is_dead = True

    def wait_for_end(self, seconds: float) -> None:
        pass


class LocalLinks:
    """`Links` to such replicas.

    Args:
        make: a Runtime for each start.
        on_wait: what happens while the group waits; without it each replica runs a pass.
    """

    are_here = True

    def __init__(self, make: Callable[[], Runtime], on_wait: Callable[[LocalLinks], None] | None = None) -> None:
        self._make = make
        self.on_wait = on_wait or (lambda links: links.advance())
        self.links: dict[int, LocalLink] = {}  # the latest of each number
        self.started = self._waits = 0

    def start(self, number: int) -> LocalLink:
        self.started += 1
        self.links[number] = LocalLink(self._make())
        return self.links[number]

    def advance(self) -> None:
        for link in self.links.values():
            link.advance()

    def wait(self, links: Sequence[Link], seconds: float) -> None:
        self._waits += 1
        assert self._waits < MOST_WAITS, "the group waits for what never comes"
        self.on_wait(self)
