"""A plan as a self-contained HTML page: figures, hints, and a tree that folds."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

from html import escape

from radixrt.planning.batch_plan import BatchPlan, Expectation
from radixrt.planning.shards import Shards
from radixrt.report.figures import REPLICA_COLUMNS, hint_texts, plan_advice, plan_figures, replica_rows
from radixrt.report.html import column_table, figure_table, html_page, prefix_branches
from radixrt.report.outline import Show, as_ids, outline
from radixrt.workloads.bound import ModelShape


def plan_page(
    plan: BatchPlan,
    *,
    title: str,
    expectation: Expectation | None = None,
    shape: ModelShape | None = None,
    card: str = "",
    mean_is_given: bool = False,
    show: Show = as_ids,
    max_prefixes: int = 1000,
    shards: Shards | None = None,
) -> str:
    """The page as HTML: figures, hints, and the largest shared prefixes as a tree that folds and unfolds.

    Args:
        title: of the page, such as the input's name.
        expectation, shape, card, mean_is_given, shards: see `plan_figures`.
        show: token ids to text.
        max_prefixes: limit on shown prefixes.
    """
    figures = figure_table(plan_figures(plan, expectation, shape, card, mean_is_given, shards))
    if shards is not None and expectation is not None and expectation.work is not None:
        figures += column_table(REPLICA_COLUMNS, replica_rows(shards, expectation.work))
    advice = "" if expectation is None else f"<p>{escape(plan_advice(plan, expectation))}</p>\n"
    hints = "".join(f'<p class="hint">{escape(text)}</p>\n' for text in hint_texts(plan.hints, plan.statistics))
    branches = prefix_branches(outline(plan, max_prefixes), show, int(plan.tree.saved_tokens.sum()))
    return html_page(f"Plan of {title}", f"{advice}{figures}{hints}<h2>Shared prefixes</h2>\n{branches}")
