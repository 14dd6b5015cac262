"""The matrix: situations in which the same prompts are asked, each of which begins with an empty cache."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from memory_pool.layout import Layout
from radixrt.config import RuntimeConfig
from radixrt.files.disk import temporary_folder
from radixrt.limits import PassLimits
from radixrt.schedule.request import Request
from radixrt.verify.questions import Asker, Question
from radixrt.verify.values import Values

CHUNKS, BATCHES = (64, 1000), (1, 8, 64)  # prompt tokens of a pass, and requests that run at once
_MORE_ANSWERS = 2
_JITTER = 0.3  # probability of each disturbance before a pass
_DELAY = 0.002  # seconds, at most


@dataclass(frozen=True)
class Situation:
    """One way to ask all questions.

    Attributes:
        name: for options and files.
        title: for tables.
        ask: asks, and yields what was said.
        options: of a Runtime of its own, where they differ from the user's.
    """

    name: str
    title: str
    ask: Callable[[Asker], Iterator[Values]]
    options: Mapping[str, Any] = field(default_factory=dict)


def situations(
    config: RuntimeConfig,
    questions: Sequence[Question],
    seeds: Sequence[int],
    *,
    limits: PassLimits,
    runs_kernels: bool,
    captures: bool,
    layout: Layout,
) -> list[Situation]:
    """All situations that differ with these options; those of one Runtime follow one another.

    Args:
        config: the user's options.
        seeds: of orders, cuts and disturbances; each gives situations of its own.
        limits: of the user's Runtime.
        runs_kernels, captures: whether kernels run, and whether passes are captured.
        layout: of KV and states; they take no more than it says.
    """
    found = [Situation("repeated", "alone, nothing cached, again", alone)]
    if config.enable_prefix_cache:
        found.append(Situation("warm", "alone, all cached", _warm))
        for seed in seeds:
            cut = partial(_cut, seed=seed)
            found.append(Situation(f"cut-{seed}", f"alone, cached up to a cut, seed {seed}", cut))
    found.append(Situation("together", "together, nothing cached", _together))
    if config.enable_prefix_cache:
        found.append(Situation("together-warm", "together, all cached", _together_warm))
    for seed in seeds:
        shuffled = partial(_shuffled, seed=seed)
        found.append(Situation(f"shuffled-{seed}", f"together, other order, seed {seed}", shuffled))
    found.append(Situation("samples", f"{_MORE_ANSWERS} more answers to each", _samples))
    found.append(Situation("aborted", "beside aborted requests", _aborted))
    for seed in seeds:
        found.append(Situation(f"jitter-{seed}", f"jitter, seed {seed}", partial(_jitter, seed=seed)))
    found.append(Situation("read", "answers read as prompts", _read))
    if config.enable_prefix_cache:
        found.append(Situation("saved", "from a saved cache", _saved))

    def own(name: str, title: str, ask: Callable[[Asker], Iterator[Values]], **options: Any) -> None:
        found.append(Situation(name, title, ask, MappingProxyType(options)))

    for size in CHUNKS:
        if size < min(limits.chunked_prefill_size, sum(len(question.ids) for question in questions)):
            own(f"chunks-{size}", f"chunks of {size:,} tokens", _together, chunked_prefill_size=size)
    for count in BATCHES:
        if count < min(limits.max_running_requests, len(questions)):
            title = f"at most {count} at once"
            own(f"batch-{count}", title, partial(_shuffled, seed=seeds[0]), max_running_requests=count)
    longest, total = max(q.max_len for q in questions), sum(q.max_len for q in questions)
    small = max(longest, total // 8)
    if small < total and (config.max_total_tokens is None or small < config.max_total_tokens):
        title = f"a pool of {small:,} tokens"
        own("small-pool", title, partial(_shuffled, seed=seeds[0]), max_total_tokens=small)
        own("small-pool-jitter", "that and jitter", partial(_jitter, seed=seeds[0]), max_total_tokens=small)
        if config.enable_prefix_cache and not config.host_memory_gb:
            states = 8 * (len(questions) + 1) * layout.bytes_per_sequence  # in a quarter of it, for each two
            host = (2 * total * layout.bytes_per_token + states) / 1e9
            title = "that and a host tier"
            own("host-tier", title, _together_warm, max_total_tokens=small, host_memory_gb=host)
    if config.enable_prefix_cache:
        off: dict[str, Any] = {"enable_prefix_cache": False, "force_miss": False, "host_memory_gb": None}
        own("no-cache", "no prefix cache", _together, **off)
    if runs_kernels and config.attention == "tree":
        own("flat", "flat attention", _together_warm, attention="flat")
    if captures:
        own("no-graphs", "kernel by kernel", _together_warm, cuda_graphs=False)
    if config.overlap:
        own("no-overlap", "one pass at a time", _together, overlap=False)
    return found


def alone(asker: Asker) -> Iterator[Values]:
    for place in range(len(asker)):
        for request in (asker.answer(place), asker.score(place)):
            asker.forget()
            yield from asker.ask([request])


def _warm(asker: Asker) -> Iterator[Values]:
    asker.forget()
    for place in range(len(asker)):
        asker.run([asker.answer(place)])
        yield from asker.ask([asker.answer(place)])
        yield from asker.ask([asker.score(place, start=_middle(asker, place))])


def _cut(asker: Asker, seed: int) -> Iterator[Values]:
    chance = random.Random(seed)
    for place in _order(asker, chance):
        asker.forget()
        cut = chance.randrange(len(asker.questions[place].ids))
        if cut:
            asker.run([asker.fill(place, cut)])
        yield from asker.ask([asker.answer(place)])
        yield from asker.ask([asker.score(place, start=cut)])


def _together(asker: Asker) -> Iterator[Values]:
    asker.forget()
    yield from asker.ask(_answers(asker))
    asker.forget()
    yield from asker.ask([asker.score(place) for place in range(len(asker))])


def _together_warm(asker: Asker) -> Iterator[Values]:
    asker.forget()
    asker.run(_answers(asker))
    yield from asker.ask(_answers(asker))
    yield from asker.ask(_second_halves(asker))


def _shuffled(asker: Asker, seed: int) -> Iterator[Values]:
    chance = random.Random(seed)
    asker.forget()
    yield from asker.ask([asker.answer(place) for place in _order(asker, chance)], in_order=True)
    asker.forget()
    yield from asker.ask([asker.score(place) for place in _order(asker, chance)], in_order=True)


def _samples(asker: Asker) -> Iterator[Values]:
    asker.forget()
    yield from asker.ask([asker.answer(place, more=_MORE_ANSWERS) for place in range(len(asker))])


def _aborted(asker: Asker) -> Iterator[Values]:
    """Each prompt is there twice, and one of the two is aborted after some passes."""
    asker.forget()
    kept = _answers(asker)
    to_abort = _answers(asker)
    aborted = {request.id for request in to_abort}

    def abort_one() -> None:
        if to_abort:
            asker.runtime.abort(to_abort.pop())

    for output in asker.drive([r for pair in zip(kept, to_abort, strict=True) for r in pair], between=abort_one):
        if output.id not in aborted or output.failure is None:
            yield from asker.heard(output)


def _jitter(asker: Asker, seed: int) -> Iterator[Values]:
    """Requests come one by one, for prompts and for beginnings of them. Before passes answers are retracted,
    prefixes forgotten, and time is lost.
    """
    chance = random.Random(seed)
    asker.forget()
    order = [*_order(asker, chance), *_order(asker, chance)]
    coming = [asker.answer(place) for place in order[: len(asker)]]
    coming += [asker.score(place) for place in order[len(asker) :]]
    for place in range(len(asker)):
        if cut := chance.randrange(len(asker.questions[place].ids)):
            coming.append(asker.fill(place, cut))
    chance.shuffle(coming)
    first, runtime = coming.pop(), asker.runtime

    def disturb() -> None:
        if coming and (not runtime.has_work or chance.random() < 0.5):
            runtime.submit(coming.pop())
        if (running := runtime.parts.scheduler.running) and chance.random() < _JITTER:
            runtime.parts.scheduler.retract(chance.choice(running))
        if chance.random() < _JITTER:
            asker.forget()
        time.sleep(chance.random() * _DELAY)

    yield from asker.ask([first], between=disturb)


def _read(asker: Asker) -> Iterator[Values]:
    asker.forget()
    yield from asker.ask([asker.score(place, answered=True) for place in range(len(asker))])


def _saved(asker: Asker) -> Iterator[Values]:
    asker.forget()
    asker.run(_answers(asker))
    with temporary_folder() as folder:
        asker.runtime.save_cache(folder / "cache.safetensors")
        asker.forget()
        asker.runtime.load_cache(folder / "cache.safetensors")
    yield from asker.ask(_answers(asker))
    yield from asker.ask(_second_halves(asker))


def _answers(asker: Asker) -> list[Request]:
    """To each question."""
    return [asker.answer(place) for place in range(len(asker))]


def _second_halves(asker: Asker) -> list[Request]:
    """Scores of each prompt from its middle on."""
    return [asker.score(place, start=_middle(asker, place)) for place in range(len(asker))]


def _order(asker: Asker, chance: random.Random) -> list[int]:
    return chance.sample(range(len(asker)), len(asker))


def _middle(asker: Asker, place: int) -> int:
    """An odd position in the middle of a prompt, or its beginning if it is short."""
    count = len(asker.questions[place].ids)
    return count // 2 | 1 if count > 2 else 0
