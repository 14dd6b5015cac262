"""Figures and hints of a plan in words."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from radixrt.limits import RunLimits
from radixrt.planning.batch_plan import BatchPlan, Expectation, Prediction
from radixrt.planning.hints import Hint
from radixrt.planning.shards import Shards
from radixrt.planning.work import Work
from radixrt.report.outline import counted
from radixrt.workloads.bound import ModelShape
from radixrt.workloads.statistics import TokenStatistics

HINTS_TOLD = 5
WORTHWHILE = 0.005  # a difference of hit rates that is told


@dataclass(frozen=True)
class PlannedRun:
    """A plan, and what is known of its run.

    Attributes:
        expectation: None omits figures of the run.
        shape: of the model; None omits bytes.
        card: what the time is for.
        mean_is_given: whether answers are expected to have a mean of tokens, rather than their maximum.
        shards: the same run on several cards; None: on one.
    """

    plan: BatchPlan
    expectation: Expectation | None = None
    shape: ModelShape | None = None
    card: str = ""
    mean_is_given: bool = False
    shards: Shards | None = None

    def figures(self) -> dict[str, str]:
        """Names and values, in reading order."""
        plan, counts, expected = self.plan, self.plan.statistics, self.expectation
        assumed = "" if self.mean_is_given else ", if each has its maximum"
        figures = {
            "prompts": f"{len(plan):,}" + ("" if plan.answers == len(plan) else f", {plan.answers:,} answers"),
            "prompt tokens": f"{counts.prompt_tokens:,} ({counts.distinct_tokens:,} distinct)",
            "expected answers": f"{counted(plan.expected_tokens, 'token')}{assumed}",
            "best possible hit rate": f"{counts.best_hit_rate:.2%}",
        }
        if expected is not None:
            figures |= {
                "pool": self._memory(expected.limits.pool_tokens),
                **_states(expected.limits, self.shape),
                "hit rate, planned order": _prediction(expected.planned),
                "hit rate, file order": _prediction(expected.file_order),
            }
        smallest = "smallest pool that keeps all hits" if plan.is_plain else "smallest pool, one at a time"
        figures[smallest] = self._memory(plan.longest_request)
        if expected is not None:
            running = min(expected.limits.max_running_requests, plan.answers)
            states = 0 if self.shape is None else running * self.shape.state_bytes
            figures[f"memory, {running:,} at once"] = self._memory(plan.pool_for(running)) + (
                f", states {_bytes(states)}" if states else ""
            )
            if expected.work is not None:
                figures |= self._times(expected.work)
        return figures

    def _times(self, work: Work) -> dict[str, str]:
        low, high = work.expected_seconds
        prefill, decode = counted(work.computed_tokens, "token"), counted(work.generated_tokens, "token")
        figures = {
            "prefill": f"{prefill}, {seconds(work.prefill_seconds)} at peak speed",
            "decode": f"{decode}, {seconds(work.decode_seconds)} at peak speed",
            "passes": f"about {work.passes:,}",
            "time": f"{seconds(low)} to {seconds(high)}",
        }
        if work.min_seconds >= 0.001:
            assumed = "" if self.mean_is_given else ", if each answer has its maximum"
            figures["time"] += f" (no engine below {seconds(work.min_seconds)}{assumed})"
        if self.shards is not None and len(self.shards) > 1:
            share = self.shards.longest_share
            twice = counted(int(self.shards.repeated_tokens.sum()), "token")
            figures[f"time, {len(self.shards)} replicas"] = (
                f"{seconds(share * low)} to {seconds(share * high)} ({1 / share:.2f} times as fast), {twice} "
                "computed twice"
            )
        return figures | ({"card": self.card} if self.card else {})

    def _memory(self, tokens: int) -> str:
        held = "" if self.shape is None else f" ({_bytes(tokens * self.shape.kv_bytes)})"
        return f"{counted(tokens, 'token')}{held}"

    def replica_rows(self) -> list[tuple[str, ...]]:
        """A row of REPLICA_COLUMNS for each replica; none where one card runs all, or the time is not known."""
        shards, work = self.shards, None if self.expectation is None else self.expectation.work
        if shards is None or work is None:
            return []
        pieces, rows = shards.pieces, []
        for replica, (begin, end) in enumerate(pairwise(shards.bounds.tolist())):
            low, high = (float(shards.shares[replica]) * bound for bound in work.expected_seconds)
            numbers = len(np.unique(pieces.places[begin:end])), int(pieces.num_answers[begin:end].sum())
            twice = counted(int(shards.repeated_tokens[replica]), "token")
            time = f"{seconds(low)} to {seconds(high)}"
            rows.append((f"{replica}", *(f"{number:,}" for number in numbers), twice, time))
        return rows

    def advice(self) -> str:
        """What the hit rates mean, and what to do, in one or two sentences; "" without an expectation."""
        expected = self.expectation
        if expected is None:
            return ""
        best, found = self.plan.statistics.best_hit_rate, expected.planned.hit_rate
        file_order = expected.file_order.hit_rate
        if best < WORTHWHILE:
            return "The prompts share next to nothing from their beginning on: no order of them brings hits."
        most = f"With memory for all, at most {best:.1%} of the prompt tokens can come from the cache"
        if found < self.plan.predict_without_eviction().hit_rate - WORTHWHILE:
            more = "a larger pool (--max-total-tokens)" + (" or more states" if expected.limits.num_states else "")
            return f"{most}. This run finds {found:.1%}: {more} may bring the rest."
        if file_order < found - WORTHWHILE:
            return (
                f"{most}. In this pool the planned order, which `radixrt batch` uses, finds {found:.1%}, the "
                f"order of the file {file_order:.1%}: nothing is left to do."
            )
        return f"{most}, and do in both orders: in so large a pool the order does not matter."


REPLICA_COLUMNS = ("replica", "prompts", "answers", "computed twice", "time")


def hint_texts(hints: tuple[Hint, ...], counts: TokenStatistics) -> list[str]:
    """A sentence for each hint, the worst first, then the number of further ones. `counts` are the plan's."""
    texts = []
    for hint in hints[:HINTS_TOLD]:
        low, high = int(hint.differing.min()), int(hint.differing.max())
        count = counted(high, "token") if low == high else f"{low} to {high} tokens"
        if hint.tail:
            best = (counts.best_cached_tokens + hint.tokens) / counts.prompt_tokens
            texts.append(
                f"{len(hint.prompts):,} prompts end with the same {counted(hint.tail, 'token')}, after {count} "
                f"that differ: if what they have in common came first, the best possible hit rate would be "
                f"{best:.1%} instead of {counts.best_hit_rate:.1%}"
            )
            continue
        where = f"after their first {counted(hint.position, 'token')}" if hint.position else "at their beginning"
        texts.append(
            f"{len(hint.prompts):,} prompts differ in {count} {where} and agree after that: about "
            f"{hint.tokens:,} more tokens could be shared if what differs came last"
        )
    if len(hints) > HINTS_TOLD:
        rest = hints[HINTS_TOLD:]
        prompts = sum(len(hint.prompts) for hint in rest)
        tokens = sum(hint.tokens for hint in rest)
        texts.append(f"{len(rest):,} more groups, {prompts:,} prompts, are like that: about {tokens:,} tokens")
    return texts


def seconds(value: float) -> str:
    """A duration, rounded to a readable unit."""
    if value < 0.001:
        return "under 1 ms" if value else "0 s"
    if value < 10:
        return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _prediction(prediction: Prediction) -> str:
    how = "" if prediction.is_rehearsed else " (modelled)"
    return f"{prediction.hit_rate:.2%}{how}"


def _states(limits: RunLimits, shape: ModelShape | None) -> dict[str, str]:
    """How many states of sequences there are, and for whom, of a model that keeps some."""
    if not limits.num_states:
        return {}
    memory = "" if shape is None else f" ({_bytes(limits.num_states * shape.state_bytes)})"
    own = min(limits.of_pass.own_states, limits.num_states)
    told = f"{own:,} for {counted(limits.max_running_requests, 'request')} at once, {limits.num_states - own:,}"
    return {"states": f"{limits.num_states:,}{memory}: {told} kept for others that begin alike"}


def _bytes(count: int) -> str:
    if count < 1e6:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
