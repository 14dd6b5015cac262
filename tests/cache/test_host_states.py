"""States in two tiers: which leave, which come back, and that they are the right ones when they do."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memory_pool.kv_transfers import KVTransfer, KVTransfers
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.slot_allocator import SlotAllocator
from radixrt import FinishReason, ParameterError, PassError, Runtime, SamplingParams, limits
from radixrt.cache.host_states import END, PASSED, SHARED, HostStates
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import DEFAULT_NAMESPACE, DEVICE, HOST, Node, RadixTree
from radixrt.cache.states import States, states_of
from radixrt.engine.engine import Engine
from radixrt.execution.executor import Executor
from radixrt.execution.kv_mover import KVMover
from radixrt.planning.simulated import DistinctRunner
from radixrt.schedule.policy import SchedulePolicy, SchedulerConfig
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler
from tests.support.checkpoints import qwen3_5, write
from tests.support.tiers import cut_short_once, prompts_of_six_heads, run, tokens
from tests.support.world.world import Sizes, World

pytestmark = pytest.mark.usefixtures("quiet")

HERE = DEFAULT_NAMESPACE


# -- which leave ---------------------------------------------------------------------------------------------


class Tier:
    """A tree whose nodes have states, and so many of the host's."""

    def __init__(self, num_host_states: int, num_states: int = 20) -> None:
        self.tree, self.transfers = RadixTree(), KVTransfers()
        self.states = States(SlotAllocator(num_states + 1), 8)
        self.host = HostStates(SlotAllocator(num_host_states + 1), self.transfers)
        self.states.host = self.host

    def node(self, token: int, *, is_end: bool = False) -> Node:
        """One that has a state on the device, and was used last."""
        tokens = np.array([token], np.int32)
        node, _ = self.tree.insert(self.tree.root(HERE), tokens, tokens)
        taken = self.states.allocator.alloc(1)
        assert taken is not None
        self.states.keep(int(taken[0]), node)
        node.worth = END if is_end else SHARED
        return node

    def give_up(self, *nodes: Node) -> None:
        """As where each of them leaves the device."""
        for node in nodes:
            self.tree.attach(node, HOST, node.tokens)
            self.tree.detach(node, DEVICE)
            self.states.drop([node], (0, 0))

    def stored(self) -> list[int]:
        return sorted(int(node.tokens[0]) for node in self.host.kept.values())


def test_those_that_were_used_longest_ago_leave_first() -> None:
    tier = Tier(2)
    nodes = [tier.node(token) for token in (1, 2, 3)]
    tier.tree.touch(nodes[0])
    tier.give_up(nodes[1], nodes[0], nodes[2])
    assert tier.stored() == [1, 3]
    assert nodes[1].host_state == 0
    tier.give_up(tier.node(4))
    assert tier.stored() == [1, 4]


def test_what_is_older_than_all_that_is_stored_is_not() -> None:
    tier = Tier(1)
    old, new = tier.node(1), tier.node(2)
    tier.give_up(new, old)
    assert tier.stored() == [2]
    assert len(tier.transfers.take()) == tier.host.stored == 1


def test_ends_of_answers_make_room_and_take_none() -> None:
    """However old what else there is may be, and those used longest ago first."""
    tier = Tier(3)
    used, first, second, third = tier.node(1), *(tier.node(token, is_end=True) for token in (2, 3, 4))
    tier.give_up(used, first, second, third)
    assert tier.stored() == [1, 3, 4]
    tier.give_up(tier.node(5), tier.node(6))
    assert tier.stored() == [1, 5, 6]
    tier.give_up(tier.node(7, is_end=True))
    assert tier.stored() == [1, 5, 6]


def test_an_end_that_one_has_gone_on_from_makes_room_first() -> None:
    """A later end is there, or comes. One that two have begun with is shared."""
    tier = Tier(3)
    nodes = [tier.node(token, is_end=True) for token in (1, 2, 3)]
    tier.states.make_room(20, (0, 0))
    for row, node in enumerate((nodes[1], nodes[2], nodes[2])):
        tier.tree.touch(node)
        assert tier.states.begin(row, node, (0, 0))
        tier.states.step(row, None, (0, 0))
    assert [node.worth for node in nodes] == [END, PASSED, SHARED]
    for token, left in ((4, [1, 3, 4]), (5, [3, 4, 5]), (6, [3, 5, 6])):
        tier.give_up(tier.node(token, is_end=token != 6))
        assert tier.stored() == left


@pytest.mark.parametrize("is_end", [False, True])
def test_nothing_takes_the_place_of_what_is_expected(is_end: bool) -> None:
    tier = Tier(1)
    expected, *others = tier.node(1, is_end=is_end), tier.node(2), tier.node(3, is_end=True)
    tier.give_up(expected)
    tier.states.expect(expected)
    tier.give_up(*others)
    assert tier.stored() == [1]
    tier.states.expect(None)
    tier.give_up(tier.node(4))
    assert tier.stored() == [4]


def test_what_a_lease_begins_with_is_loaded_whatever_makes_room() -> None:
    """Its own end is worth less than what the device gives up for it."""
    tier = Tier(1, num_states=2)
    end = tier.node(1, is_end=True)
    tier.states.make_room(2, (0, 0))
    tier.node(2), tier.node(3)
    assert tier.states.begin(0, end, (0, 0))
    assert end.state > 0
    assert tier.host.loaded == 1


def test_what_the_host_has_is_not_stored_again() -> None:
    tier = Tier(3)
    node = tier.node(1)
    tier.states.make_room(20, (0, 0))
    assert (node.state, node.host_state) == (0, 1)
    assert tier.states.begin(0, node, (0, 0))
    assert node.state > 0
    tier.states.step(0, None, (0, 0))
    tier.states.pass_launched()
    tier.states.release(0, None, (0, 0))
    tier.states.make_room(20, (0, 0))
    assert (node.state, node.host_state, tier.host.stored, tier.host.loaded) == (0, 1, 1, 1)


def test_what_takes_the_place_of_a_state_comes_after_its_load() -> None:
    tier = Tier(1)
    first, second = tier.node(1), tier.node(2)
    tier.states.make_room(19, (0, 0))
    assert tier.stored() == [1]
    assert tier.states.begin(0, first, (0, 0))
    tier.transfers.take()
    tier.host.load(first, 20)
    tier.host.drop(first)
    tier.give_up(second)
    assert tier.stored() == [2]
    told = [(one.to_host, one.sources.tolist(), one.targets.tolist()) for one in tier.transfers.take()]
    assert told == [(False, [1], [20]), (True, [2], [1])]


def test_what_has_left_the_tree_leaves_the_host() -> None:
    tier = Tier(3)
    nodes = [tier.node(token) for token in (1, 2)]
    tier.give_up(*nodes)
    tier.tree.detach(nodes[0], HOST)
    tier.states.drop(tier.tree.left, (0, 0))
    assert tier.stored() == [2]
    forgotten = tier.node(3)
    tier.tree.detach(forgotten, DEVICE)
    tier.states.drop([forgotten], (0, 0))
    assert tier.stored() == [2]
    assert tier.host.stored == 2
    assert tier.states.allocator.num_free == tier.states.allocator.capacity


def test_a_state_goes_where_its_node_goes() -> None:
    """One that leaves the host alone keeps its state there."""
    tier = Tier(3)
    node = tier.node(1)
    tier.states.make_room(20, (0, 0))
    tier.tree.attach(node, HOST, node.tokens)
    tier.tree.detach(node, HOST)
    tier.states.drop(tier.tree.left, (0, 0))
    assert node.host_state > 0


@pytest.mark.parametrize(("free", "begins"), [(1, False), (2, True)])
def test_a_lease_that_loads_needs_two(free: int, begins: bool) -> None:
    """One for its own, and one that is loaded; more than that only as others run."""
    tier = Tier(3, num_states=8)
    node = tier.node(1)
    tier.states.make_room(8, (0, 0))
    assert tier.states.allocator.alloc(8 - free) is not None
    assert tier.states.begin(0, node, (0, 0)) is begins
    assert (node.state > 0) is begins
    assert not begins or tier.states.at[0] == node.state != tier.states.own[0]
    assert tier.states.allocator.num_free == (0 if begins else free)


# -- told examples in the simulation ---------------------------------------------------------------------------

A, B, C = [1] * 10, [2] * 10, [3] * 10


def world(**sizes: Any) -> World:
    options = {
        "num_slots": 21,
        "host_slots": 100,
        "num_rows": 3,
        "chunk": 16,
        "spare_states": 4,
        "host_states": 20,
    }
    return World(Sizes(**{**options, **sizes}))


def test_what_was_evicted_is_found_with_its_state() -> None:
    """The second run leaves a state before the last token, the third begins with it."""
    there = world()
    assert run(there, *[A, A, B, B, C, C], *[A, B, C]) == [0, 0, 0, 0, 0, 0, 9, 9, 9]
    stats = there.cache.stats()
    assert stats.state_loaded >= 2
    assert stats.state_stored >= 3
    without = world(host_slots=0)
    assert run(without, *[A, A, B, B, C, C], *[A, B, C]) == [0] * 9
    there.drain()


def test_a_state_alone_is_loaded() -> None:
    """The tokens have stayed on the device."""
    there = world(num_slots=200)
    run(there, A, A)
    there.cache.states.make_room(100, there.cache.passes)
    assert run(there, A) == [9]
    stats = there.cache.stats()
    assert (stats.state_loaded, stats.loaded_tokens) == (1, 0)
    assert run(there, A) == [9]  # the device has it again
    assert there.cache.stats().state_loaded == 1
    there.drain()


def test_a_full_host_keeps_what_was_used_last() -> None:
    there = world(host_states=3)
    run(there, *[A, A, B, B, C, C])
    run(there, [4] * 10)
    assert run(there, C) == [9]
    there.drain()


def test_a_request_that_ends_while_its_state_is_loaded() -> None:
    there = world()
    run(there, *[A, A, B, B, C, C])
    request = there.submit(A, 6)
    there.step()
    assert any(transfer.of_states and not transfer.to_host for transfer in there.runner.transfers)
    there.abort(request)
    there.step()
    there.check()
    there.drain_requests()
    assert run(there, A) == [9]
    there.drain()


@pytest.mark.parametrize("started", [None, 0, 1, 2])
def test_a_launch_that_fails_with_transfers_of_states(started: int | None) -> None:
    """All were started, none, or some."""
    there = world()
    run(there, *[A, A, B, B, C, C])
    if started is None:
        there.runner.fail_launch = True
    else:
        there.runner.fail_transfer = started
    doomed = there.submit(A, 3)
    there.drain_requests()
    assert doomed.log.finish_reason is FinishReason.ERROR
    assert run(there, A) == [9]
    there.drain()


def test_room_that_takes_the_end_of_the_match() -> None:
    """What is stored to make room drops what was to be loaded: the lease begins with a state above."""
    there = world(num_slots=23, host_slots=6)
    other = [1] * 6 + [5] * 6
    assert run(there, *[A, A, A], *[other, other], B, A) == [0, 0, 9, 0, 6, 0, 6]
    assert there.events["state dropped before it was loaded"] == 1
    there.drain()


def test_flush_forgets_states_of_both_tiers() -> None:
    there = world()
    run(there, *[A, A, B, B, C, C])
    assert there.cache.stats().state_on_host > 0
    there.cache.flush()
    assert there.cache.stats().state_on_host == there.cache.stats().state_nodes == 0
    assert run(there, A) == [0]
    there.drain()


def test_a_pass_waits_for_a_bounded_number_of_states() -> None:
    there = world(num_slots=100, num_rows=12, max_running=8, host_states=30)
    prompts = [[token] * 3 for token in range(5)]
    run(there, *prompts, *prompts)
    there.cache.states.make_room(100, there.cache.passes)
    assert there.cache.stats().state_nodes >= 5
    requests = [there.submit(prompt, 1) for prompt in prompts]
    config = there.scheduler.config
    there.cache.states.host.tokens_each = config.max_loaded_chunks * config.chunked_prefill_size // 2
    there.step()
    assert sum(request not in there.scheduler.waiting for request in requests) == 2
    there.drain()
    assert [request.usage().cached_tokens for request in requests] == [2] * 5


def test_a_kept_cache_has_states_of_both_tiers() -> None:
    there = world(num_slots=31)
    run(there, *[A, A, B, B, C, C])
    there.save_cache()
    assert there.events["save of a state from the host"]
    there.cache.flush()
    there.load_cache(fails=True)
    there.check()
    there.load_cache()
    there.check()
    stats = there.cache.stats()
    assert there.events["load of states"] == stats.state_nodes > 2
    assert (stats.state_on_host, stats.state_loaded) == (0, 0)
    assert run(there, C, B) == [9, 9]
    there.drain()


def hits(kind: str, num_host_states: int) -> float:
    """Of prompts one after the other, in rounds of random order, with few states on the device: documents, each
    with a new question, beside requests that come once; or chats, of which each has a turn.
    """
    rng = np.random.default_rng(0)
    rows = ReqToTokenPool(6, 2048)
    cache = PrefixCache(
        rows,
        SlotAllocator(3000),
        host_slots=SlotAllocator(40_000) if num_host_states else None,
        states=states_of(10, rows.max_requests),
        host_states=SlotAllocator(num_host_states + 1) if num_host_states else None,
    )
    engine = Engine(Scheduler(cache, SchedulerConfig(4, 1024, 8, SchedulePolicy.FCFS)), DistinctRunner())
    known = [rng.integers(0, 2**20, 300).tolist() for _ in range(20)]
    params, index = SamplingParams(max_new_tokens=20), itertools.count()
    for _ in range(6):
        for k in rng.permutation(20):
            new = rng.integers(0, 2**20, 40).tolist()
            for prompt in [[*known[k], *new]] + [rng.integers(0, 2**20, 50).tolist()] * (kind == "documents"):
                ids = np.array(prompt, np.int32)
                (answer,) = engine.submit_all([Request(next(index), ids, params, max_new_tokens=20, seed=0)])
                while engine.has_work:
                    engine.step()
                if kind == "chats":
                    known[k] = answer.tokens().tolist()
    return cache.cached_tokens / cache.prompt_tokens


@pytest.mark.parametrize(("kind", "num_host_states", "least"), [("documents", 20, 0.4), ("chats", 20, 0.7)])
def test_hits_of_a_host_with_as_many_states_as_prefixes(kind: str, num_host_states: int, least: float) -> None:
    """The states that others leave behind do not push out those that are to come."""
    assert hits(kind, 0) < 0.2
    assert hits(kind, num_host_states) >= least


# -- the Runtime -------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
HOST_MEMORY = {"host_memory_gb": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.device("cpu"):
        return write(qwen3_5(seed=4), tmp_path_factory.mktemp("qwen3.5"))


def runtime(folder: Path, device: torch.device, **options: Any) -> Runtime:
    options = {"dtype": "float32", "max_total_tokens": 200, "schedule_policy": "fcfs", **options}
    runtime = Runtime(folder, device=device, **options)
    pool, host_pool = runtime.parts.model.kv_pool, runtime.parts.model._rank.host_pool
    for each in (pool, *(() if host_pool is None else (host_pool,))):
        each.fill(torch.nan)
    return runtime


@pytest.fixture(scope="module")
def cold(folder: Path, device: torch.device) -> Iterator[list[tuple[int, ...]]]:
    """Greedy answers, each computed for itself."""
    with runtime(folder, device, force_miss=True, max_total_tokens=2000) as alone:
        yield tokens(alone.generate(prompts_of_six_heads(), GREEDY))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 16},
        {"max_running_requests": 1},
        {"max_running_requests": 2, "max_total_tokens": 600},
        {"host_memory_gb": 0.0001},
    ],
    ids=["plain", "chunks", "one by one", "few states on the device", "a host that fills up"],
)
def test_answers_from_the_host_are_those_computed_cold(
    folder: Path,
    device: torch.device,
    cold: list[tuple[int, ...]],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "max_total_tokens" in options:
        monkeypatch.setattr(limits, "_FEWEST_KEPT", 2)
    with runtime(folder, device, **{k: v for k, v in options.items() if k != "host_memory_gb"}) as without:
        assert tokens(without.generate(prompts_of_six_heads(), GREEDY)) == cold
        few = without.cache_stats()
        assert (few.state_on_host, few.state_stored) == (0, 0)
    with runtime(folder, device, **{**HOST_MEMORY, **options}) as tiered:
        assert tokens(tiered.generate(prompts_of_six_heads(), GREEDY)) == cold
        many = tiered.cache_stats()
        assert many.state_stored > 0
        if "host_memory_gb" in options:
            assert many.state_on_host == 2  # as many as there are
            return
        assert many.state_loaded >= 5
        assert many.cached_tokens >= max(5 * 60, few.cached_tokens + 60)
        # Once more, with n answers and log-probabilities of what was computed and evicted before.
        again = tiered.generate(
            prompts_of_six_heads()[:6], SamplingParams(temperature=0, max_new_tokens=6, n=2, ignore_eos=True)
        )
        assert [output.token_ids for output in again] == cold[:6]
        assert all(output.usage.cached_tokens >= 60 for output in again)
        assert tiered.flush_cache() > 0
        flushed = tiered.cache_stats()
        assert (flushed.free, flushed.host_free) == (flushed.capacity, flushed.host_capacity)
        assert flushed.state_on_host == flushed.state_nodes == 0


def test_the_next_turn_of_a_chat_finds_the_last_one(folder: Path, device: torch.device) -> None:
    """What was evicted meanwhile comes back with the state at the end of the answer."""
    with runtime(folder, device, **HOST_MEMORY) as tiered, runtime(folder, device, max_total_tokens=900) as roomy:
        chats = [prompt[:40] for prompt in prompts_of_six_heads()[:6]]
        for turn in range(3):
            outputs = tiered.generate(chats, GREEDY)
            assert tokens(outputs) == tokens(roomy.generate(chats, GREEDY))
            assert all(output.usage.cached_tokens >= 40 for output in outputs) or not turn
            chats = [[*chat, *output.token_ids, 3, 4] for chat, output in zip(chats, outputs, strict=True)]
        assert tiered.cache_stats().state_loaded >= 6


def test_a_pass_that_fails_does_not_spoil_states(
    folder: Path, device: torch.device, cold: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime(folder, device, **HOST_MEMORY) as tiered:
        for owner, name in ((Executor, "score"), (KVMover, "run")):  # scores are launched last
            assert tokens(tiered.generate(prompts_of_six_heads(), GREEDY)) == cold
            cut_short_once(monkeypatch, owner, name, is_under_way=owner is Executor)
            with pytest.raises(PassError, match="cut short"):
                tiered.generate(prompts_of_six_heads()[6], GREEDY)
        assert tokens(tiered.generate(prompts_of_six_heads(), GREEDY)) == cold


def test_answers_depend_on_what_is_loaded(
    folder: Path, device: torch.device, cold: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above see whether it is: here no state comes back."""
    run = KVMover.run

    def lossy(self: KVMover, transfers: deque[KVTransfer]) -> None:
        kept = deque(one for one in transfers if not one.of_states or one.to_host)
        transfers.clear()
        if kept:
            run(self, kept)

    monkeypatch.setattr(KVMover, "run", lossy)
    with runtime(folder, device, **HOST_MEMORY) as tiered:
        assert tokens(tiered.generate(prompts_of_six_heads(), GREEDY, on_error="return")) != cold
        assert tiered.cache_stats().state_loaded > 0


def test_memory_for_states(folder: Path) -> None:
    with pytest.raises(ParameterError, match="in a quarter of it, two states of 6,400 need more"):
        Runtime(folder, device="cpu", dtype="float32", max_total_tokens=100, host_memory_gb=5e-5)


def test_what_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="radixrt")
    Runtime(folder, device="cpu", dtype="float32", max_total_tokens=100, host_memory_gb=0.001).close()
    assert "host tier: 2,930 tokens, 0.00 GiB; states: 38 sequences, 0.00 GiB" in caplog.text
