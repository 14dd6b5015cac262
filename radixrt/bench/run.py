"""Runs one repetition of one workload on a Runtime with an empty cache, and gives its figures."""

# Tests: tests/bench/test_prefix_reuse.py

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from radixrt.bench.catalogue import LISTS, WORKLOADS, Scale
from radixrt.errors import RadixrtError
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.workloads.bound import DeviceSpeed, ModelShape, program_bound
from radixrt.workloads.lists import VOCAB_SIZE, WorkloadPrompt
from radixrt.workloads.programs import PROGRAMS, Answer, Program, play, program_statistics

TEMPERATURE = 0.6
SEED_STEP = 100  # between the prompts of two repetitions


@dataclass(frozen=True)
class Run:
    """Figures of one repetition of one workload, over all its requests.

    Attributes:
        seconds: in `Runtime.generate`, over all rounds.
        requests: of all rounds.
        prompt_tokens: tokens of the prompts.
        cached_tokens: prompt tokens found in the cache.
        generated_tokens: of the answers.
        recomputed_tokens: computed again after a retraction, because the pool was full.
        best_cached_tokens: prompt tokens that an unlimited cache, empty at first, could have served.
        bound_seconds: roofline lower bound on this device; None if its speed is unknown.
    """

    seconds: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    best_cached_tokens: int
    bound_seconds: float | None


class Runs(list[Run]):
    """The repetitions of one workload. What takes time is a median; rates of hits are of all of them."""

    @property
    def seconds(self) -> float:
        return median(run.seconds for run in self)

    @property
    def output_tokens_per_second(self) -> float:
        return median(run.generated_tokens / run.seconds for run in self)

    @property
    def tokens_per_second(self) -> float:
        """Prompt and generated tokens a second."""
        return median((run.prompt_tokens + run.generated_tokens) / run.seconds for run in self)

    @property
    def hit_rate(self) -> float:
        """cached_tokens over prompt_tokens, 0 to 1."""
        return sum(run.cached_tokens for run in self) / sum(run.prompt_tokens for run in self)

    @property
    def best_hit_rate(self) -> float:
        """The best possible one: see `program_statistics`."""
        return sum(run.best_cached_tokens for run in self) / sum(run.prompt_tokens for run in self)

    @property
    def bound_seconds(self) -> float | None:
        """None if the device's speed is unknown."""
        return median(bounds) if (bounds := [bound for _, bound in self._bounded]) else None

    @property
    def times_bound(self) -> float | None:
        """Seconds over the bound of the same list: 1 is the device's limit."""
        return median(times) if (times := [run.seconds / bound for run, bound in self._bounded]) else None

    @property
    def _bounded(self) -> list[tuple[Run, float]]:
        return [(run, run.bound_seconds) for run in self if run.bound_seconds is not None]

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(run) for run in self]


def program_of(name: str, scale: Scale, vocab_size: int, repetition: int) -> Program:
    """A program of LISTS or WORKLOADS in the sizes of a scale, with other prompts for each `repetition`."""
    # The lists' own seeds are 0 to 15, in this order, those of the programs after the first five lists 5 to 7.
    own_seed = (LISTS if name in LISTS else WORKLOADS).index(name)
    seed = own_seed + SEED_STEP * repetition
    return PROGRAMS[name](seed, vocab_size=min(VOCAB_SIZE, vocab_size), **scale.sizes.get(name, {}))


def run_once(runtime: Runtime, program: Program, shape: ModelShape, speed: DeviceSpeed | None) -> Run:
    """Play a workload once, from an empty cache.

    Raises:
        PromptError: a prompt does not fit into the model's context or the pool.
        RadixrtError: an answer has another length than was asked for, or a text other tokens than by itself.
    """
    seconds = 0.0

    def timed(prompts: Sequence[WorkloadPrompt]) -> list[Answer]:
        nonlocal seconds
        answers, taken = _answered(runtime, prompts)
        seconds += taken
        return answers

    runtime.flush_cache()
    before = runtime.cache_stats()
    rounds = list(play(program, timed))
    after = runtime.cache_stats()
    return Run(
        seconds=seconds,
        requests=sum(len(played.prompts) for played in rounds),
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        generated_tokens=sum(len(answer) for played in rounds for answer in played.answers),
        recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
        best_cached_tokens=program_statistics(rounds).best_cached_tokens,
        bound_seconds=None if speed is None else program_bound(rounds, shape, speed),
    )


def answer(runtime: Runtime, prompts: Sequence[WorkloadPrompt]) -> list[Answer]:
    """Run a round in one call: it generates answers, or scores continuations."""
    return _answered(runtime, prompts)[0]


def _answered(runtime: Runtime, prompts: Sequence[WorkloadPrompt]) -> tuple[list[Answer], float]:
    """The answers, and the seconds of the Runtime's call."""
    given = [prompt.prompt_ids if prompt.text is None else prompt.text for prompt in prompts]
    if prompts[0].continuation_ids is not None:  # only its time is of interest here
        continuations = [
            prompt.continuation_ids.tolist() for prompt in prompts if prompt.continuation_ids is not None
        ]
        began = time.perf_counter()
        runtime.score(given, continuations)
        return [()] * len(prompts), time.perf_counter() - began
    params = [
        SamplingParams(max_new_tokens=prompt.max_new_tokens, temperature=TEMPERATURE, ignore_eos=True)
        for prompt in prompts
    ]
    began = time.perf_counter()
    outputs = runtime.generate(given, params)
    seconds = time.perf_counter() - began
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(output.token_ids) != prompt.max_new_tokens:
            why = output.error or f"the context is {runtime.context_length}"
            raise RadixrtError(
                f"a prompt of {len(prompt.prompt_ids)} tokens got {len(output.token_ids)} of "
                f"{prompt.max_new_tokens} new ones ({why}): nothing can be compared"
            )
        if not np.array_equal(np.asarray(output.prompt_ids), prompt.prompt_ids):
            raise RadixrtError(f"a text has other tokens in its list than by itself: {prompt.text!r:.200}")
    return [output.token_ids for output in outputs], seconds
