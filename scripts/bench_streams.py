"""How evenly concurrent streams get their tokens: the real Runtime around passes that only take time. No GPU.

python scripts/bench_streams.py

Runs 1 to 256 streams at once, as tasks of an event loop and in threads. Prints passes, chunks, and the longest
time in which the event loop did nothing else. It takes half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console

from radixrt.bench.report import figure_table
from radixrt.limits import RunLimits
from radixrt.planning.simulated import ConstantRunner, simulated_parts
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import Pass, PassResult
from radixrt.text.cuts import Cuts, NoCuts
from radixrt.text.tokenizer import Tokenizer

STREAMS = (1, 4, 16, 64, 256)
TOKENS = 64  # of each stream
PASS_SECONDS = 0.02
PROMPT_LEN = 16


@dataclass
class SlowRunner(ConstantRunner):
    """Samples an "x" after some seconds, from the moment on at which all requests are there; `passes` counts."""

    seconds: float = 0.0
    passes: int = 0
    all_there: threading.Event = field(default_factory=threading.Event)

    def launch(self, pass_: Pass) -> Pass:
        self.all_there.wait()
        return super().launch(pass_)

    def collect(self, handle: object) -> PassResult:
        self.passes += 1
        time.sleep(self.seconds)
        return super().collect(handle)


@dataclass
class Figures:
    """What N streams saw.

    Attributes:
        kind: "tasks" of one event loop, or "threads".
        passes: that ran.
        chunks: the sizes in tokens of each stream's chunks.
        stall: the longest time in seconds in which a task that sleeps a millisecond at a time did not run; 0 for
            threads.
        seconds: that all of it took.
    """

    kind: str
    passes: int = 0
    chunks: list[list[int]] = field(default_factory=list)
    stall: float = 0.0
    seconds: float = 0.0

    @property
    def num_chunks(self) -> float:
        """Chunks a stream; median."""
        return statistics.median(map(len, self.chunks))

    @property
    def largest_chunk(self) -> int:
        return max(max(sizes) for sizes in self.chunks)


def measure(kind: str, num_streams: int, *, tokens: int, seconds: float = 0.02) -> Figures:
    """Run streams at once, as "tasks" of an event loop or in "threads"."""
    runner = SlowRunner(token=ord("x"), seconds=seconds)
    limits = RunLimits(num_streams * (PROMPT_LEN + tokens + 2), num_streams)
    parts = simulated_parts(runner, limits, PROMPT_LEN + tokens, vocab_size=256, tokenizer=letters())
    figures = Figures(kind)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    tokens_of = np.random.default_rng(0).integers(0, 256, (num_streams, PROMPT_LEN))
    tokens_of[:, 0] = np.arange(num_streams)  # nothing to share: nobody waits for another one's prefix
    prompts = tokens_of.tolist()
    with Runtime.from_parts(parts) as runtime:
        began = time.perf_counter()
        starter = threading.Thread(target=_start, args=(runtime, runner, num_streams))
        starter.start()
        if kind == "tasks":
            asyncio.run(_in_tasks(runtime, prompts, params, figures))
        else:
            _in_threads(runtime, prompts, params, figures)
        figures.seconds = time.perf_counter() - began
        figures.passes = runner.passes
        starter.join()
    return figures


def _start(runtime: Runtime, runner: SlowRunner, count: int) -> None:
    """Let passes begin when all requests have been submitted: no stream needs more of them than its tokens."""
    while runtime.num_running + runtime.num_waiting < count:
        time.sleep(0.005)
    runner.all_there.set()


class Letters:
    """A codec whose tokens are single bytes."""

    size = 256
    byte_ids: frozenset[int] = frozenset()

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode("latin-1")) for text in texts]

    def cuts(self) -> Cuts:
        raise NoCuts("texts are short")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("latin-1")

    def piece(self, token_id: int) -> str | None:
        return chr(token_id)

    def token_id(self, piece: str) -> int | None:
        return ord(piece)

    def serialized(self) -> str | None:
        return None

    def token_bytes(self) -> list[bytes | None]:
        return [bytes([byte]) for byte in range(256)]

    def definition(self) -> bytes:
        return b"bytes"


def letters() -> Tokenizer:
    """A tokenizer whose tokens are single bytes."""
    return Tokenizer(Letters())


async def _in_tasks(runtime: Runtime, prompts: list[list[int]], params: SamplingParams, figures: Figures) -> None:
    async def consume(prompt: list[int]) -> list[int]:
        return [len(chunk.token_ids) async for chunk in runtime.async_stream(prompt, params)]

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            figures.stall = max(figures.stall, time.perf_counter() - began)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    figures.chunks = await asyncio.gather(*map(consume, prompts))
    watching.cancel()


def _in_threads(runtime: Runtime, prompts: list[list[int]], params: SamplingParams, figures: Figures) -> None:
    ready = threading.Barrier(len(prompts))
    figures.chunks = [[] for _ in prompts]

    def consume(place: int) -> None:
        ready.wait()
        figures.chunks[place] = [len(chunk.token_ids) for chunk in runtime.stream(prompts[place], params)]

    threads = [threading.Thread(target=consume, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    columns = "kind", "passes", "chunks a stream", "largest chunk", "longest stall, ms", "seconds"
    title = f"streams at once: {TOKENS} tokens each, passes of {PASS_SECONDS * 1000:g} ms"
    table = figure_table(title, "streams", *columns)
    for kind in ("tasks", "threads"):
        for count in STREAMS:
            found = measure(kind, count, tokens=TOKENS, seconds=PASS_SECONDS)
            stall = f"{found.stall * 1000:.1f}" if kind == "tasks" else "-"
            table.add_row(
                str(count),
                kind,
                str(found.passes),
                f"{found.num_chunks:g}",
                str(found.largest_chunk),
                stall,
                f"{found.seconds:.2f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
