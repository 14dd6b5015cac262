"""Does the host keep up with passes of answers in a form? Around a device and threads that only take their time.

python scripts/bench_form_host.py --mask-ms 2.4

All else that the host does is real. The same answers without a form come after those with one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from radixrt.arrays import Int32Array
from radixrt.bench.report import figure_table, wide_console
from radixrt.builtin import MODEL_PATH
from radixrt.execution.pass_builder import PackedPass
from radixrt.forms import llguidance_form
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import Pass, PassResult
from radixrt.text.tokenizer import load_tokenizer
from scripts.bench_host import HostRunner, host_runtime

PROMPT_LEN = 512
PUSH_SHARE = 0.1  # of the time for masks: what threads need to take tokens


def work(seconds: float) -> None:
    """As the host does, which holds the interpreter's lock."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@dataclass
class Flight:
    """A launched pass, and when the device has done what was launched of it."""

    pass_: Pass
    end: float = 0.0


@dataclass
class SlowDevice(HostRunner):
    """Has the logits of a pass after `seconds["forward"]`, and draws in `seconds["draw"]`; to launch the two takes
    the host `seconds["launch forward"]` and `seconds["launch draw"]`.

    Attributes:
        intervals: seconds from each launch of decodes to the next: first those of the same decodes as before.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    token: int = 0
    intervals: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    _masks: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    _free_at: float = 0.0
    _packed: tuple[Pass, PackedPass] | None = None
    _before: tuple[Int32Array, float] | None = None

    def prepare(self, pass_: Pass) -> None:
        assert self.builder is not None
        self._packed = pass_, self.builder.build(pass_)

    def launch(self, pass_: Pass) -> Flight:  # type: ignore[override]
        if self._packed is None or self._packed[0] is not pass_:
            self.prepare(pass_)
        self._packed, rows, now = None, pass_.req_pool_indices, time.perf_counter()
        if self._before is not None and not pass_.extended_tokens:
            self.intervals[rows is not self._before[0]].append(now - self._before[1])
        self._before = rows, now
        flight = Flight(pass_)
        self._start(flight, "forward")
        if pass_.sampling.masked is None:
            self._start(flight, "draw")
        return flight

    def mask_memory(self, num_masks: int, num_words: int) -> Int32Array:
        if self._masks.size < num_masks * num_words:
            self._masks = np.zeros(num_masks * num_words, np.int32)
        return self._masks[: num_masks * num_words].reshape(num_masks, num_words)

    def draw_masked(self, handle: object, masks: Int32Array) -> None:
        assert isinstance(handle, Flight)
        self._start(handle, "draw")

    def _start(self, flight: Flight, part: str) -> None:
        work(self.seconds[f"launch {part}"])
        flight.end = self._free_at = max(self._free_at, time.perf_counter()) + self.seconds[part]

    def collect(self, handle: object) -> PassResult:
        assert isinstance(handle, Flight)
        time.sleep(max(0.0, handle.end - time.perf_counter()))
        return super().collect(handle.pass_)

    def draw(self, count: int) -> Int32Array:
        return np.full(count, self.token, np.int32)


@dataclass
class SlowThreads:
    """In the place of llguidance's: `seconds` for the masks of `count` answers."""

    seconds: float
    count: int

    def unsafe_compute_mask_ptr(self, given: Sequence[Any], *_: int) -> None:
        time.sleep(self.seconds * len(given) / self.count)

    def consume_token_par(self, given: Sequence[Any]) -> list[bool]:
        time.sleep(PUSH_SHARE * self.seconds * len(given) / self.count)
        return [True] * len(given)


def measure(count: int, seconds: dict[str, float], *, with_form: bool) -> tuple[float, float]:
    """Milliseconds of a pass of the same decodes as before, and of others."""
    tokenizer, rng = load_tokenizer(MODEL_PATH), np.random.default_rng(0)
    runner = SlowDevice(seconds=seconds, token=tokenizer.encode("a")[-1])
    runtime, _ = host_runtime(count, 2 * PROMPT_LEN, runner, tokenizer)
    prompts = list(rng.integers(3, tokenizer.vocab_size, (count, PROMPT_LEN), np.int32))
    own: dict[str, Any] = {"regex": "[ a]*"} if with_form else {}
    params = [
        SamplingParams(max_new_tokens=int(length), ignore_eos=True, temperature=0.8, **own)
        for length in rng.integers(70, 110, count)
    ]
    with patch.object(llguidance_form, "_executor", lambda: SlowThreads(seconds["masks"], count)):
        for _ in range(2):  # the first one warms up
            runtime.flush_cache()
            runner.intervals = [], []
            runtime.generate(prompts, params)
    same, others = (1000 * median(each) for each in runner.intervals)
    return same, others


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=512, metavar="N")
    parser.add_argument("--forward-ms", type=float, default=4.0, metavar="MS", help="of the device, logits (4)")
    parser.add_argument("--draw-ms", type=float, default=0.6, metavar="MS", help="of the device, draws (0.6)")
    parser.add_argument("--launch-forward-ms", type=float, default=0.2, metavar="MS", help="of the host (0.2)")
    parser.add_argument("--launch-draw-ms", type=float, default=0.1, metavar="MS", help="of the host (0.1)")
    parser.add_argument("--mask-ms", type=float, default=2.4, metavar="MS", help="of threads, all masks (2.4)")
    given = parser.parse_args(argv)
    seconds = {
        "forward": given.forward_ms / 1000,
        "draw": given.draw_ms / 1000,
        "launch forward": given.launch_forward_ms / 1000,
        "launch draw": given.launch_draw_ms / 1000,
        "masks": given.mask_ms / 1000,
    }
    table = figure_table(None, "answers", "form", "ms a pass of the same", "ms a pass after one has ended")
    for with_form in (True, False):
        found = measure(given.answers, seconds, with_form=with_form)
        table.add_row(str(given.answers), "yes" if with_form else "no", *(f"{value:.2f}" for value in found))
    wide_console(100).print(table)


if __name__ == "__main__":
    main()
