"""The host tier: what leaves the device goes to host memory and comes back, bit by bit, when a prompt has it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixrt import FinishReason, ParameterError, PassError, Runtime, SamplingParams
from radixrt.cache.radix_tree import Namespace
from radixrt.execution import kv_mover
from radixrt.execution.executor import Executor
from radixrt.execution.kv_mover import KVMover
from radixrt.execution.model_runner import ModelRunner
from tests.support.checkpoints import llama, write
from tests.support.tiers import cut_short_once, prompts_of_six_heads, run, tokens
from tests.support.world.model import histories
from tests.support.world.world import Sizes, World

pytestmark = pytest.mark.usefixtures("quiet")

HERE = Namespace()


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


# -- told examples in the simulation -----------------------------------------------------------------------


def world(num_slots: int = 21, host_slots: int = 100, chunk: int = 16) -> World:
    return World(Sizes(num_slots=num_slots, host_slots=host_slots, num_rows=4, chunk=chunk))


A, B, C = [1] * 10, [2] * 10, [3] * 10


def test_what_was_evicted_is_found_on_the_host() -> None:
    there = world()
    assert run(there, A, B, C, A, B, C) == [0, 0, 0, 9, 9, 9]
    stats = there.cache.stats()
    assert stats.stored_tokens > 0
    assert stats.loaded_tokens > 0
    assert stats.evicted_tokens > stats.stored_tokens  # what the host has already is not stored again
    without = world(host_slots=0)
    assert run(without, A, B, C, A, B, C) == [0] * 6
    there.drain()


def test_only_what_the_host_alone_has_is_loaded() -> None:
    there = world(num_slots=28)
    run(there, A, B, C)  # a part of A has left
    match = there.cache.match(HERE, ids(*A), 9)
    assert match.length == 9
    on_device = match.on_device.length
    assert 0 < on_device < 9
    assert run(there, A) == [9]
    assert there.cache.stats().loaded_tokens == 9 - on_device
    there.drain()


def test_a_full_host_forgets_what_was_used_longest_ago() -> None:
    there = world(num_slots=13, host_slots=21)
    run(there, A, B, C, [4] * 10)
    lengths = [there.cache.match(HERE, ids(*prompt), 9).length for prompt in (A, B, C)]
    assert lengths[0] < 9
    assert lengths[1:] == [9, 9]
    assert there.cache.stats().host_free == 0
    there.drain()


def test_a_host_that_is_smaller_than_a_prompt_keeps_its_beginning() -> None:
    there = world(num_slots=13, host_slots=5)
    run(there, A, B)
    assert there.cache.match(HERE, ids(*A), 9).length == 6  # two of them on the device
    assert run(there, B) == [9]
    there.drain()


def test_a_host_node_is_split_where_a_match_ends() -> None:
    there = world()
    run(there, A, B, C, [2] * 10)
    assert run(there, [*A[:4], 2, 2, 2]) == [4]
    assert run(there, A) == [9]
    there.drain()


def test_computed_tokens_take_the_place_of_what_only_the_host_has() -> None:
    there = world()
    run(there, A, B, C)
    assert there.cache.match(HERE, ids(*A), 9).on_device.length == 0
    there.cache.force_miss = True
    run(there, A)
    there.cache.force_miss = False
    match = there.cache.match(HERE, ids(*A), 9)
    assert (match.length, match.on_device.length) == (9, 9)
    assert there.cache.stats().loaded_tokens == 0
    there.drain()


def test_a_request_that_ends_while_it_is_loaded() -> None:
    there = world()
    run(there, A, B, C)
    request = there.submit(A, 6)
    there.step()
    assert there.runner.transfers  # not made yet
    there.abort(request)
    there.step()
    there.check()
    there.drain_requests()
    assert there.cache.match(HERE, ids(*A), 9).on_device.length == 9
    assert run(there, A) == [9]
    there.drain()


@pytest.mark.parametrize("started", [None, 0, 1])
def test_a_launch_that_fails_with_transfers(started: int | None) -> None:
    """All were started, none, or the first one."""
    there = world()
    run(there, A, B, C)
    if started is None:
        there.runner.fail_launch = True
    else:
        there.runner.fail_transfer = started
    doomed = there.submit(A, 3)
    there.drain_requests()
    assert doomed.log.finish_reason is FinishReason.ERROR
    assert run(there, B, A, C) == [9, 9, 9]
    there.drain()


def test_a_pass_waits_for_a_bounded_number_of_tokens() -> None:
    there = world(num_slots=60, chunk=2)
    run(there, A, B, C)
    first = [0] * 30
    run(there, first, [4] * 30)  # everything else has left
    requests = [there.submit(prompt, 1) for prompt in (A, B, C)]
    config = there.scheduler.config
    assert config.max_loaded_chunks * config.chunked_prefill_size == 8
    there.step()  # nine are loaded for the first, and that is enough
    assert [r in there.scheduler.waiting for r in requests] == [False, True, True]
    there.drain()
    assert [r.usage().cached_tokens for r in requests] == [9, 9, 9]


def test_flush_forgets_both_tiers() -> None:
    there = world()
    run(there, A, B, C, A)
    tokens = there.cache.tree.total_tokens
    assert there.cache.tree.host_only_tokens > 0
    assert there.cache.flush() == tokens == 30  # each once, wherever it is
    stats = there.cache.stats()
    assert (stats.free, stats.host_free) == (stats.capacity, stats.host_capacity)
    assert run(there, A) == [0]
    there.drain()


def test_other_weights_find_nothing_on_the_host() -> None:
    there = world()
    run(there, A, B, C)
    there.update_weights(bump=False)
    assert run(there, A) == [0]
    there.drain()


def test_branches_and_answers_from_the_host() -> None:
    there = world(num_slots=34)
    first = there.submit(A, 4)
    there.drain_requests()
    run(there, B, C, [4] * 12)
    there.fork(first, [[0], [1]], 3, n=2)
    there.drain()
    assert all(r.log.finish_reason is FinishReason.LENGTH for r in there.answers)
    assert there.cache.stats().loaded_tokens > 0


def test_transfers_are_made_while_the_pass_before_is_computed() -> None:
    there = world(num_slots=28)
    run(there, A, B, C)
    running = there.submit([0, 1, 2], 6)
    there.step()
    late = there.submit(A, 1)
    there.step()
    assert late.lease is not None
    assert there.runner.queue  # the pass before has not run
    while there.runner.transfers:
        there.runner.transfer_next()
    match = there.cache.match(HERE, ids(*A), 9)
    assert match.node is not None
    node = match.node if match.at_boundary else match.node.parent
    assert node is not None
    slots = there.cache.tree.slots_of(node)
    assert there.runner.kv[slots].tolist() == histories(HERE, A[: len(slots)])
    there.drain()
    assert running.log.finish_reason is FinishReason.LENGTH


# -- the Runtime -------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
HOST = {"host_memory_gb": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.device("cpu"):
        return write(llama(seed=4), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def prompts() -> list[list[int]]:
    return prompts_of_six_heads()


def runtime(folder: Path, device: torch.device, **options: Any) -> Runtime:
    options = {"dtype": "float32", "max_total_tokens": 200, "schedule_policy": "fcfs", **options}
    runtime = Runtime(folder, device=device, **options)
    runtime.parts.model.kv_pool.fill(float("nan"))
    return runtime


@pytest.fixture
def cold(folder: Path, device: torch.device, prompts: list[list[int]]) -> Iterator[list[tuple[int, ...]]]:
    """Greedy answers, each computed for itself."""
    with runtime(folder, device, force_miss=True, max_total_tokens=2000) as alone:
        yield tokens(alone.generate(prompts, GREEDY))


@pytest.mark.parametrize(
    "options",
    [{}, {"chunked_prefill_size": 16}, {"max_running_requests": 1}, {"host_memory_gb": 0.0001}],
    ids=["plain", "chunks", "one by one", "a host that fills up"],
)
def test_answers_from_the_host_are_those_computed_cold(
    folder: Path,
    device: torch.device,
    prompts: list[list[int]],
    cold: list[tuple[int, ...]],
    options: dict[str, Any],
) -> None:
    with runtime(folder, device, **{k: v for k, v in options.items() if k != "host_memory_gb"}) as without:
        assert tokens(without.generate(prompts, GREEDY)) == cold
        few = without.cache_stats()
    assert (few.host_capacity, few.stored_tokens) == (0, 0)
    with runtime(folder, device, **{**HOST, **options}) as tiered:
        assert tiered.parts.model.kv_pool.memory["kv"].isnan().all()
        assert tokens(tiered.generate(prompts, GREEDY)) == cold
        many = tiered.cache_stats()
        assert many.stored_tokens > 0
        if "host_memory_gb" in options:
            assert many.host_free < 70
            return
        assert few.cached_tokens < 100
        assert many.cached_tokens >= 12 * 60  # every head is computed once
        assert many.loaded_tokens > 0
        # Once more, with n answers and log-probabilities of what was computed and evicted before.
        again = tiered.generate(prompts[:6], SamplingParams(temperature=0, max_new_tokens=6, n=2, ignore_eos=True))
        assert [output.token_ids for output in again] == cold[:6]
        assert all(output.usage.cached_tokens >= 60 for output in again)
        free = tiered.cache_stats()
        assert tiered.flush_cache() > 0
        flushed = tiered.cache_stats()
        assert (flushed.free, flushed.host_free) == (free.capacity, free.host_capacity)


def test_a_pass_that_fails_does_not_spoil_the_host(
    folder: Path,
    device: torch.device,
    prompts: list[list[int]],
    cold: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with runtime(folder, device, **HOST) as tiered:
        for owner, name in ((Executor, "score"), (KVMover, "run")):  # scores are launched last
            assert tokens(tiered.generate(prompts[:6], GREEDY)) == cold[:6]  # the pool is full
            cut_short_once(monkeypatch, owner, name, is_under_way=owner is Executor)
            with pytest.raises(PassError, match="cut short"):
                tiered.generate(prompts[6], GREEDY)
        assert tokens(tiered.generate(prompts, GREEDY)) == cold


def test_other_weights_leave_nothing_on_the_host(folder: Path, device: torch.device, tmp_path: Path) -> None:
    with torch.device("cpu"):
        other = write(llama(seed=5), tmp_path)
    prompt = [*range(1, 101)]
    with runtime(folder, device, **HOST) as tiered, runtime(other, device) as expected:
        tiered.generate([prompt, [9] * 100, [8] * 100], GREEDY)
        assert tiered.cache_stats().stored_tokens > 0
        tiered.update_weights(other)
        output = tiered.generate(prompt, GREEDY)
        assert output.usage.cached_tokens == 0
        assert output.token_ids == expected.generate(prompt, GREEDY).token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_no_pass_waits_for_transfers_on_the_host(
    folder: Path, device: torch.device, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises where a launch, or the transfers before it, would wait."""

    def watched(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    with runtime(folder, device, **HOST) as tiered:
        expected = tokens(tiered.generate(prompts, GREEDY))  # kernels are compiled
        loaded = tiered.cache_stats().loaded_tokens
        monkeypatch.setattr(ModelRunner, "launch", watched(ModelRunner.launch))
        monkeypatch.setattr(ModelRunner, "transfer", watched(ModelRunner.transfer))
        assert tokens(tiered.generate(prompts, GREEDY)) == expected
        assert tiered.cache_stats().loaded_tokens > loaded > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory_gb": -1}, "host_memory_gb is -1; it must be a number from 0 to"),
        ({"host_memory_gb": 1e9}, "host_memory_gb is 1000000000.0; it must be a number from 0 to"),
        ({"host_memory_gb": "1"}, "host_memory_gb is '1'"),
        ({"host_memory_gb": 1e-9}, "host_memory_gb is 1e-09: two KV slots of"),
        ({"host_memory_gb": 0.01, "enable_prefix_cache": False}, "enable_prefix_cache is False"),
    ],
)
def test_memory_out_of_bounds(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        Runtime(folder, device="cpu", max_total_tokens=100, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("nothing", [None, 0])
def test_no_host_memory_is_no_tier(folder: Path, nothing: float | None) -> None:
    options: dict[str, Any] = {"host_memory_gb": nothing, "enable_prefix_cache": False}
    with Runtime(folder, device="cpu", max_total_tokens=100, **options) as plain:
        assert plain.cache_stats().host_capacity == 0


def test_what_is_on_the_host_is_kept_in_files_too(
    folder: Path, device: torch.device, prompts: list[list[int]], cold: list[tuple[int, ...]], tmp_path: Path
) -> None:
    with runtime(folder, device, **HOST) as tiered:
        tiered.generate(prompts, GREEDY)
        tree = tiered.parts.cache.tree
        assert tree.host_only_tokens > 0
        assert tiered.save_cache(tmp_path / "kept") == tree.total_tokens
        # What only the host has is on the device again as far as there is room, from the file.
        tiered.parts.cache.evict(150)
        before = tree.device_tokens
        assert tiered.load_cache(tmp_path / "kept") == 200 - before
        assert tree.device_tokens == 200
        assert tokens(tiered.generate(prompts, GREEDY)) == cold
    with runtime(folder, device, max_total_tokens=2000) as roomy:
        assert roomy.load_cache(tmp_path / "kept") > 6 * 60
        outputs = roomy.generate(prompts, GREEDY)
        assert tokens(outputs) == cold
        assert all(output.usage.cached_tokens >= 60 for output in outputs)


def test_ctrl_c_does_not_cut_a_flush(
    folder: Path, device: torch.device, prompts: list[list[int]], cold: list[tuple[int, ...]]
) -> None:
    with runtime(folder, device, **HOST) as tiered:
        tiered.generate(prompts, GREEDY)
        free = tiered.parts.cache.slots.free

        def interrupted(slots: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            free(slots)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiered.parts.cache.slots, "free", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tiered.flush_cache()
        stats = tiered.cache_stats()
        assert (stats.free, stats.host_free) == (stats.capacity, stats.host_capacity)
        assert tiered.parts.cache.tree.total_tokens == 0
        assert tokens(tiered.generate(prompts, GREEDY)) == cold


def test_ctrl_c_does_not_start_a_transfer_twice(
    folder: Path,
    device: torch.device,
    prompts: list[list[int]],
    cold: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes between a transfer and the note that it has been made, when nothing runs and a cache is kept."""
    with runtime(folder, device, **HOST) as tiered:
        tiered.generate(prompts, GREEDY)
        tiered.parts.cache.evict(150)
        copy, calls = kv_mover.kv_copy, []

        def interrupted(*arguments: Any, **options: Any) -> None:
            copy(*arguments, **options)
            calls.append(None)
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(kv_mover, "kv_copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tiered.save_cache(tmp_path / "kept")
        assert len(calls) == 1
        assert not tiered.parts.cache.transfers.take()
        assert not (tmp_path / "kept").exists()
        assert tokens(tiered.generate(prompts, GREEDY)) == cold
