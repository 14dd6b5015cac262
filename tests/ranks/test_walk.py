"""A Runtime of two ranks in any order of events, until one of them is killed or stopped."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from radixrt.builtin import MODEL_PATH
from radixrt.errors import DeviceLostError
from radixrt.kept_cache import cache_file
from radixrt.ranks import followers
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from tests.ranks.test_ranks import none_left, ranks_of_this_process, runtime
from tests.support.rank_walk import RankWalk, Watch

LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)
QUICK = (2,)  # seeds whose walks are short, with retractions and loaded caches
SLACK_SECONDS = 10.0  # of a busy machine


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(MODEL_PATH, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensor.neg_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def alone() -> Iterator[Runtime]:
    with runtime(1, max_total_tokens=30_000) as one:
        yield one


class Calls:
    """Calls of other threads, each of which is to raise DeviceLostError."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.raised: list[BaseException] = []

    def begin(self, call: Callable[[], object], *, may_end: bool = False) -> None:
        """Begin one, which may also have its answer already."""

        def run() -> None:
            try:
                call()
            except BaseException as error:
                self.raised.append(error)
            else:
                if not may_end:
                    self.raised.append(AssertionError("it has ended"))

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def end(self, by: float) -> None:
        """All have raised by that time, and the first one why."""
        for thread in self._threads:
            thread.join(max(0.0, by - time.monotonic()))
            assert not thread.is_alive(), "a call hangs"
        assert {type(error) for error in self.raised} == {DeviceLostError}, self.raised
        assert any("rank 1 of 2" in str(error) for error in self.raised), self.raised


def lose_a_rank(walk: RankWalk, number: signal.Signals, seconds: float, weights: Path) -> None:
    """Kill or stop the follower at some moment: all calls raise within so many seconds."""
    both, rng, calls = walk.both, walk.rng, Calls()
    (rank,) = ranks_of_this_process()
    moment = rng.choice(["while calls run", "between steps", "while weights are read", "while it is saved"])
    walk.events[moment] += 1

    def forever(call: Callable[[], object]) -> None:
        while True:
            call()

    if moment == "while weights are read":
        calls.begin(lambda: forever(lambda: both.update_weights(weights)))
    elif moment == "while it is saved":
        calls.begin(lambda: forever(walk.save_cache))
    elif moment == "while calls run":
        prompts = [walk.prompt() for _ in range(80)]
        calls.begin(lambda: both.generate(prompts, LONG))
        calls.begin(lambda: asyncio.run(both.async_generate(prompts, LONG)))  # type: ignore[arg-type]
        calls.begin(lambda: [chunk for prompt in prompts for chunk in both.stream(prompt, LONG)])
    if moment != "between steps":
        time.sleep(rng.random() * 0.6)
    os.kill(rank.pid, number)
    end = time.monotonic() + seconds + SLACK_SECONDS
    for asked in walk.streams():
        assert asked.stream is not None
        calls.begin(partial(list, asked.stream), may_end=True)
    calls.begin(lambda: both.generate(walk.prompt(), LONG))
    calls.end(end)
    for call in (lambda: both.update_weights(weights), both.identity, walk.save_cache):
        with pytest.raises(DeviceLostError):
            call()
    both.close()
    assert time.monotonic() < end


@pytest.mark.long_unless(kept=lambda given: given["seed"] in QUICK)
@pytest.mark.parametrize("seed", range(16))
def test_walk(
    seed: int, alone: Runtime, other_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two ranks hold and answer is one rank's after every step; then one is lost, and so is the Runtime."""
    rng, watch = random.Random(seed), Watch.of(monkeypatch)
    monkeypatch.setattr(cache_file, "PIECE_BYTES", 9 * 4096)  # of 9 tokens
    number = [signal.SIGKILL, signal.SIGSTOP][seed % 2]
    if seed in QUICK:
        monkeypatch.setattr(followers, "SILENCE_SECONDS", 5.0)
    options = {
        "max_total_tokens": rng.choice([64, 80, 110]),
        "chunked_prefill_size": rng.choice([5, 16, 64]),
        "max_running_requests": rng.choice([4, 10]),
        "context_length": 256,
        "host_memory_gb": rng.choice([0.0, 0.0004, 0.002]),
        "overlap": seed % 3 < 2,
    }
    with none_left(), runtime(2, **options) as both:
        walk = RankWalk(both, alone, watch, [MODEL_PATH, other_weights], tmp_path / "kept", seed)
        alone.update_weights(MODEL_PATH)
        for _ in range(60 if seed in QUICK else rng.randrange(70, 120)):
            walk.act()
        walk.settle()
        walk.events["retraction"] += both.parts.scheduler.num_retractions
        print(dict(walk.events))
        lose_a_rank(walk, number, followers.SILENCE_SECONDS if number == signal.SIGSTOP else 2.0, other_weights)
