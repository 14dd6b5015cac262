"""`verify`: asks the same prompts in every situation, and compares what is said as bits."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from radixrt.arrays import Int32Array
from radixrt.assembly import LoadedModel, assemble
from radixrt.builtin import MODEL_PATH
from radixrt.config import RuntimeConfig
from radixrt.engine.engine import Engine
from radixrt.engine.parts import Parts
from radixrt.errors import ParameterError
from radixrt.frontend.arguments import Call, Params, Prompt, listed_prompts
from radixrt.frontend.request_builder import builder_without_weights
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Decoder
from radixrt.ranks.rank import check_config
from radixrt.runtime import Runtime
from radixrt.verify.layer_watch import LayerWatch, Origin, Trace, WatchingRunner
from radixrt.verify.questions import Asker, Question
from radixrt.verify.situations import Situation, alone, situations
from radixrt.verify.values import Difference, Values
from radixrt.verify.verification import Outcome, Verification

SEEDS = (0, 1, 2)


def verify(
    prompts: Prompt | Iterable[Prompt],
    sampling_params: Params | Iterable[Params] = None,
    *,
    config: RuntimeConfig | None = None,
    seeds: Sequence[int] = SEEDS,
    only: Collection[str] = (),
    progress: bool = False,
) -> Verification:
    """Ask prompts in every situation, and compare tokens and log-probabilities with those of each prompt alone.

    Several Runtimes are made, one after the other, which share their weights.

    Args:
        prompts, sampling_params: as `Runtime.generate` takes them.
        config: of the Runtimes; situations change one option or two of it.
        seeds: of orders, cuts and disturbances; each gives situations of its own.
        only: names of situations; () is all.
        progress: show a bar on stderr.

    Raises:
        PromptError, ParameterError: a prompt cannot be run, or an option is refused.
        PassError: a request failed.
    """
    config = RuntimeConfig() if config is None else config
    source = MODEL_PATH if config.model is None else config.model
    builder = builder_without_weights(
        source,
        config.context_length,
        revision=config.revision,
        chat_template_kwargs=config.chat_template_kwargs,
        generation_config=config.generation_config,
    )
    listed, many = listed_prompts(prompts)
    _, requests = builder.build_all(listed, sampling_params, Call(many=many))
    questions = [Question(request.index, request.prompt_ids, request.params) for request in requests]
    return verify_questions(questions, config, builder.config, seeds=seeds, only=only, progress=progress)


def verify_questions(
    questions: Sequence[Question],
    config: RuntimeConfig,
    model: ModelConfig,
    *,
    seeds: Sequence[int] = SEEDS,
    only: Collection[str] = (),
    progress: bool = False,
) -> Verification:
    """`verify` for prompts that are checked and tokenised for a model. Raises as it does."""
    if not questions:
        raise ParameterError("there are no prompts to verify")
    if not seeds:
        raise ParameterError("seeds is empty; give one at least")
    if config.num_ranks > 1:
        raise ParameterError(f"{config.told_ranks}; Runtimes of one rank are compared here")
    lab = _Lab(questions, config)
    matrix = _chosen(lab.situations(model, seeds), only)
    outcomes: dict[str, Outcome] = {}
    with tqdm(total=len(matrix), unit=" situations", disable=not progress, file=sys.stderr) as bar:

        def make(asker: Asker, group: Iterable[Situation]) -> None:
            for situation in group:
                bar.set_postfix_str(situation.title)
                outcomes[situation.name] = lab.outcome(asker, situation)
                bar.update()

        bar.set_postfix_str("each alone")
        with lab.opened({}) as asker:
            lab.hear_each_alone(asker)
            make(asker, (situation for situation in matrix if not situation.options))
        groups = [(options, list(group)) for options, group in itertools.groupby(matrix, lambda s: s.options)]
        for options, group in groups:
            if options:
                with lab.opened(options) as asker:
                    make(asker, group)
        bar.set_postfix_str("each layer")
        origins = lab.origins(groups, {name: o.first for name, o in outcomes.items() if o.first is not None})
    return Verification(
        lines=tuple(question.line for question in questions),
        outcomes=tuple(replace(outcome, origin=origins.get(name)) for name, outcome in outcomes.items()),
        model="the built-in model" if config.model is None else str(config.model),
        device=str(lab.decoder.placement.device),
        dtype=str(lab.decoder.placement.dtype).removeprefix("torch."),
        deterministic=config.deterministic,
    )


def _chosen(matrix: list[Situation], only: Collection[str]) -> list[Situation]:
    names = [situation.name for situation in matrix]
    if unknown := [name for name in only if name not in names]:
        raise ParameterError(f"there is no situation {unknown[0]!r} here; there are {', '.join(names)}")
    return [situation for situation in matrix if not only or situation.name in only]


def _watched(parts: Parts, watch: LayerWatch) -> Parts:
    """The same parts, with a watch on the passes."""
    runner = WatchingRunner(parts.engine.runner, parts.scheduler, watch)
    return replace(parts, engine=Engine(parts.scheduler, runner, max_in_flight=int(parts.config.overlap)))


class _Lab:
    """Makes Runtimes that share their weights, and asks them. `decoder` is there once the first has been made."""

    decoder: Decoder

    def __init__(self, questions: Sequence[Question], config: RuntimeConfig) -> None:
        self._questions, self._config = questions, replace(config, seed=config.run_seed)
        self._said: dict[tuple[int, int], Values] = {}
        self._device, self._runs_kernels, self._captures = check_config(config)

    @contextmanager
    def opened(self, options: Mapping[str, Any], *, watch: LayerWatch | None = None) -> Iterator[Asker]:
        """An asker of a Runtime with other options."""
        parts = assemble(replace(self._config, **options), getattr(self, "decoder", None))
        assert isinstance(parts.model, LoadedModel)
        self.decoder = parts.model.decoder
        if watch is not None:
            parts = _watched(parts, watch)
        with Runtime.from_parts(parts) as runtime:
            del parts  # and with them the pool, when the Runtime is closed: the next one needs the memory
            yield Asker(runtime, self._questions, self._said)

    @contextmanager
    def watched(self, options: Mapping[str, Any]) -> Iterator[tuple[Asker, LayerWatch]]:
        """The same, and what looks at each layer."""
        limits = replace(self._config, **options).pass_limits(on_gpu=self._device.type == "cuda")
        # More tokens than any pass has, with its padding.
        watch = LayerWatch(self.decoder, 2 * (limits.chunked_prefill_size + limits.max_samples) + 1024)
        with watch.hooked(), self.opened(options, watch=watch) as asker:
            asker.on_forget = watch.forget
            yield asker, watch

    def situations(self, model: ModelConfig, seeds: Sequence[int]) -> list[Situation]:
        return situations(
            self._config,
            self._questions,
            seeds,
            limits=self._config.pass_limits(on_gpu=self._device.type == "cuda"),
            runs_kernels=self._runs_kernels,
            captures=self._captures,
            layout=model.kv_layout(torch.float32),
        )

    def hear_each_alone(self, asker: Asker) -> None:
        """Find out what all others are compared with."""
        answers: dict[tuple[int, int], Values] = {}
        for values in alone(asker):
            if values.start < values.prompt_len:
                self._said[values.prompt, 0] = values
            else:
                answers[values.prompt, values.sample] = values
        for key, values in answers.items():
            self._said[key] = self._said[key].followed_by(values) if key in self._said else values

    def outcome(self, asker: Asker, situation: Situation) -> Outcome:
        """Make a situation, and compare."""
        stats, runtime, began = asker.runtime.cache_stats(), asker.runtime, time.perf_counter()
        forgotten = asker.num_forgotten
        retractions = runtime.parts.scheduler.num_retractions
        count, found = 0, dict[int, Difference]()
        for values in situation.ask(asker):
            expected = self._expected(values)
            if expected is None:
                continue
            count += 2 * len(values.token_ids)
            difference = expected.difference(values)
            before = found.get(values.prompt)
            if difference is not None and (before is None or difference.position < before.position):
                found[values.prompt] = difference
        ended = runtime.cache_stats()
        asked, hits = ended.prompt_tokens - stats.prompt_tokens, ended.cached_tokens - stats.cached_tokens
        return Outcome(
            name=situation.name,
            title=situation.title,
            values=count,
            differing=tuple(self._questions[place].line for place in sorted(found)),
            first=found[min(found)] if found else None,
            origin=None,
            hit_rate=hits / asked if asked else 0.0,
            retractions=runtime.parts.scheduler.num_retractions - retractions,
            evicted_tokens=ended.evicted_tokens - stats.evicted_tokens - (asker.num_forgotten - forgotten),
            loaded_tokens=ended.loaded_tokens - stats.loaded_tokens,
            seconds=time.perf_counter() - began,
        )

    def _expected(self, values: Values) -> Values | None:
        """What was said alone; None where nothing was: of further answers, which are drawn otherwise."""
        is_greedy = self._questions[values.prompt].params.temperature == 0
        return self._said.get((values.prompt, values.sample), self._said[values.prompt, 0] if is_greedy else None)

    def origins(
        self,
        groups: Iterable[tuple[Mapping[str, Any], Sequence[Situation]]],
        differences: Mapping[str, Difference],
    ) -> dict[str, Origin]:
        """Make what differs once more, and the prompts concerned alone: which layer is the first that differs?"""
        traces: dict[str, Trace] = {}
        for options, group in groups:
            again = [situation for situation in group if situation.name in differences]
            if again:
                with self.watched(options) as (asker, watch):
                    for situation in again:
                        trace = self._traced(asker, watch, situation, differences[situation.name])
                        if trace is not None:
                            traces[situation.name] = trace
        found: dict[str, Origin] = {}
        if not traces:
            return found
        with self.watched({}) as (asker, watch):
            for name, trace in traces.items():
                difference = differences[name]
                asker.forget()
                watch.look_for(self._tokens(difference))
                request = (asker.score if difference.in_prompt else asker.answer)(difference.prompt)
                asker.run([request])
                origin = trace.origin(watch.trace(request.id))
                if origin is not None:
                    found[name] = origin
        return found

    def _traced(
        self, asker: Asker, watch: LayerWatch, situation: Situation, difference: Difference
    ) -> Trace | None:
        """What was computed for the prompt that differs, if it differs at the same position again."""
        trace: Trace | None = None
        watch.look_for(self._tokens(difference))
        for values in situation.ask(asker):
            if trace is None and values.prompt == difference.prompt:
                expected = self._expected(values)
                again = None if expected is None else expected.difference(values)
                place = difference.sample, difference.position
                if again is not None and (again.sample, again.position) == place:
                    trace = watch.trace(values.request_id)
        return trace

    def _tokens(self, difference: Difference) -> Int32Array:
        """All tokens that the model had read when it found what differs."""
        ids = self._questions[difference.prompt].ids
        said = self._said.get((difference.prompt, difference.sample), self._said[difference.prompt, 0])
        return np.concatenate([ids, said.token_ids[len(ids) - said.start :]])[: difference.position]
