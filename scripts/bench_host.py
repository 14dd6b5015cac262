"""The host's work in a call of `Runtime.generate`: CPU seconds by part, around a device that computes nothing.

python scripts/bench_host.py --list fewshot10k --running 512
python scripts/bench_host.py --list evaluation --running 2048 --text

All that the host does is real: checks, radix tree, scheduler, attention plans, packed words, booking, outputs. It
encodes prompts and decodes answers, too, with --text.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import itertools
import pstats
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from radixrt.arrays import Int32Array
from radixrt.bench.catalogue import SHAPES
from radixrt.bench.report import figure_table
from radixrt.bench.subject import tokenizer_folder, usual_tokenizer
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.engine.driver import Driver
from radixrt.execution.attention.flat import KernelShape
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.execution.graphs import captured_shapes
from radixrt.execution.pass_builder import PassBuilder
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.limits import RunLimits
from radixrt.planning.simulated import ConstantRunner, simulated_parts
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.admission import Admission
from radixrt.schedule.booking import Bookkeeper
from radixrt.schedule.passes import Pass, PassResult
from radixrt.schedule.sampling_table import SamplingTable
from radixrt.schedule.scheduler import Scheduler
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from radixrt.workloads import lists
from radixrt.workloads.lists import TokenSource, WorkloadPrompt, fewshot, samples
from radixrt.workloads.texts import as_texts
from triton_ops.implementation import GPU

SHAPE = "qwen3-0.6b"
POOL_TOKENS, CHUNK, VOCAB_SIZE = 500_000, 16_384, SHAPES[SHAPE]["vocab_size"]
NUM_WEIGHTS = 600_000_000  # small enough for captured passes with extends

# Parts, by the methods whose time is theirs, but for that of other parts inside, and of other threads.
PARTS: dict[str, list[tuple[type, str]]] = {
    "encoding": [(Tokenizer, "encode_batch")],
    "checks": [(RequestBuilder, "build_all"), (Runtime, "_late")],
    "submission": [(Driver, "submit"), (Driver, "_submit_inbox")],
    "match": [(PrefixCache, "match"), (PrefixCache, "leader"), (PrefixCache, "loan")],
    "admission": [(Admission, "admit")],
    "acquire": [(PrefixCache, "acquire"), (PrefixCache, "extend"), (PrefixCache, "lend")],
    "scheduling": [(Scheduler, "next_pass")],
    "draws": [(SamplingTable, "prepare")],
    "attention": [
        (AttentionPlanner, "plan"),
        (AttentionPlanner, "plan_padded_decodes"),
        (AttentionPlanner, "plan_padded_extends"),
    ],
    "packing": [(PassBuilder, "build")],
    "booking": [(Bookkeeper, "process")],
    "commit": [(PrefixCache, "commit")],
    "release": [(Bookkeeper, "finish"), (PrefixCache, "pass_ended")],
    "outputs": [(Driver, "_end")],
}


def chain(steps: int = 1000, step_len: int = 8, new_tokens: int = 2) -> list[WorkloadPrompt]:
    """Prompts each of which is the beginning of the next."""
    tokens = TokenSource(0).tokens(steps * step_len)
    return [WorkloadPrompt(tokens[: step_len * (step + 1)], new_tokens) for step in range(steps)]


LISTS: dict[str, Callable[[], list[WorkloadPrompt]]] = {
    **lists.LISTS,
    "fewshot10k": lambda: fewshot(questions=176, new_tokens=32)[:10_000],
    "samples2048": lambda: samples(prompts=64, new_tokens=128),
    "chain": chain,
}


class Meter:
    """Adds up the CPU seconds of parts while it is entered: those of the thread that starts it. What all others
    take together, mostly for encoding, is a part of its own.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0
        self._others = 0.0  # their clock at the start
        self._thread = threading.get_ident()
        self._originals: list[tuple[type, str, Any]] = []

    def start(self) -> None:
        """Forget what was added up before."""
        self.seconds.clear()
        self._thread, self._since = threading.get_ident(), time.thread_time()
        self._others = time.process_time() - self._since

    def so_far(self) -> dict[str, float]:
        self._book()
        return dict(self.seconds)

    def _book(self) -> None:
        now = time.thread_time()
        self.seconds["other threads"] = time.process_time() - now - self._others
        self.seconds[self._open[-1] if self._open else "other"] += now - self._since
        self._since = now

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._book()
            self._open.append(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._book()
                self._open.pop()

        return timed

    def __enter__(self) -> Meter:
        for part, methods in PARTS.items():
            for owner, name in methods:
                original = getattr(owner, name)
                self._originals.append((owner, name, original))
                setattr(owner, name, self._timed(part, original))
        return self

    def __exit__(self, *error: object) -> None:
        self._book()
        for owner, name, original in self._originals:
            setattr(owner, name, original)


@dataclass
class HostRunner(ConstantRunner):
    """Builds each pass as for an H100, and computes nothing. `first_launch`: the CPU's clock at the first pass."""

    builder: PassBuilder | None = None
    meter: Meter | None = None
    first_launch: tuple[float, float] | None = None
    first_parts: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    steady: list[float] = field(default_factory=list)  # seconds from a pass to the next of the same decodes
    ends: list[tuple[int, float]] = field(default_factory=list)  # where fewer decode and none begin: by how many
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    _rows: Int32Array | None = None
    _launched: float = 0.0

    def launch(self, pass_: Pass) -> Pass:
        assert self.builder is not None
        self.builder.build(pass_)
        rows, now = pass_.req_pool_indices, time.process_time()
        if rows is self._rows:
            self.steady.append(now - self._launched)
        elif self._rows is not None and not pass_.num_extends and len(rows) < len(self._rows):
            self.ends.append((len(self._rows) - len(rows), now - self._launched))
        self._rows, self._launched = rows, now
        if not self.passes:
            self.first_launch = time.process_time(), time.perf_counter()
            if self.meter is not None:
                self.first_parts = self.meter.so_far()
        self.passes += 1
        return pass_

    def collect(self, handle: object) -> PassResult:
        assert isinstance(handle, Pass)
        return super().collect(handle)

    def draw(self, count: int) -> Int32Array:
        return self.rng.integers(0, VOCAB_SIZE, count, np.int32)


def host_runtime(
    max_running: int,
    context_length: int,
    runner: HostRunner | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Runtime, HostRunner]:
    """A Runtime whose model is as large as Qwen3-0.6B, and is not there."""
    runner, limits = runner or HostRunner(), RunLimits(POOL_TOKENS, max_running, CHUNK)
    parts = simulated_parts(runner, limits, context_length, vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    shape = KernelShape(GPU(90, 132), num_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    rows = parts.cache.rows
    planner = AttentionPlanner(shape, [None], rows.req_to_token, torch.bfloat16, tree=True)
    shapes = captured_shapes(max_running, CHUNK, NUM_WEIGHTS)
    runner.builder = PassBuilder(planner, shapes, padding_row=rows.max_requests - 1)
    for key in runner.builder.keys(shapes):  # as graphs are captured
        runner.builder.idle(key)
    return Runtime.from_parts(parts), runner


@dataclass(frozen=True)
class Run:
    """CPU seconds of a call, until its first pass (also in seconds of the clock) and in all, and those by part."""

    first: float
    first_wall: float
    total: float
    passes: int
    steady: float | None  # mean from a pass to the next of the same decodes; None: there are none
    end: float | None  # of a request, where only ends change the passes; None: nowhere
    first_parts: dict[str, float]
    parts: dict[str, float]


def measure(
    prompts: Sequence[WorkloadPrompt],
    max_running: int,
    *,
    tokenizer: Tokenizer | None = None,
    as_lists: bool = False,
    by_part: bool = False,
    profile: AbstractContextManager[object] | None = None,
) -> Run:
    """Answer the prompts in a Runtime of their own, with this tokenizer. Measuring parts itself takes time: totals
    are without it.
    """
    longest = max(len(prompt.prompt_ids) + prompt.max_new_tokens for prompt in prompts)
    given = [
        (prompt.prompt_ids.tolist() if as_lists else prompt.prompt_ids) if prompt.text is None else prompt.text
        for prompt in prompts
    ]
    params = [
        SamplingParams(max_new_tokens=prompt.max_new_tokens, temperature=1.0, ignore_eos=True)
        for prompt in prompts
    ]
    meter = Meter()
    with meter if by_part else nullcontext():  # before the Runtime is made, which keeps some of the methods
        runtime, runner = host_runtime(max_running, longest + 1, tokenizer=tokenizer)
        runner.meter = meter
        meter.start()
        began, began_wall = time.process_time(), time.perf_counter()
        with profile or nullcontext():
            runtime.generate(given, params)
        total = time.process_time() - began
    assert runner.first_launch is not None
    first, first_wall = runner.first_launch
    parts = meter.seconds if by_part else {}
    num_ended, ended_in = (sum(column) for column in zip((0, 0.0), *runner.ends, strict=True))
    return Run(
        first - began,
        first_wall - began_wall,
        total,
        runner.passes,
        fmean(runner.steady) if runner.steady else None,
        ended_in / num_ended if num_ended else None,
        runner.first_parts,
        dict(parts),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", dest="lists", action="append", choices=LISTS, help="may be repeated (all)")
    parser.add_argument("--running", type=int, action="append", metavar="N", help="requests at once (512, 2048)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--as-lists", action="store_true", help="ids are lists of integers, not arrays")
    parser.add_argument(
        "--text",
        action="store_true",
        help="prompts are texts of English words in the list's shape; then their ids, with the same tokenizer",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER_OR_ID",
        help="of the texts; or: built-in, smollm2 (smollm2 if it is there, or else built-in)",
    )
    parser.add_argument("--profile", action="store_true", help="print a profile of each call instead")
    given = parser.parse_args(argv)
    if given.tokenizer is not None and not given.text:
        parser.error("--tokenizer is of texts: --text")
    tokenizer, of_which = None, ""
    if given.text:
        name = given.tokenizer or usual_tokenizer(SHAPE)
        tokenizer, of_which = load_tokenizer(tokenizer_folder(name)), f" of {name}"
    for listed in given.lists or LISTS:
        forms: dict[str, Sequence[WorkloadPrompt]] = {"": LISTS[listed]()}
        if tokenizer is not None:
            texts = as_texts(forms[""], tokenizer)
            forms = {", texts": texts, ", their ids": [replace(prompt, text=None) for prompt in texts]}
        first = next(iter(forms.values()))
        num_tokens = sum(len(prompt.prompt_ids) for prompt in first)
        title = f"{listed}: {len(first):,} prompts, {num_tokens:,} tokens{of_which}"
        title += f"; CPU s, medians of {given.repeat}; ms up to the first pass"
        table = figure_table(title, "part")
        columns: list[dict[str, str]] = []
        for running, form in itertools.product(given.running or (512, 2048), forms):
            if given.profile:
                _profile(forms[form], running, tokenizer=tokenizer, as_lists=given.as_lists)
                continue
            table.add_column(f"{running} running{form}", justify="right")
            columns.append(
                _column(forms[form], running, given.repeat, tokenizer=tokenizer, as_lists=given.as_lists)
            )
        if columns:
            for part in columns[0]:
                table.add_row(part, *(column[part] for column in columns))
            Console().print(table)


def _column(prompts: Sequence[WorkloadPrompt], running: int, repeat: int, **options: Any) -> dict[str, str]:
    """The figures of a list, by what they are of; `options` of `measure`."""
    runs = [measure(prompts, running, **options) for _ in range(repeat)]
    parted = [measure(prompts, running, by_part=True, **options) for _ in range(repeat)]
    total, passes = median(run.total for run in runs), runs[0].passes
    steady = min((run.steady for run in runs if run.steady is not None), default=None)
    ends = [run.end for run in runs if run.end is not None]
    column = {
        "total": f"{total:.3f}",
        "passes": f"{passes}",
        "ms a request": f"{1000 * total / len(prompts):.3f}",
        "ms a pass": f"{1000 * total / passes:.3f}",
        "ms a pass of the same decodes, least": "-" if steady is None else f"{1000 * steady:.3f}",
        "us an ended request, where none begin": f"{1e6 * median(ends):.1f}" if ends else "-",
        "ms to the first pass": f"{1000 * median(run.first for run in runs):.1f}",
        "the same by the clock, least": f"{1000 * min(run.first_wall for run in runs):.1f}",
    }
    for part in (*PARTS, "other", "other threads"):
        seconds, first = (
            median(found.get(part, 0.0) for found in each)
            for each in ([run.parts for run in parted], [run.first_parts for run in parted])
        )
        column[part] = f"{seconds:.3f} {1000 * first:.1f}"
    return column


def _profile(prompts: Sequence[WorkloadPrompt], running: int, **options: Any) -> None:
    profiler = cProfile.Profile()
    measure(prompts, running, profile=profiler, **options)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
