"""Figures and hints of a plan in words."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

from radixrt.planning.batch_plan import BatchPlan, Expectation, Prediction
from radixrt.planning.hints import Hint
from radixrt.report.outline import counted

HINTS_TOLD = 5


def plan_figures(plan: BatchPlan, expectation: Expectation | None, kv_bytes: int | None) -> dict[str, str]:
    """Names and values of a plan's figures, in reading order.

    Args:
        expectation: of a run; None omits its figures.
        kv_bytes: of one token's keys and values; None omits bytes.
    """
    counts = plan.statistics

    def memory(tokens: int) -> str:
        return f"{tokens:,} tokens" + ("" if kv_bytes is None else f" ({_bytes(tokens * kv_bytes)})")

    figures = {
        "prompts": f"{len(plan):,}",
        "prompt tokens": f"{counts.prompt_tokens:,} ({counts.distinct_tokens:,} distinct)",
        "expected answers": f"{int(plan.new_tokens[plan.run.order].sum()):,} tokens",
        "best possible hit rate": f"{counts.best_hit_rate:.2%}",
    }
    if expectation is not None:
        limits = expectation.limits
        figures |= {
            "pool": memory(limits.pool_tokens),
            "hit rate, planned order": _prediction(expectation.planned),
            "hit rate, file order": _prediction(expectation.file_order),
        }
    figures["memory, one at a time"] = memory(plan.longest_request)
    if expectation is not None:
        running = min(expectation.limits.max_running_requests, len(plan))
        figures[f"memory, {running:,} at once"] = memory(plan.pool_for(running))
        work = expectation.work
        if work is not None:
            low, high = work.expected_seconds
            figures |= {
                "prefill": f"{work.computed_tokens:,} tokens, at least {seconds(work.prefill_seconds)}",
                "decode": f"{work.generated_tokens:,} tokens in about {work.decode_steps:,} passes, "
                f"at least {seconds(work.decode_seconds)}",
                "time": f"{seconds(low)} to {seconds(high)} (no engine below {seconds(work.min_seconds)})",
            }
    return figures


def hint_texts(hints: tuple[Hint, ...]) -> list[str]:
    """A sentence for each hint, the worst first, then the number of further ones."""
    texts = []
    for hint in hints[:HINTS_TOLD]:
        low, high = int(hint.differing.min()), int(hint.differing.max())
        count = counted(high, "token") if low == high else f"{low} to {high} tokens"
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
    if value < 10:
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _prediction(prediction: Prediction) -> str:
    how = "" if prediction.is_rehearsed else " (modelled)"
    return f"{prediction.hit_rate:.2%}{how}"


def _bytes(count: int) -> str:
    if count < 1e6:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
