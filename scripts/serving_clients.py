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
        counts: how many came at each of them.
    """

    request: bytes
    ended: asyncio.Future[None]
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
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
            self.counts.append(count)
        self.tail = (self.tail + data)[-32:]

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self.ended.set_exception(error)
        elif b" 200 " not in self.head.split(b"\r\n")[0] or b"data: [DONE]\n\n" not in self.tail:
            self.ended.set_exception(RuntimeError(f"a stream has no end: {self.head!r} ... {self.tail!r}"))
        else:
            self.ended.set_result(None)


def request_of(given: dict[str, Any], body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {given['path']} HTTP/1.1\r\nHost: {given['host']}\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + content


async def ask(address: tuple[str, int], request: bytes, at: float) -> tuple[float, list[float], list[int]]:
    """When a request was sent and its events came, in seconds of the clock, and how many came at once. The last
    event, which says that all have come, is not counted.
    """
    loop = asyncio.get_running_loop()
    stream = Stream(request, loop.create_future())
    await asyncio.sleep(at - time.perf_counter())
    sent = time.perf_counter()
    await loop.create_connection(lambda: stream, *address)
    await stream.ended
    return sent, stream.times, [*stream.counts[:-1], stream.counts[-1] - 1]


async def ask_all(
    address: tuple[str, int], requests: list[bytes], times: list[float]
) -> list[tuple[float, list[float], list[int]]]:
    due = zip(requests, times, strict=True)
    return await asyncio.gather(*(ask(address, request, at) for request, at in due))


def main() -> None:
    given = json.loads(sys.stdin.readline())
    requests = [request_of(given, body) for body in given["bodies"]]
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    times = [start + at for at in given["times"]]
    json.dump(asyncio.run(ask_all((given["host"], given["port"]), requests, times)), sys.stdout)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("this is a part of scripts/bench_serving.py, which runs it")
    main()
