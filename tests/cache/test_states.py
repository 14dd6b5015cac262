"""Which states are kept, and which go first, with the real scheduler over a runner that computes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memory_pool.slot_allocator import SlotAllocator
from radixrt.cache.pending_match import PendingMatch
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import DEFAULT_NAMESPACE, Node, RadixTree
from radixrt.cache.states import LEAST_GAIN, States
from radixrt.engine.engine import Engine
from radixrt.limits import RunLimits
from radixrt.planning.demands import Demands
from radixrt.planning.rehearsal import rehearse
from radixrt.planning.simulated import ConstantRunner, DistinctRunner, simulated_engine
from radixrt.planning.token_store import TokenStore
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request
from radixrt.workloads.lists import classification, judging


def engine_of(
    num_states: int, running: int = 8, chunk: int = 4096, runner: ConstantRunner | None = None
) -> tuple[Engine, PrefixCache, States]:
    limits = RunLimits(400_000, running, chunk, num_states)
    engine = simulated_engine(DistinctRunner() if runner is None else runner, limits, 8192)
    cache = engine.scheduler.cache
    assert cache.states is not None
    return engine, cache, cache.states


def request(index: int, tokens: list[int], *, new: int = 4, n: int = 1, ends_at: int = 0) -> Request:
    params = SamplingParams(n=n, max_new_tokens=new)
    prompt_ids = np.array(tokens, np.int32)
    return Request(index, prompt_ids, params, max_new_tokens=new, seed=0, stop_ids=frozenset({ends_at}))


def run(engine: Engine, *requests: Request) -> None:
    engine.submit_all(requests)
    while engine.has_work:
        engine.step()


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2**20, count).tolist()


def test_what_is_used_outlives_what_nobody_uses() -> None:
    """Two prompts that many begin with keep their states, however many states are left beside and not used."""
    engine, cache, states = engine_of(30)
    heads = [tokens_of(seed, 200) for seed in (1, 2)]
    for index in range(150):
        before = cache.cached_tokens
        by_chance = [*heads[index % 2], *tokens_of(3 + index // 4, LEAST_GAIN)]  # two of each begin so
        run(engine, request(index, [*by_chance, *tokens_of(1000 + index, 20)]))
        assert index < 8 or cache.cached_tokens - before >= 200
    assert len(states.unused) > 0


@pytest.mark.parametrize(("gain", "is_kept"), [(LEAST_GAIN - 1, False), (LEAST_GAIN, True)])
def test_a_state_must_save_some_tokens(gain: int, is_kept: bool) -> None:
    """Where a second prompt parts, one is left for a third, which may never come."""
    engine, cache, states = engine_of(30)
    shared = tokens_of(0, gain)
    for index in range(3):
        run(engine, request(index, [*shared, *tokens_of(index + 1, 50)]))
    assert cache.cached_tokens == (gain if is_kept else 0)
    assert len(states.kept) - len(states.ends) == is_kept


@pytest.mark.parametrize("running", [2, 8])
def test_first_tokens_that_find_no_place(running: int) -> None:
    """Of many answers to a prompt, those that are drawn apart compute its last token, not the prompt."""
    engine, cache, _ = engine_of(60, running)
    run(engine, request(0, tokens_of(0, 500), n=64))
    assert cache.recomputed_tokens <= 64


@pytest.mark.parametrize("option", ["enabled", "force_miss"])
def test_nothing_is_kept_where_nothing_is_matched(option: str) -> None:
    engine, cache, states = engine_of(30)
    setattr(cache, option, option == "force_miss")
    shared = tokens_of(0, 100)
    engine.submit_all([request(index, [*shared, *tokens_of(index + 1, 50)], new=30) for index in range(20)])
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
        assert not states.fresh
    assert most == 8
    assert cache.cached_tokens == 0


def test_a_leader_leaves_a_state_for_who_comes_later() -> None:
    """They wait for what it computes, and part from it before its end."""
    engine, cache, _ = engine_of(30, chunk=64)
    first = tokens_of(0, 400)
    engine.submit_all([request(0, first)])
    engine.step()
    run(engine, *(request(index, [*first[:300], *tokens_of(index, 20)]) for index in (1, 2)))
    assert cache.cached_tokens == 2 * 300


def test_the_next_turn_begins_after_the_end_token() -> None:
    """A pass has gone on with that token when it is found to end the answer."""
    engine, cache, states = engine_of(30, runner=ConstantRunner(7))
    prompt = tokens_of(0, 500)
    run(engine, request(0, prompt, new=40, ends_at=7))
    assert [len(states.kept), *states.ends] == [1, *states.kept]
    run(engine, request(1, [*prompt, 7, *tokens_of(1, 100)]))
    assert cache.cached_tokens == 501


def test_a_retracted_answer_goes_on_where_it_was() -> None:
    """Also where the pass in flight computes a part of its prompt; and what it left is not the first to go."""
    for steps in (1, 2, 5):
        engine, cache, states = engine_of(30, chunk=64)
        engine.submit_all([request(0, tokens_of(0, 200), new=30)])
        for _ in range(steps):
            engine.step()
        engine.scheduler.retract(engine.scheduler.running[0])
        while cache.in_flight:
            engine.step()
        assert len(states.unused) == 1
        run(engine)
        assert cache.recomputed_tokens <= 1


def test_one_of_many_computes_a_prefix_again_whose_state_is_gone() -> None:
    engine, cache, _ = engine_of(100, running=64)
    shared = tokens_of(0, 4000)
    run(engine, request(0, [*shared, *tokens_of(1, 20)]))
    run(engine, *(request(index, [*shared, *tokens_of(1 + index, 20)]) for index in range(1, 65)))
    assert cache.cached_tokens == 63 * 4000


def test_requests_do_not_wait_for_states_one_by_one() -> None:
    """Where all are kept for others, and answers are short: as many begin with a pass as end with one, nearly."""
    passes = []
    shape = judging(questions=30, rubric_len=100, question_len=(40, 60), answer_len=(40, 60), new_tokens=(8, 16))
    store = TokenStore.of([prompt.prompt_ids for prompt in shape])
    demands = Demands.of(store.lengths, np.array([prompt.max_new_tokens for prompt in shape]))
    limits = RunLimits(100_000, max_running_requests=16, chunked_prefill_size=1024)
    for num_states in (0, limits.of_pass.num_rows + 12):
        run = rehearse(store, np.arange(len(store)), demands, replace(limits, num_states=num_states))
        passes.append(run.passes)
    assert passes[1] < 1.5 * passes[0]


def test_ends_make_room_for_all_that_begin() -> None:
    """Short answers, where all states are those of ends: as many begin with each pass as find a prefix and fit."""
    shape = classification(requests=1000, instruction_len=400, text_len=(10, 20))
    store = TokenStore.of([prompt.prompt_ids for prompt in shape])
    demands = Demands.of(store.lengths, np.array([prompt.max_new_tokens for prompt in shape]))
    limits = RunLimits(200_000, max_running_requests=64, chunked_prefill_size=2048)
    passes = []
    for num_states in (0, limits.of_pass.num_rows + 12):
        run = rehearse(store, np.arange(len(store)), demands, replace(limits, num_states=num_states))
        passes.append(run.passes)
    assert passes[1] < 1.2 * passes[0]


def test_nobody_waits_for_the_one_token_that_all_begin_with() -> None:
    engine, _, _ = engine_of(60)
    engine.submit_all([request(index, [1, *tokens_of(index, 50)]) for index in range(8)])
    engine.step()
    assert len(engine.scheduler.running) == 8


def test_who_recomputes_is_waited_for_until_a_state_is_there() -> None:
    """It may be somebody else's, at the place where the match ends."""
    engine, cache, states = engine_of(30, chunk=64)
    shared = tokens_of(0, 100)
    run(engine, request(0, [*shared, *tokens_of(1, 20)]))
    engine.submit_all([request(1, [*shared, *tokens_of(2, 20)])])
    engine.step()
    tokens = np.array([*shared, *tokens_of(3, 20)], np.int32)
    node = cache.tree.node_at(DEFAULT_NAMESPACE, cache.match(DEFAULT_NAMESPACE, tokens, len(tokens) - 1))
    match = PendingMatch(cache, DEFAULT_NAMESPACE, tokens, len(tokens) - 1)
    assert match.has_leader()
    taken = states.allocator.alloc(1)
    assert taken is not None
    states.keep(int(taken[0]), node)
    assert not match.has_leader()


def test_ends_stay_until_others_begin() -> None:
    """Of 16 that wait one begins with a pass."""
    engine, _, states = engine_of(20, running=16, chunk=256)
    run(engine, *(request(index, tokens_of(index, 20)) for index in range(12)))
    ends = len(states.ends)
    assert ends > 4
    engine.submit_all([request(index, tokens_of(index, 256)) for index in range(20, 36)])
    engine.step()
    assert len(states.ends) == ends


def test_ends_of_answers_go_first() -> None:
    """However old what else is kept, and used, is."""
    states, tree = States(SlotAllocator(4), 4), RadixTree()

    def node(token: int) -> Node:
        tokens = np.array([token], np.int32)
        return tree.insert(tree.root(DEFAULT_NAMESPACE), tokens, tokens)[0]

    passes, (used, end) = (0, 0), (node(1), node(2))
    for row, at in enumerate((used, end)):
        assert states.begin(row, tree.root(DEFAULT_NAMESPACE), passes)
        if at is used:
            states.step(row, 1, passes)
            states.publish(row, 1, at, passes)
            states.step(row, None, passes)
            states.pass_launched()
            states.release(row, None, passes)
            states.unused.clear()
        else:
            states.step(row, None, passes)
            states.release(row, at, passes)
    assert set(states.kept.values()) == {used, end}
    states.make_room(2, passes)
    assert list(states.kept.values()) == [used]


def test_passed_ends_go_before_all_others() -> None:
    """Conversations take turns. Each goes on from its latest end, and nobody from those before."""
    engine, cache, _ = engine_of(16)
    histories, last_lens = [tokens_of(talk, 50) for talk in range(10)], [0] * 10
    for turn in range(6):
        for talk in range(10):
            before = cache.cached_tokens
            (answer,) = engine.submit_all([request(10 * turn + talk, histories[talk])])
            while engine.has_work:
                engine.step()
            assert cache.cached_tokens - before == last_lens[talk]
            last_lens[talk] = answer.known_len - 1  # the last token is never computed
            histories[talk] = [*answer.tokens().tolist(), *tokens_of(100 + 10 * turn + talk, 40)]


def test_what_others_wait_for_stays() -> None:
    """First go ends, then what nobody waits for, however late it was used, then what saves least for the
    time until its next use.
    """
    tree = RadixTree()

    def node(above: Node, first: int, length: int) -> Node:
        tokens = np.arange(first, first + length, dtype=np.int32)
        return tree.insert(above, tokens, tokens)[0]

    root = tree.root(DEFAULT_NAMESPACE)
    head = node(root, 1, 100)
    soon, late, long = node(head, 200, 30), node(head, 300, 30), node(node(head, 400, 70), 500, 20)
    awaited_end, nobody, later, end = (node(root, 1000 * i, 50) for i in range(1, 5))
    uses = {head: 12, soon: 10, late: 30, long: 30, awaited_end: 20}
    states = States(SlotAllocator(9), 4)
    states.next_use = uses.get
    for at in (head, soon, late, long, awaited_end, nobody, later, end):
        taken = states.allocator.alloc(1)
        assert taken is not None
        states.keep(int(taken[0]), at)
    states.ends |= {awaited_end.state, end.state}
    states.unused |= {head.state, soon.state}
    tree.touch(nobody)
    states.make_room(3, (0, 0), ends_only=True)
    assert end.state == 0
    assert states.allocator.num_free == 1, "the other end is waited for"
    gone = []
    for count in range(2, 9):
        before = set(states.kept.values())
        states.make_room(count, (0, 0))
        gone += before - set(states.kept.values())
    # Tokens for the time from the soonest use on: 30 / 21, 90 / 21, 50 / 11, 30 / 1, 100 / 3.
    assert gone == [later, nobody, late, long, awaited_end, soon, head]


def test_where_many_are_waited_for_several_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of so many, the least worth ones; and as many as are wanted where that is more."""
    monkeypatch.setattr("radixrt.cache.states.AT_ONCE", 4)
    tree, states, uses = RadixTree(), States(SlotAllocator(14), 4), dict[Node, int]()
    states.next_use = uses.get
    for number in range(13):
        tokens = np.arange(20, dtype=np.int32) + 100 * number
        node, *_ = tree.insert(tree.root(DEFAULT_NAMESPACE), tokens, tokens)
        uses[node] = number
        (taken,) = states.allocator.alloc(1)  # type: ignore[misc]
        states.keep(int(taken), node)
    states.make_room(1, (0, 0))
    assert [uses[node] for node in states.kept.values()] == [*range(10)]
    states.make_room(7, (0, 0))
    assert [uses[node] for node in states.kept.values()] == [*range(6)]


def test_few_states_in_the_order_of_a_file() -> None:
    """Groups whose members stand far apart, with many more nodes than states."""
    shape = judging(questions=40, rubric_len=300, question_len=(80, 120), answer_len=(60, 100), new_tokens=(8, 16))
    store = TokenStore.of([prompt.prompt_ids for prompt in shape])
    demands = Demands.of(store.lengths, np.array([prompt.max_new_tokens for prompt in shape]))
    limits = RunLimits(200_000, max_running_requests=8, chunked_prefill_size=1024)
    limits = replace(limits, num_states=limits.of_pass.num_rows + 24)
    assert rehearse(store, np.arange(len(store)), demands, limits).hit_rate > 0.79  # by last use alone 0.69


def test_a_retracted_answer_waits_for_its_states() -> None:
    """At once: other answers may be about to extend."""
    engine, cache, states = engine_of(30, chunk=64)
    engine.submit_all([request(5, tokens_of(0, 200), new=30)])
    for _ in range(3):
        engine.step()
    answer = engine.scheduler.running[0]
    node = cache.tree.match(DEFAULT_NAMESPACE, answer.tokens()).node
    assert states.next_use(node) is None
    engine.scheduler.retract(answer)
    assert states.next_use(node) == 0


def test_uses_are_counted_by_the_queue() -> None:
    """Not by who came first: an urgent request is served before those that came earlier."""
    engine, cache, states = engine_of(30)
    heads = [tokens_of(seed, 40) for seed in range(3)]

    def asked(index: int, head: list[int]) -> Request:
        return request(index, head + tokens_of(100 + index, 9))

    run(engine, *(asked(2 * i + k, head) for i, head in enumerate(heads) for k in range(2)))
    engine.submit_all([asked(10 + i, head) for i, head in enumerate(heads[:2])], in_order=True)
    engine.submit_all([replace(asked(20, heads[2]), priority=-1)])
    scheduler = engine.scheduler
    scheduler._admission._neighbours.add(scheduler.waiting)  # as when some of them are admitted
    nodes = [cache.tree.match(DEFAULT_NAMESPACE, np.array(head, np.int32)).node for head in heads]
    assert all(node.state for node in nodes)
    assert [states.next_use(node) for node in nodes] == [1, 2, 0]


def test_what_lacks_a_state_is_counted() -> None:
    """KV of what two share is there when the second one comes, and the state is there for the third one."""
    engine, cache, _ = engine_of(30)
    shared = tokens_of(0, 100)
    counts = []
    for index in range(3):
        run(engine, request(index, [*shared, *tokens_of(index + 1, 50)]))
        counts.append((cache.stats().stateless_tokens, cache.stats().cached_tokens))
    assert counts == [(0, 0), (100, 0), (100, 100)]
    assert (cache.stats().state_unused, cache.stats().states_given_up_unused) == (0, 0)
    assert cache.stats().state_ends == cache.stats().state_kept - 1 == 3
    cache.flush()
    stats = cache.stats()
    assert (stats.state_kept, stats.state_ends, stats.state_free) == (0, 0, 30)
    assert stats.states_given_up_unused == 0


def test_what_is_left_in_vain_is_counted() -> None:
    """A state was left where a second one parts, and nobody came. Ends of answers are not left in vain."""
    engine, cache, _ = engine_of(30)
    shared = tokens_of(0, 100)
    run(engine, request(0, [*shared, *tokens_of(1, 50)]))
    run(engine, request(1, [*shared, *tokens_of(2, 50)]))
    assert (cache.stats().state_unused, cache.stats().states_given_up_unused) == (1, 0)
    cache.flush()
    assert (cache.stats().state_unused, cache.stats().states_given_up_unused) == (0, 1)


def test_states_of_those_that_run() -> None:
    engine, cache, _ = engine_of(30)
    engine.submit_all([request(index, tokens_of(index, 50)) for index in range(3)])
    engine.step()
    assert (cache.stats().state_own, cache.stats().state_free) == (3, 27)
    while engine.has_work:
        engine.step()
    stats = cache.stats()
    assert (stats.state_own, stats.state_kept + stats.state_free + stats.state_pending) == (0, 30)
