"""Figures and hints of a plan in words."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

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


def plan_figures(
    plan: BatchPlan,
    expectation: Expectation | None,
    shape: ModelShape | None,
    card: str = "",
    mean_is_given: bool = False,
    shards: Shards | None = None,
) -> dict[str, str]:
    """Names and values of a plan's figures, in reading order.

    Args:
        expectation: of a run; None omits its figures.
        shape: of the model; None omits bytes.
        card: what the time is for.
        mean_is_given: whether answers are expected to have a mean of tokens, rather than their maximum.
        shards: the same run on several cards; None: on one.
    """
    counts = plan.statistics

    def memory(tokens: int) -> str:
        return counted(tokens, "token") + ("" if shape is None else f" ({_bytes(tokens * shape.kv_bytes)})")

    assumed = "" if mean_is_given else ", if each has its maximum"
    figures = {
        "prompts": f"{len(plan):,}" + ("" if plan.answers == len(plan) else f", {plan.answers:,} answers"),
        "prompt tokens": f"{counts.prompt_tokens:,} ({counts.distinct_tokens:,} distinct)",
        "expected answers": f"{counted(plan.expected_tokens, 'token')}{assumed}",
        "best possible hit rate": f"{counts.best_hit_rate:.2%}",
    }
    if expectation is not None:
        limits = expectation.limits
        figures |= {
            "pool": memory(limits.pool_tokens),
            **_states(limits, shape),
            "hit rate, planned order": _prediction(expectation.planned),
            "hit rate, file order": _prediction(expectation.file_order),
        }
    figures["smallest pool that keeps all hits" if plan.is_plain else "smallest pool, one at a time"] = memory(
        plan.longest_request
    )
    if expectation is not None:
        running = min(expectation.limits.max_running_requests, plan.answers)
        figures[f"memory, {running:,} at once"] = memory(plan.pool_for(running))
        if shape is not None and shape.state_bytes:
            figures[f"memory, {running:,} at once"] += f", states {_bytes(running * shape.state_bytes)}"
        work = expectation.work
        if work is not None:
            low, high = work.expected_seconds
            prefill, decode = counted(work.computed_tokens, "token"), counted(work.generated_tokens, "token")
            figures |= {
                "prefill": f"{prefill}, {seconds(work.prefill_seconds)} at peak speed",
                "decode": f"{decode}, {seconds(work.decode_seconds)} at peak speed",
                "passes": f"about {work.passes:,}",
                "time": f"{seconds(low)} to {seconds(high)}",
            }
            if work.min_seconds >= 0.001:
                assumed = assumed.replace("each", "each answer")
                figures["time"] += f" (no engine below {seconds(work.min_seconds)}{assumed})"
            if shards is not None and len(shards) > 1:
                low, high = work.expected_seconds
                share = shards.longest_share
                twice = counted(int(shards.repeated_tokens.sum()), "token")
                figures[f"time, {len(shards)} replicas"] = (
                    f"{seconds(share * low)} to {seconds(share * high)} ({1 / share:.2f} times as fast), {twice} "
                    "computed twice"
                )
            if card:
                figures["card"] = card
    return figures


REPLICA_COLUMNS = ("replica", "prompts", "answers", "computed twice", "time")


def replica_rows(shards: Shards, work: Work) -> list[tuple[str, ...]]:
    """A row of REPLICA_COLUMNS for each replica."""
    pieces, rows = shards.pieces, []
    for replica, (begin, end) in enumerate(pairwise(shards.bounds.tolist())):
        low, high = (float(shards.shares[replica]) * bound for bound in work.expected_seconds)
        numbers = len(np.unique(pieces.places[begin:end])), int(pieces.num_answers[begin:end].sum())
        twice = counted(int(shards.repeated_tokens[replica]), "token")
        rows.append(
            (f"{replica}", *(f"{number:,}" for number in numbers), twice, f"{seconds(low)} to {seconds(high)}")
        )
    return rows


def plan_advice(plan: BatchPlan, expectation: Expectation) -> str:
    """What the hit rates of a plan mean, and what to do, in one or two sentences."""
    best, found = plan.statistics.best_hit_rate, expectation.planned.hit_rate
    file_order = expectation.file_order.hit_rate
    if best < WORTHWHILE:
        return "The prompts share next to nothing from their beginning on: no order of them brings hits."
    most = f"With memory for all, at most {best:.1%} of the prompt tokens can come from the cache"
    if found < plan.predict_without_eviction().hit_rate - WORTHWHILE:
        more = "a larger pool (--max-total-tokens)" + (" or more states" if expectation.limits.num_states else "")
        return f"{most}. This run finds {found:.1%}: {more} may bring the rest."
    if file_order < found - WORTHWHILE:
        return (
            f"{most}. In this pool the planned order, which `radixrt batch` uses, finds {found:.1%}, the order of "
            f"the file {file_order:.1%}: nothing is left to do."
        )
    return f"{most}, and do in both orders: in so large a pool the order does not matter."


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
