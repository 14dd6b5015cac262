"""Seeded faults in the real code, each of which the simulation must find, by the invariant that it breaks.

A fault is found when a random walk raises the violation that is named, or when the code itself refuses what the
fault makes it do (a slot freed twice). Without a fault the same walks find nothing: see test_state_machine.py.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from memory_pool.kv_transfers import KVTransfer, KVTransfers
from memory_pool.req_to_token_pool import ReqToTokenPool, RowChanges
from radixrt.cache import prefix_cache, radix_tree
from radixrt.cache.host_states import HostStates
from radixrt.cache.host_tier import HostTier
from radixrt.cache.lease import Lease, Loan
from radixrt.cache.pending_match import PendingMatch
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import DEVICE, HOST, LeafQueue, Match, Namespace, Node, RadixTree
from radixrt.cache.states import States
from radixrt.engine.driver import Driver
from radixrt.engine.engine import Engine
from radixrt.errors import SchedulerError
from radixrt.execution.attention import shared_segments
from radixrt.execution.attention.pass_plans import Capacity, PassPlans
from radixrt.execution.attention.shared_segments import SharedSegments
from radixrt.execution.pass_builder import PackedPass, PassBuilder
from radixrt.output import FinishReason
from radixrt.schedule import admission, booking, policy, scheduler
from radixrt.schedule.admission import Admission
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Bookkeeper
from radixrt.schedule.masks import PassForms
from radixrt.schedule.passes import Pass, PassResult
from radixrt.schedule.policy import OutputEstimate, SchedulePolicy, SchedulerConfig
from radixrt.schedule.request import Request
from radixrt.schedule.request_table import RequestTable
from radixrt.schedule.sampling_table import SamplingTable
from radixrt.schedule.scheduler import Scheduler
from tests.cache import test_host_states, test_prefix_cache, test_radix_tree
from tests.schedule import test_admission, test_policy, test_scheduler
from tests.support.forms import RuleMatcher
from tests.support.planned_reads import PlannedWorld
from tests.support.world.invariants import Violation
from tests.support.world.runner import SimulatedPass, SimulatedRunner
from tests.support.world.walk import Walk
from tests.support.world.world import Sizes, World
from triton_ops.attention.plan import AttentionPlan, SharedItems

Patch = Callable[[pytest.MonkeyPatch], None]

# A tight pool, chunks, several rows: everything happens here. With forced misses every prompt is remapped. First
# come, first served lets a prompt that is scored compute what the tree has, before those that match more of it.
SIZES = Sizes(num_slots=48, num_rows=6, max_running=4, chunk=5, drops=True)
ALL_SIZES = [
    SIZES,
    replace(SIZES, force_miss=True, num_slots=64),
    replace(SIZES, policy=SchedulePolicy.FCFS, chunk=16, num_slots=64),
]
# A host that has hardly room for a prompt, one in which most of what was evicted is found, and one that fills up.
TIERED_SIZES = [
    replace(SIZES, num_slots=30, host_slots=8, chunk=16, max_running=2),
    replace(SIZES, num_slots=44, host_slots=150, chunk=16),
    replace(SIZES, num_slots=44, host_slots=24),
]


# Prompts that begin with one another come together, and passes have room for several.
FAMILY_SIZES = [
    replace(SIZES, num_slots=90, num_rows=12, max_running=8, chunk=chunk, families=True) for chunk in (16, 32)
]

FORM_SIZES = [replace(one, forms=True) for one in ALL_SIZES[:2]]

# Hardly a state more than running answers have, and enough to keep many.
STATE_SIZES = [replace(one, spare_states=spare) for one, spare in zip(ALL_SIZES, (4, 1, 12), strict=True)]
STATE_SIZES += [replace(FAMILY_SIZES[0], spare_states=spare) for spare in (0, 6)]
# Few states on the device, and on the host few or enough.
TIERED_STATE_SIZES = [
    replace(one, spare_states=spare, host_states=host, families=True)
    for one, spare, host in zip(TIERED_SIZES, (1, 0, 3), (3, 20, 6), strict=True)
]

DRAFT_SIZES = [replace(one, drafts=True, max_in_flight=0) for one in ALL_SIZES]


@dataclass(frozen=True)
class Mutant:
    name: str
    breaks: tuple[str, ...]  # the number of the invariant, or the beginning of its name
    apply: Patch
    sizes: list[Sizes]
    world: type[World]
    first: int  # the seed of the walk that is tried before the others


MUTANTS: list[Mutant] = []


def mutant(
    *breaks: str, sizes: list[Sizes] = ALL_SIZES, world: type[World] = World, first: int = 0
) -> Callable[[Patch], Patch]:
    def register(apply: Patch) -> Patch:
        MUTANTS.append(Mutant(apply.__name__, breaks, apply, sizes, world, first))
        return apply

    return register


@mutant("5:")
def drop_the_remap(patch: pytest.MonkeyPatch) -> None:
    """A duplicate's slots go to pending while the row still points at them."""
    write = ReqToTokenPool.write
    commit = PrefixCache.commit

    def forgetful(self: PrefixCache, lease: Lease, tokens: np.ndarray, computed: int) -> None:
        patch.setattr(ReqToTokenPool, "write", lambda *_: None)
        commit(self, lease, tokens, computed)
        patch.setattr(ReqToTokenPool, "write", write)

    patch.setattr(PrefixCache, "commit", forgetful)


@mutant("5:", "7:", "6:", "2:", "4:")
def free_while_pending(patch: pytest.MonkeyPatch) -> None:
    """Slots are let go at once, though a pass in flight reads them."""
    patch.setattr(PrefixCache, "_defer_free", lambda self, pending: self._free_pending([pending]))


@mutant("6:", "7:")
def match_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    match = RadixTree.match

    def generous(self: RadixTree, namespace: Namespace, tokens: np.ndarray, limit: int | None = None) -> Match:
        found = match(self, namespace, tokens, limit)
        if found.inside < len(found.node.tokens) and found.length < len(tokens) - 1:
            return Match(found.node, found.inside + 1, found.length + 1)
        return found

    patch.setattr(RadixTree, "match", generous)


@mutant("6:")
def match_the_last_token_too(patch: pytest.MonkeyPatch) -> None:
    match = RadixTree.match
    patch.setattr(RadixTree, "match", lambda self, ns, tokens, limit=None: match(self, ns, tokens, None))


@mutant("4:", "9:")
def forget_to_unlock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "unlock", lambda self, node, keep=None: np.zeros(0, dtype=np.int32))


@mutant("4:", "5:", "2:")
def evict_locked_nodes(patch: pytest.MonkeyPatch) -> None:
    evict = RadixTree.evict

    def ruthless(self: RadixTree, count: int) -> np.ndarray:
        locks = [(node, node.lock) for root in self.roots.values() for node in _below(root)]
        for node, _ in locks:
            node.lock = 0
        slots = evict(self, count)
        for node, lock in locks:
            node.lock = lock
        return slots

    def always_enough(self: RadixTree) -> int:
        return self.device_tokens

    patch.setattr(RadixTree, "evict", ruthless)
    is_leaf = radix_tree.is_leaf

    def unlocked(node: Node, tier: int) -> bool:
        on_device = node.parent is not None and not node.num_children[DEVICE]
        return on_device if tier == DEVICE else is_leaf(node, tier)

    patch.setattr(radix_tree, "is_leaf", unlocked)
    patch.setattr(RadixTree, "evictable_tokens", property(always_enough))


def _below(root: Node) -> list[Node]:
    out = [root]
    for node in out:
        out.extend(node.children.values())
    return out


@mutant("7:", "6:")
def pad_to_a_live_slot(patch: pytest.MonkeyPatch) -> None:
    build = World.__post_init__

    def padded(self: World) -> None:
        build(self)
        self.runner.pad_slot = 1

    patch.setattr(World, "__post_init__", padded)


@mutant("followers wait")
def release_followers_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "leader", lambda *_: None)


@mutant("followers wait", first=2)
def look_for_leaders_at_the_match_alone(patch: pytest.MonkeyPatch) -> None:
    """A leader that stands before the match, where others published what comes between, is not seen."""
    leader = PrefixCache.leader

    def near(self: PrefixCache, match: Match, tokens: np.ndarray, limit: int) -> Lease | None:
        found = leader(self, match, tokens, limit)
        nearest = match.node if match.at_boundary else match.node.parent
        return found if found is not None and found.node is nearest else None

    patch.setattr(PrefixCache, "leader", near)


@mutant("7:", sizes=FAMILY_SIZES)
def read_a_slot_before_its_leader_writes_it(patch: pytest.MonkeyPatch) -> None:
    """A pass reads all prefixes before it writes what is new."""
    patch.setattr(SimulatedRunner, "_order", lambda self, flight: [*range(flight.batch.num_rows)][::-1])


@mutant("18:", sizes=FAMILY_SIZES)
def borrow_of_a_pass_in_flight(patch: pytest.MonkeyPatch) -> None:
    """One that follows goes on where the pass before, which computes its prefix, fails."""
    launched = PrefixCache.pass_launched

    def remembering(self: PrefixCache) -> None:
        lenders = dict(self._lenders)
        launched(self)
        self._lenders.update(lenders)

    def hasty(self: PendingMatch) -> Loan | None:
        return self._cache.loan(self.match(), self._tokens, self._limit)

    patch.setattr(PrefixCache, "pass_launched", remembering)
    patch.setattr(PendingMatch, "loan", hasty)


@mutant("1:", "2:", "5:", "6:", "7:", "18:", "freeing", sizes=FAMILY_SIZES, first=8)
def free_what_others_borrow(patch: pytest.MonkeyPatch) -> None:
    """A leader that ends before its pass does takes all of its slots along."""

    def heartless(self: PrefixCache, lease: Lease) -> int:
        for borrower in lease.borrowers:
            borrower.lender = None
        if lease.lender is not None:
            lease.lender.borrowers.remove(lease)
        first = lease.own_start
        lease.lender, lease.borrowers = None, []
        return first

    patch.setattr(PrefixCache, "_bequeath", heartless)


@mutant("2:", "freeing", sizes=FAMILY_SIZES)
def own_what_is_borrowed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "own_start", property(lambda self: self.committed))


@mutant("2:", "freeing", "1:", "5:", "6:", "7:", sizes=FAMILY_SIZES)
def free_the_duplicates_that_are_lent(patch: pytest.MonkeyPatch) -> None:
    """A follower publishes, and gives up what the tree has already: what its leader computed."""
    commit = PrefixCache.commit

    def greedy(self: PrefixCache, lease: Lease, tokens: np.ndarray, computed: int) -> None:
        if lease.lender is not None and lease.lender.committed >= lease.lent_end:
            lease.lender.borrowers.remove(lease)
            lease.lender, lease.lent_end = None, 0
        commit(self, lease, tokens, computed)

    patch.setattr(PrefixCache, "commit", greedy)


@mutant("7:", "8:", "18:", "12:", "6:", sizes=FAMILY_SIZES)
def let_followers_outlive_a_pass_that_failed(patch: pytest.MonkeyPatch) -> None:
    fail = Bookkeeper.fail

    def lenient(self: Bookkeeper, failed: booking.Booking, cause: Exception) -> list[Answer]:
        borrows = [answer.lease is not None and answer.lease.lender is not None for answer in failed.answers]
        led = tuple(answer for answer, follows in zip(failed.answers, borrows, strict=True) if not follows)
        return fail(self, replace(failed, answers=led), cause)

    patch.setattr(Bookkeeper, "fail", lenient)


@mutant("13:", "followers wait", sizes=FAMILY_SIZES)
def count_what_is_borrowed_as_computed(patch: pytest.MonkeyPatch) -> None:
    acquire = PrefixCache.acquire

    def forgetful(self: PrefixCache, *arguments: Any) -> Lease | None:
        lease = acquire(self, *arguments)
        if lease is not None:
            lease.matched = lease.committed
        return lease

    patch.setattr(PrefixCache, "acquire", forgetful)


@mutant("6:")
def commit_what_is_only_launched(patch: pytest.MonkeyPatch) -> None:
    release, computed_len = Admission.release, Answer.computed_len

    def hasty(self: Admission, answer: Answer, reusable_len: int | None = None, **options: Any) -> None:
        launched = property(lambda self: min(self.lease.allocated_len, self.known_len))
        patch.setattr(Answer, "computed_len", launched)
        release(self, answer, reusable_len, **options)
        patch.setattr(Answer, "computed_len", computed_len)

    patch.setattr(Admission, "release", hasty)


@mutant("6:", "7:", "12:")
def commit_what_is_not_finite(patch: pytest.MonkeyPatch) -> None:
    collect = SimulatedRunner.collect

    def blind(self: SimulatedRunner, handle: SimulatedPass) -> PassResult:
        result = collect(self, handle)
        return replace(result, finite=np.ones_like(result.finite))

    patch.setattr(SimulatedRunner, "collect", blind)


@mutant("2:", "8:", "freeing")
def release_twice(patch: pytest.MonkeyPatch) -> None:
    """Two ways out of a request each release it, and release does not notice."""
    release = PrefixCache.release

    def again(self: PrefixCache, lease: Lease, *arguments: Any, **options: Any) -> None:
        release(self, lease, *arguments, **options)
        lease.released = False
        release(self, lease, *arguments, **options)

    patch.setattr(PrefixCache, "release", again)


@mutant("1:")
def drop_what_nobody_needs_and_lose_its_slots(patch: pytest.MonkeyPatch) -> None:
    unlock = RadixTree.unlock

    def careless(self: RadixTree, node: Node, keep: int | None = None) -> np.ndarray:
        unlock(self, node, keep)
        return np.zeros(0, dtype=np.int32)

    patch.setattr(RadixTree, "unlock", careless)


@mutant("4:", "5:", "2:", "unlocking")
def drop_what_others_hold(patch: pytest.MonkeyPatch) -> None:
    """What nobody after it needs goes, although a request beside it still reads it."""
    settle = PrefixCache._free_pending

    def ruthless(self: PrefixCache, ended: Any) -> None:
        for pending in ended:
            lease = pending.lease
            if lease is not None and lease.reusable_len is not None:
                for step in self.tree.path(lease.node):
                    step.lock = 1
            settle(self, [pending])

    patch.setattr(PrefixCache, "_free_pending", ruthless)


@mutant("1:", "9:", "4:", "5:", "6:", "16:", "freeing", "assert", sizes=TIERED_SIZES, first=17)
def drop_what_the_host_has_a_copy_of(patch: pytest.MonkeyPatch) -> None:
    """Its node leaves the tree, and its slots on the host with it."""
    unlock = RadixTree.unlock

    def blind(self: RadixTree, node: Node, keep: int | None = None) -> np.ndarray:
        copies = [(step, step.slots[HOST]) for step in self.path(node)]
        for step, _ in copies:
            step.slots[HOST] = None
        freed = unlock(self, node, keep)
        for step, host_slots in copies:
            if len(step.tokens):
                step.slots[HOST] = host_slots
        return freed

    patch.setattr(RadixTree, "unlock", blind)


@mutant("6:", "7:")
def ignore_the_namespace(patch: pytest.MonkeyPatch) -> None:
    match, node_at = RadixTree.match, RadixTree.node_at

    def merged_match(self: RadixTree, namespace: Namespace, tokens: np.ndarray, limit: int | None = None) -> Match:
        return match(self, Namespace(), tokens, limit)

    patch.setattr(RadixTree, "match", merged_match)
    patch.setattr(RadixTree, "node_at", lambda self, namespace, found: node_at(self, Namespace(), found))


@mutant("12:")
def lose_a_retracted_request_s_last_token(patch: pytest.MonkeyPatch) -> None:
    append = Answer.append

    def lossy(self: Answer, token_id: int) -> None:
        append(self, (token_id + 1) % 5 if self.lease is None else token_id)

    patch.setattr(Answer, "append", lossy)


@mutant("rows:", "7:", "5:", first=2)
def keep_a_freed_row_s_changes(patch: pytest.MonkeyPatch) -> None:
    free = ReqToTokenPool.free

    def hoarding(self: ReqToTokenPool, row: int) -> None:
        changes, self._changes = self._changes, []
        stretches, self._runs = self._runs, {}
        free(self, row)
        self._changes, self._runs = changes, stretches

    patch.setattr(ReqToTokenPool, "free", hoarding)


@mutant("7:", first=10)
def lose_the_changes_of_a_failed_launch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReqToTokenPool, "give_back", lambda self, changes: None)


@mutant("7:")
def lose_a_change(patch: pytest.MonkeyPatch) -> None:
    take = ReqToTokenPool.take_changes

    def careless(self: ReqToTokenPool) -> RowChanges:
        changes = take(self)
        return RowChanges(changes.rows[:-1], changes.positions[:-1], changes.slots[:-1])

    patch.setattr(ReqToTokenPool, "take_changes", careless)


@mutant("13:")
def count_a_hit_again_after_a_retraction(patch: pytest.MonkeyPatch) -> None:
    retract = Admission.retract

    def inflating(self: Admission, answer: Answer) -> None:
        retract(self, answer)
        answer.log.cached_tokens = None

    patch.setattr(Admission, "retract", inflating)


@mutant("11:")
def never_overdue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerConfig, "is_overdue", lambda self, oldest: False)


@mutant("11: the more urgent", sizes=[SIZES])
def rank_by_the_match_alone(patch: pytest.MonkeyPatch) -> None:
    order = policy.admission_order

    def equal(config: SchedulerConfig, waiting: list[Answer], cache: PrefixCache) -> list[Answer]:
        ranked = order(config, waiting, cache)
        return sorted(ranked, key=lambda one: one.match_in(cache).length(), reverse=True)

    patch.setattr(admission, "admission_order", equal)


@mutant("11: the queue")
def ignore_the_priority(patch: pytest.MonkeyPatch) -> None:
    submit_all = Scheduler.submit_all

    def by_arrival(self: Scheduler, requests: Iterable[Request], **options: Any) -> list[Answer]:
        answers = submit_all(self, requests, **options)
        self.waiting.sort(key=lambda answer: answer.arrival)
        return answers

    place = property(lambda self: (0, self.arrival), lambda self, place: None)
    patch.setattr(Answer, "place", place, raising=False)
    patch.setattr(Scheduler, "submit_all", by_arrival)


@mutant("3:", "6:", "4:", "5:", "unlocking")
def split_forgets_the_lock(patch: pytest.MonkeyPatch) -> None:
    cut = RadixTree.cut

    def sloppy(self: RadixTree, node: Node, at: int) -> Node:
        upper = cut(self, node, at)
        if upper is not node:
            upper.lock = 0
        return upper

    patch.setattr(RadixTree, "cut", sloppy)


@mutant("2:", "5:", "6:", "1:")
def insert_returns_no_duplicates(patch: pytest.MonkeyPatch) -> None:
    insert = RadixTree.insert

    def silent(self: RadixTree, node: Node, tokens: np.ndarray, slots: np.ndarray) -> tuple[Node, np.ndarray]:
        return insert(self, node, tokens, slots)[0], np.zeros(0, np.int32)

    patch.setattr(RadixTree, "insert", silent)


@mutant("6:", "7:", first=1)
def ignore_the_weights_version(patch: pytest.MonkeyPatch) -> None:
    match, node_at = RadixTree.match, RadixTree.node_at

    def stale(self: RadixTree, namespace: Namespace, tokens: np.ndarray, limit: int | None = None) -> Match:
        return match(self, namespace._replace(weights_version=0), tokens, limit)

    def at(self: RadixTree, namespace: Namespace, found: Match) -> Node:
        return node_at(self, namespace._replace(weights_version=0), found)

    patch.setattr(RadixTree, "match", stale)
    patch.setattr(RadixTree, "node_at", at)


@mutant("6:", "7:", "12:", first=1)
def take_other_weights_while_requests_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Driver, "while_idle", lambda self, action: action())


@mutant("2:", "5:", "7:", "8: a token", "cannot allocate -", first=2)
def share_a_row_between_answers(patch: pytest.MonkeyPatch) -> None:
    run = Admission._run

    def shared(self: Admission, answers: Sequence[Answer], leases: Sequence[Lease]) -> None:
        for answer, lease in zip(answers, leases, strict=True):
            if answer.parent is not None and answer.parent.lease is not None:
                lease.row = answer.parent.lease.row
        run(self, answers, leases)

    patch.setattr(Admission, "_run", shared)


@mutant("8:", first=22)
def abort_one_answer_and_not_the_others(patch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def alone(self: Engine, aborts: Iterable[Answer] = (), *others: Any) -> list[Answer]:
        return [answer for answer in aborts if self.scheduler.abort(answer)] + step(self, (), *others)

    patch.setattr(Engine, "step", alone)


@mutant("8:", first=23)
def abort_an_answer_and_keep_what_it_holds(patch: pytest.MonkeyPatch) -> None:
    finish, release = Bookkeeper.finish, Admission.release

    def forgetful(self: Bookkeeper, answer: Answer, reason: FinishReason, error: str | None = None) -> None:
        keeps = reason is FinishReason.ABORT and answer.parent is not None
        patch.setattr(Admission, "release", (lambda *_, **options: None) if keeps else release)
        finish(self, answer, reason, error)
        patch.setattr(Admission, "release", release)

    patch.setattr(Bookkeeper, "finish", forgetful)


@mutant("10:", first=3)
def sample_all_first_tokens_in_one_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_limited", lambda self, num_samples, num_decodes: num_samples)


@mutant("12:")
def draw_all_answers_as_the_same_sample(patch: pytest.MonkeyPatch) -> None:
    fork = Answer.fork
    patch.setattr(Answer, "fork", lambda self, sample_index: fork(self, 1))


@mutant("13:")
def find_in_the_cache_what_is_to_be_scored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Answer, "match_limit", property(lambda self: self.known_len - 1))


# -- the numbers of running answers ------------------------------------------------------------------------


@mutant("12:", first=5)
def overlook_what_is_special(patch: pytest.MonkeyPatch) -> None:
    """Requests with many stop tokens are booked like all others."""
    begin = RequestTable.begin

    def alike(self: RequestTable, rows: Sequence[int], requests: Sequence[Request], *known: Any) -> None:
        begin(self, rows, requests, *known)
        self.is_special[rows] &= [request.params.logprobs is not None for request in requests]

    patch.setattr(RequestTable, "begin", alike)


@mutant("12:")
def forget_the_stops_of_running_requests(patch: pytest.MonkeyPatch) -> None:
    append = RequestTable.append

    def deaf(self: RequestTable, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        append(self, rows, token_ids)
        return self.known_lens[rows] >= self.max_lens[rows]

    patch.setattr(RequestTable, "append", deaf)


@mutant("12:", "6:", "7:")
def leave_tokens_in_a_row_that_others_get(patch: pytest.MonkeyPatch) -> None:
    """What an answer takes along when it stops running is still a view of its row."""
    stop = Answer.stop

    def view(self: Answer) -> None:
        tokens = self.tokens()
        stop(self)
        self._tokens = tokens

    patch.setattr(Answer, "stop", view)


@mutant("8:", "12:", "13:", "list index")
def book_for_a_row_that_was_let_go(patch: pytest.MonkeyPatch) -> None:
    """A retracted answer's last token goes to the row that it had."""
    release = Admission.release

    def careless(self: Admission, answer: Answer, *arguments: Any, **options: Any) -> None:
        row = answer.lease.row
        release(self, answer, *arguments, **options)
        self.table.runs[row] = True

    patch.setattr(Admission, "release", careless)


@mutant("8:")
def decode_whoever_decoded_before(patch: pytest.MonkeyPatch) -> None:
    """That an answer was released is not noticed."""
    release = Admission.release

    def unnoticed(self: Admission, answer: Answer, *arguments: Any, **options: Any) -> None:
        changes = self.changes
        release(self, answer, *arguments, **options)
        self.changes = changes

    patch.setattr(Admission, "release", unnoticed)


@mutant("8: nothing")
def decode_beyond_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """That an answer has launched its last token is not noticed."""
    group = Scheduler._group

    def rarely(self: Scheduler) -> None:
        self._passes_left += bool(self._decodes)
        group(self)

    patch.setattr(Scheduler, "_group", rarely)


@mutant("6:", "7:", "8:", "12:", "13:")
def come_back_while_a_token_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    retract = Admission.retract

    def at_once(self: Admission, answer: Answer) -> None:
        retract(self, answer)
        answer.resumable_after = 0

    patch.setattr(Admission, "retract", at_once)


@mutant("13:", "zip()")
def count_log_probabilities_of_those_who_want_none(patch: pytest.MonkeyPatch) -> None:
    """Rows are taken to have as many as they sample."""
    patch.setattr(booking.np, "searchsorted", lambda rows, first_samples: first_samples)


@mutant("8: a token is drawn")
def draw_with_the_parameters_of_who_had_the_row_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SamplingTable, "admit", lambda *_: None)


@mutant("6: what an answer")
def expect_what_was_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingMatch, "_is_current", lambda self: True)


@mutant("6: what an answer")
def keep_the_edge_of_what_left_the_tree(patch: pytest.MonkeyPatch) -> None:
    evict = RadixTree.evict

    def silent(self: RadixTree, count: int) -> np.ndarray:
        before = [(node, node.tokens) for root in self.roots.values() for node in _below(root)]
        slots = evict(self, count)
        for node, tokens in before:
            if not len(node.tokens):
                node.tokens = tokens
        return slots

    patch.setattr(RadixTree, "evict", silent)


@mutant("6: what an answer", "10:", "11: the more", first=2)
def wait_for_who_has_gone_on(patch: pytest.MonkeyPatch) -> None:
    """That a leader has come further is not noticed."""
    has_leader = PendingMatch.has_leader
    patch.setattr(PendingMatch, "has_leader", lambda self: self._leader is not None or has_leader(self))


@mutant("8:", sizes=DRAFT_SIZES)
def keep_the_positions_of_wrong_drafts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "truncate", lambda *_: None)


@mutant("6:", "7:", "8:", "12:", sizes=DRAFT_SIZES)
def take_what_follows_a_wrong_draft(patch: pytest.MonkeyPatch) -> None:
    collect = SimulatedRunner.collect

    def credulous(self: SimulatedRunner, handle: SimulatedPass) -> PassResult:
        return replace(collect(self, handle), accepted=handle.booking.pass_.num_samples)

    patch.setattr(SimulatedRunner, "collect", credulous)


# -- forms -------------------------------------------------------------------------------------------------


@mutant("12:", sizes=FORM_SIZES)
def mask_one_token_late(patch: pytest.MonkeyPatch) -> None:
    """A pass is not waited for before the masks of the next one are filled."""
    fill = PassForms.fill

    def late(self: PassForms, masks: np.ndarray) -> None:
        matchers = [answer.matcher for answer in self.drawn]
        known = [(one, one.tokens[:]) for one in matchers if isinstance(one, RuleMatcher) and one.tokens]
        for matcher, tokens in known:
            matcher.tokens = tokens[:-1]
        fill(self, masks)
        for matcher, tokens in known:
            matcher.tokens = tokens

    patch.setattr(PassForms, "fill", late)


@mutant("12:", sizes=FORM_SIZES)
def begin_the_form_at_each_token(patch: pytest.MonkeyPatch) -> None:
    form = property(lambda self: None if self.request.form is None else self.request.form.matcher())
    patch.setattr(Answer, "matcher", form)


@mutant("12:", "13:", sizes=FORM_SIZES)
def book_answers_with_a_form_like_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PassForms, "push", lambda self, token_ids: {})


@mutant("12:", "19:", sizes=FORM_SIZES)
def give_masks_to_others(patch: pytest.MonkeyPatch) -> None:
    """The first mask is the last draw's."""
    draw = Engine._draw

    patch.setattr(Engine, "_draw", lambda self, masks: draw(self, np.roll(masks, 1, axis=0)))


@mutant("19:", sizes=[replace(one, max_forced_rows=0) for one in FORM_SIZES])
def leave_masks_to_the_thread_that_fills_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "start_draws", lambda self: None)


@mutant("12:", "19:", sizes=[replace(one, max_forced_rows=0) for one in FORM_SIZES])
def fill_masks_before_all_tokens_are_pushed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PassForms, "suffice", lambda self, token_ids: True)


@mutant("6:", "8:", "12:", sizes=FORM_SIZES)
def decode_after_forced_tokens_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "extend_again", lambda self, answer, count: None)


@mutant("6:", "8:", sizes=FORM_SIZES)
def take_forced_tokens_for_computed_ones(patch: pytest.MonkeyPatch) -> None:
    """The extend begins after them, as the first bookkeeper had it where an answer ended among them."""
    extend_again = Admission.extend_again
    patch.setattr(Admission, "extend_again", lambda self, answer, count: extend_again(self, answer, 0))


@mutant("8:", "12:", sizes=FORM_SIZES)
def draw_what_is_forced_once_more(patch: pytest.MonkeyPatch) -> None:
    """The token that a pass in flight has drawn follows those that were forced meanwhile."""
    book = Bookkeeper._book

    def credulous(self: Bookkeeper, one: booking.Booking, result: PassResult, i: int, *drawn: Any) -> list[Answer]:
        answer, (token_ids, _) = one.answers[i], drawn
        ended = book(self, one, result, i, *drawn)
        if token_ids and not answer.finished and int(one.pass_.seq_lens[i]) + len(token_ids) < answer.known_len:
            answer.append(token_ids[0])
        return ended

    patch.setattr(Bookkeeper, "_book", credulous)


# -- two tiers ---------------------------------------------------------------------------------------------


@mutant("6:", "7:", sizes=TIERED_SIZES)
def load_before_the_stores(patch: pytest.MonkeyPatch) -> None:
    """All loads of a pass come before its stores: into slots that are yet to be stored."""
    take = KVTransfers.take

    def reordered(self: KVTransfers) -> deque[KVTransfer]:
        return deque(sorted(take(self), key=lambda transfer: transfer.to_host))

    patch.setattr(KVTransfers, "take", reordered)


@mutant("6:", "7:", sizes=TIERED_SIZES[:1], first=3)
def store_before_the_loads(patch: pytest.MonkeyPatch) -> None:
    """All stores of a pass come before its loads: over what is yet to be loaded."""
    take = KVTransfers.take

    def reordered(self: KVTransfers) -> deque[KVTransfer]:
        return deque(sorted(take(self), key=lambda transfer: not transfer.to_host))

    patch.setattr(KVTransfers, "take", reordered)


@mutant("transfers:", sizes=TIERED_SIZES)
def merge_transfers_to_one_target(patch: pytest.MonkeyPatch) -> None:
    unique = np.unique

    def blind(targets: np.ndarray) -> np.ndarray:
        unique(targets)
        return targets

    patch.setattr("memory_pool.kv_transfers.np.unique", blind)


@mutant("6:", "7:", sizes=TIERED_SIZES)
def make_transfers_again_after_a_failed_launch(patch: pytest.MonkeyPatch) -> None:
    """Those that had been started are given back with the others."""
    give_back, take = KVTransfers.give_back, KVTransfers.take
    taken: list[KVTransfer] = []

    def remembered(self: KVTransfers) -> deque[KVTransfer]:
        transfers = take(self)
        taken[:] = transfers
        return transfers

    patch.setattr(KVTransfers, "take", remembered)
    patch.setattr(KVTransfers, "give_back", lambda self, transfers: give_back(self, deque(taken)))


@mutant("6:", "7:", sizes=TIERED_SIZES)
def lose_the_transfers_of_a_failed_launch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVTransfers, "give_back", lambda self, transfers: None)


@mutant("6:", sizes=TIERED_SIZES)
def store_nothing(patch: pytest.MonkeyPatch) -> None:
    book = KVTransfers.book
    patch.setattr(KVTransfers, "book", lambda self, transfer: None if transfer.to_host else book(self, transfer))


@mutant("6:", "7:", sizes=TIERED_SIZES)
def load_nothing(patch: pytest.MonkeyPatch) -> None:
    book = KVTransfers.book
    patch.setattr(KVTransfers, "book", lambda self, transfer: book(self, transfer) if transfer.to_host else None)


@mutant("1:", "2:", "3:", "4:", "16:", "assert", sizes=TIERED_SIZES)
def split_forgets_the_host(patch: pytest.MonkeyPatch) -> None:
    cut = RadixTree.cut

    def careless(self: RadixTree, node: Node, at: int) -> Node:
        host_slots, node.slots[HOST] = node.slots[HOST], None
        upper = cut(self, node, at)
        node.slots[HOST] = host_slots
        return upper

    patch.setattr(RadixTree, "cut", careless)


@mutant("4:", "5:", "16:", sizes=TIERED_SIZES)
def split_miscounts_children_on_the_host(patch: pytest.MonkeyPatch) -> None:
    cut = RadixTree.cut

    def careless(self: RadixTree, node: Node, at: int) -> Node:
        upper = cut(self, node, at)
        if upper is not node:
            upper.num_children[HOST] = 0
        return upper

    patch.setattr(RadixTree, "cut", careless)


@mutant("1:", "2:", "3:", "4:", "5:", "16:", sizes=TIERED_SIZES, first=2)
def drop_a_host_node_above_others(patch: pytest.MonkeyPatch) -> None:
    """The host forgets a node whose descendants it keeps."""
    is_leaf = radix_tree.is_leaf

    def anywhere(node: Node, tier: int) -> bool:
        return node.slots[HOST] is not None if tier == HOST else is_leaf(node, tier)

    patch.setattr(radix_tree, "is_leaf", anywhere)


@mutant("1:", "2:", "16:", sizes=TIERED_SIZES)
def forget_what_the_host_could_keep_and_say_it_has_it(patch: pytest.MonkeyPatch) -> None:
    """A node leaves the device though the host has no copy, and stays in the tree."""
    patch.setattr(HostTier, "_store", lambda *_: None)
    detach = RadixTree.detach

    def staying(self: RadixTree, node: Node, tier: int) -> np.ndarray:
        other, node.slots[1 - tier] = node.slots[1 - tier], np.zeros(0, np.int32)
        slots = detach(self, node, tier)
        node.slots[1 - tier] = other
        return slots

    patch.setattr(RadixTree, "detach", staying)


@mutant("4:", "16:", "5:", "assert", sizes=TIERED_SIZES, first=8)
def evict_above_what_is_on_the_device(patch: pytest.MonkeyPatch) -> None:
    """An unlocked node leaves the device though a child is there."""
    detach = RadixTree.detach

    def its_parent(self: RadixTree, node: Node, tier: int) -> np.ndarray:
        above = node.parent if tier == DEVICE else None
        if above is not None and above.parent is not None and not above.lock and above.slots[HOST] is not None:
            node = above
        return detach(self, node, tier)

    patch.setattr(RadixTree, "detach", its_parent)


@mutant("1:", "2:", "5:", "16:", "assert", "all the input arrays", sizes=TIERED_SIZES)
def computed_slots_do_not_fill_what_the_host_has(patch: pytest.MonkeyPatch) -> None:
    """A request that computed what the host has: its slots are neither the tree's nor its own."""
    attach = RadixTree.attach

    def elsewhere(self: RadixTree, node: Node, tier: int, slots: np.ndarray) -> None:
        if tier == HOST or node.slots[HOST] is None:
            attach(self, node, tier, slots)

    patch.setattr(RadixTree, "attach", elsewhere)


@mutant("4:", "5:", "16:", "6:", "unlocking", sizes=TIERED_SIZES)
def load_what_nobody_locks(patch: pytest.MonkeyPatch) -> None:
    lock = RadixTree.lock
    load = PrefixCache._load

    def unlocked(self: PrefixCache, *arguments: Any) -> object:
        patch.setattr(RadixTree, "lock", lambda self, node, until=None: None)
        out = load(self, *arguments)
        patch.setattr(RadixTree, "lock", lock)
        return out

    patch.setattr(PrefixCache, "_load", unlocked)


@mutant("2:", "3:", "5:", "6:", "16:", "assert", "index", sizes=TIERED_SIZES[:1], first=3)
def load_what_making_room_has_dropped(patch: pytest.MonkeyPatch) -> None:
    """The match is not looked up again once there is room for it."""
    match = RadixTree.match
    acquire = PrefixCache.acquire

    def stale(
        self: PrefixCache, namespace: Namespace, tokens: np.ndarray, found: Match, *arguments: Any
    ) -> object:
        patch.setattr(RadixTree, "match", lambda *_: found)
        out = acquire(self, namespace, tokens, found, *arguments)
        patch.setattr(RadixTree, "match", match)
        return out

    patch.setattr(PrefixCache, "acquire", stale)


@mutant("1:", "2:", sizes=TIERED_SIZES[:1], first=3)
def keep_slots_that_nothing_is_loaded_into(patch: pytest.MonkeyPatch) -> None:
    load = PrefixCache._load

    def hoarding(self: PrefixCache, *arguments: Any) -> object:
        free, self.slots.free = self.slots.free, lambda slots: None
        out = load(self, *arguments)
        self.slots.free = free
        return out

    patch.setattr(PrefixCache, "_load", hoarding)


@mutant("5:", sizes=TIERED_SIZES)
def drop_from_the_host_whatever_comes_first(patch: pytest.MonkeyPatch) -> None:
    """Its queue is in order of arrival."""

    class Line(LeafQueue):
        def __init__(self) -> None:
            self.line: list[Node] = []

        def offer(self, node: Node) -> None:
            if node not in self.line and radix_tree.is_leaf(node, HOST):
                self.line.append(node)

        def pop(self) -> Node | None:
            while self.line:
                node = self.line.pop(0)
                if radix_tree.is_leaf(node, HOST):
                    return node
            return None

        @property
        def heap(self) -> list[tuple[Node]]:
            return [(node,) for node in self.line]

    build = RadixTree.__init__

    def unordered(self: RadixTree) -> None:
        build(self)
        self.leaves[HOST] = Line()

    patch.setattr(RadixTree, "__init__", unordered)


@mutant("6:", "7:", "9:", sizes=TIERED_SIZES)
def flush_the_device_alone(patch: pytest.MonkeyPatch) -> None:
    def flush(self: PrefixCache) -> int:
        self.evict(self.tree.evictable_tokens)
        return 0

    patch.setattr(PrefixCache, "flush", flush)


@mutant("13:", sizes=TIERED_SIZES)
def count_as_computed_what_was_loaded(patch: pytest.MonkeyPatch) -> None:
    run = Admission._run

    def ignorant(self: Admission, answers: Sequence[Answer], leases: Sequence[Lease]) -> None:
        run(self, answers, leases)
        for lease in leases:
            lease.matched -= lease.loaded

    patch.setattr(Admission, "_run", ignorant)


# -- what plans read for several ---------------------------------------------------------------------------


@mutant("17: each position", world=PlannedWorld)
def end_shared_segments_a_token_late(patch: pytest.MonkeyPatch) -> None:
    find = SharedSegments.find

    def late(*arguments: Any, **limits: Any) -> tuple[np.ndarray, SharedItems]:
        tail_starts, shared = find(*arguments, **limits)
        return tail_starts, replace(shared, lens=shared.lens + 1)

    patch.setattr(SharedSegments, "find", late)


@mutant("17: what is read for several is what each has", world=PlannedWorld)
def share_a_token_that_is_each_one_s_own(patch: pytest.MonkeyPatch) -> None:
    """Segments end a token late, and so tails begin a token late."""
    depth_first = shared_segments.depth_first

    def generous(slots: np.ndarray, offsets: np.ndarray, lens: np.ndarray, max_stops: int) -> Any:
        order, common = depth_first(slots, offsets, lens, max_stops)
        most = np.minimum(lens[order][:-1], lens[order][1:])
        return order, np.minimum(common + (common > 0), most)

    patch.setattr(shared_segments, "depth_first", generous)


@mutant("7:", "17: what is read for several is what each has on the device", world=PlannedWorld)
def send_no_remap(patch: pytest.MonkeyPatch) -> None:
    """The device's row still names a duplicate's own slots."""
    commit, write = PrefixCache.commit, ReqToTokenPool.write

    def on_the_host(self: ReqToTokenPool, row: int, start: int, slots: np.ndarray) -> None:
        self.req_to_token[row, start : start + len(slots)] = slots

    def silent(self: PrefixCache, lease: Lease, tokens: np.ndarray, computed: int) -> None:
        patch.setattr(ReqToTokenPool, "write", on_the_host)
        commit(self, lease, tokens, computed)
        patch.setattr(ReqToTokenPool, "write", write)

    patch.setattr(PrefixCache, "commit", silent)


@mutant("17: each position", "17: what is read", "17: a plan is made", world=PlannedWorld)
def decode_by_the_plan_of_those_before(patch: pytest.MonkeyPatch) -> None:
    """That other requests decode is not noticed."""
    build = PassBuilder.build

    def unnoticed(self: PassBuilder, pass_: Pass) -> PackedPass:
        current = self._current
        if current is not None and current.rows is not None and len(current.rows) == pass_.num_rows:
            current.rows = pass_.req_pool_indices
        return build(self, pass_)

    patch.setattr(PassBuilder, "build", unnoticed)


@mutant("17: each position", "17: a plan is of", world=PlannedWorld)
def let_no_tail_grow(patch: pytest.MonkeyPatch) -> None:
    def stunted(self: PassPlans[Any], seq_lens: np.ndarray) -> None:
        for plan in self.decode.values():
            plan.seq_lens[: len(seq_lens)] = seq_lens

    patch.setattr(PassPlans, "grow", stunted)


@mutant("17: a plan is made", world=PlannedWorld, first=17)
def share_more_than_padded_plans_have_room_for(patch: pytest.MonkeyPatch) -> None:
    find = SharedSegments.find
    wide = Capacity(99, 99)
    patch.setattr(
        SharedSegments, "find", lambda *arguments, **options: find(*arguments, **options | {"capacity": wide})
    )


@mutant("17: a result is one item's", world=PlannedWorld)
def take_nothing_in(patch: pytest.MonkeyPatch) -> None:
    """A row that has one narrow item writes its result, whatever shared items computed."""
    of_items = AttentionPlan.of_items

    def direct(*arguments: Any, **options: Any) -> AttentionPlan[Any]:
        plan = of_items(*arguments, **options)
        return replace(plan, tail_partial_starts=np.zeros_like(plan.tail_partial_starts))

    patch.setattr(AttentionPlan, "of_items", staticmethod(direct))


# -- states -------------------------------------------------------------------------------------------------


@mutant("20:", sizes=STATE_SIZES)
def keep_a_state_late(patch: pytest.MonkeyPatch) -> None:
    """What is left where prompts part goes to the lease's own state, as if it were copied after the next pass."""
    step = States.step

    def late(self: States, row: int, keep_at: int | None, passes: tuple[int, int]) -> tuple[int, int]:
        before, after = step(self, row, keep_at, passes)
        return before, after if keep_at is None else int(self.own[row])

    patch.setattr(States, "step", late)


@mutant("20:", sizes=STATE_SIZES)
def overwrite_the_kept_state(patch: pytest.MonkeyPatch) -> None:
    """A lease that begins with a kept state goes on in it."""
    begin = States.begin

    def sharing(self: States, row: int, node: Node, passes: tuple[int, int]) -> bool:
        found = begin(self, row, node, passes)
        if found and node.state:
            self.own[row] = node.state
        return found

    patch.setattr(States, "begin", sharing)


@mutant("20: a row begins with the state", sizes=STATE_SIZES)
def match_beyond_the_last_state(patch: pytest.MonkeyPatch) -> None:
    """A prefix is taken for all its tokens, with the state of a part of them."""
    patch.setattr(Match, "at_state", property(lambda self: self))
    patch.setattr("tests.support.world.world.require", lambda *arguments: None)


@mutant("20:", sizes=STATE_SIZES)
def give_up_what_is_about_to_be_read(patch: pytest.MonkeyPatch) -> None:
    make_room = States.make_room

    def ruthless(self: States, *arguments: Any, **options: Any) -> None:
        readers, self._readers = self._readers, Counter()
        make_room(self, *arguments, **options)
        self._readers = readers

    patch.setattr(States, "make_room", ruthless)


@mutant("20: a row begins with the state", sizes=STATE_SIZES)
def free_a_state_that_a_pass_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(States, "_give_up", lambda self, state, passes: self._free(state))


@mutant("20: a state is in one place", sizes=STATE_SIZES)
def lose_the_state_of_an_evicted_node(patch: pytest.MonkeyPatch) -> None:
    def careless(self: PrefixCache) -> None:
        for node in self.tree.left:
            if node.state and node.slots[DEVICE] is None:
                del self.states.kept[node.state]  # type: ignore[union-attr]
                node.state = 0
        self.tree.left.clear()

    patch.setattr(PrefixCache, "_drop_states", careless)


@mutant("20: a kept state is that of its node's path", sizes=STATE_SIZES)
def keep_the_state_of_what_goes_beyond(patch: pytest.MonkeyPatch) -> None:
    """What a lease leaves is kept at the end of what it has published, also where passes have gone on."""
    release = States.release

    def generous(
        self: States, row: int, node: Node | None, passes: tuple[int, int], *, comes_back: bool = False
    ) -> None:
        lease = next(one for one in world_leases(self) if one.row == row)
        release(self, row, lease.node, passes, comes_back=comes_back)

    def world_leases(states: States) -> Iterable[Lease]:
        return next(cache.leases for cache in caches if cache.states is states)

    caches: list[PrefixCache] = []
    init = PrefixCache.__init__

    def known(self: PrefixCache, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        caches.append(self)

    patch.setattr(PrefixCache, "__init__", known)
    patch.setattr(States, "release", generous)


@mutant("6:", sizes=STATE_SIZES)
def publish_an_end_at_once(patch: pytest.MonkeyPatch) -> None:
    """What the pass in flight computes of an answer that has ended is published before it has."""
    release = PrefixCache.release

    def eager(self: PrefixCache, lease: Lease, *arguments: Any, **options: Any) -> None:
        release(self, lease, *arguments, **options)
        if lease.tail is not None:
            self.commit(lease, lease.tail, lease.allocated_len)

    patch.setattr(PrefixCache, "release", eager)


@mutant("6:", "20: a kept state is that of its node's path", sizes=STATE_SIZES)
def keep_an_end_that_is_not_finite(patch: pytest.MonkeyPatch) -> None:
    ended = PrefixCache.pass_ended
    patch.setattr(PrefixCache, "pass_ended", lambda self, spoilt=None: ended(self))


@mutant("20:", sizes=STATE_SIZES)
def split_keeps_the_state_above(patch: pytest.MonkeyPatch) -> None:
    cut = RadixTree.cut

    def wrong(self: RadixTree, node: Node, at: int) -> Node:
        upper = cut(self, node, at)
        if upper is not node:
            upper.state, node.state = node.state, 0
        return upper

    patch.setattr(RadixTree, "cut", wrong)


# -- states in two tiers ---------------------------------------------------------------------------------------


class Late(KVTransfers):
    """Makes those of states that `is_late` one pass later than the others."""

    @staticmethod
    def is_late(transfer: KVTransfer) -> bool:
        raise NotImplementedError

    def take(self) -> deque[KVTransfer]:
        kept, self.kept = getattr(self, "kept", []), [one for one in self.booked if self.is_late(one)]
        self.booked = deque([*kept, *(one for one in self.booked if not self.is_late(one))])
        return super().take()


@mutant("20:", sizes=TIERED_STATE_SIZES)
def store_a_state_late(patch: pytest.MonkeyPatch) -> None:
    """After the pass for which it made room."""

    class LateStores(Late):
        @staticmethod
        def is_late(transfer: KVTransfer) -> bool:
            return transfer.of_states and transfer.to_host

    patch.setattr(prefix_cache, "KVTransfers", LateStores)


@mutant("20:", sizes=TIERED_STATE_SIZES)
def load_a_state_late(patch: pytest.MonkeyPatch) -> None:
    """After the pass that begins with it."""

    class LateLoads(Late):
        @staticmethod
        def is_late(transfer: KVTransfer) -> bool:
            return transfer.of_states and not transfer.to_host

    patch.setattr(prefix_cache, "KVTransfers", LateLoads)


@mutant("20:", sizes=TIERED_STATE_SIZES)
def load_before_the_room_is_stored(patch: pytest.MonkeyPatch) -> None:
    class LoadsFirst(KVTransfers):
        def take(self) -> deque[KVTransfer]:
            self.booked = deque(sorted(self.booked, key=lambda one: one.of_states and one.to_host))
            return super().take()

    patch.setattr(prefix_cache, "KVTransfers", LoadsFirst)


@mutant("20: a kept state", "assert", sizes=TIERED_STATE_SIZES)
def leave_the_state_of_what_has_left_the_tree(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostStates, "drop", lambda self, node: None)
    drop = States.drop

    def forgetful(self: States, nodes: Iterable[Node], passes: tuple[int, int]) -> None:
        drop(self, nodes, passes)
        for node in nodes:
            if not len(node.tokens):
                node.host_state = 0

    patch.setattr(States, "drop", forgetful)


@mutant("20:", sizes=TIERED_STATE_SIZES)
def drop_the_host_s_state_with_the_device_s(patch: pytest.MonkeyPatch) -> None:
    """It is free, and still at its node."""
    forget = States._forget

    def both(self: States, node: Node, passes: tuple[int, int]) -> None:
        forget(self, node, passes)
        if self.host is not None and node.host_state and node.slots[HOST] is None:
            state = node.host_state
            self.host.drop(node)
            node.host_state = state

    patch.setattr(States, "_forget", both)


@mutant("20: a state is in one place", sizes=TIERED_STATE_SIZES)
def load_into_the_own_state(patch: pytest.MonkeyPatch) -> None:
    """What is loaded is kept, and overwritten by the lease."""
    begin = States.begin

    def sharing(self: States, row: int, node: Node, passes: tuple[int, int]) -> bool:
        loads = self.loads(node)
        found = begin(self, row, node, passes)
        if found and loads:
            self.own[row] = node.state
        return found

    patch.setattr(States, "begin", sharing)


def walk_until_it_breaks(sizes: list[Sizes], seeds: Iterable[int], actions: int, kind: type[World] = World) -> str:
    """The first violation of the walks, or of the code's own checks; "" if there is none."""
    for seed in seeds:
        world = kind(sizes[seed % len(sizes)])
        walk = Walk(world, seed, faults=4)
        try:
            for _ in range(actions):
                walk.act()
            world.drain()
        except Violation as violation:
            return violation.name
        except SchedulerError:
            return "10: requests wait and none can be admitted"
        except (ValueError, IndexError, AssertionError) as error:
            return str(error) or "assert"
    return ""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("radixrt.engine.engine"), "disabled", True)


@pytest.mark.parametrize("fault", MUTANTS, ids=lambda m: m.name)
def test_the_fault_is_found(fault: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.apply(monkeypatch)
    seeds = sorted(range(36), key=lambda seed: seed != fault.first)
    found = walk_until_it_breaks(fault.sizes, seeds, actions=120, kind=fault.world)
    assert found, "no invariant saw the fault"
    assert found.startswith(fault.breaks), found


@pytest.mark.long_unless(kept=lambda given: given["world"] is PlannedWorld and given["actions"] == 40)
@pytest.mark.parametrize("actions", [40, 120])
@pytest.mark.parametrize("world", [World, PlannedWorld])
@pytest.mark.parametrize(
    "sizes",
    [ALL_SIZES, TIERED_SIZES, STATE_SIZES, TIERED_STATE_SIZES],
    ids=["device", "device and host", "states", "states in two tiers"],
)
def test_without_a_fault_nothing_is_found(sizes: list[Sizes], world: type[World], actions: int) -> None:
    assert walk_until_it_breaks(sizes, range(len(sizes)), actions=actions, kind=world) == ""


# -- what costs hits or time, and no answer: each is found by a test of its own --------------------------------

COSTLY: list[tuple[Patch, Callable[[], None]]] = []


def found_by(test: Callable[[], None]) -> Callable[[Patch], Patch]:
    def register(apply: Patch) -> Patch:
        COSTLY.append((apply, test))
        return apply

    return register


@found_by(test_prefix_cache.test_a_leader_is_found_at_the_match_and_before_it)
def follow_whoever_begins_alike(patch: pytest.MonkeyPatch) -> None:
    """A leader is any lease with the same next token, whatever follows."""
    patch.setattr(prefix_cache.np, "array_equal", lambda mine, yours: True)


@found_by(test_prefix_cache.test_incoming_counts_what_nobody_else_holds)
def expect_what_others_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "held_alone", lambda self, end: sum(len(node.tokens) for node in self.path(end)))


@found_by(test_radix_tree.test_a_whole_path_is_used_with_its_end)
def use_a_node_and_not_its_path(patch: pytest.MonkeyPatch) -> None:
    touch = RadixTree.touch

    def alone(self: RadixTree, end: Node) -> None:
        parent, end.parent = end.parent, None
        touch(self, end)
        end.parent = parent

    patch.setattr(RadixTree, "touch", alone)


@found_by(test_admission.test_room_is_kept_for_who_waits_for_a_leader)
def keep_no_room_for_followers(patch: pytest.MonkeyPatch) -> None:
    has_leader = PendingMatch.has_leader

    def undemanding(self: PendingMatch) -> bool:
        found = has_leader(self)
        self.leader_match_len = 10**6
        return found

    patch.setattr(PendingMatch, "has_leader", undemanding)


@found_by(test_host_states.test_what_takes_the_place_of_a_state_comes_after_its_load)
def drop_a_state_whose_load_is_booked(patch: pytest.MonkeyPatch) -> None:
    take = KVTransfers.take

    def stores_first(self: KVTransfers) -> deque[KVTransfer]:
        self.booked = deque(sorted(self.booked, key=lambda one: one.of_states and not one.to_host))
        return take(self)

    patch.setattr(KVTransfers, "take", stores_first)


@found_by(test_host_states.test_room_that_takes_the_end_of_the_match)
def go_on_where_the_state_was_dropped(patch: pytest.MonkeyPatch) -> None:
    load = PrefixCache._load

    def trusting(self: PrefixCache, *arguments: Any) -> tuple[Node, int, int]:
        at_state = Match.at_state
        patch.setattr(Match, "at_state", property(lambda match: match))
        try:
            return load(self, *arguments)
        finally:
            patch.setattr(Match, "at_state", at_state)

    patch.setattr(PrefixCache, "_load", trusting)


@found_by(test_policy.test_more_is_expected_once_memory_has_fallen_short)
def learn_nothing_from_too_little_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutputEstimate, "fell_short", lambda self: None)


@found_by(test_scheduler.test_the_least_urgent_yield)
def let_the_latest_yield_however_urgent(patch: pytest.MonkeyPatch) -> None:
    make_room, place_of = Scheduler._make_room, scheduler.place_of

    def blind(self: Scheduler, per_pass: int) -> None:
        patch.setattr(scheduler, "place_of", lambda answer: (0, answer.arrival))
        make_room(self, per_pass)
        patch.setattr(scheduler, "place_of", place_of)

    patch.setattr(Scheduler, "_make_room", blind)


@pytest.mark.parametrize(("fault", "test"), COSTLY, ids=lambda one: one.__name__)
def test_the_costly_fault_is_found(
    fault: Patch, test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test()
