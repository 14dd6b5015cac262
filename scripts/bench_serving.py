"""What a server adds: Poisson arrivals at shares of the capacity, beside `generate` on the same requests.

python scripts/bench_serving.py --config llama-3.1-8b --workload system_prompt
python scripts/bench_serving.py --pass-ms 16

Random weights, and a vocabulary in which each token spells a word; or a device that only takes its time, so much
a pass, while all else is real. The capacity is the list's requests over the time of `generate`. Clients are
processes of their own; each request is a stream on a connection of its own.

Rates and times are those of the steady state: from the arrival of a third of the requests, by when as many run as
will, to that of the last one. The end, in which a few long answers run alone, is left out. A server keeps up if as
many tokens come in that time as requests that arrive in it ask for; where it does not, requests pile up. The list
must take several times as long as an answer: of too few requests nothing is steady.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as WordTokenizer
from tokenizers import decoders, models

from radixrt.arrays import Int32Array
from radixrt.bench.catalogue import SHAPES, write_shape
from radixrt.bench.report import figure_table, wide_console
from radixrt.builtin import MODEL_PATH
from radixrt.frontend.openai import COMPLETIONS
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.passes import Pass, PassResult
from radixrt.server.app import Server
from radixrt.server.run import Listener, listening_socket, switching_soon
from radixrt.server.writers.writers import StreamWriters
from radixrt.text.tokenizer import load_tokenizer
from radixrt.workloads import lists
from scripts.bench_host import HostRunner, host_runtime

LISTS = ("unshared", "fewshot", "docqa", "system_prompt")
SMALL: dict[str, dict[str, Any]] = {  # sizes with --small
    "unshared": {"prompt_len": (50, 150), "new_tokens": (8, 32)},
    "fewshot": {"examples_len": (100, 200)},
    "docqa": {"document_len": 256, "new_tokens": 16},
    "system_prompt": {"system_len": 256, "new_tokens": (8, 32)},
}
GROWING = {  # what a list has more of with more requests, and how many of these each is
    "unshared": ("requests", 1),
    "fewshot": ("questions", 57),
    "docqa": ("documents", 64),
    "system_prompt": ("requests", 1),
}
REQUESTS, FEW_REQUESTS = 2048, 48  # the second with --small
STREAMED = {"ignore_eos": True, "stream": True}
WARM_UP = 1 / 3  # of the requests arrive before the steady state
FEWEST = 10  # requests of a list
GOAL = 0.95  # of what is offered

# Of the device that only takes its time.
LAUNCH_SECONDS = 0.0005  # of the host
PIECES = 259, 300  # tokens that are pieces of words
RELEASES = 10  # of the interpreter's lock in a launch


@dataclass(frozen=True)
class Told:
    """What a client saw of a request for `num_tokens`, in seconds from the begin of the run: when it was sent,
    when events came, and how many came at each of these times.
    """

    num_tokens: int
    sent: float
    times: list[float]
    counts: list[int]

    def tokens_in(self, begin: float, end: float) -> float:
        """How many of its tokens came from `begin` to `end`, if each event has as many as the others."""
        counts = zip(self.times, self.counts, strict=True)
        return self.num_tokens * sum(n for at, n in counts if begin < at <= end) / sum(self.counts)


@dataclass(frozen=True)
class Run:
    """What became of all requests, what the engine did, and CPU seconds of the server: of its event loop, and of
    all other threads.
    """

    told: list[Told]
    activity: Activity
    loop_seconds: float
    other_seconds: float

    @property
    def steady(self) -> tuple[float, float]:
        """Seconds from when until when a run is in its steady state."""
        arrivals = sorted(one.sent for one in self.told)
        return arrivals[int(WARM_UP * len(arrivals))], arrivals[-1]


def prompts_of(name: str, count: int | None, *, small: bool) -> list[lists.WorkloadPrompt]:
    """So many requests of a list, or as many as there are by default."""
    if count is None:
        count = FEW_REQUESTS if small else REQUESTS
    grown, each = GROWING[name]
    sizes = {**SMALL[name], "vocab_size": 1000} if small else {}
    return getattr(lists, name)(**sizes, **{grown: -(-count // each)})[:count]  # type: ignore[no-any-return]


# --- the server ---


@dataclass
class Launched:
    """A pass, and when the device will have computed it."""

    pass_: Pass
    end: float


@dataclass
class Device(HostRunner):
    """Takes `pass_seconds` for each pass, and draws pieces of words. A launch holds the interpreter for a while,
    but first lets other threads have it, as calls of a captured pass do.
    """

    pass_seconds: float = 0.0
    _prepared: Pass | None = None
    _free_at: float = 0.0

    def prepare(self, pass_: Pass) -> None:
        assert self.builder is not None
        self.builder.build(pass_)
        self._prepared = pass_

    def launch(self, pass_: Pass) -> Launched:  # type: ignore[override]
        for _ in range(RELEASES):
            time.sleep(0)
        if self._prepared is not pass_:
            self.prepare(pass_)
        self._prepared = None
        end = time.perf_counter() + LAUNCH_SECONDS
        while time.perf_counter() < end:
            pass
        self._free_at = max(self._free_at, time.perf_counter()) + self.pass_seconds
        return Launched(pass_, self._free_at)

    def collect(self, handle: object) -> PassResult:
        assert isinstance(handle, Launched)
        time.sleep(max(0.0, handle.end - time.perf_counter()))
        return super().collect(handle.pass_)

    def draw(self, count: int) -> Int32Array:
        return self.rng.integers(*PIECES, count, np.int32)


@contextmanager
def runtime_of(given: argparse.Namespace) -> Iterator[Runtime]:
    """Of random weights in a shape, or around a device that only takes its time."""
    with tempfile.TemporaryDirectory() as folder:
        if given.pass_ms is not None:
            device = Device(pass_seconds=given.pass_ms / 1000)
            runtime, _ = host_runtime(512, 4096, device, load_tokenizer(MODEL_PATH))
        else:
            write_shape(given.config, Path(folder))
            write_words(Path(folder), SHAPES[given.config]["vocab_size"])
            most = given.max_running_requests
            runtime = Runtime(folder, load_format="dummy", device=given.device, max_running_requests=most)
        with runtime:
            runtime.capture_graphs()  # as a server does
            yield runtime


def write_words(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer in which each id spells text at once: characters of ASCII, then words after a blank."""
    spelled = [chr(i) for i in range(ord("!"), ord("~") + 1)]
    spelled += [f"Ġ{i:x}" for i in range(vocab_size - len(spelled))]  # the first letter is a blank's spelling
    tokenizer = WordTokenizer(models.BPE({one: i for i, one in enumerate(spelled)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@contextmanager
def served(runtime: Runtime, num_writers: int) -> Iterator[tuple[str, int, threading.Thread]]:
    """A server's address, and the thread of its event loop."""
    with (
        listening_socket("127.0.0.1", 0) as bound,
        switching_soon(),
        StreamWriters(runtime.tokenizer, num_writers, late_seconds=60) as writers,
    ):
        listener = Listener(Server(runtime, "bench", writers=writers), drain_seconds=60)
        thread = threading.Thread(target=listener.run, kwargs={"sockets": [bound]})
        thread.start()
        while not listener.started:
            time.sleep(0.01)
        try:
            yield *bound.getsockname()[:2], thread
        finally:
            listener.should_exit = True
            thread.join()


def cpu_seconds(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def generated(runtime: Runtime, prompts: Sequence[lists.WorkloadPrompt]) -> tuple[float, float]:
    """Seconds of `generate`, from an empty cache, and CPU seconds."""
    runtime.flush_cache()
    began, cpu_began = time.perf_counter(), time.process_time()
    params = [SamplingParams(max_new_tokens=one.max_new_tokens, ignore_eos=True) for one in prompts]
    runtime.generate([one.prompt_ids for one in prompts], params)
    return time.perf_counter() - began, time.process_time() - cpu_began


def measured(
    runtime: Runtime, prompts: Sequence[lists.WorkloadPrompt], rate: float, given: argparse.Namespace
) -> Run:
    """The list, served: requests in its order, arriving at so many a second in the mean."""
    num_clients, num_writers = given.clients, given.stream_writers
    runtime.flush_cache()
    gaps = np.random.default_rng(given.seed).exponential(size=len(prompts))
    times = (np.cumsum(gaps) / (rate * gaps.mean())).tolist()  # the last one is where the rate has it
    bodies = [
        {"model": "any", "prompt": one.prompt_ids.tolist(), "max_tokens": one.max_new_tokens, **STREAMED}
        for one in prompts
    ]
    with served(runtime, num_writers) as (host, port, loop), ExitStack() as stack:
        where = {"host": host, "port": port, "path": COMPLETIONS}
        clients = [
            stack.enter_context(
                Clients({**where, "bodies": bodies[place::num_clients], "times": times[place::num_clients]})
            )
            for place in range(num_clients)
        ]
        for one in clients:
            one.until_ready()
        before = runtime.activity()
        loop_began, began, start = cpu_seconds(loop), time.process_time(), time.perf_counter() + 0.1
        with ThreadPoolExecutor(num_clients) as threads:
            told = [one for found in threads.map(lambda one: one.told(start), clients) for one in found]
        loop_seconds = cpu_seconds(loop) - loop_began
        other_seconds = time.process_time() - began - loop_seconds
        return Run(told, runtime.activity() - before, loop_seconds, other_seconds)


class Clients:
    """A process that sends requests when they are due; it has been killed once the `with` is left."""

    def __init__(self, given: dict[str, Any]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("serving_clients.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(json.dumps(given), file=self._process.stdin, flush=True)
        self._num_tokens = [body["max_tokens"] for body in given["bodies"]]

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def until_ready(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def told(self, start: float) -> list[Told]:
        """What became of the requests, if all begins at `start`."""
        answered, _ = self._process.communicate(f"{start}\n")
        if self._process.returncode:
            raise SystemExit("the clients have failed")
        return [
            Told(num_tokens, sent - start, [at - start for at in times], counts)
            for num_tokens, (sent, times, counts) in zip(self._num_tokens, json.loads(answered), strict=True)
        ]


def pass_of(activity: Activity) -> list[str]:
    """Milliseconds of a pass, of the device and of the host."""
    count = max(1, activity.passes)
    return [f"{1e3 * each / count:.1f}" for each in (activity.busy_seconds, activity.scheduling_seconds)]


def row(run: Run) -> list[str]:
    """Figures of a run."""
    told, (begin, end) = run.told, run.steady
    arrived = [one for one in told if begin < one.sent <= end]
    offered, came = sum(one.num_tokens for one in arrived), sum(one.tokens_in(begin, end) for one in told)
    first = [one.times[0] - one.sent for one in arrived]
    between = [later - earlier for one in told for earlier, later in pairwise(one.times) if begin < later <= end]
    num_tokens = sum(one.num_tokens for one in told)
    return [
        f"{len(arrived) / (end - begin):.1f}",
        f"{came / (end - begin):,.0f}",
        f"{came / offered:.3f}",
        "yes" if came >= GOAL * offered else "no",
        *(f"{1e3 * np.percentile(first, q):.1f}" for q in (50, 99)),
        *(f"{1e3 * np.percentile(between or [0.0], q):.1f}" for q in (50, 99)),
        *pass_of(run.activity),
        f"{num_tokens / sum(sum(one.counts) for one in told):.2f}",
        *(f"{1e6 * seconds / num_tokens:.1f}" for seconds in (run.loop_seconds, run.other_seconds)),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=SHAPES, default="qwen3-0.6b", help="a shape (qwen3-0.6b)")
    parser.add_argument("--workload", action="append", choices=LISTS, help="may be repeated (system_prompt)")
    parser.add_argument(
        "--load", type=float, action="append", metavar="SHARE", help="of the capacity; repeatable (0.5 0.8 0.95)"
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"of a list ({REQUESTS:,}; small: {FEW_REQUESTS})"
    )
    parser.add_argument(
        "--max-running-requests",
        type=int,
        default=512,
        metavar="N",
        help="as of the Runtime (512); with more, the steady state comes later: one stream lasts as many passes",
    )
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="processes that ask (4)")
    parser.add_argument(
        "--stream-writers",
        type=int,
        default=StreamWriters.usual_count(),
        metavar="N",
        help="as of radixrt serve (its default)",
    )
    parser.add_argument("--small", action="store_true", help="short prompts and answers, for a laptop")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the arrivals (0)")
    parser.add_argument("--device", help="such as cpu or cuda:1")
    parser.add_argument(
        "--pass-ms", type=float, metavar="MS", help="in place of a model, a device of so long a pass"
    )
    given = parser.parse_args(argv)
    if any(not 0 < load <= 1 for load in given.load or ()):
        parser.error("--load is above 0, and 1 at most")
    if given.requests is not None and given.requests < FEWEST:
        parser.error(f"--requests is {FEWEST} at least")
    caption = (
        "came: tokens that came over those that were asked for, from the arrival of a third of the requests to "
        f"that of the last; met: these are {GOAL} at least; first: time to the first event, between: to the next; "
        "device, host: what a pass takes of them; loop, rest: CPU time of the event loop and of all other "
        "threads, a token"
    )
    served_as = "load", "requests/s", "tokens/s", "came", "met", "first, ms", "99 %", "between, ms", "99 %"
    costs = "device, ms", "host, ms", "tokens an event", "loop, µs", "rest, µs"
    table = figure_table("A server beside generate", "workload", *served_as, *costs, caption=caption)
    with runtime_of(given) as runtime:
        for name in given.workload or ("system_prompt",):
            prompts = prompts_of(name, given.requests, small=given.small)
            num_tokens = sum(one.max_new_tokens for one in prompts)
            generated(runtime, prompts[: len(prompts) // 4])  # it warms up
            before = runtime.activity()
            whole, cpu = generated(runtime, prompts)
            passes = pass_of(runtime.activity() - before)
            rates = f"{len(prompts) / whole:.1f}", f"{num_tokens / whole:,.0f}"
            table.add_row(name, "generate", *rates, *[""] * 6, *passes, "", "", f"{1e6 * cpu / num_tokens:.1f}")
            for load in given.load or (0.5, 0.8, 0.95):
                run = measured(runtime, prompts, load * len(prompts) / whole, given)
                table.add_row(name, f"{load:.2f}", *row(run))
    wide_console(180).print(table)


if __name__ == "__main__":
    main()
