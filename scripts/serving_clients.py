"""Clients of bench_serving.py, in a process of their own, which is to be quick to start and has little to do.

On standard input: a line of JSON, then the moment to begin, after "ready" is on standard output. There comes what
became of each request in the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Stream(asyncio.Protocol):
    """A request, from its connection to its end. It looks for ends of events, and at nothing else in them.

    Attributes:
        ended: is set once the server has closed the connection.
        times: when events came; those that come together have one.
        num_events: how many came, with the one that says that all have.
    """

    request: bytes
    ended: asyncio.Future[None]
    times: list[float] = field(default_factory=list)
    num_events: int = 0
    head: bytes = b""
    tail: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if len(self.head) < 512:
            self.head += data[:512]
        count = (self.tail[-1:] + data).count(b"\n\n")
        if count:
            self.times.append(now)
            self.num_events += count
        self.tail = (self.tail + data)[-32:]

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self.ended.set_exception(error)
        elif b" 200 " not in self.head.split(b"\r\n")[0] or b"data: [DONE]\n\n" not in self.tail:
            self.ended.set_exception(RuntimeError(f"a stream has no end: {self.head!r} ... {self.tail!r}"))
        else:
            self.ended.set_result(None)


async def ask(given: dict[str, Any], body: dict[str, Any], at: float) -> tuple[float, list[float], int]:
    """When a request was sent and its events came, in seconds of the clock, and how many these were."""
    host, port, path = given["host"], given["port"], given["path"]
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    loop = asyncio.get_running_loop()
    stream = Stream(head.encode() + content, loop.create_future())
    await asyncio.sleep(at - time.perf_counter())
    sent = time.perf_counter()
    await loop.create_connection(lambda: stream, host, port)
    await stream.ended
    return sent, stream.times, stream.num_events - 1


async def ask_all(given: dict[str, Any], start: float) -> list[tuple[float, list[float], int]]:
    due = zip(given["bodies"], given["times"], strict=True)
    return await asyncio.gather(*(ask(given, body, start + at) for body, at in due))


def main() -> None:
    given = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    json.dump(asyncio.run(ask_all(given, start)), sys.stdout)


if __name__ == "__main__":
    main()
