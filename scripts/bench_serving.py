"""What a server adds: Poisson arrivals at shares of the capacity, beside `generate` on the same requests.

python scripts/bench_serving.py --config llama-3.1-8b --workload system_prompt

Random weights. The capacity is the list's requests over the time of `generate`. Clients are a process of their
own; each request is a stream on a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from radixrt.bench.catalogue import SHAPES, write_shape
from radixrt.bench.report import wide_console
from radixrt.builtin import MODEL_PATH
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.server.app import Server
from radixrt.server.run import Listener, listening_socket
from radixrt.workloads import lists

LISTS = ("unshared", "fewshot", "docqa", "system_prompt")
SIZES: dict[str, dict[str, Any]] = {  # with --small
    "unshared": {"requests": 24, "prompt_len": (50, 150), "new_tokens": (8, 32)},
    "fewshot": {"subjects": 6, "questions": 8, "examples_len": (100, 200), "new_tokens": 8},
    "docqa": {"documents": 3, "document_len": 256, "questions": 8, "new_tokens": 16},
    "system_prompt": {"requests": 24, "system_len": 256, "new_tokens": (8, 32)},
}


# --- clients ---


@dataclass(frozen=True)
class Told:
    """What a client saw of a request, in seconds from the begin of the run: when it was sent, and when each event
    came.
    """

    sent: float
    events: list[float]


async def ask(host: str, port: int, body: bytes, at: float, start: float) -> Told:
    """Send a request when it is due, and read its stream to the end."""
    await asyncio.sleep(start + at - time.perf_counter())
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the server said {status!r} {await reader.read()!r}")
    events, is_done = [], False
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            is_done = True
        elif line.startswith(b"data: "):
            events.append(time.perf_counter() - start)
    writer.close()
    if not is_done:
        raise RuntimeError("a stream has no end")
    return Told(sent - start, events)


async def ask_all(given: dict[str, Any]) -> list[Told]:
    start = time.perf_counter() + 0.2
    bodies = [json.dumps(body).encode() for body in given["bodies"]]
    due = zip(bodies, given["times"], strict=True)
    return await asyncio.gather(*(ask(given["host"], given["port"], body, at, start) for body, at in due))


def clients_main() -> None:
    """In the process of the clients: requests on standard input, what became of them on standard output."""
    told = asyncio.run(ask_all(json.load(sys.stdin)))
    json.dump([[one.sent, one.events] for one in told], sys.stdout)


# --- the server ---


@contextmanager
def served(runtime: Runtime) -> Iterator[tuple[str, int]]:
    """A server's address."""
    with listening_socket("127.0.0.1", 0) as bound:
        listener = Listener(Server(runtime, "bench"), drain_seconds=60)
        thread = threading.Thread(target=listener.run, kwargs={"sockets": [bound]})
        thread.start()
        while not listener.started:
            time.sleep(0.01)
        try:
            yield bound.getsockname()[:2]
        finally:
            listener.should_exit = True
            thread.join()


def generated(runtime: Runtime, prompts: Sequence[lists.WorkloadPrompt]) -> float:
    """Seconds of `generate`, from an empty cache."""
    runtime.flush_cache()
    began = time.perf_counter()
    params = [SamplingParams(max_new_tokens=one.max_new_tokens, ignore_eos=True) for one in prompts]
    runtime.generate([one.prompt_ids for one in prompts], params)
    return time.perf_counter() - began


def measured(runtime: Runtime, prompts: Sequence[lists.WorkloadPrompt], rate: float, seed: int) -> list[Told]:
    """The list, served: requests in its order, arriving at so many a second in the mean."""
    runtime.flush_cache()
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(prompts))
    with served(runtime) as (host, port):
        bodies = [
            {
                "input_ids": one.prompt_ids.tolist(),
                "sampling_params": {"max_new_tokens": one.max_new_tokens, "ignore_eos": True},
                "stream": True,
            }
            for one in prompts
        ]
        given = {"host": host, "port": port, "bodies": bodies, "times": np.cumsum(gaps).tolist()}
        command = [sys.executable, __file__, "--clients"]
        asked = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    if asked.returncode:
        raise SystemExit(f"the clients have failed:\n{asked.stderr}")
    return [Told(sent, events) for sent, events in json.loads(asked.stdout)]


def row(told: Sequence[Told], num_tokens: int, whole: float) -> list[str]:
    """Figures of a run, beside `generate`'s seconds."""
    arrived, ended = max(one.sent for one in told), max(one.events[-1] for one in told)
    first = [one.events[0] - one.sent for one in told]
    between = [later - earlier for one in told for earlier, later in pairwise(one.events)]
    return [
        f"{len(told) / arrived:.1f}",
        f"{num_tokens / ended:,.0f}",
        f"{ended / max(whole, arrived):.3f}",
        *(f"{1e3 * np.percentile(first, q):.1f}" for q in (50, 99)),
        *(f"{1e3 * np.percentile(between or [0.0], q):.1f}" for q in (50, 99)),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=SHAPES, default="qwen3-0.6b", help="a shape (qwen3-0.6b)")
    parser.add_argument("--workload", action="append", choices=LISTS, help="may be repeated (system_prompt)")
    parser.add_argument(
        "--load", type=float, action="append", metavar="SHARE", help="of the capacity; repeatable (0.5 0.8 0.95)"
    )
    parser.add_argument("--small", action="store_true", help="small lists, for a laptop")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the arrivals (0)")
    parser.add_argument("--device", help="such as cpu or cuda:1")
    given = parser.parse_args(argv)
    if any(not 0 < load <= 1 for load in given.load or ()):
        parser.error("--load is above 0, and 1 at most")
    table = Table(
        title="A server beside generate",
        caption="x: the time to the end of the last answer, over that of generate or, if longer, of the arrivals",
    )
    columns = "workload", "load", "requests/s", "tokens/s", "x", "first, ms", "99 %", "between, ms", "99 %"
    for column in columns:
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        write_shape(given.config, Path(folder))
        for file in MODEL_PATH.glob("tokenizer*"):  # streams need one
            shutil.copy(file, folder)
        with Runtime(folder, load_format="dummy", device=given.device) as runtime:
            for name in given.workload or ("system_prompt",):
                sizes = {**SIZES[name], "vocab_size": 1000} if given.small else {}
                prompts = getattr(lists, name)(**sizes)
                generated(runtime, prompts)  # it warms up
                whole, num_tokens = generated(runtime, prompts), sum(one.max_new_tokens for one in prompts)
                table.add_row(name, "generate", f"{len(prompts) / whole:.1f}", f"{num_tokens / whole:,.0f}")
                for load in given.load or (0.5, 0.8, 0.95):
                    told = measured(runtime, prompts, load * len(prompts) / whole, given.seed)
                    table.add_row(name, f"{load:.2f}", *row(told, num_tokens, whole))
    wide_console(140).print(table)


if __name__ == "__main__":
    clients_main() if sys.argv[1:] == ["--clients"] else main()
