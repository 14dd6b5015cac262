"""A Runtime whose layers are in stages: what it answers, and how it ends. In most tests ranks are threads."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layers.ranks import Ranks
from radixrt.builtin import MODEL_PATH
from radixrt.config import RuntimeConfig
from radixrt.errors import DeviceLostError, ModelError, ParameterError
from radixrt.execution.attention.planner import AttentionPlanner
from radixrt.ranks.followers import Followers
from radixrt.ranks.group import RankGroup, Shape
from radixrt.ranks.leading_runner import LeadingRunner
from radixrt.ranks.rank import RankParts
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.workers.channel import Channel, Message, encode
from tests.ranks.test_ranks import LINES, none_left, ranks_of_this_process, tokens_of
from tests.ranks.test_ranks import PARAMS as MAY_STOP
from tests.ranks.test_ranks import runtime as on_ranks
from tests.support import checkpoints
from tests.support.stages import followers_of, staged

PARAMS = [
    SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True),
    SamplingParams(max_new_tokens=14, temperature=0.9, seed=5, n=3, ignore_eos=True),
    SamplingParams(max_new_tokens=17, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
]
FORM = SamplingParams(max_new_tokens=30, temperature=0.0, regex="( [a-z]+)+[.]")
PENALTIES = SamplingParams(max_new_tokens=20, temperature=0.7, seed=3, repetition_penalty=1.3, logprobs=1)
LIST = [line + " " + str(k) for k in range(3) for line in LINES]
OF_LIST = [[FORM, *MAY_STOP[:2], PENALTIES][k % 4] for k in range(len(LIST))]
SMALL = {"max_total_tokens": 90, "host_memory_gb": 0.01}  # answers are retracted, and prefixes go to the host

Answers = list[list[list[tuple[int, ...]]]]


def answers_of(runtime: Runtime, lines: Any, params: Any) -> Answers:
    """Cold, and warm."""
    return [tokens_of(runtime.generate(lines, params)) for _ in range(2)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of one rank."""
    found = {}
    with on_ranks(1) as alone:
        found["lines"] = answers_of(alone, LINES, PARAMS)
        (output,) = alone.generate(LINES[2:], PARAMS[2:])
        found["scores"] = output.outputs[0].logprobs, output.prompt_logprobs
    with on_ranks(1, **SMALL) as alone:
        found["list"] = answers_of(alone, LIST, OF_LIST)
        assert alone.parts.scheduler.num_retractions
    return found


def assert_scores(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for own, other in zip(mine, theirs, strict=True):
            assert own.token_id == other.token_id
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)


# Of four layers: of three stages, one has two of them.
SHAPES = [
    (3, 1, False),
    (2, 2, True),
    *(pytest.param(shape, marks=pytest.mark.long) for shape in ((2, 1, True), (3, 1, True), (2, 2, False))),
]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def pipeline(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """By stages, ranks in each, and whether passes are padded to captured shapes."""
    stages, ranks, captured = request.param
    with staged(stages, ranks, captured=captured) as runtime:
        yield runtime


def test_answers_are_those_of_one_rank(pipeline: Runtime, expected: dict[str, Any]) -> None:
    """Greedy and drawn, chunked, cold and warm, several to a prompt, and their log-probabilities; each rank has
    planned each pass.
    """
    assert answers_of(pipeline, LINES, PARAMS) == expected["lines"]
    (output,) = pipeline.generate(LINES[2:], PARAMS[2:])
    assert_scores((output.outputs[0].logprobs, output.prompt_logprobs), expected["scores"])
    followers = followers_of(pipeline)
    followers.check()
    assert len(followers.digests) > 20
    runner: Any = pipeline.parts.engine.runner
    for each in (runner._own, *(parts.runner for parts in followers.parts.values())):
        assert each.num_uncaptured == 0  # all ranks have captured everything at the start, together
    tables = [runner._own_rows, *(parts.rows for parts in followers.parts.values())]
    for table in tables:
        np.testing.assert_array_equal(table.req_to_token, tables[-1].req_to_token)


def test_passes_of_several_lanes_are_in_flight(pipeline: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are stages before the last one has begun to compute the first of them. What is planned of a
    lane's attention serves its later passes, too, on each rank.
    """
    ahead, planned = [], []
    for name in ("plan", "plan_padded_decodes"):
        plan = getattr(AttentionPlanner, name)

        def counted(self: AttentionPlanner, *arguments: Any, plan: Any = plan) -> Any:
            planned.append(self)
            return plan(self, *arguments)

        monkeypatch.setattr(AttentionPlanner, name, counted)
    collect, runner = LeadingRunner.collect, pipeline.parts.engine.runner
    assert isinstance(runner, LeadingRunner)

    def watched(self: LeadingRunner, handle: Any) -> Any:
        ahead.append(len(self._waiting))
        return collect(self, handle)

    monkeypatch.setattr(LeadingRunner, "collect", watched)
    pipeline.generate(LIST, SamplingParams(max_new_tokens=20, temperature=1.0, ignore_eos=True))
    stages = pipeline.parts.config.pipeline_parallel_size
    if runner._own.executor.graphs:  # else plans are the references', which serve one pass
        assert len(planned) < pipeline.parts.config.num_ranks * len(ahead) * 0.4
    assert max(ahead) == stages + 1
    assert ahead.count(stages + 1) > len(ahead) * 0.6


@pytest.mark.parametrize(("stages", "ranks"), [(3, 1), (2, 2)])
def test_forms_two_tiers_and_a_small_pool(stages: int, ranks: int, expected: dict[str, Any]) -> None:
    """Masks reach the last stage alone, transfers all; answers are retracted where the pool does not hold all."""
    with staged(stages, ranks, **SMALL) as runtime:
        assert answers_of(runtime, LIST, OF_LIST) == expected["list"]
        assert runtime.parts.scheduler.num_retractions
        assert runtime.parts.cache.stats().loaded_tokens
        told = followers_of(runtime).num_told
        assert len(set(told[ranks:])) == 1  # in the stages before
        assert all(own > told[-1] for own in told[1:ranks])


ODD = {
    "llama": (checkpoints.llama, {}),
    "llama in equal bits": (checkpoints.llama, {"deterministic": True}),
    "gemma2 without overlap": (partial(checkpoints.gemma2, sliding_window=16), {"overlap": False}),
    "gemma2, KV in e4m3": (partial(checkpoints.gemma2, sliding_window=16), {"kv_dtype": "fp8"}),
}


@pytest.mark.long_unless(kept=lambda given: given["name"] in ("llama", "gemma2 without overlap"))
@pytest.mark.parametrize("name", ODD)
def test_an_odd_number_of_layers(name: str, tmp_path: Path) -> None:
    """Of random models, before and after other weights are read, from a folder or from memory."""
    make, options = ODD[name]
    folders = [checkpoints.write(make(seed, num_hidden_layers=5), tmp_path / str(seed)) for seed in (0, 1)]
    prompts = [[7 * k % 90 + 3, *range(3, 20 + k)] for k in range(9)]
    params, found = SamplingParams(max_new_tokens=12, temperature=0.8, seed=1, ignore_eos=True), []
    with staged(3, model=folders[0], **options) as runtime:
        found = [tokens_of(runtime.generate(prompts, params))]  # type: ignore[arg-type]
        runtime.update_weights(folders[1])
        found.append(tokens_of(runtime.generate(prompts, params)))  # type: ignore[arg-type]
        runtime.update_weights(make(0, num_hidden_layers=5).state_dict())
        assert tokens_of(runtime.generate(prompts, params)) == found[0]  # type: ignore[arg-type]
    for folder, answers in zip(folders, found, strict=True):
        with on_ranks(1, model=folder, dtype="float32", **options) as alone:
            assert tokens_of(alone.generate(prompts, params)) == answers  # type: ignore[arg-type]


def test_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of KV are computed anew, after tokens that nobody has taken. What fails in the first rank then leaves
    the others waiting for it: all end.
    """
    with staged(2, kv_dtype="fp8", max_running_requests=4) as runtime:
        expected = answers_of(runtime, LINES, PARAMS)
        for line in LINES * 5:
            runtime.generate(line, SamplingParams(max_new_tokens=1))
        runtime.update_weights(MODEL_PATH)
        assert answers_of(runtime, LINES, PARAMS) == expected
        own, reload = runtime.parts.model._rank, RankParts.reload  # type: ignore[attr-defined]

        def fails(self: RankParts, source: Any, before_change: Any = lambda: None) -> None:
            if self is not own:
                return reload(self, source, before_change)
            before_change()
            raise ModelError("a file cannot be read")

        monkeypatch.setattr(RankParts, "reload", fails)
        with pytest.raises(DeviceLostError, match="a file cannot be read"):
            runtime.update_weights(MODEL_PATH)
        monkeypatch.undo()
        followers_of(runtime).gives_up = True


@pytest.mark.parametrize("error", [None, RuntimeError("the device is lost")])
def test_sums_that_wait_are_released_before(error: RuntimeError | None) -> None:
    """Groups that are aborted may wait for them."""
    called: list[str] = []

    def release() -> None:
        called.append("release")
        if error is not None:
            raise error

    group = SimpleNamespace(abort=lambda: called.append("abort"))
    RankGroup(ranks=Ranks(0, 2, peers=SimpleNamespace(release=release)), groups=(group,)).abort()  # type: ignore[arg-type]
    assert called == ["release", "abort"]


def test_all_groups_are_aborted_at_once() -> None:
    """One may wait for what waits for another one."""
    all_begun = threading.Barrier(3, timeout=2)
    groups = [SimpleNamespace(abort=all_begun.wait) for _ in range(3)]
    RankGroup(groups=(*groups, object())).abort()
    assert not all_begun.broken


def test_each_rank_holds_its_part(pipeline: Runtime) -> None:
    """Of the KV pool, too, in as many slots."""
    config, parts = pipeline.parts.config, followers_of(pipeline).parts
    counts, heads = [0] * config.pipeline_parallel_size, 4 // config.tensor_parallel_size
    own = [pipeline.parts.model, *parts.values()]
    for part in own:
        decoder, pool = part.decoder, part.kv_pool.memory["kv"]
        counts[decoder.stage.index] += len(decoder.blocks)
        assert pool.shape[:4] == (len(decoder.blocks), 2, 801, heads)
        assert (len(decoder.layers), hasattr(decoder, "norm")) == (len(decoder.blocks), decoder.stage.is_last)
    assert sum(counts) == 4 * config.tensor_parallel_size
    assert len({part.decoder.num_weights for part in own}) == 1


def test_what_is_told_of_ranks() -> None:
    config = RuntimeConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert (config.num_ranks, config.num_lanes) == (6, 3)
    assert config.told_ranks == "tensor_parallel_size is 2 and pipeline_parallel_size 3: 6 ranks"
    assert RuntimeConfig(pipeline_parallel_size=3, overlap=False).num_lanes == 1


def test_a_rank_that_reads_nothing_is_not_waited_for_in_vain() -> None:
    """It may wait for what this rank has yet to compute."""
    own, other = socket.socketpair()
    own.setblocking(False)
    channel, received = Channel(own), bytearray()

    def meanwhile() -> bool:
        received.extend(other.recv(1 << 16))
        return True

    followers: Any = Followers.__new__(Followers)
    followers._lost, followers._shape = None, Shape(2, 2)
    followers._processes = [SimpleNamespace(channel=channel, send=channel.send)]
    message = Message({"launch": 1}, np.arange(1 << 20, dtype=np.int32))
    followers.send(message, meanwhile=meanwhile)
    while len(received) < len(encode(message)):
        meanwhile()
    assert received == encode(message)
    followers.send(message, draws=True)  # nobody else draws
    own.close()
    other.close()


# --- processes ---


def test_processes(expected: dict[str, Any]) -> None:
    """One for each stage; one that is killed ends all."""
    with none_left():
        runtime = on_ranks(1, pipeline_parallel_size=2)
        assert len(ranks_of_this_process()) == 1
        assert answers_of(runtime, LINES, PARAMS) == expected["lines"]
        (rank,) = ranks_of_this_process()
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(DeviceLostError, match="rank 1 of 2"):
            runtime.generate(LINES * 20, SamplingParams(max_new_tokens=100, ignore_eos=True))
        with pytest.raises(DeviceLostError):
            runtime.generate(LINES[0])
        runtime.close()


def test_what_cannot_be_divided_is_refused() -> None:
    """By name; no process is started."""
    with none_left(), pytest.raises(ModelError, match="num_hidden_layers 4 is less than pipeline_parallel_size 5"):
        on_ranks(1, pipeline_parallel_size=5)
    with pytest.raises(ParameterError, match="pipeline_parallel_size"):
        on_ranks(1, pipeline_parallel_size=0)
